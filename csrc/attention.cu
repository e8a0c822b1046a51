// Causal grouped-query attention by hand for Hopper: the sums of kernels/attention.py, bit for bit.
//
//     out_i = Σ_j p_ij v_j,  p_ij = exp(scale·q_i·k_j - lse_i),  lse_i = log(Σ_j exp(scale·q_i·k_j) [+ exp(sink)])
//
// over the keys j <= i of the same sample, with a window only those with i - j < window.
// Online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867. Backward: Dao et al. 2022, arXiv:2205.14135, app. B.
// Splits over keys: Dao et al. 2023 (Flash-Decoding). Sinks: the gpt-oss model file (one more logit per head).
//
// Promise, to the bit. A row of `out` and `lse` depends on its query, on the keys and values up to it, and on constants
// of (width, dtype): prefill, chunks, decode, packed, padded, contiguous and paged agree. The gradients of a sample
// depend on that sample alone. No atomics on results (one counts the tiles that are handed out); runs agree.
//
// Where the order comes from. It is that of the Triton kernel, whose header gives the reasons, so both agree:
// - Blocks of 64 keys from position 0 of the sample; within one the matrix unit chains them upward in groups of 16.
// - Blocks are gathered into splits whose borders follow from the position (`Schedule`). A split starts from the empty
//   state; finished splits are folded upward, in place, by a second kernel or in a cluster (decode.cuh), in one
//   expression (`Factors`).
// - Sums of rows are p·1 on the matrix unit. Maxima are exact in any order, and kept scaled.
// - A key that a row does not see leaves its state as it was; what stands past the last key is replaced by zeros.
// - dK and dV: heads of the group upward, in each the blocks of 64 queries upward. dQ: blocks of 64 keys upward.
// - Multiplications and additions are spelled out where a compiler may contract them.
//
// How it runs. A thread asks the copy engine (TMA) for keys and values, and one for each warpgroup for its queries. A
// warpgroup multiplies 64 rows, with rows of scores in registers. In prefill two or three share the keys and values.
//
// Limits: bf16, fp16; widths 16, 32, 64, 128 (narrower ones are filled up with zeros, which keep the bits); at most 64
// query heads a key head; pages of at least 8 tokens. Values of a sample must be finite.
#include "decode.cuh"

