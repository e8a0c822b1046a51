// Attention of few queries over few splits, as in decode: the sums of attention.cu, bit for bit, in one kernel. Keys
// and values are the rows of the products, the query heads of a key head their columns: hardly anything is multiplied
// that is no query.
//
// One or two (`SHARE`) blocks of threads take a split of a sample and a key head; of two, each multiplies every other
// block of keys, and half of the columns of all values. The scores of eight blocks of keys (of fewer, the more queries)
// are there before the first exponential, as their maxima are exact in any order; what remains to be done block by
// block is to rescale and to add. All splits of a sample and a key head are a cluster: each hands the sums of a row to
// the one that folds it, upward.
#pragma once

#include <type_traits>

#include "attention.cuh"

namespace rlspec {

constexpr int JOINED = 8;  // blocks of threads of a cluster

// Of a place in the shared memory of this block of threads, the one in that of another block of the cluster.
__device__ __forceinline__ uint32_t place_in(void const* here, int block) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(hopper::shared_address(here)), "r"(block));
    return there;
}

// The barriers that were initialised before `cluster_arrive`, with `barrier_init_fence`, are there behind
// `cluster_wait`.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Into the memory of another block, whose barrier counts the bytes as they come: no fence has to wait for them.
__device__ __forceinline__ void send(uint32_t place, uint32_t barrier, float x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(place), "f"(x),
                 "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void send(uint32_t place, uint32_t barrier, float2 x) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(place),
                 "f"(x.x), "f"(x.y), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void send(uint32_t place, uint32_t barrier, uint4 x) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(place),
        "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(barrier)
        : "memory");
}

// At a barrier of another block.
__device__ __forceinline__ void arrive_there(uint32_t barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
            hopper::shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// D[16, 8] += 1·B[16, 8], rows alike: sums of columns on the matrix unit, in its order.
template <typename Element>
__device__ __forceinline__ void add_columns(float (&d)[4], uint32_t b0, uint32_t b1);
template <>
__device__ __forceinline__ void add_columns<__nv_bfloat16>(float (&d)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%6, %6, %6, %6}, {%4, %5}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(b0), "r"(b1), "r"(0x3f803f80u));
}
template <>
__device__ __forceinline__ void add_columns<__half>(float (&d)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%6, %6, %6, %6}, {%4, %5}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(b0), "r"(b1), "r"(0x3c003c00u));
}

// The blocks of keys of one split of a sample.
struct Share {
    int row, start, before, queries, keys;  // of the sample; keys before its first query
    int first, blocks;
    template <typename Read>
    __device__ Share(Forward const& a, int line, int split, Read read) {
        int const* const entry = a.table + line * 5;
        row = read(entry), start = read(entry + 3), queries = read(entry + 2), keys = read(entry + 4);
        before = keys - queries;
        first = max(a.window > 0 ? max(before - a.window + 1, 0) / KEYS * KEYS : 0, a.schedule.start(split));
        int const stop = min(min(before + a.limit, keys), a.schedule.start(split + 1));
        blocks = max(stop - first + KEYS - 1, 0) / KEYS;
    }
};

template <typename Element, int D, int N, int SHARE>
struct Decode {
    static constexpr int GROUPS = D / 64;          // warpgroups
    static constexpr int COLUMNS = D / SHARE;      // of values, of a block of threads
    static constexpr int CHUNK = 64 / N;           // blocks of keys whose scores are there at a time
    static constexpr int KEY_TILE = KEYS * D * 2, VALUE_TILE = KEYS * COLUMNS * 2;
    static constexpr int KEY_TILES = 8 / SHARE, VALUE_TILES = SHARE > 1 || D == 64 ? 8 : 3;
    static constexpr int ADDING = COLUMNS / 64 * 4;  // warps that have columns of the values
    static constexpr int WIDE = COLUMNS + 4;         // floats of a row of sums, with its maximum and its mass
    static constexpr int GIVEN = 64 * WIDE * 4;      // of rows that are folded here, those of all splits
    static constexpr int RING = KEY_TILES * KEY_TILE + VALUE_TILES * VALUE_TILE;
    static constexpr int BARRIERS = 2 * (KEY_TILES + VALUE_TILES) + 3;
    static constexpr int BYTES = RING + N * D * 2 + 64 * 128 + 64 * 16 + GIVEN + BARRIERS * 8;
    static_assert(BYTES <= 232448);
};