namespace rlspec {

constexpr int GROUPS = 3;           // warpgroups of a tile in prefill of long samples; of shorter ones 2, in decode 1
constexpr int POSTED = 8;           // tiles on the board: more than can be under way at a time
constexpr int64_t NEAR = 24 << 20;  // bytes of keys and values that are read again and again at a time, to stay in L2

// ---------------------------------------------------------------------------------------------------------------------
// Forward

// A place in a ring of N, and which turn it is.
template <int N>
struct Ring {
    int slot;
    uint32_t turn;
    __device__ __forceinline__ void advance(int by) {
        slot += by;
        if (slot >= N) slot -= N, turn ^= 1;
    }
};

// A tile: 64·COUNT rows (the query heads of one key head, of neighbouring queries) and its blocks of keys; with PART,
// those of one split. `near` pairs of head and sample take turns, so that their keys and values stay in L2; among them
// the longest rows (with PART, the latest splits) come first.
template <int COUNT, bool PART>
struct Tile {
    int head, line, split;
    Segment segment;
    int query, span, before, first, blocks;  // first query, queries in all, keys before the sample's first query
    int border;                              // where the second split starts
    Tile() = default;
    __device__ Tile(Forward const& a, int item)
        : Tile(a, item, item / (a.near * a.tiles * a.splits) * a.near) {}
    __device__ Tile(Forward const& a, int item, int from)
        : Tile(a, item - from * a.tiles * a.splits, from, min(a.near, a.kv * a.segments - from)) {}
    __device__ Tile(Forward const& a, int item, int from, int pairs)
        : head((from + item % pairs) % a.kv),
          line((from + item % pairs) / a.kv),
          split(0),
          segment(a.table + line * 5) {
        int const rest = item / pairs;
        span = COUNT * 64 / a.group, before = segment.keys - segment.queries;
        query = (a.tiles - 1 - rest % a.tiles) * span;
        int stop = min(before + query + span, segment.keys);
        first = a.window > 0 ? max(before + query - a.window + 1, 0) / KEYS * KEYS : 0;
        if (PART) {
            split = a.splits - 1 - rest / a.tiles;
            first = max(first, a.schedule.start(split)), stop = min(stop, a.schedule.start(split + 1));
        }
        blocks = query < segment.queries ? max(stop - first + KEYS - 1, 0) / KEYS : 0;
        border = PART ? 0 : a.schedule.start(a.schedule.of(first) + 1);
    }
};

// Read by the lane that will say that it has been read, and handed on so that the compiler knows it is one a warp.
template <typename T>
__device__ __forceinline__ T of_warp(T const& x) {
    T copy;
#pragma unroll
    for (int i = 0; i < int(sizeof(T) / 4); ++i)
        reinterpret_cast<int*>(&copy)[i] =
            __shfl_sync(0xffffffff, threadIdx.x % 32 == 0 ? reinterpret_cast<int const*>(&x)[i] : 0, 0);
    return copy;
}

// Blocks of threads take tiles one after the other, as they get free. With PART the state of a row goes to memory;
// otherwise splits are folded as they end.
template <typename Element, int D, int COUNT, bool PART, int RING, int PLACES>
__global__ __launch_bounds__(COUNT * 128 + 128, PART ? 2 : 1) void attention_forward_kernel(
    __grid_constant__ CUtensorMap const query_map, __grid_constant__ CUtensorMap const key_map,
    __grid_constant__ CUtensorMap const value_map, __grid_constant__ Forward const a) {
    constexpr bool KEPT = COUNT < GROUPS;  // totals of the splits which have ended stay in registers
    constexpr int TILE = KEYS * D * 2;     // bytes of a block of keys, of values, and of the queries of a warpgroup
    extern __shared__ __align__(1024) uint8_t memory[];
    uint8_t* const q_tiles = memory;
    uint8_t* const ring = q_tiles + PLACES * COUNT * TILE;  // keys of a block, its values, those of the next, ...
    uint8_t* const totals = ring + RING * TILE;  // fp32, of a warp at a time; at its end the rows on the way out
    auto* const ready = reinterpret_cast<uint64_t*>(totals + (PART ? 0 : KEPT ? COUNT : 2 * COUNT) * TILE);
    uint64_t* const free = ready + RING;
    uint64_t *const q_full = free + RING, *const q_free = q_full + PLACES * COUNT;  // of each warpgroup
    uint64_t* const posted = q_free + PLACES * COUNT;
    auto* const board = reinterpret_cast<Tile<COUNT, PART>*>(posted + POSTED);  // without blocks: no more
    auto* const ones = reinterpret_cast<Element*>(board + POSTED);              // 16 by 8, in any order

    if (threadIdx.x == 0) {
        for (int i = 0; i < RING; ++i) hopper::barrier_init(ready + i, 1), hopper::barrier_init(free + i, COUNT * 4);
        for (int i = 0; i < PLACES * COUNT; ++i)
            hopper::barrier_init(q_full + i, 1), hopper::barrier_init(q_free + i, 4);
        for (int i = 0; i < POSTED; ++i) hopper::barrier_init(posted + i, 1);
        hopper::barrier_init_fence();
    }
    if (threadIdx.x < 128) {
        ones[threadIdx.x] = Element(1.0f);
        hopper::async_fence();
    }
    // In this order, so that the kernel of the fold may read the table before it waits.
    wait_for_previous();
    next_may_start();
    __syncthreads();

    bool const boxed = 64 % a.group == 0;  // a box of the copy engine holds the queries of a warpgroup
    if (threadIdx.x >= COUNT * 128) {     // the threads that ask: first for keys and values, then each for queries
        hopper::registers_shrink<56>();
        int const asker = threadIdx.x / 32 - COUNT * 4;
        if (threadIdx.x % 32 > 0 || asker > COUNT) return;
        for (int n = 0; asker > 0; ++n) {
            int const place = n % PLACES * COUNT + asker - 1;
            hopper::barrier_wait(posted + n % POSTED, n / POSTED % 2);
            hopper::barrier_wait(q_free + place, n / PLACES % 2 ^ 1);  // the warpgroup has done with what was there
            Tile<COUNT, PART> const& tile = board[n % POSTED];
            bool const more = tile.blocks > 0;
            if (more && boxed) {
                hopper::barrier_expect(q_full + place, TILE);
#pragma unroll
                for (int half = 0; half < D / 64; ++half) {
                    int const token = tile.segment.query_start + tile.query + (asker - 1) * (64 / a.group);
                    hopper::tma_load(q_tiles + (place * D + half * 64) * 128, &query_map, q_full + place, half * 64,
                                     tile.head * a.group, token, tile.segment.row);
                }
            } else {
                hopper::barrier_arrive(q_full + place);
                if (!more) return;
            }
        }

        int slot = 0, turn = 0;  // of the ring
        int round = 0;
        auto const next_item = [&]() -> int {
            if (!PART) return gridDim.x + atomicAdd(a.taken, 1);
            ++round;  // forth and back, so that who began with a short split gets one more
            return round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
        };
        for (int n = 0, item = blockIdx.x;; ++n) {
            int following = next_item();
            Tile<COUNT, PART> tile;
            for (tile.blocks = 0; item < a.items; item = following, following = next_item()) {
                tile = Tile<COUNT, PART>(a, item);
                if (tile.blocks > 0) break;
            }
            board[n % POSTED] = tile;
            hopper::barrier_arrive(posted + n % POSTED);
            if (tile.blocks == 0) return;
            Segment const& segment = tile.segment;
            int const* const pages = a.pages + static_cast<int64_t>(tile.line) * a.listed;
            auto const fetch = [&](CUtensorMap const* map, int start) {
                uint8_t* const to = ring + slot * TILE;
                auto const ask = [&](int token, int row, int at) {
#pragma unroll
                    for (int half = 0; half < D / 64; ++half)
                        hopper::tma_load(to + (half * KEYS + at) * 128, map, ready + slot, half * 64, tile.head,
                                         token, row);
                };
                if (a.box == KEYS) {  // all is worked out before the wait
                    int const row = a.page ? pages[start / a.page] : segment.row;
                    int const token = a.page ? start % a.page : segment.key_start + start;
                    hopper::barrier_wait(free + slot, turn ^ 1);
                    hopper::barrier_expect(ready + slot, TILE);
                    ask(token, row, 0);
                } else {
                    int const pieces = min(KEYS, segment.keys - start + a.box - 1) / a.box;
                    hopper::barrier_wait(free + slot, turn ^ 1);
                    hopper::barrier_expect(ready + slot, pieces * a.box * D * 2);
#pragma unroll 1
                    for (int i = 0; i < pieces; ++i) {
                        int const at = start + i * a.box;
                        ask(at % a.page, pages[at / a.page], i * a.box);
                    }
                }
                if (++slot == RING) slot = 0, turn ^= 1;
            };
#pragma unroll 1
            for (int j = 0; j < tile.blocks; ++j) {
                fetch(&key_map, tile.first + j * KEYS);
                fetch(&value_map, tile.first + j * KEYS);
            }
            item = following;
        }
    }

    hopper::registers_grow<PART ? 200 : KEPT ? 224 : 152>();
    int const group = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);  // so that the compiler knows it is one a warp
    int const thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    int const row = group * 64 + thread / 32 * 16 + lane / 4, column = lane % 4 * 2, heads = a.kv * a.group;
    uint64_t const k_at = hopper::k_major(ring), v_at = hopper::mn_major(ring, KEYS * 128);
    // Not swizzled, 8 by 8 after 8 by 8.
    uint64_t const ones_at = 8ull << 32 | 8ull << 16 | (hopper::shared_address(ones) & 0x3ffff) >> 4;
    uint8_t* const rows_out = totals + threadIdx.x / 32 * (KEPT ? 32 * D : 64 * D);
    float4* const total_mine = reinterpret_cast<float4*>(rows_out) + lane;
    Ring<RING> keys = {};  // where the next ones will be
    for (int n = 0;; ++n) {
        int const place = n % PLACES * COUNT + group;
        hopper::barrier_wait(q_full + place, n / PLACES % 2);
        Tile<COUNT, PART> const tile = of_warp(board[n % POSTED]);
        if (tile.blocks == 0) return;
        Segment const& segment = tile.segment;
        int const first = tile.first;
        uint8_t* const q_mine = q_tiles + place * TILE;
        auto const head_of = [&](int of) { return tile.head * a.group + a.head_of(of); };
        if (!boxed) {
            for (int i = thread; i < 64 * D / 8; i += 128) {
                int const r = i / (D / 8), of = group * 64 + r, query = tile.query + a.query_of(of);
                uint4 chunk = {};
                if (query < segment.queries && a.query_of(of) < tile.span && i % (D / 8) * 8 < a.width) {
                    int64_t const at = segment.row * a.q.row + (segment.query_start + query) * a.q.token;
                    int64_t const head = head_of(of) * a.q.head + i % (D / 8) * 8;
                    chunk = *reinterpret_cast<uint4 const*>(static_cast<Element const*>(a.query) + at + head);
                }
                *reinterpret_cast<uint4*>(q_mine + swizzled(r, i % (D / 8), 64)) = chunk;
            }
            hopper::async_fence();
            hopper::group_sync(1 + group, 128);
        }

        int const last = segment.queries - 1;
        int const position[2] = {tile.before + min(tile.query + a.query_of(row), last),
                                 tile.before + min(tile.query + a.query_of(row + 8), last)};
        int const low = tile.before + min(tile.query + a.query_of(group * 64), last);
        int const high = tile.before + min(tile.query + a.query_of(group * 64 + 63), last);
        // Of this warpgroup, the last rows of which may be too early for the last block.
        int const blocks = max(min(tile.blocks, (high - first) / KEYS + 1), 1);
        int const full = a.window > 0 ? first : (low + 1) / KEYS * KEYS;  // blocks below it are seen whole by every row

        // The state of a row: its scaled maximum m, its mass, and in acc the sum of exp2(scores - m)·v. Two rows a
        // thread, r and r + 8 of the fragment; the total is that of the splits which have ended.
        float scores[32], acc[D / 2], mass[4] = {}, m[2], rescale[2];
        float total_m[2], total_mass[2] = {};
        bool folded = false;
        float4 kept[KEPT && !PART ? D / 8 : 1];
        uint32_t p[4][4];
        m[0] = m[1] = total_m[0] = total_m[1] = -INFINITY;
#pragma unroll
        for (int i = 0; i < D / 2; ++i) acc[i] = 0.0f;
#pragma unroll
        for (int i = 0; i < (KEPT && !PART ? D / 8 : 1); ++i) kept[i] = float4{};

        uint64_t const q_at = hopper::k_major(q_mine);
        auto const wait_for = [&](Ring<RING> const& place) { hopper::barrier_wait(ready + place.slot, place.turn); };
        auto const release = [&](Ring<RING> const& place) {
            if (lane == 0) hopper::barrier_arrive(free + place.slot);
        };
        auto const multiply_keys = [&](int slot) {
            uint64_t const keys = k_at + slot * (TILE / 16);
            hopper::registers_fence(scores);
            hopper::wgmma_fence();
#pragma unroll
            for (int k = 0; k < D / 16; ++k) {
                uint64_t const at = k / 4 * (KEYS * 128 / 16) + k % 4 * hopper::K_STEP;
                hopper::Wgmma<Element, 64>::both(scores, q_at + at, keys + at, k > 0);
            }
            hopper::wgmma_commit();
        };
        auto const multiply_values = [&](int slot, int j) {  // and sum the rows
            int const known = segment.keys - first - j * KEYS;
            if (known < KEYS) {  // what stands past the last key may be NaN, and 0·NaN is NaN
                for (int i = thread; i < (KEYS - known) * (D / 8); i += 128) {
                    int const at = swizzled(KEYS - 1 - i / (D / 8), i % (D / 8), KEYS);
                    *reinterpret_cast<uint4*>(ring + slot * TILE + at) = uint4{};
                }
                hopper::async_fence();
                hopper::group_sync(1 + group, 128);
            }
            uint64_t const values = v_at + slot * (TILE / 16);
            hopper::registers_fence(acc);
            hopper::registers_fence(mass);
            hopper::wgmma_fence();
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k) hopper::Wgmma<Element, 8>::left(mass, p[k], ones_at, 1);
#pragma unroll
            for (int k = 0; k < KEYS / 16; ++k)
                hopper::Wgmma<Element, D, hopper::K_MAJOR, hopper::MN_MAJOR>::left(
                    acc, p[k], values + k * hopper::MN_STEP, 1);
            hopper::wgmma_commit();
        };
        float base[2];  // what the exponents of a row are counted from
        auto const maxima_of = [&](int j, bool masked) {
            int const start = first + j * KEYS;
            if (masked) {
                int const reach = a.window > 0 ? a.window : 1 << 30;
#pragma unroll
                for (int i = 0; i < 32; ++i) {  // a row sees the `reach` columns up to its own
                    int const own = position[i / 2 % 2] - start - column, at = i / 4 * 8 + i % 2;
                    if (at > own || at <= own - reach) scores[i] = -INFINITY;
                }
            }
            float top[2] = {scores[0], scores[2]};
#pragma unroll
            for (int i = 0; i < 32; ++i) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                top[r] = fmaxf(m[r], __fmul_rn(row_max(top[r]), a.scale));
                base[r] = no_infinity(top[r]);
                rescale[r] = __fsub_rn(m[r], base[r]);
                m[r] = top[r];
            }
        };
        // Twice the code: the compiler moves what follows, the wait for the sums, in front of no branch.
        auto const maxima = [&](int j) {
            if (first + j * KEYS >= full) {
                maxima_of(j, true);
                asm volatile("// some rows do not see all");
            } else {
                maxima_of(j, false);
                asm volatile("// every row sees all");
            }
        };
        auto const exponentials = [&] {  // scores become exp2(scores - m), rounded for the product with the values
#pragma unroll
            for (int r = 0; r < 2; ++r) rescale[r] = exp2_of(rescale[r]);
#pragma unroll
            for (int i = 0; i < 32; ++i) scores[i] = exp2_of(__fmaf_rn(scores[i], a.scale, -base[i / 2 % 2]));
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i)
                p[i / 4][i % 4] = hopper::pack(scores[2 * i], scores[2 * i + 1], Element());
        };
        auto const rescale_sums = [&] {
#pragma unroll
            for (int i = 0; i < 4; ++i) mass[i] = __fmul_rn(mass[i], rescale[i / 2]);
#pragma unroll
            for (int i = 0; i < D / 2; ++i) acc[i] = __fmul_rn(acc[i], rescale[i / 2 % 2]);
        };
        auto const wait_for_sums = [&] {
            hopper::wgmma_wait<0>();
            hopper::registers_fence(acc);
            hopper::registers_fence(mass);
        };
        auto const fold = [&](float const(&ended)[2], float const(&ended_mass)[2], bool last) {
            if constexpr (!PART) {
                Factors const factors[2] = {{total_m[0], ended[0]}, {total_m[1], ended[1]}};
#pragma unroll
                for (int r = 0; r < 2; ++r) total_mass[r] = factors[r](total_mass[r], ended_mass[r]);
#pragma unroll
                for (int i = 0; i < D / 8; ++i) {
                    float4 total = {};
                    if (KEPT) total = kept[i];
                    else if (folded) total = total_mine[i * 32];
                    total.x = factors[0](total.x, acc[4 * i]), total.y = factors[0](total.y, acc[4 * i + 1]);
                    total.z = factors[1](total.z, acc[4 * i + 2]), total.w = factors[1](total.w, acc[4 * i + 3]);
                    if (last) {
                        acc[4 * i] = total.x, acc[4 * i + 1] = total.y;
                        acc[4 * i + 2] = total.z, acc[4 * i + 3] = total.w;
                    } else if (KEPT) {
                        kept[i] = total;
                    } else {
                        total_mine[i * 32] = total;
                    }
                }
                folded = true;
            }
        };

        // So that the compiler knows it is one a warp.
        keys.slot = __shfl_sync(0xffffffff, keys.slot, 0), keys.turn = __shfl_sync(0xffffffff, keys.turn, 0);
        Ring<RING> values = keys;
        values.advance(1);
        wait_for(keys);
        multiply_keys(keys.slot);
        hopper::wgmma_wait<0>();
        hopper::registers_fence(scores);
        release(keys);
        keys.advance(2);
        maxima(0);
        exponentials();
        int border = tile.border;  // where the next split starts
        for (int j = 1; j < blocks; ++j) {
            // The scores of this block and the sums of the one before are in flight together.
            wait_for(keys);
            multiply_keys(keys.slot);
            wait_for(values);
            multiply_values(values.slot, j - 1);
            hopper::wgmma_wait<1>();
            hopper::registers_fence(scores);
            release(keys);
            keys.advance(2);
            if (j + 1 == blocks && lane == 0) hopper::barrier_arrive(q_free + place);
            bool const fresh = first + j * KEYS == border;
            float const ended[2] = {m[0], m[1]};
            if (fresh) m[0] = m[1] = -INFINITY;  // then rescale is 0
            maxima(j);
            wait_for_sums();  // before the exponentials, so that the place of the values is free early
            release(values);
            values.advance(2);
            if (fresh) {
                float const ended_mass[2] = {mass[0], mass[2]};
                fold(ended, ended_mass, false);
                border += border < a.schedule.change ? a.schedule.early : a.schedule.late;
            }
            exponentials();
            rescale_sums();
        }
        if (blocks == 1 && lane == 0) hopper::barrier_arrive(q_free + place);
        wait_for(values);
        multiply_values(values.slot, blocks - 1);
        wait_for_sums();
        release(values);
        float const ended_mass[2] = {mass[0], mass[2]};
        fold(m, ended_mass, true);
        for (int i = blocks; i < tile.blocks; ++i) {
            wait_for(keys), release(keys), keys.advance(1);
            wait_for(keys), release(keys), keys.advance(1);
        }

        int64_t const slot = static_cast<int64_t>(segment.row) * a.queries + segment.query_start;
        if constexpr (PART) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                int const of = row + 8 * r, query = tile.query + a.query_of(of);
                if (query >= segment.queries || a.query_of(of) >= tile.span) continue;
                int64_t const cell = (tile.split * a.slots + slot + query) * heads + head_of(of);
                if (column == 0) a.part_m[cell] = m[r], a.part_mass[cell] = mass[2 * r];
#pragma unroll
                for (int i = 0; i < D / 8; ++i)
                    if (i * 8 < a.width)
                        *reinterpret_cast<float2*>(a.part + cell * a.width + i * 8 + column) =
                            float2{acc[4 * i + 2 * r], acc[4 * i + 2 * r + 1]};
            }
            continue;
        }
        int const known = min(segment.queries, a.limit);  // what is longer than promised is NaN already
        __syncwarp();  // the totals of the warp have been read: their place holds the rows on the way out
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int const of = row + 8 * r, query = tile.query + a.query_of(of), head = head_of(of);
            bool const live = query < known && a.query_of(of) < tile.span;
            Finish const finish(total_m[r], total_mass[r], a.sinks == nullptr ? nullptr : a.sinks + head);
            if (live && column == 0) a.lse[(slot + query) * heads + head] = finish.lse;
#pragma unroll
            for (int i = 0; i < D / 8; ++i) {
                float const left = finish(acc[4 * i + 2 * r]), right = finish(acc[4 * i + 2 * r + 1]);
                *reinterpret_cast<uint32_t*>(rows_out + swizzled(of % 16, i, 16) + column * 2) =
                    hopper::pack(left, right, Element());
            }
        }
        __syncwarp();
        for (int i = lane; i < 16 * D / 8; i += 32) {
            int const of = group * 64 + thread / 32 * 16 + i / (D / 8), query = tile.query + a.query_of(of);
            if (query >= known || a.query_of(of) >= tile.span || i % (D / 8) * 8 >= a.width) continue;
            int64_t const cell = (slot + query) * heads + head_of(of);
            *reinterpret_cast<uint4*>(static_cast<Element*>(a.out) + cell * a.width + i % (D / 8) * 8) =
                *reinterpret_cast<uint4 const*>(rows_out + swizzled(i / (D / 8), i % (D / 8), 16));
        }
        __syncwarp();
    }
}