template <typename Element, int D, int N, int SHARE>
__global__ __launch_bounds__(D * 2 + 64, 1) void attention_decode_kernel(
    __grid_constant__ CUtensorMap const key_map, __grid_constant__ CUtensorMap const value_map,
    __grid_constant__ Forward const a) {
    using T = Decode<Element, D, N, SHARE>;
    constexpr int GROUPS = T::GROUPS, CONSUMERS = GROUPS * 128, CHUNK = T::CHUNK;
    extern __shared__ __align__(1024) uint8_t memory[];
    uint8_t *const key_ring = memory, *const value_ring = key_ring + T::KEY_TILES * T::KEY_TILE;
    uint8_t* const q_tile = memory + T::RING;                         // [N, D]
    uint8_t* const p_tiles = q_tile + N * D * 2;                      // [N, 64] of each block of a chunk
    auto* const tops = reinterpret_cast<float*>(p_tiles + 64 * 128);  // [blocks, warps, N]
    float* const given = tops + 64 * 4;                               // [rows, splits, WIDE]
    auto* const ready = reinterpret_cast<uint64_t*>(given + T::GIVEN / 4);
    uint64_t *const free = ready + T::KEY_TILES + T::VALUE_TILES, *const met = ready + T::BARRIERS - 3;

    int const rank = blockIdx.x % (a.splits * SHARE), pair = blockIdx.x / (a.splits * SHARE);
    int const split = rank / SHARE, part = rank % SHARE, head = pair % a.kv, line = pair / a.kv;
    int const warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    int const* const pages = a.pages + static_cast<int64_t>(line) * a.listed;

    if (threadIdx.x == 0) {
        for (int i = 0; i < T::KEY_TILES + T::VALUE_TILES; ++i) {
            hopper::barrier_init(ready + i, 1);
            hopper::barrier_init(free + i, i < T::KEY_TILES ? CONSUMERS / 32 : T::ADDING);
        }
        for (int i = 0; i < 2; ++i) hopper::barrier_init(met + i, CONSUMERS + 1);
        hopper::barrier_init(met + 2, 1);
        hopper::barrier_init_fence();
    }
    __syncwarp();
    cluster_arrive();
    if (SHARE > 1 && warp < CONSUMERS / 32) {
        // What the table says may be old, but is good enough for what comes near; what lies outside is left alone.
        Share const share(a, line, split, [](int const* x) { return __ldcg(x); });
        for (int i = threadIdx.x; i < min(share.blocks, 16) * KEYS; i += CONSUMERS) {
            int const at = share.first + i;
            int row = share.row, token = share.start + at;
            if (a.page > 0) {
                unsigned const number = at / a.page;
                row = number < unsigned(a.listed) ? __ldcg(pages + number) : -1, token = at % a.page;
            }
            if (at >= share.keys || unsigned(row) >= unsigned(a.key_rows) || unsigned(token) >= unsigned(a.key_tokens))
                continue;
            auto const* key = static_cast<Element const*>(a.key) + row * a.k.row;
            auto const* value = static_cast<Element const*>(a.value) + row * a.v.row;
            key += token * a.k.token + head * a.k.head, value += token * a.v.token + head * a.v.head;
            if (i / KEYS % SHARE == part)
                for (int half = 0; half * 64 < a.width; ++half) fetch_ahead(key + half * 64);
            for (int half = 0; half * 64 < min(a.width, T::COLUMNS); ++half)
                fetch_ahead(value + part * T::COLUMNS + half * 64);
        }
    }
    __syncwarp();
    cluster_wait();
    wait_for_previous();
    __syncthreads();

    Share const share(a, line, split, [](int const* x) { return *x; });
    int const rows = min(a.limit, share.queries) * a.group, heads = a.kv * a.group;
    int const q_start = a.table[line * 5 + 1];
    if (warp == CONSUMERS / 32) {
        if (lane == 0) {
            int slots[2] = {}, turns[2] = {};  // of keys and of values
            auto const ask = [&](int block, auto values) {
                constexpr bool VALUES = decltype(values)::value;
                int& slot = slots[VALUES];
                int const place = slot + (VALUES ? T::KEY_TILES : 0);
                constexpr int WIDTH = VALUES ? T::COLUMNS : D, TILE = VALUES ? T::VALUE_TILE : T::KEY_TILE;
                hopper::barrier_wait(free + place, turns[VALUES] ^ 1);
                uint8_t* const to = (VALUES ? value_ring : key_ring) + slot * TILE;
                int const from = share.first + block * KEYS, pieces = min(KEYS, share.keys - from + a.box - 1) / a.box;
                hopper::barrier_expect(ready + place, pieces * a.box * WIDTH * 2);
#pragma unroll 1
                for (int i = 0; i < pieces; ++i) {
                    int const at = from + i * a.box;
                    int const row = a.page ? pages[at / a.page] : share.row;
                    int const token = a.page ? at % a.page : share.start + at;
#pragma unroll
                    for (int half = 0; half < WIDTH / 64; ++half)
                        hopper::tma_load(to + (half * KEYS + i * a.box) * 128, VALUES ? &value_map : &key_map,
                                         ready + place, (VALUES ? part * T::COLUMNS : 0) + half * 64, head, token, row);
                }
                if (++slot == (VALUES ? T::VALUE_TILES : T::KEY_TILES)) slot = 0, turns[VALUES] ^= 1;
            };
#pragma unroll 1
            for (int chunk = 0; chunk < share.blocks; chunk += CHUNK) {
                int const end = min(chunk + CHUNK, share.blocks);
#pragma unroll 1
                for (int j = chunk + part; j < end; j += SHARE) ask(j, std::false_type());
#pragma unroll 1
                for (int j = chunk; j < end; ++j) ask(j, std::true_type());
            }
        }
    } else if (warp > CONSUMERS / 32) {
        // Slots in no segment get 0 and -inf, slots past a promised length NaN.
        for (int64_t slot = blockIdx.x; slot < a.slots; slot += gridDim.x) {
            int const token = static_cast<int>(slot % a.queries);
            int const found = segment_of(a.table, a.segments, static_cast<int>(slot / a.queries), token, 1);
            bool const wrong = found >= 0 && token - a.table[found * 5 + 1] >= a.limit;
            if (found >= 0 && !wrong) continue;
            auto* const out = static_cast<Element*>(a.out) + slot * heads * a.width;
            for (int i = lane; i < heads * a.width; i += 32) out[i] = Element(wrong ? NAN : 0.0f);
            for (int i = lane; i < heads; i += 32) a.lse[slot * heads + i] = wrong ? NAN : -INFINITY;
        }
    } else {
        int const group = warp / 4, thread = threadIdx.x % 128, column = lane % 4 * 2;
        int const key = warp % 4 * 16 + lane / 4;  // of a block, and key + 8
        for (int i = threadIdx.x; i < N * D / 8; i += CONSUMERS) {
            int const r = i / (D / 8), chunk = i % (D / 8);
            uint4 some = {};
            if (r < rows && chunk * 8 < a.width) {
                int64_t const at = share.row * a.q.row + (q_start + r / a.group) * a.q.token;
                int64_t const of = (head * a.group + r % a.group) * a.q.head + chunk * 8;
                some = *reinterpret_cast<uint4 const*>(static_cast<Element const*>(a.query) + at + of);
            }
            *reinterpret_cast<uint4*>(q_tile + swizzled(r, chunk, N)) = some;
        }
        hopper::async_fence();
        hopper::group_sync(1, CONSUMERS);

        // The state of a column: its scaled maximum m, its mass, and in acc the sum of exp2(scores - m)·v.
        constexpr int MINE = N / 4;  // columns of a thread, number i being column + 8·(i / 2) + i % 2
        float acc[N / 2], mass[N / 8][4] = {}, m[MINE];
        int position[MINE];
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            m[i] = -INFINITY;
            position[i] = share.before + min((column + i / 2 * 8 + i % 2) / a.group, share.queries - 1);
        }
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
        int const reach = a.window > 0 ? a.window : 1 << 30;
        bool const adds = group < T::COLUMNS / 64;  // this warpgroup has columns of the values
        uint64_t const k_at = hopper::k_major(key_ring), q_at = hopper::k_major(q_tile);
        uint64_t const p_at = hopper::k_major(p_tiles);
        uint64_t const v_at = hopper::mn_major(value_ring + (adds ? group : 0) * KEYS * 128, KEYS * 128);
        auto const release = [&](int place) {
            if (lane == 0) hopper::barrier_arrive(free + place);
        };
        int meetings = 0;
        int const other = split * SHARE + SHARE - 1 - part;
        // All threads have come so far; so has the other block of threads of the split, and what it sends is here.
        auto const meet = [&](int which, int bytes) {
            if constexpr (SHARE == 1) {
                hopper::group_sync(1, CONSUMERS);
            } else {
                if (threadIdx.x == 0) hopper::barrier_expect(met + which, bytes);
                if (threadIdx.x > 0) hopper::barrier_arrive(met + which);
                wait_for_cluster(met + which, meetings % 2);
            }
        };
        // No thread here reads any more what the other block sends for meeting `which`. Told before each, sent or not,
        // so that neither block is ever more than one meeting ahead.
        auto const expects = [&](int which) {
            hopper::group_sync(1, CONSUMERS);
            if (threadIdx.x == 0) arrive_there(place_in(met + which, other));
        };

#pragma unroll 1
        for (int chunk = 0; chunk < share.blocks; chunk += CHUNK, ++meetings) {
            int const blocks = min(CHUNK, share.blocks - chunk), before = chunk / SHARE;
            int const theirs = (blocks + part) / 2;  // of two blocks of threads
            if constexpr (SHARE > 1) expects(0);
            // Of a chunk, this block of threads multiplies the keys of blocks part, part + SHARE, ..., its warpgroups
            // in turn; `before`: those of earlier chunks.
            constexpr int TIMES = CHUNK / SHARE / GROUPS;
            static_assert(TIMES > 0);
            float scores[TIMES][N / 2];
#pragma unroll
            for (int t = 0; t < TIMES; ++t) {
                int const mine = (t * GROUPS + group) * SHARE + part;
#pragma unroll
                for (int g = 0; g < GROUPS; ++g) {
                    int const number = before + t * GROUPS + g, place = number % T::KEY_TILES;
                    if ((t * GROUPS + g) * SHARE + part >= blocks) continue;
                    hopper::barrier_wait(ready + place, number / T::KEY_TILES % 2);
                    if (g != group) release(place);
                }
                if (mine < blocks) {
                    int const place = (before + t * GROUPS + group) % T::KEY_TILES;
                    uint64_t const keys = k_at + place * (T::KEY_TILE / 16);
                    hopper::registers_fence(scores[t]);
                    hopper::wgmma_fence();
#pragma unroll
                    for (int k = 0; k < D / 16; ++k) {
                        uint64_t const half = k / 4, within = k % 4 * hopper::K_STEP;
                        hopper::Wgmma<Element, N>::both(scores[t], keys + half * (KEYS * 128 / 16) + within,
                                                        q_at + half * (N * 128 / 16) + within, k > 0);
                    }
                    hopper::wgmma_commit();
                    hopper::wgmma_wait<0>();
                    hopper::registers_fence(scores[t]);
                    release(place);
                    int const from = share.first + (chunk + mine) * KEYS;
                    float high[MINE];
#pragma unroll
                    for (int i = 0; i < MINE; ++i) {
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            float& score = scores[t][i / 2 * 4 + h * 2 + i % 2];
                            int const apart = position[i] - from - key - 8 * h;
                            score = (apart >= 0) & (apart < reach) ? score : -INFINITY;
                        }
                        high[i] = fmaxf(scores[t][i / 2 * 4 + i % 2], scores[t][i / 2 * 4 + 2 + i % 2]);
#pragma unroll
                        for (int apart = 4; apart < 32; apart *= 2)
                            high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffff, high[i], apart));
                    }
#pragma unroll
                    for (int i = 0; i < MINE; i += 2) {
                        auto* const to = reinterpret_cast<float2*>(tops + (mine * 4 + warp % 4) * N + column + i * 4);
                        float2 const two = {high[i], high[i + 1]};
                        if (lane < 4) *to = two;
                        if (SHARE > 1 && lane < 4) send(place_in(to, other), place_in(met, other), two);
                    }
                }
            }
            meet(0, theirs * 4 * N * 4);
            float bases[CHUNK][MINE], rescale[CHUNK][MINE];