// A warp folds the splits of one query head of a slot upward. A pad gets 0 and -inf; what is longer than promised, NaN.
template <typename Element, int D>
__global__ __launch_bounds__(128, 4) void attention_fold_kernel(__grid_constant__ Forward const a) {
    constexpr int MINE = D / 32, DEPTH = 16;  // columns a lane; splits on their way at a time
    next_may_start();
    // The kernel in front has let this one start after its own wait, so the table is there; the splits are not yet.
    int const heads = a.kv * a.group, lane = threadIdx.x % 32;
    int64_t const cell = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32, cells = a.slots * heads;
    int const token = static_cast<int>(cell / heads % a.queries), row = static_cast<int>(cell / heads / a.queries);
    int const line = cell < cells ? segment_of(a.table, a.segments, row, token, 1) : -1;
    int const* const entry = a.table + max(line, 0) * 5;
    int const query = token - __ldcg(entry + 1), position = __ldcg(entry + 4) - __ldcg(entry + 2) + query;
    int const first = a.window > 0 ? a.schedule.of(max(position - a.window + 1, 0)) : 0;
    int const last = a.schedule.of(position), end = min(last + 1, a.splits);
    wait_for_previous();
    if (cell >= cells) return;
    auto* const out = static_cast<Element*>(a.out) + cell * a.width + lane * MINE;
    bool const inside = lane * MINE < a.width;
    if (line < 0) {
        for (int i = 0; inside && i < MINE; ++i) out[i] = Element(0.0f);
        if (lane == 0) a.lse[cell] = -INFINITY;
        return;
    }
    Numbers<MINE> acc[DEPTH], total = {};
    int64_t const step = cells * a.width;
    auto const fetch = [&](int start) {
        float const* from = a.part + start * step + cell * a.width + lane * MINE;
#pragma unroll
        for (int i = 0; i < DEPTH; ++i, from += step) {
            acc[i] = Numbers<MINE>{};
            if (inside && start + i < end) acc[i] = *reinterpret_cast<Numbers<MINE> const*>(from);
        }
    };
    // The factors of 32 splits side by side, from the maximum up to each; the sums one after the other.
    float total_m = -INFINITY, total_mass = 0.0f;
    for (int chunk = first; chunk < end; chunk += 32) {
        fetch(chunk);
        bool const mine = chunk + lane < end;
        int64_t const place = (chunk + lane) * cells + cell;
        float const m = mine ? a.part_m[place] : -INFINITY, mass = mine ? a.part_mass[place] : 0.0f;
        float top = fmaxf(m, total_m);
        for (int apart = 1; apart < 32; apart *= 2) {
            float const below = __shfl_up_sync(0xffffffff, top, apart);
            if (lane >= apart) top = fmaxf(top, below);
        }
        float const below = __shfl_up_sync(0xffffffff, top, 1);
        float so_far = lane == 0 ? total_m : below;
        Factors const factors(so_far, m);
        for (int start = 0; start < min(32, end - chunk); start += DEPTH) {
            if (start > 0) fetch(chunk + start);
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                if (chunk + start + i >= end) break;
                Factors const of_split = factors.of_lane(start + i);
                total_mass = of_split(total_mass, __shfl_sync(0xffffffff, mass, start + i));
#pragma unroll
                for (int c = 0; c < MINE; ++c) total.of[c] = of_split(total.of[c], acc[i].of[c]);
            }
        }
        total_m = __shfl_sync(0xffffffff, top, 31);
    }
    Finish const finish(total_m, total_mass, a.sinks == nullptr ? nullptr : a.sinks + cell % heads);
    float const wrong = last >= a.splits || query >= a.limit ? NAN : 1.0f;
    for (int i = 0; inside && i < MINE; ++i) out[i] = Element(finish(total.of[i]) * wrong);
    if (lane == 0) a.lse[cell] = finish.lse * wrong;
}

// Slots in no segment get 0 (and -inf); slots past a promised length get NaN. A warp a slot. `taken` becomes 0.
template <typename Element>
__global__ __launch_bounds__(128) void attention_pads_kernel(
    Element* x, float* lse, int* taken, int const* table, int segments, int rows, int length, int heads, int width,
    int column, int limit) {
    next_may_start();
    wait_for_previous();
    if (taken != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *taken = 0;
    int const lane = threadIdx.x % 32;
    int64_t const slot = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32;
    if (slot >= static_cast<int64_t>(rows) * length) return;
    int const token = static_cast<int>(slot % length);
    int const line = segment_of(table, segments, static_cast<int>(slot / length), token, column);
    bool const wrong = line >= 0 && token - table[line * 5 + column] >= limit;
    if (line >= 0 && !wrong) return;
    for (int i = lane; i < heads * width; i += 32) x[slot * heads * width + i] = Element(wrong ? NAN : 0.0f);
    for (int i = lane; lse != nullptr && i < heads; i += 32) lse[slot * heads + i] = wrong ? NAN : -INFINITY;
}

// ---------------------------------------------------------------------------------------------------------------------
// Backward: with dp_ij = dout_i·v_j and delta_i = dout_i·out_i,
//     dv_j = Σ_i p_ij dout_i, ds_ij = p_ij (dp_ij - delta_i), dk_j = scale Σ_i ds_ij q_i, dq_i = scale Σ_j ds_ij k_j

struct Backward {
    void const *query, *out, *grad;
    int const* table;
    float const* lse;
    float2* stats;  // [rows, heads, queries]: -log2(e)·lse and delta
    void *dq, *dk, *dv;
    Strides q, o, g;
    int64_t slots;
    float scale, factor;  // scale with log2(e), and without
    int segments, tiles, queries, keys, kv, group, width, window;
};

// A row is summed by D / 8 threads: eight products each in this order, then halves, quarters, ... of them together.
template <typename Element, int D>
__global__ __launch_bounds__(128) void attention_delta_kernel(__grid_constant__ Backward const a) {
    constexpr int SHARE = D / 8;
    int const heads = a.kv * a.group, place = threadIdx.x % SHARE;
    int64_t const cell = static_cast<int64_t>(blockIdx.x) * (128 / SHARE) + threadIdx.x / SHARE;
    bool const live = cell < a.slots * heads;
    int64_t const slot = live ? cell / heads : 0, row = slot / a.queries, token = slot % a.queries;
    int const head = live ? static_cast<int>(cell % heads) : 0;
    auto const* const o = static_cast<Element const*>(a.out) + row * a.o.row + token * a.o.token + head * a.o.head;
    auto const* const g = static_cast<Element const*>(a.grad) + row * a.g.row + token * a.g.token + head * a.g.head;
    uint4 const left = reinterpret_cast<uint4 const*>(o)[place], right = reinterpret_cast<uint4 const*>(g)[place];
    auto const* const x = reinterpret_cast<Element const*>(&left);
    auto const* const y = reinterpret_cast<Element const*>(&right);
    float sum = __fmul_rn(float(x[1]), float(y[1]));
#pragma unroll
    for (int i = 0; i < 8; ++i)
        if (i != 1) sum = __fmaf_rn(float(x[i]), float(y[i]), sum);
#pragma unroll
    for (int apart = SHARE / 2; apart > 0; apart /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffff, sum, apart));
    if (live && place == 0)
        a.stats[(row * heads + head) * a.queries + token] = {-__fmul_rn(a.lse[cell], LOG2E), sum};
}

// Rows of a tile of 64 that lie outside [from, to) become zero, in the way of the matrix unit. By one warpgroup.
template <int D>
__device__ __forceinline__ void clear_rows(uint8_t* tile, int from, int to, int thread) {
    for (int i = thread; i < 64 * D / 8; i += 128) {
        int const r = i / (D / 8);
        if (r < from || r >= to) *reinterpret_cast<uint4*>(tile + swizzled(r, i % (D / 8), 64)) = uint4{};
    }
}

// acc[64, N] (+)= A·Bᵀ over D, both K-major tiles of 64 rows.
template <typename Element, int D>
__device__ __forceinline__ void multiply(float (&acc)[32], uint64_t a, uint64_t b) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k) {
        uint64_t const step = k / 4 * (KEYS * 128 / 16) + k % 4 * hopper::K_STEP;
        hopper::Wgmma<Element, 64>::both(acc, a + step, b + step, k > 0);
    }
}

template <typename Element>
__device__ __forceinline__ void fragments(uint32_t (&a)[4][4], float const (&x)[32]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = hopper::pack(x[2 * i], x[2 * i + 1], Element());
}

// acc[64, D] += A·B, A in fragments over 64 of K, B a tile whose rows are K.
template <typename Element, int D>
__device__ __forceinline__ void accumulate(float (&acc)[D / 2], uint32_t const (&a)[4][4], uint64_t b) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
        hopper::Wgmma<Element, D, hopper::K_MAJOR, hopper::MN_MAJOR>::left(acc, a[k], b + k * hopper::MN_STEP, 1);
}

// 64·2 keys of a key head: the query heads of its group upward, in each the blocks of 64 queries upward from the first
// that sees a key. Query blocks start at multiples of 64 from position 0 of the sample.
template <typename Element, int D, int STAGES>
__global__ __launch_bounds__(384, 1) void attention_dkv_kernel(
    __grid_constant__ CUtensorMap const query_map, __grid_constant__ CUtensorMap const grad_map,
    __grid_constant__ CUtensorMap const key_map, __grid_constant__ CUtensorMap const value_map,
    __grid_constant__ Backward const a) {
    constexpr int TILE = 64 * D * 2;
    extern __shared__ __align__(1024) uint8_t memory[];
    uint8_t* const k_tile = memory;
    uint8_t* const v_tile = k_tile + 2 * TILE;
    uint8_t* const q_tile = v_tile + 2 * TILE;
    uint8_t* const g_tile = q_tile + STAGES * TILE;
    auto* const stats = reinterpret_cast<float4*>(g_tile + STAGES * TILE);  // of two queries
    auto* const full = reinterpret_cast<uint64_t*>(stats + STAGES * 32);
    uint64_t *const free = full + STAGES, *const ready = free + STAGES;

    // The tiles of a sample side by side, so that its queries and gradients stay in L2.
    int const tiles = gridDim.x / (a.kv * a.segments), place = blockIdx.x / a.kv;
    int const head = blockIdx.x % a.kv, line = place / tiles, tile = place % tiles;
    Segment const segment(a.table + line * 5);
    if (tile * 128 >= segment.keys) return;
    int const before = segment.keys - segment.queries;  // keys before the first query
    int const begin = max(tile * 128, before) / KEYS;
    int end = (segment.keys + KEYS - 1) / KEYS;
    if (a.window > 0) end = min(end, (tile * 128 + 127 + a.window + KEYS - 1) / KEYS);
    int const run = end - begin, blocks = run * a.group;

    if (threadIdx.x == 0) {
        hopper::barrier_init(ready, 1);
        for (int i = 0; i < STAGES; ++i) hopper::barrier_init(full + i, 33), hopper::barrier_init(free + i, 256);
        hopper::barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= 256) {
        hopper::registers_shrink<24>();
        if (threadIdx.x >= 288) return;
        int const lane = threadIdx.x % 32;
        if (lane == 0) {
            hopper::barrier_expect(ready, 4 * TILE);
            for (int i = 0; i < 2; ++i)
                for (int half = 0; half < D / 64; ++half) {
                    int const at = i * TILE + half * KEYS * 128, token = segment.key_start + tile * 128 + i * 64;
                    hopper::tma_load(k_tile + at, &key_map, ready, half * 64, head, token, segment.row);
                    hopper::tma_load(v_tile + at, &value_map, ready, half * 64, head, token, segment.row);
                }
        }
        for (int j = 0; j < blocks; ++j) {
            int const stage = j % STAGES, member = head * a.group + j / run, start = (begin + j % run) * KEYS;
            hopper::barrier_wait(free + stage, j / STAGES % 2 ^ 1);  // the consumers have done with it
            int const first = start - before;  // may be negative: rows that the consumers clear
            int64_t const line_of = static_cast<int64_t>(segment.row) * a.kv * a.group + member;
            float2 const* const line_stats = a.stats + line_of * a.queries + segment.query_start;
            if (lane == 0) {
                hopper::barrier_expect(full + stage, 2 * TILE);
                for (int half = 0; half < D / 64; ++half) {
                    int const at = stage * TILE + half * KEYS * 128, token = segment.query_start + first;
                    hopper::tma_load(q_tile + at, &query_map, full + stage, half * 64, member, token, segment.row);
                    hopper::tma_load(g_tile + at, &grad_map, full + stage, half * 64, member, token, segment.row);
                }
            }
            // The stats, while the tiles are on their way: each lane arrives for its two.
            float2 two[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int const at = first + lane + 32 * i;
                two[i] = at >= 0 && at < segment.queries ? line_stats[at] : float2{};
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) reinterpret_cast<float2*>(stats + stage * 32)[lane + 32 * i] = two[i];
            hopper::barrier_arrive(full + stage);
        }
        return;
    }

    hopper::registers_grow<240>();
    int const group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    int const row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2, lowest = tile * 128 + group * 64;
    uint64_t const k_at = hopper::k_major(k_tile + group * TILE), v_at = hopper::k_major(v_tile + group * TILE);
    uint64_t const q_at = hopper::k_major(q_tile), g_at = hopper::k_major(g_tile);
    uint64_t const q_rows = hopper::mn_major(q_tile, KEYS * 128), g_rows = hopper::mn_major(g_tile, KEYS * 128);
    float dk[D / 2], dv[D / 2], p[32], dp[32];
    uint32_t left[4][4], right[4][4];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.0f;

    hopper::barrier_wait(ready, 0);
    for (int j = 0; j < blocks; ++j) {
        int const stage = j % STAGES, start = (begin + j % run) * KEYS;
        hopper::barrier_wait(full + stage, j / STAGES % 2);
        if (start + 63 >= lowest) {  // else no query of the block sees a key of this warpgroup
            int const from = before - start, to = segment.keys - start;
            if (from > 0 || to < 64) {
                clear_rows<D>(q_tile + stage * TILE, from, to, thread);
                clear_rows<D>(g_tile + stage * TILE, from, to, thread);
                hopper::async_fence();
                hopper::group_sync(1 + group, 128);
            }
            uint64_t const step = stage * (TILE / 16);
            hopper::registers_fence(p);
            hopper::registers_fence(dp);
            hopper::wgmma_fence();
            multiply<Element, D>(p, k_at, q_at + step);
            hopper::wgmma_commit();
            multiply<Element, D>(dp, v_at, g_at + step);
            hopper::wgmma_commit();
            hopper::wgmma_wait<1>();
            hopper::registers_fence(p);
            float4 const* const pairs = stats + stage * 32 + lane % 4;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float4 const two = pairs[4 * i];
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    p[4 * i + e] = exp2_of(__fmaf_rn(p[4 * i + e], a.scale, e % 2 ? two.z : two.x));
            }
            if (start < lowest + 64 || a.window > 0) {
                int const reach = a.window > 0 ? a.window : 1 << 30;
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    int const apart = start + column - lowest - row + (i / 4 * 8 + i % 2 - i / 2 % 2 * 8);
                    p[i] = (apart >= 0) & (apart < reach) ? p[i] : 0.0f;
                }
            }
            fragments<Element>(left, p);
            hopper::registers_fence(dv);
            hopper::wgmma_fence();
            accumulate<Element, D>(dv, left, g_rows + step);
            hopper::wgmma_commit();
            hopper::wgmma_wait<1>();
            hopper::registers_fence(dp);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float4 const two = pairs[4 * i];
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    dp[4 * i + e] = __fmul_rn(p[4 * i + e], __fsub_rn(dp[4 * i + e], e % 2 ? two.w : two.y));
            }
            fragments<Element>(right, dp);
            hopper::registers_fence(dk);
            hopper::wgmma_fence();
            accumulate<Element, D>(dk, right, q_rows + step);
            hopper::wgmma_commit();
            hopper::wgmma_wait<0>();
            hopper::registers_fence(dk);
            hopper::registers_fence(dv);
        }
        hopper::barrier_arrive(free + stage);  // every thread, for the stats that it read itself
    }

    // The keys and values of this warpgroup are no longer needed: their place holds the gradients on the way out.
    hopper::group_sync(1 + group, 128);
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
        int const r = row + i % 2 * 8, at = swizzled(r, i / 2, 64) + column * 2;
        *reinterpret_cast<uint32_t*>(k_tile + group * TILE + at) =
            hopper::pack(__fmul_rn(dk[2 * i], a.factor), __fmul_rn(dk[2 * i + 1], a.factor), Element());
        *reinterpret_cast<uint32_t*>(v_tile + group * TILE + at) = hopper::pack(dv[2 * i], dv[2 * i + 1], Element());
    }
    __syncwarp();
    for (int i = lane; i < 16 * D / 8; i += 32) {
        int const r = thread / 32 * 16 + i / (D / 8), chunk = i % (D / 8);
        if (lowest + r >= segment.keys || chunk * 8 >= a.width) continue;
        int64_t const slot = static_cast<int64_t>(segment.row) * a.keys + segment.key_start + lowest + r;
        int64_t const to = (slot * a.kv + head) * (a.width / 8) + chunk;
        int const at = group * TILE + swizzled(r, chunk, 64);
        static_cast<uint4*>(a.dk)[to] = *reinterpret_cast<uint4 const*>(k_tile + at);
        static_cast<uint4*>(a.dv)[to] = *reinterpret_cast<uint4 const*>(v_tile + at);
    }
}