#pragma unroll
            for (int j = 0; j < CHUNK; ++j) {
                if (j >= blocks) continue;
#pragma unroll
                for (int i = 0; i < MINE; i += 2) {
                    float2 top = {-INFINITY, -INFINITY};
#pragma unroll
                    for (int w = 0; w < 4; ++w) {
                        float2 const one = *reinterpret_cast<float2*>(tops + (j * 4 + w) * N + column + i * 4);
                        top.x = fmaxf(top.x, one.x), top.y = fmaxf(top.y, one.y);
                    }
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float const now = fmaxf(m[i + e], __fmul_rn(e ? top.y : top.x, a.scale));
                        bases[j][i + e] = no_infinity(now);
                        rescale[j][i + e] = exp2_of(__fsub_rn(m[i + e], bases[j][i + e]));
                        m[i + e] = now;
                    }
                }
            }
#pragma unroll
            for (int t = 0; t < TIMES; ++t) {
                int const mine = (t * GROUPS + group) * SHARE + part;
                if (mine >= blocks) continue;
                uint8_t* const to = p_tiles + mine * N * 128;
#pragma unroll
                for (int i = 0; i < MINE; ++i) {
                    float from = 0.0f;
#pragma unroll
                    for (int j = t * GROUPS * SHARE; j < (t + 1) * GROUPS * SHARE; ++j)
                        if (j == mine) from = bases[j][i];
                    int const n = column + i / 2 * 8 + i % 2;
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        Element const p(exp2_of(__fmaf_rn(scores[t][i / 2 * 4 + h * 2 + i % 2], a.scale, -from)));
                        uint8_t* const place = to + swizzled(n, (key + 8 * h) / 8, N) + (key + 8 * h) % 8 * 2;
                        *reinterpret_cast<Element*>(place) = p;
                    }
                }
            }
            if constexpr (SHARE > 1) {
                expects(1);
                static_assert(CHUNK / SHARE * N * 8 == CONSUMERS);
                int const j = threadIdx.x / (N * 8) * SHARE + part;
                uint8_t* const place = p_tiles + j * N * 128 + threadIdx.x % (N * 8) * 16;
                if (j < blocks)
                    send(place_in(place, other), place_in(met + 1, other), *reinterpret_cast<uint4 const*>(place));
            }
            hopper::async_fence();
            meet(1, theirs * N * 128);
            if (SHARE > 1) hopper::async_fence();
            auto const add_masses = [&](int j) {
                uint8_t const* const from = p_tiles + j * N * 128 + column * 2;
#pragma unroll
                for (int i = 0; i < MINE; ++i) mass[i / 2][i % 2] = __fmul_rn(mass[i / 2][i % 2], rescale[j][i]);
#pragma unroll
                for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
                    for (int i = 0; i < N / 8; ++i) {
                        auto const two = [&](int chunk_of) {
                            int const at = swizzled(i * 8 + lane / 4, chunk_of, N);
                            return *reinterpret_cast<uint32_t const*>(from + at);
                        };
                        add_columns<Element>(mass[i], two(2 * k), two(2 * k + 1));
                    }
                }
            };
            if (adds) {
#pragma unroll
                for (int j = 0; j < CHUNK; ++j) {
                    if (j >= blocks) continue;
                    int const number = chunk + j, slot = number % T::VALUE_TILES, place = T::KEY_TILES + slot;
                    int const known = share.keys - share.first - number * KEYS;
                    hopper::barrier_wait(ready + place, number / T::VALUE_TILES % 2);
                    if (known < KEYS) {  // what stands past the last key may be NaN, and 0·NaN is NaN
                        uint8_t* const half = value_ring + slot * T::VALUE_TILE + group * KEYS * 128;
                        for (int i = thread; i < (KEYS - known) * 8; i += 128)
                            *reinterpret_cast<uint4*>(half + known * 128 + i * 16) = uint4{};
                        hopper::async_fence();
                        hopper::group_sync(2 + group, 128);
                    }
#pragma unroll
                    for (int i = 0; i < MINE; ++i) {
                        acc[i / 2 * 4 + i % 2] = __fmul_rn(acc[i / 2 * 4 + i % 2], rescale[j][i]);
                        acc[i / 2 * 4 + 2 + i % 2] = __fmul_rn(acc[i / 2 * 4 + 2 + i % 2], rescale[j][i]);
                    }
                    uint64_t const values = v_at + slot * (T::VALUE_TILE / 16), p = p_at + j * (N * 128 / 16);
                    hopper::registers_fence(acc);
                    hopper::wgmma_fence();
#pragma unroll
                    for (int k = 0; k < KEYS / 16; ++k)
                        hopper::Wgmma<Element, N, hopper::MN_MAJOR, hopper::K_MAJOR>::both(
                            acc, values + k * hopper::MN_STEP, p + k * hopper::K_STEP, 1);
                    hopper::wgmma_commit();
                    if (SHARE == 1) add_masses(j);
                    hopper::wgmma_wait<0>();
                    hopper::registers_fence(acc);
                    release(place);
                }
            } else {
#pragma unroll
                for (int j = 0; j < CHUNK; ++j)
                    if (j < blocks) add_masses(j);
            }
        }
        next_may_start();

        // Row r is folded by warp r mod WARPS of a split that follows from r; `at`: where, among the rows folded there.
        constexpr int WARPS = CONSUMERS / 32, WIDTH = T::COLUMNS / 32;
        int const folding = min(a.splits, (rows + WARPS - 1) / WARPS);
        auto const at = [&](int r, int of) {
            int const number = r / WARPS / a.splits * WARPS + r % WARPS;
            return given + (number * a.splits + of) * T::WIDE;
        };
        bool const tells = warp == (SHARE > 1 ? WARPS / 2 : 0);  // of maxima and masses
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            int const n = column + i / 2 * 8 + i % 2;
            if (n >= rows || !(adds || tells)) continue;
            int const there = n / WARPS % a.splits * SHARE + part;
            uint32_t const to = place_in(at(n, split), there), barrier = place_in(met + 2, there);
            if (tells && lane < 4) send(to + T::COLUMNS * 4, barrier, float2{m[i], mass[i / 2][i % 2]});
            if (!adds) continue;
            send(to + (group * 64 + key) * 4, barrier, acc[i / 2 * 4 + i % 2]);
            send(to + (group * 64 + key + 8) * 4, barrier, acc[i / 2 * 4 + 2 + i % 2]);
        }
        if (split >= folding) return;
        int here = 0;
        for (int r = split * WARPS; r < rows; r += a.splits * WARPS) here += min(rows - r, WARPS);
        if (threadIdx.x == 0) hopper::barrier_expect(met + 2, here * a.splits * (T::COLUMNS + 2) * 4);
        wait_for_cluster(met + 2, 0);
        for (int r = split * WARPS + warp; r < rows; r += a.splits * WARPS) {
            constexpr int MOST = JOINED / SHARE;
            Numbers<WIDTH> there[MOST], total = {};
            float const* const from = at(r, min(lane, a.splits - 1)) + T::COLUMNS;
            float m_of = from[0], mass_of = from[1];
#pragma unroll
            for (int of = 0; of < MOST; ++of)
                if (of < a.splits) there[of] = *reinterpret_cast<Numbers<WIDTH> const*>(at(r, of) + lane * WIDTH);
            if (lane >= a.splits) m_of = -INFINITY, mass_of = 0.0f;
            float top = m_of;
#pragma unroll
            for (int apart = 1; apart < MOST; apart *= 2) {
                float const below = __shfl_up_sync(0xffffffff, top, apart);
                if (lane >= apart) top = fmaxf(top, below);
            }
            float const below = __shfl_up_sync(0xffffffff, top, 1);
            float so_far = lane == 0 ? -INFINITY : below, total_mass = 0.0f;
            Factors const factors(so_far, m_of);
#pragma unroll
            for (int of = 0; of < MOST; ++of) {
                if (of >= a.splits) break;
                Factors const of_split = factors.of_lane(of);
                total_mass = of_split(total_mass, __shfl_sync(0xffffffff, mass_of, of));
#pragma unroll
                for (int c = 0; c < WIDTH; ++c) total.of[c] = of_split(total.of[c], there[of].of[c]);
            }
            float const total_m = __shfl_sync(0xffffffff, top, MOST - 1);
            int const query = r / a.group, member = head * a.group + r % a.group;
            Finish const finish(total_m, total_mass, a.sinks == nullptr ? nullptr : a.sinks + member);
            float const wrong = a.schedule.of(share.before + query) >= a.splits ? NAN : 1.0f;
            int64_t const slot = static_cast<int64_t>(share.row) * a.queries + q_start + query;
            int64_t const cell = slot * heads + member;
            int const first = part * T::COLUMNS + lane * WIDTH;
            auto* const out = static_cast<Element*>(a.out) + cell * a.width + first;
            uint32_t packed[WIDTH / 2];
#pragma unroll
            for (int c = 0; c < WIDTH; c += 2)
                packed[c / 2] = hopper::pack(finish(total.of[c]) * wrong, finish(total.of[c + 1]) * wrong, Element());
            if (first < a.width) {
                if constexpr (WIDTH == 4) *reinterpret_cast<uint2*>(out) = {packed[0], packed[1]};
                else *reinterpret_cast<uint32_t*>(out) = packed[0];
            }
            if (lane == 0 && part == 0) a.lse[cell] = finish.lse * wrong;
        }
    }
}

template <typename Element, int D, int N, int SHARE>
cudaError_t run_decode(Forward const& a, CUtensorMap const& key_map, CUtensorMap const& value_map,
                       cudaStream_t stream) {
    constexpr int bytes = Decode<Element, D, N, SHARE>::BYTES;
    auto* const kernel = attention_decode_kernel<Element, D, N, SHARE>;
    RLSPEC_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {unsigned(a.splits * SHARE), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(unsigned(a.kv * a.segments * a.splits * SHARE)), config.blockDim = dim3(D * 2 + 64);
    config.dynamicSmemBytes = bytes, config.stream = stream, config.attrs = attributes, config.numAttrs = 2;
    return cudaLaunchKernelEx(&config, kernel, key_map, value_map, a);
}

}  // namespace rlspec