// 128 rows (the query heads of one key head, of neighbouring queries) over their key blocks, upward.
template <typename Element, int D, int STAGES>
__global__ __launch_bounds__(384, 1) void attention_dq_kernel(
    __grid_constant__ CUtensorMap const key_map, __grid_constant__ CUtensorMap const value_map,
    __grid_constant__ Backward const a) {
    constexpr int TILE = 64 * D * 2;
    extern __shared__ __align__(1024) uint8_t memory[];
    uint8_t* const q_tile = memory;
    uint8_t* const g_tile = q_tile + 2 * TILE;
    uint8_t* const k_tile = g_tile + 2 * TILE;
    uint8_t* const v_tile = k_tile + STAGES * TILE;
    auto* const full = reinterpret_cast<uint64_t*>(v_tile + STAGES * TILE);
    uint64_t* const free = full + STAGES;

    int const head = blockIdx.x % a.kv, line = blockIdx.x / a.kv / a.tiles, rest = blockIdx.x / a.kv % a.tiles;
    Segment const segment(a.table + line * 5);
    int const tile = a.tiles - 1 - rest, span = 128 / a.group, before = segment.keys - segment.queries;
    if (tile * span >= segment.queries) return;
    int const lowest = before + tile * span, stop = min(lowest + span, segment.keys);
    int const first = a.window > 0 ? max(lowest - a.window + 1, 0) / KEYS * KEYS : 0;
    int const blocks = (stop - first + KEYS - 1) / KEYS;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) hopper::barrier_init(full + i, 1), hopper::barrier_init(free + i, 8);
        hopper::barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= 256) {
        hopper::registers_shrink<24>();
        if (threadIdx.x != 256) return;
        for (int j = 0; j < blocks; ++j) {
            int const stage = j % STAGES, token = segment.key_start + first + j * KEYS;
            hopper::barrier_wait(free + stage, j / STAGES % 2 ^ 1);
            hopper::barrier_expect(full + stage, 2 * TILE);
            for (int half = 0; half < D / 64; ++half) {
                int const at = stage * TILE + half * KEYS * 128;
                hopper::tma_load(k_tile + at, &key_map, full + stage, half * 64, head, token, segment.row);
                hopper::tma_load(v_tile + at, &value_map, full + stage, half * 64, head, token, segment.row);
            }
        }
        return;
    }

    hopper::registers_grow<240>();
    int const group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32, heads = a.kv * a.group;
    int64_t const slot = static_cast<int64_t>(segment.row) * a.queries + segment.query_start;
    for (int i = thread; i < 64 * D / 8; i += 128) {
        int const r = i / (D / 8), chunk = i % (D / 8), place = group * 64 + r, query = tile * span + place / a.group;
        uint4 q = {}, g = {};
        if (query < segment.queries && place / a.group < span && chunk * 8 < a.width) {
            int const member = head * a.group + place % a.group, token = segment.query_start + query;
            int64_t const q_from = segment.row * a.q.row + token * a.q.token + member * a.q.head;
            int64_t const g_from = segment.row * a.g.row + token * a.g.token + member * a.g.head;
            q = *reinterpret_cast<uint4 const*>(static_cast<Element const*>(a.query) + q_from + chunk * 8);
            g = *reinterpret_cast<uint4 const*>(static_cast<Element const*>(a.grad) + g_from + chunk * 8);
        }
        *reinterpret_cast<uint4*>(q_tile + group * TILE + swizzled(r, chunk, 64)) = q;
        *reinterpret_cast<uint4*>(g_tile + group * TILE + swizzled(r, chunk, 64)) = g;
    }
    hopper::async_fence();
    hopper::group_sync(1 + group, 128);

    int const row = group * 64 + thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
    int position[2];
    float2 stats[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        int const place = row + 8 * r, query = tile * span + place / a.group;
        bool const live = query < segment.queries && place / a.group < span;
        position[r] = before + min(query, segment.queries - 1);
        int64_t const line_of = static_cast<int64_t>(segment.row) * heads + head * a.group + place % a.group;
        stats[r] = live ? a.stats[line_of * a.queries + segment.query_start + query] : float2{};
    }
    int const low = before + min(tile * span + group * 64 / a.group, segment.queries - 1);
    int const whole = a.window > 0 ? first : (low + 1) / KEYS * KEYS;
    uint64_t const q_at = hopper::k_major(q_tile + group * TILE), g_at = hopper::k_major(g_tile + group * TILE);
    uint64_t const k_at = hopper::k_major(k_tile), v_at = hopper::k_major(v_tile);
    uint64_t const k_rows = hopper::mn_major(k_tile, KEYS * 128);
    float dq[D / 2], p[32], dp[32];
    uint32_t ds[4][4];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dq[i] = 0.0f;

    for (int j = 0; j < blocks; ++j) {
        int const stage = j % STAGES, start = first + j * KEYS;
        hopper::barrier_wait(full + stage, j / STAGES % 2);
        if (start + KEYS > segment.keys) {
            clear_rows<D>(k_tile + stage * TILE, 0, segment.keys - start, thread);
            clear_rows<D>(v_tile + stage * TILE, 0, segment.keys - start, thread);
            hopper::async_fence();
            hopper::group_sync(1 + group, 128);
        }
        uint64_t const step = stage * (TILE / 16);
        hopper::registers_fence(p);
        hopper::registers_fence(dp);
        hopper::wgmma_fence();
        multiply<Element, D>(p, q_at, k_at + step);
        hopper::wgmma_commit();
        multiply<Element, D>(dp, g_at, v_at + step);
        hopper::wgmma_commit();
        hopper::wgmma_wait<1>();
        hopper::registers_fence(p);
#pragma unroll
        for (int i = 0; i < 32; ++i) p[i] = exp2_of(__fmaf_rn(p[i], a.scale, stats[i / 2 % 2].x));
        if (start >= whole) {
            int const reach = a.window > 0 ? a.window : 1 << 30;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                int const apart = position[i / 2 % 2] - start - column - (i / 4 * 8 + i % 2);
                p[i] = (apart >= 0) & (apart < reach) ? p[i] : 0.0f;
            }
        }
        hopper::wgmma_wait<0>();
        hopper::registers_fence(dp);
#pragma unroll
        for (int i = 0; i < 32; ++i) dp[i] = __fmul_rn(p[i], __fsub_rn(dp[i], stats[i / 2 % 2].y));
        fragments<Element>(ds, dp);
        hopper::registers_fence(dq);
        hopper::wgmma_fence();
        accumulate<Element, D>(dq, ds, k_rows + step);
        hopper::wgmma_commit();
        hopper::wgmma_wait<0>();
        hopper::registers_fence(dq);
        if (lane == 0) hopper::barrier_arrive(free + stage);
    }

    hopper::group_sync(1 + group, 128);
#pragma unroll
    for (int i = 0; i < D / 4; ++i)
        *reinterpret_cast<uint32_t*>(q_tile + group * TILE + swizzled(row % 64 + i % 2 * 8, i / 2, 64) + column * 2) =
            hopper::pack(__fmul_rn(dq[2 * i], a.factor), __fmul_rn(dq[2 * i + 1], a.factor), Element());
    __syncwarp();
    for (int i = lane; i < 16 * D / 8; i += 32) {
        int const r = thread / 32 * 16 + i / (D / 8), place = group * 64 + r, query = tile * span + place / a.group;
        if (query >= segment.queries || place / a.group >= span || i % (D / 8) * 8 >= a.width) continue;
        int64_t const to = ((slot + query) * heads + head * a.group + place % a.group) * (a.width / 8) + i % (D / 8);
        static_cast<uint4*>(a.dq)[to] =
            *reinterpret_cast<uint4 const*>(q_tile + group * TILE + swizzled(r, i % (D / 8), 64));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// Keys, values or queries as [rows, tokens, heads, width], in boxes of `box` tokens of one head and 64 columns.
template <typename Element>
cudaError_t map_tokens(CUtensorMap* map, void const* x, int64_t rows, int64_t tokens, int64_t heads, int64_t width,
                       Strides const& step, int box_tokens, int box_heads = 1) {
    uint64_t const sizes[4] = {uint64_t(width), uint64_t(heads), uint64_t(tokens), uint64_t(rows)};
    uint64_t const steps[3] = {uint64_t(step.head) * 2, uint64_t(step.token) * 2, uint64_t(step.row) * 2};
    uint32_t const box[4] = {64, uint32_t(box_heads), uint32_t(box_tokens), 1};
    return encode_tiled(map, hopper::map_type<Element>(), 4, x, sizes, steps, box, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

// `early`: the kernel may start before the one in front of it has ended, and waits for it itself.
template <typename Kernel, typename... Arguments>
cudaError_t launch(Kernel kernel, int64_t blocks, int threads, int bytes, bool early, cudaStream_t stream,
                   Arguments... arguments) {
    RLSPEC_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes, config.stream = stream, config.attrs = &attribute, config.numAttrs = early;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// x [rows, length, heads, width]; `column` of the table says where its segments start.
template <typename Element>
cudaError_t clear_pads(void* x, float* lse, int* taken, int const* table, int segments, int64_t rows, int length,
                       int heads, int width, int column, int limit, cudaStream_t stream) {
    return launch(attention_pads_kernel<Element>, (rows * length + 3) / 4, 128, 0, true, stream,
                  static_cast<Element*>(x), lse, taken, table, segments, int(rows), length, heads, width, column,
                  limit);
}

template <typename Element, int D, int COUNT, bool PART, int RING, int PLACES>
cudaError_t launch_forward(CUtensorMap const (&maps)[3], Forward const& a, int64_t blocks, cudaStream_t stream) {
    int const totals = PART ? 0 : COUNT < GROUPS ? COUNT : 2 * COUNT;
    int const barriers = 2 * (RING + PLACES * COUNT) + POSTED, board = POSTED * sizeof(Tile<COUNT, PART>);
    int const bytes = (PLACES * COUNT + RING + totals) * KEYS * D * 2 + barriers * 8 + board + 256;
    return launch(attention_forward_kernel<Element, D, COUNT, PART, RING, PLACES>, blocks, COUNT * 128 + 128, bytes,
                  true, stream, maps[0], maps[1], maps[2], a);
}

template <typename Element, int D>
cudaError_t run_forward(Forward a, void const* key, void const* value, int64_t key_rows, int64_t key_tokens,
                        Strides const& k, Strides const& v, int64_t rows, int64_t share, cudaStream_t stream) {
    CUtensorMap maps[3];
    int const heads = a.kv * a.group;
    if (share > 0) {
        RLSPEC_TRY(map_tokens<Element>(&maps[1], key, key_rows, key_tokens, a.kv, a.width, k, a.box));
        RLSPEC_TRY(map_tokens<Element>(&maps[2], value, key_rows, key_tokens, a.kv, a.width, v, a.box));
        a.key = key, a.value = value, a.k = k, a.v = v, a.key_rows = key_rows, a.key_tokens = key_tokens;
        auto const launch_with = [&](auto run) { return run(a, maps[1], maps[2], stream); };
        if (a.limit * a.group > 8) return launch_with(run_decode<Element, D, 32, 1>);
        return launch_with(share > 1 ? run_decode<Element, D, 8, D / 64> : run_decode<Element, D, 8, 1>);
    }
    if (64 % a.group == 0)
        RLSPEC_TRY(map_tokens<Element>(&maps[0], a.query, rows, a.queries, heads, a.width, a.q, 64 / a.group, a.group));
    RLSPEC_TRY(map_tokens<Element>(&maps[1], key, key_rows, key_tokens, a.kv, a.width, k, a.box));
    RLSPEC_TRY(map_tokens<Element>(&maps[2], value, key_rows, key_tokens, a.kv, a.width, v, a.box));
    int const pairs = a.kv * a.segments;
    auto const tiles = [&](int count) { return (a.limit + count * 64 / a.group - 1) / (count * 64 / a.group); };
    int device = 0, processors = 0;
    RLSPEC_TRY(cudaGetDevice(&device));
    RLSPEC_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    a.near = pairs, a.tiles = tiles(1);
    bool wide = false;
    if (a.part == nullptr) {
        int64_t const keys = min(int64_t(a.schedule.start(a.splits)), a.page ? int64_t(a.listed) * a.page : key_tokens);
        a.near = int(max(int64_t(1), min(int64_t(pairs), NEAR / (keys * a.width * 4))));
        a.splits = 1;
        wide = keys >= 4096 && pairs * tiles(GROUPS) >= 4 * processors;
        a.tiles = tiles(wide ? GROUPS : 2);
    }
    a.items = pairs * a.tiles * a.splits;
    if (a.part != nullptr) {
        int const busy = 2 * processors;  // blocks of threads at a time
        if (a.items > 4 * busy) RLSPEC_TRY((launch_forward<Element, D, 1, true, 4, 2>(maps, a, busy, stream)));
        else RLSPEC_TRY((launch_forward<Element, D, 1, true, 6, 1>(maps, a, a.items, stream)));
        return launch(attention_fold_kernel<Element, D>, (a.slots * heads + 3) / 4, 128, 0, true, stream, a);
    }
    RLSPEC_TRY(clear_pads<Element>(a.out, a.lse, a.taken, a.table, a.segments, rows, a.queries, heads, a.width, 1,
                                   a.limit, stream));
    int const blocks = min(a.items, processors);
    if (wide) return launch_forward<Element, D, GROUPS, false, D == 128 ? 5 : 12, 1>(maps, a, blocks, stream);
    return launch_forward<Element, D, 2, false, 7, 2>(maps, a, blocks, stream);
}

template <typename Element, int D>
cudaError_t run_backward(Backward a, void const* key, void const* value, int64_t rows, Strides const& k,
                         Strides const& v, int max_query, int max_key, cudaStream_t stream) {
    constexpr int TILE = 64 * D * 2, DKV = 3, DQ = D == 128 ? 3 : 4;
    int const heads = a.kv * a.group;
    CUtensorMap query_map, grad_map, key_map, value_map;
    RLSPEC_TRY(map_tokens<Element>(&query_map, a.query, rows, a.queries, heads, a.width, a.q, 64));
    RLSPEC_TRY(map_tokens<Element>(&grad_map, a.grad, rows, a.queries, heads, a.width, a.g, 64));
    RLSPEC_TRY(map_tokens<Element>(&key_map, key, rows, a.keys, a.kv, a.width, k, 64));
    RLSPEC_TRY(map_tokens<Element>(&value_map, value, rows, a.keys, a.kv, a.width, v, 64));
    auto* const delta = a.width == 16   ? attention_delta_kernel<Element, 16>
                        : a.width == 32 ? attention_delta_kernel<Element, 32>
                                        : attention_delta_kernel<Element, D>;
    RLSPEC_TRY(launch(delta, (a.slots * heads * (a.width / 8) + 127) / 128, 128, 0, false, stream, a));
    int64_t const samples = static_cast<int64_t>(a.kv) * a.segments;
    int const for_dkv = (4 + 2 * DKV) * TILE + DKV * (512 + 16) + 8, for_dq = (4 + 2 * DQ) * TILE + DQ * 16;
    RLSPEC_TRY(launch(attention_dkv_kernel<Element, D, DKV>, samples * ((max_key + 127) / 128), 384, for_dkv, false,
                      stream, query_map, grad_map, key_map, value_map, a));
    a.tiles = (max_query + 128 / a.group - 1) / (128 / a.group);
    RLSPEC_TRY(launch(attention_dq_kernel<Element, D, DQ>, samples * a.tiles, 384, for_dq, false, stream, key_map,
                      value_map, a));
    auto const clear = [&](void* x, int length, int of, int column, int limit) {
        return clear_pads<Element>(x, nullptr, nullptr, a.table, a.segments, rows, length, of, a.width, column, limit,
                                   stream);
    };
    RLSPEC_TRY(clear(a.dq, a.queries, heads, 1, max_query));
    RLSPEC_TRY(clear(a.dk, a.keys, a.kv, 3, max_key));
    return clear(a.dv, a.keys, a.kv, 3, max_key);
}

}  // namespace rlspec

using namespace rlspec;

// `part`, `part_m` and `part_mass` null: splits are folded in place. `scale` holds log2(e) too. `share`, if not 0: by
// the kernel of decode.cuh, with so many blocks of threads a split, for at most 32 rows a key head.
extern "C" int attention_forward(
    void const* query, void const* key, void const* value, int const* table, int const* pages, float const* sinks,
    void* out, float* lse, int* taken, float* part, float* part_m, float* part_mass, int64_t dtype, int64_t width,
    int64_t rows, int64_t queries, int64_t key_rows, int64_t key_tokens, int64_t kv, int64_t group, int64_t q_row,
    int64_t q_token, int64_t q_head, int64_t k_row, int64_t k_token, int64_t k_head, int64_t v_row, int64_t v_token,
    int64_t v_head, int64_t segments, int64_t max_query, int64_t splits, int64_t listed, int64_t page, int64_t window,
    int64_t early, int64_t change, int64_t late, int64_t share, float scale, cudaStream_t stream) {
    Forward a = {};
    a.query = query, a.table = table, a.pages = pages, a.sinks = sinks, a.out = out, a.lse = lse;
    a.taken = taken, a.part = part, a.part_m = part_m, a.part_mass = part_mass;
    a.q = {q_row, q_token, q_head}, a.slots = rows * queries, a.scale = scale;
    a.segments = int(segments), a.splits = int(splits);
    a.queries = int(queries), a.listed = int(listed), a.page = int(page), a.kv = int(kv), a.group = int(group);
    a.width = int(width), a.limit = int(max_query), a.inverse = 65536 / int(group) + 1;
    a.box = page > 0 && page < KEYS ? int(page) : KEYS, a.window = int(window);
    a.schedule = {int(early), int(change), int(late)};
    Strides const k = {k_row, k_token, k_head}, v = {v_row, v_token, v_head};
    auto const run = [&](auto runner) {
        return runner(a, key, value, key_rows, key_tokens, k, v, rows, share, stream);
    };
    if (dtype == BF16 && width <= 64) return run(run_forward<__nv_bfloat16, 64>);
    if (dtype == BF16 && width == 128) return run(run_forward<__nv_bfloat16, 128>);
    if (dtype == FP16 && width <= 64) return run(run_forward<__half, 64>);
    if (dtype == FP16 && width == 128) return run(run_forward<__half, 128>);
    return cudaErrorInvalidValue;
}

// `scale` holds log2(e) too, `factor` does not. stats: fp32 [rows, heads, queries, 2], scratch.
extern "C" int attention_backward(
    void const* query, void const* key, void const* value, void const* out, float const* lse, void const* grad,
    int const* table, float* stats, void* dq, void* dk, void* dv, int64_t dtype, int64_t width, int64_t rows,
    int64_t queries, int64_t keys, int64_t kv, int64_t group, int64_t q_row, int64_t q_token, int64_t q_head,
    int64_t k_row, int64_t k_token, int64_t k_head, int64_t v_row, int64_t v_token, int64_t v_head, int64_t o_row,
    int64_t o_token, int64_t o_head, int64_t g_row, int64_t g_token, int64_t g_head, int64_t segments,
    int64_t max_query, int64_t max_key, int64_t window, float scale, float factor, cudaStream_t stream) {
    Backward a = {};
    a.query = query, a.out = out, a.grad = grad, a.table = table, a.lse = lse;
    a.stats = reinterpret_cast<float2*>(stats), a.dq = dq, a.dk = dk, a.dv = dv;
    a.q = {q_row, q_token, q_head}, a.o = {o_row, o_token, o_head}, a.g = {g_row, g_token, g_head};
    a.slots = rows * queries, a.scale = scale, a.factor = factor, a.segments = int(segments), a.queries = int(queries);
    a.keys = int(keys), a.kv = int(kv), a.group = int(group), a.width = int(width), a.window = int(window);
    Strides const k = {k_row, k_token, k_head}, v = {v_row, v_token, v_head};
    auto const run = [&](auto runner) {
        return runner(a, key, value, rows, k, v, int(max_query), int(max_key), stream);
    };
    if (dtype == BF16 && width <= 64) return run(run_backward<__nv_bfloat16, 64>);
    if (dtype == BF16 && width == 128) return run(run_backward<__nv_bfloat16, 128>);
    if (dtype == FP16 && width <= 64) return run(run_backward<__half, 64>);
    if (dtype == FP16 && width == 128) return run(run_backward<__half, 128>);
    return cudaErrorInvalidValue;
}
