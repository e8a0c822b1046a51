// Causal grouped-query attention for Hopper: TMA brings keys and values, wgmma multiplies, bits as in kernels/attention.py.
//
//     out_i = sum_j p_ij v_j,   p_ij = exp(scale q_i.k_j - lse_i),   lse_i = log(sum_j exp(scale q_i.k_j) [+ exp(sink)])
//
// over the keys j <= i of the same sample, with a window only those with i - j < window.
#include <type_traits>

#include "attention.cuh"

namespace rlspec {

struct Forward {
    void const* query;
    int const *table, *pages;
    float const* sinks;
    void* out;
    float *lse, *part, *part_m, *part_mass;
    Strides q;
    int64_t slots;  // rows · queries
    float scale;    // holds log2(e) too
    int segments, tiles, splits, queries, listed, page, box, kv, group, window;
    Schedule schedule;
};

// The state of a row: its scaled maximum m, its mass, and (elsewhere) the sum of exp2(scores - m)·v.
// Two rows a thread, r and r + 8 of the fragment.

// One tile of 64·GROUPS rows (the query heads of one key head, of neighbouring queries) over its key blocks, upward.
// PART: one split a block, its state goes to memory. Otherwise splits are folded as they end.
template <typename Element, int D, int GROUPS, bool PART, int STAGES, int FLAGS>
__global__ __launch_bounds__(GROUPS * 128 + 128, PART ? 2 : 1) void attention_forward_kernel(
    __grid_constant__ CUtensorMap const key_map, __grid_constant__ CUtensorMap const value_map,
    __grid_constant__ Forward const a) {
    constexpr bool PINGPONG = FLAGS & 1, AHEAD = FLAGS & 2, SHELF = FLAGS & 4;
    constexpr int TILE = KEYS * D * 2;  // bytes of a block of keys, of values, and of the queries of a warpgroup
    extern __shared__ __align__(1024) uint8_t memory[];
    uint8_t* const q_tile = memory;
    uint8_t* const k_tile = q_tile + GROUPS * TILE;
    uint8_t* const v_tile = k_tile + STAGES * TILE;
    auto* const k_full = reinterpret_cast<uint64_t*>(v_tile + STAGES * TILE);
    uint64_t *const v_full = k_full + STAGES, *const k_free = v_full + STAGES, *const v_free = k_free + STAGES;
    auto* const shelf = reinterpret_cast<float*>(v_free + STAGES);

    // Heads vary fastest, then samples; the longest rows (with PART, the latest splits) start first.
    int const head = blockIdx.x % a.kv, line = blockIdx.x / a.kv % a.segments, rest = blockIdx.x / a.kv / a.segments;
    Segment const segment(a.table + line * 5);
    int const tile = a.tiles - 1 - rest % a.tiles;
    int const span = GROUPS * 64 / a.group, before = segment.keys - segment.queries;
    if (tile * span >= segment.queries) return;
    int const lowest = before + tile * span;
    int stop = min(lowest + span, segment.keys), first = 0, split = 0;
    if (a.window > 0) first = max(lowest - a.window + 1, 0) / KEYS * KEYS;
    if (PART) {
        split = a.splits - 1 - rest / a.tiles;
        first = max(first, a.schedule.start(split));
        stop = min(stop, a.schedule.start(split + 1));
        if (first >= stop) return;
    }
    int const blocks = (stop - first + KEYS - 1) / KEYS;
    if (PART) asm volatile("griddepcontrol.launch_dependents;");

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            hopper::barrier_init(k_full + i, 1), hopper::barrier_init(v_full + i, 1);
            hopper::barrier_init(k_free + i, GROUPS * 4), hopper::barrier_init(v_free + i, GROUPS * 4);
        }
        hopper::barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= GROUPS * 128) {  // the warp that asks for keys and values
        hopper::registers_shrink<24>();
        if (threadIdx.x != GROUPS * 128) return;
        hopper::map_prefetch(&key_map), hopper::map_prefetch(&value_map);
        int const* const pages = a.pages + static_cast<int64_t>(line) * a.listed;
        auto const fetch = [&](CUtensorMap const* map, uint8_t* to, uint64_t* full, int start) {
            int const pieces = min(KEYS, segment.keys - start + a.box - 1) / a.box;
            hopper::barrier_expect(full, pieces * a.box * D * 2);
            for (int i = 0; i < pieces; ++i) {
                int const at = start + i * a.box;
                int const row = a.page ? pages[at / a.page] : segment.row;
                int const token = a.page ? at % a.page : segment.key_start + at;
                for (int half = 0; half < D / 64; ++half)
                    hopper::tma_load(to + half * KEYS * 128 + i * a.box * 128, map, full, half * 64, head, token, row);
            }
        };
        for (int j = 0; j < blocks; ++j) {
            int const stage = j % STAGES, parity = j / STAGES % 2 ^ 1;
            hopper::barrier_wait(k_free + stage, parity);
            fetch(&key_map, k_tile + stage * TILE, k_full + stage, first + j * KEYS);
            hopper::barrier_wait(v_free + stage, parity);
            fetch(&value_map, v_tile + stage * TILE, v_full + stage, first + j * KEYS);
        }
        return;
    }

    hopper::registers_grow<PART ? 232 : 240>();
    int const group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
    uint8_t* const q_mine = q_tile + group * TILE;
    for (int i = thread; i < 64 * D / 8; i += 128) {
        int const r = i / (D / 8), row = group * 64 + r, query = tile * span + row / a.group;
        uint4 chunk = {};
        if (query < segment.queries && row / a.group < span) {
            int64_t const at = segment.row * a.q.row + (segment.query_start + query) * a.q.token;
            auto const* q = static_cast<Element const*>(a.query) + at + (head * a.group + row % a.group) * a.q.head;
            chunk = *reinterpret_cast<uint4 const*>(q + i % (D / 8) * 8);
        }
        *reinterpret_cast<uint4*>(q_mine + swizzled(r, i % (D / 8), 64)) = chunk;
    }
    hopper::async_fence();
    hopper::group_sync(1 + group, 128);

    int const row = group * 64 + thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
    int const last = segment.queries - 1;
    int const position[2] = {before + min(tile * span + row / a.group, last),
                             before + min(tile * span + (row + 8) / a.group, last)};
    int const low = before + min(tile * span + group * 64 / a.group, last);
    int const full = a.window > 0 ? first : (low + 1) / KEYS * KEYS;  // blocks below it are seen whole by every row

    float scores[32], acc[D / 2], total[PART || SHELF ? 1 : D / 2], mass[4] = {}, m[2], total_m[2], total_mass[2] = {};
    uint32_t p[4][4], next[4][4];
    m[0] = m[1] = total_m[0] = total_m[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) acc[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < (PART || SHELF ? 1 : D / 2); ++i) total[i] = 0.0f;
    auto const total_at = [&](int i) -> float& {
        if constexpr (SHELF) return shelf[(group * (D / 2) + i) * 128 + thread];
        else return total[i];
    };
    if (SHELF)
        for (int i = 0; i < D / 2; ++i) total_at(i) = 0.0f;
    uint32_t q_left[SHELF ? D / 16 : 1][4];
    if constexpr (SHELF) {
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                q_left[k][i] = *reinterpret_cast<uint32_t const*>(q_mine + swizzled(row % 64 + i % 2 * 8, 2 * k + i / 2, 64) + column * 2);
    }

    uint64_t const q_at = hopper::k_major(q_mine), k_at = hopper::k_major(k_tile);
    uint64_t const v_at = hopper::mn_major(v_tile, KEYS * 128);
    auto const multiply_keys = [&](int j) {
        int const stage = j % STAGES;
        hopper::barrier_wait(k_full + stage, j / STAGES % 2);
        hopper::registers_fence(scores);
        hopper::wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k) {
            uint64_t const step = k / 4 * (KEYS * 128 / 16) + k % 4 * hopper::K_STEP;
            if constexpr (SHELF) hopper::Wgmma<Element, 64>::left(scores, q_left[k], k_at + stage * (TILE / 16) + step, k > 0);
            else hopper::Wgmma<Element, 64>::both(scores, q_at + step, k_at + stage * (TILE / 16) + step, k > 0);
        }
        hopper::wgmma_commit();
    };
    auto const multiply_values = [&](int j, uint32_t const (&p)[4][4]) {
        int const stage = j % STAGES, start = first + j * KEYS;
        if (!AHEAD || j == 0) hopper::barrier_wait(v_full + stage, j / STAGES % 2);
        if (start + KEYS > segment.keys) {  // what stands past the last key may be NaN, and 0·NaN is NaN
            int const rows = start + KEYS - segment.keys;
            for (int i = thread; i < rows * (D / 8); i += 128) {
                int const at = swizzled(KEYS - 1 - i / (D / 8), i % (D / 8), KEYS);
                *reinterpret_cast<uint4*>(v_tile + stage * TILE + at) = uint4{};
            }
            hopper::async_fence();
            hopper::group_sync(1 + group, 128);
        }
        hopper::registers_fence(acc);
        hopper::wgmma_fence();
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k)
            hopper::Wgmma<Element, D, hopper::K_MAJOR, hopper::MN_MAJOR>::left(
                acc, p[k], v_at + stage * (TILE / 16) + k * hopper::MN_STEP, 1);
        hopper::wgmma_commit();
    };
    auto const release = [&](uint64_t* barriers, int j) {
        if (lane == 0) hopper::barrier_arrive(barriers + j % STAGES);
    };
    float rescale[2];
    auto const weigh = [&](int j) {  // scores -> exp2(scores - m), rescale
        int const start = first + j * KEYS;
        if (start >= full) {
            int const reach = a.window > 0 ? a.window : 1 << 30;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                int const apart = position[i / 2 % 2] - start - column - (i / 4 * 8 + i % 2);
                scores[i] = (apart >= 0) & (apart < reach) ? scores[i] : -INFINITY;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float top = scores[2 * r];
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (i / 2 % 2 == r) top = fmaxf(top, scores[i]);
            top = fmaxf(m[r], __fmul_rn(row_max(top), a.scale));
            float const base = no_infinity(top);
#pragma unroll
            for (int i = 0; i < 32; ++i)
                if (i / 2 % 2 == r) scores[i] = exp2_of(__fmaf_rn(scores[i], a.scale, -base));
            rescale[r] = exp2_of(__fsub_rn(m[r], base));
            m[r] = top;
        }
    };
    auto const sum_rows = [&](uint32_t (&p)[4][4]) {  // after rescaling
#pragma unroll
        for (int k = 0; k < KEYS / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) p[k][i] = hopper::pack(scores[8 * k + 2 * i], scores[8 * k + 2 * i + 1], Element());
            add_rows<Element>(mass, p[k]);
        }
    };
    auto const fold = [&](float const (&ended)[2], float const (&mass)[2]) {
        if constexpr (!PART) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                Factors const factors(total_m[r], ended[r]);
                total_mass[r] = factors(total_mass[r], mass[r]);
#pragma unroll
                for (int i = 0; i < D / 2; ++i)
                    if (i / 2 % 2 == r) total_at(i) = factors(total_at(i), acc[i]);
            }
        }
    };

    int border = PART ? stop : a.schedule.start(a.schedule.of(first) + 1);  // where the next split starts
    auto const mine = [&] { if (PINGPONG) hopper::group_sync(4 + group, 256); };
    auto const yours = [&] { if (PINGPONG) hopper::group_arrive(5 - group, 256); };
    if (PINGPONG && group == 1) yours();
    mine();
    multiply_keys(0);
    yours();
    hopper::wgmma_wait<0>();
    hopper::registers_fence(scores);
    release(k_free, 0);
    weigh(0);
    sum_rows(p);
    auto const turn = [&](int j, uint32_t(&now)[4][4], uint32_t(&then)[4][4]) {
        // The scores of this block and the sums of the one before are in flight together.
        mine();
        multiply_keys(j);
        multiply_values(j - 1, now);
        yours();
        hopper::wgmma_wait<1>();
        hopper::registers_fence(scores);
        release(k_free, j);
        int const start = first + j * KEYS;
        bool const fresh = start == border;
        float const ended[2] = {m[0], m[1]}, ended_mass[2] = {mass[0], mass[2]};
        if (fresh) m[0] = m[1] = -INFINITY;
        weigh(j);
#pragma unroll
        for (int i = 0; i < 4; ++i) mass[i] = __fmul_rn(mass[i], rescale[i / 2]);
        if (AHEAD) sum_rows(then);
        if (AHEAD) hopper::barrier_wait(v_full + j % STAGES, j / STAGES % 2);
        hopper::wgmma_wait<0>();
        hopper::registers_fence(acc);
        release(v_free, j - 1);
        if (fresh) {
            fold(ended, ended_mass);
            border = a.schedule.start(a.schedule.of(start) + 1);
        }
#pragma unroll
        for (int i = 0; i < D / 2; ++i) acc[i] = __fmul_rn(acc[i], rescale[i / 2 % 2]);
        if (!AHEAD) sum_rows(now);
    };
    auto const last_values = [&](uint32_t(&now)[4][4]) {
        mine();
        multiply_values(blocks - 1, now);
        yours();
        hopper::wgmma_wait<0>();
        hopper::registers_fence(acc);
    };
    if (AHEAD) {
        int j = 1;
        for (; j + 1 < blocks; j += 2) turn(j, p, next), turn(j + 1, next, p);
        if (j < blocks) {
            turn(j, p, next);
            last_values(next);
        } else {
            last_values(p);
        }
    } else {
        for (int j = 1; j < blocks; ++j) turn(j, p, p);
        last_values(p);
    }
    float const ended_mass[2] = {mass[0], mass[2]};
    if (!PART) fold(m, ended_mass);

    int64_t const slot = static_cast<int64_t>(segment.row) * a.queries + segment.query_start;
    int const heads = a.kv * a.group;
    if constexpr (PART) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int const place = row + 8 * r, query = tile * span + place / a.group;
            if (query >= segment.queries || place / a.group >= span) continue;
            int64_t const cell = (split * a.slots + slot + query) * heads + head * a.group + place % a.group;
            if (column == 0) a.part_m[cell] = m[r], a.part_mass[cell] = mass[2 * r];
#pragma unroll
            for (int i = 0; i < D / 8; ++i)
                *reinterpret_cast<float2*>(a.part + cell * D + i * 8 + column) = {acc[4 * i + 2 * r], acc[4 * i + 2 * r + 1]};
        }
    } else {
        hopper::group_sync(1 + group, 128);  // all products with the queries are done: their place holds the rows now
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            int const place = row + 8 * r, query = tile * span + place / a.group, member = head * a.group + place % a.group;
            bool const live = query < segment.queries && place / a.group < span;
            Finish const finish(total_m[r], total_mass[r], a.sinks == nullptr ? nullptr : a.sinks + (live ? member : 0));
            if (live && column == 0) a.lse[(slot + query) * heads + member] = finish.lse;
#pragma unroll
            for (int i = 0; i < D / 8; ++i) {
                uint32_t const both = hopper::pack(finish(total_at(4 * i + 2 * r)), finish(total_at(4 * i + 2 * r + 1)), Element());
                *reinterpret_cast<uint32_t*>(q_mine + swizzled(place % 64, i, 64) + column * 2) = both;
            }
        }
        __syncwarp();
        for (int i = lane; i < 16 * D / 8; i += 32) {
            int const r = thread / 32 * 16 + i / (D / 8), place = group * 64 + r, query = tile * span + place / a.group;
            if (query >= segment.queries || place / a.group >= span) continue;
            int64_t const cell = (slot + query) * heads + head * a.group + place % a.group;
            *reinterpret_cast<uint4*>(static_cast<Element*>(a.out) + cell * D + i % (D / 8) * 8) =
                *reinterpret_cast<uint4 const*>(q_mine + swizzled(r, i % (D / 8), 64));
        }
    }
}

// The segment that holds a slot, or -1: a warp looks through the table.
__device__ __forceinline__ int segment_of(int const* table, int segments, int row, int token, int column) {
    int found = -1;
    for (int i = threadIdx.x % 32; i < segments; i += 32) {
        int const* const line = table + i * 5;
        if (line[0] == row && token >= line[column] && token < line[column] + line[column + 1]) found = i;
    }
    return __reduce_max_sync(0xffffffff, found);
}

// A warp a query head of a slot folds its splits upward. A pad gets 0 and -inf; more keys or queries than promised, NaN.
template <typename Element, int D>
__global__ __launch_bounds__(128) void attention_fold_kernel(__grid_constant__ Forward const a, int limit) {
    constexpr int MINE = D / 32;
    int const heads = a.kv * a.group, lane = threadIdx.x % 32;
    int64_t const cell = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / 32, cells = a.slots * heads;
    if (cell >= cells) return;
    int const token = static_cast<int>(cell / heads % a.queries);
    auto* const out = static_cast<Element*>(a.out) + cell * D + lane * MINE;
    int const line = segment_of(a.table, a.segments, static_cast<int>(cell / heads / a.queries), token, 1);
    if (line < 0) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        for (int i = 0; i < MINE; ++i) out[i] = Element(0.0f);
        if (lane == 0) a.lse[cell] = -INFINITY;
        return;
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");  // from here on the states of the splits are there
    Segment const segment(a.table + line * 5);
    int const query = token - segment.query_start, position = segment.keys - segment.queries + query;
    int const first = a.window > 0 ? a.schedule.of(max(position - a.window + 1, 0)) : 0;
    int const last = a.schedule.of(position), end = min(last + 1, a.splits);
    // The factors of 32 splits side by side, from the maximum up to each; the sums one after the other.
    constexpr int DEPTH = 8;
    float total_m = -INFINITY, total_mass = 0.0f, total[MINE] = {};
    for (int chunk = first; chunk < end; chunk += 32) {
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
            float acc[DEPTH][MINE];
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                int64_t const there = (chunk + start + i) * cells + cell;
#pragma unroll
                for (int c = 0; c < MINE; ++c)
                    acc[i][c] = chunk + start + i < end ? a.part[there * D + lane * MINE + c] : 0.0f;
            }
#pragma unroll
            for (int i = 0; i < DEPTH; ++i) {
                Factors const of_split = factors.of_lane(start + i);
                total_mass = of_split(total_mass, __shfl_sync(0xffffffff, mass, start + i));
#pragma unroll
                for (int c = 0; c < MINE; ++c) total[c] = of_split(total[c], acc[i][c]);
            }
        }
        total_m = __shfl_sync(0xffffffff, top, 31);
    }
    Finish const finish(total_m, total_mass, a.sinks == nullptr ? nullptr : a.sinks + cell % heads);
    float const wrong = last >= a.splits || query >= limit ? NAN : 1.0f;
    for (int i = 0; i < MINE; ++i) out[i] = Element(finish(total[i]) * wrong);
    if (lane == 0) a.lse[cell] = finish.lse * wrong;
}

// Slots in no segment get 0 (and -inf); slots past a promised length get NaN. A warp a slot.
template <typename Element>
__global__ __launch_bounds__(128) void attention_pads_kernel(
    Element* x, float* lse, int const* table, int segments, int rows, int length, int heads, int width, int column, int limit) {
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
// Backward: with dp_ij = dout_i.v_j and delta_i = dout_i.out_i,
//     dv_j = sum_i p_ij dout_i,  ds_ij = p_ij (dp_ij - delta_i),  dk_j = scale sum_i ds_ij q_i,  dq_i = scale sum_j ds_ij k_j

struct Backward {
    void const *query, *out, *grad;
    int const* table;
    float const* lse;
    float2* stats;  // [rows, heads, queries]: -log2(e)·lse and delta
    void *dq, *dk, *dv;
    Strides q, o, g;
    int64_t slots;
    float scale, factor;  // scale with log2(e), and without
    int segments, tiles, queries, keys, kv, group, window;
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

    int const head = blockIdx.x % a.kv, line = blockIdx.x / a.kv % a.segments, tile = blockIdx.x / a.kv / a.segments;
    Segment const segment(a.table + line * 5);
    if (tile * 128 >= segment.keys) return;
    int const before = segment.keys - segment.queries;  // keys before the first query
    int const begin = max(tile * 128, before) / KEYS;
    int end = (segment.keys + KEYS - 1) / KEYS;
    if (a.window > 0) end = min(end, (tile * 128 + 127 + a.window + KEYS - 1) / KEYS);
    int const run = end - begin, blocks = run * a.group;

    if (threadIdx.x == 0) {
        hopper::barrier_init(ready, 1);
        for (int i = 0; i < STAGES; ++i) hopper::barrier_init(full + i, 33), hopper::barrier_init(free + i, 8);
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
            hopper::barrier_wait(free + stage, j / STAGES % 2 ^ 1);
            int const first = start - before;  // may be negative: rows that the consumers clear
            float2 const* const line_stats =
                a.stats + (static_cast<int64_t>(segment.row) * a.kv * a.group + member) * a.queries + segment.query_start;
            for (int i = lane; i < 64; i += 32) {
                bool const live = first + i >= 0 && first + i < segment.queries;
                uint32_t const to = hopper::shared_address(reinterpret_cast<float2*>(stats + stage * 32) + i);
                asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to),
                             "l"(line_stats + (live ? first + i : 0)), "r"(live ? 8 : 0)
                             : "memory");
            }
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(hopper::shared_address(full + stage))
                         : "memory");
            if (lane == 0) {
                hopper::barrier_expect(full + stage, 2 * TILE);
                for (int half = 0; half < D / 64; ++half) {
                    int const at = stage * TILE + half * KEYS * 128, token = segment.query_start + first;
                    hopper::tma_load(q_tile + at, &query_map, full + stage, half * 64, member, token, segment.row);
                    hopper::tma_load(g_tile + at, &grad_map, full + stage, half * 64, member, token, segment.row);
                }
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
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
                for (int e = 0; e < 4; ++e) p[4 * i + e] = exp2_of(__fmaf_rn(p[4 * i + e], a.scale, e % 2 ? two.z : two.x));
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
        if (lane == 0) hopper::barrier_arrive(free + stage);
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
        if (lowest + r >= segment.keys) continue;
        int64_t const slot = static_cast<int64_t>(segment.row) * a.keys + segment.key_start + lowest + r;
        int64_t const to = (slot * a.kv + head) * (D / 8) + chunk;
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

    int const head = blockIdx.x % a.kv, line = blockIdx.x / a.kv % a.segments, rest = blockIdx.x / a.kv / a.segments;
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
        if (query < segment.queries && place / a.group < span) {
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
        if (query >= segment.queries || place / a.group >= span) continue;
        int64_t const to = ((slot + query) * heads + head * a.group + place % a.group) * (D / 8) + i % (D / 8);
        static_cast<uint4*>(a.dq)[to] =
            *reinterpret_cast<uint4 const*>(q_tile + group * TILE + swizzled(r, i % (D / 8), 64));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

// Keys, values or queries as [rows, tokens, heads, width], in boxes of `box` tokens of one head and 64 columns.
template <typename Element>
cudaError_t map_tokens(CUtensorMap* map, void const* x, int64_t rows, int64_t tokens, int64_t heads, int64_t width,
                       Strides const& step, int box_tokens) {
    uint64_t const sizes[4] = {uint64_t(width), uint64_t(heads), uint64_t(tokens), uint64_t(rows)};
    uint64_t const steps[3] = {uint64_t(step.head) * 2, uint64_t(step.token) * 2, uint64_t(step.row) * 2};
    uint32_t const box[4] = {64, 1, uint32_t(box_tokens), 1};
    return encode_tiled(map, hopper::map_type<Element>(), 4, x, sizes, steps, box, CU_TENSOR_MAP_SWIZZLE_128B,
                        CU_TENSOR_MAP_L2_PROMOTION_L2_256B);
}

template <typename Kernel, typename... Arguments>
cudaError_t launch(Kernel kernel, int64_t blocks, int threads, int bytes, cudaStream_t stream, Arguments const&... arguments) {
    RLSPEC_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(arguments...);
    return cudaGetLastError();
}

// A kernel that may start before the one in front of it has ended, and waits for it itself.
template <typename Kernel, typename... Arguments>
cudaError_t launch_early(Kernel kernel, int64_t blocks, int threads, bool early, cudaStream_t stream, Arguments... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = early;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks)), config.blockDim = dim3(threads), config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <typename Element>
cudaError_t clear_pads(void* x, float* lse, int const* table, int segments, int64_t rows, int64_t length, int heads,
                       int width, int column, int limit, cudaStream_t stream) {
    return launch(attention_pads_kernel<Element>, (rows * length + 3) / 4, 128, 0, stream, static_cast<Element*>(x), lse,
                  table, segments, int(rows), int(length), heads, width, column, limit);
}

template <typename Element, int D, int GROUPS, bool PART, int STAGES, int FLAGS>
cudaError_t launch_forward(CUtensorMap const& key, CUtensorMap const& value, Forward const& a, cudaStream_t stream) {
    int const bytes = (GROUPS + 2 * STAGES) * KEYS * D * 2 + STAGES * 32 + (FLAGS & 4 ? GROUPS * 64 * D * 4 : 0);
    int64_t const blocks = static_cast<int64_t>(a.kv) * a.segments * a.tiles * (PART ? a.splits : 1);
    return launch(attention_forward_kernel<Element, D, GROUPS, PART, STAGES, FLAGS>, blocks, GROUPS * 128 + 128, bytes,
                  stream, key, value, a);
}

template <typename Element, int D>
cudaError_t run_forward(Forward const& a, void const* key, void const* value, int64_t key_rows, int64_t key_tokens,
                        Strides const& k, Strides const& v, int64_t rows, int max_query, int variant, cudaStream_t stream) {
    CUtensorMap key_map, value_map;
    RLSPEC_TRY(map_tokens<Element>(&key_map, key, key_rows, key_tokens, a.kv, D, k, a.box));
    RLSPEC_TRY(map_tokens<Element>(&value_map, value, key_rows, key_tokens, a.kv, D, v, a.box));
    if (a.part != nullptr) {
        RLSPEC_TRY((launch_forward<Element, D, 1, true, 3, 0>(key_map, value_map, a, stream)));
        return launch_early(attention_fold_kernel<Element, D>, (a.slots * a.kv * a.group + 3) / 4, 128, variant != 8, stream, a,
                            max_query);
    }
#ifdef VARIANTS
    bool done = false;
    if constexpr (D == 128 && std::is_same_v<Element, __nv_bfloat16>) {
        done = variant > 0;
        if (variant == 1) RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 1>(key_map, value_map, a, stream)));
        if (variant == 2) RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 2>(key_map, value_map, a, stream)));
        if (variant == 3) RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 3>(key_map, value_map, a, stream)));
        if (variant == 4) RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 4>(key_map, value_map, a, stream)));
        if (variant == 5) RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 5>(key_map, value_map, a, stream)));
        if (variant == 6) RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 6>(key_map, value_map, a, stream)));
        if (variant == 7) RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 7>(key_map, value_map, a, stream)));
    }
    if (!done)
#endif
    RLSPEC_TRY((launch_forward<Element, D, 2, false, 4, 0>(key_map, value_map, a, stream)));
    return clear_pads<Element>(a.out, a.lse, a.table, a.segments, rows, a.queries, a.kv * a.group, D, 1, max_query, stream);
}

template <typename Element, int D>
cudaError_t run_backward(Backward a, void const* key, void const* value, int64_t rows, Strides const& k,
                         Strides const& v, int max_query, int max_key, cudaStream_t stream) {
    constexpr int TILE = 64 * D * 2, DKV = 3, DQ = D == 128 ? 3 : 4;
    int const heads = a.kv * a.group;
    CUtensorMap query_map, grad_map, key_map, value_map;
    RLSPEC_TRY(map_tokens<Element>(&query_map, a.query, rows, a.queries, heads, D, a.q, 64));
    RLSPEC_TRY(map_tokens<Element>(&grad_map, a.grad, rows, a.queries, heads, D, a.g, 64));
    RLSPEC_TRY(map_tokens<Element>(&key_map, key, rows, a.keys, a.kv, D, k, 64));
    RLSPEC_TRY(map_tokens<Element>(&value_map, value, rows, a.keys, a.kv, D, v, 64));
    RLSPEC_TRY(launch(attention_delta_kernel<Element, D>, (a.slots * heads * (D / 8) + 127) / 128, 128, 0, stream, a));
    int64_t const samples = static_cast<int64_t>(a.kv) * a.segments;
    RLSPEC_TRY(launch(attention_dkv_kernel<Element, D, DKV>, samples * ((max_key + 127) / 128), 384,
                      (4 + 2 * DKV) * TILE + DKV * (512 + 16) + 8, stream, query_map, grad_map, key_map, value_map, a));
    a.tiles = (max_query + 128 / a.group - 1) / (128 / a.group);
    RLSPEC_TRY(launch(attention_dq_kernel<Element, D, DQ>, samples * a.tiles, 384, (4 + 2 * DQ) * TILE + DQ * 16, stream,
                      key_map, value_map, a));
    RLSPEC_TRY(clear_pads<Element>(a.dq, nullptr, a.table, a.segments, rows, a.queries, heads, D, 1, max_query, stream));
    RLSPEC_TRY(clear_pads<Element>(a.dk, nullptr, a.table, a.segments, rows, a.keys, a.kv, D, 3, max_key, stream));
    return clear_pads<Element>(a.dv, nullptr, a.table, a.segments, rows, a.keys, a.kv, D, 3, max_key, stream);
}

}  // namespace rlspec

using namespace rlspec;

// `part`, `part_m` and `part_mass` null: splits are folded in place. `scale` holds log2(e) too.
extern "C" int attention_forward(
    void const* query, void const* key, void const* value, int const* table, int const* pages, float const* sinks,
    void* out, float* lse, int*, float* part, float* part_m, float* part_mass, int64_t dtype, int64_t width, int64_t rows,
    int64_t queries, int64_t key_rows, int64_t key_tokens, int64_t kv, int64_t group, int64_t q_row, int64_t q_token,
    int64_t q_head, int64_t k_row, int64_t k_token, int64_t k_head, int64_t v_row, int64_t v_token, int64_t v_head,
    int64_t segments, int64_t max_query, int64_t splits, int64_t listed, int64_t page, int64_t window, int64_t early,
    int64_t change, int64_t late, int64_t variant, float scale, cudaStream_t stream) {
    int const span = (part != nullptr ? 64 : 128) / static_cast<int>(group);
    Forward a = {};
    a.query = query, a.table = table, a.pages = pages, a.sinks = sinks, a.out = out, a.lse = lse;
    a.part = part, a.part_m = part_m, a.part_mass = part_mass;
    a.q = {q_row, q_token, q_head}, a.slots = rows * queries, a.scale = scale;
    a.segments = int(segments), a.tiles = int((max_query + span - 1) / span), a.splits = int(splits);
    a.queries = int(queries), a.listed = int(listed), a.page = int(page), a.kv = int(kv), a.group = int(group);
    a.box = page > 0 && page < KEYS ? int(page) : KEYS, a.window = int(window);
    a.schedule = {int(early), int(change), int(late)};
    Strides const k = {k_row, k_token, k_head}, v = {v_row, v_token, v_head};
    auto const run = [&](auto runner) {
        return runner(a, key, value, key_rows, key_tokens, k, v, rows, int(max_query), int(variant), stream);
    };
    if (dtype == BF16 && width == 64) return run(run_forward<__nv_bfloat16, 64>);
    if (dtype == BF16 && width == 128) return run(run_forward<__nv_bfloat16, 128>);
    if (dtype == FP16 && width == 64) return run(run_forward<__half, 64>);
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
    a.query = query, a.out = out, a.grad = grad, a.table = table, a.lse = lse, a.stats = reinterpret_cast<float2*>(stats);
    a.dq = dq, a.dk = dk, a.dv = dv;
    a.q = {q_row, q_token, q_head}, a.o = {o_row, o_token, o_head}, a.g = {g_row, g_token, g_head};
    a.slots = rows * queries, a.scale = scale, a.factor = factor, a.segments = int(segments), a.queries = int(queries);
    a.keys = int(keys), a.kv = int(kv), a.group = int(group), a.window = int(window);
    Strides const k = {k_row, k_token, k_head}, v = {v_row, v_token, v_head};
    auto const run = [&](auto runner) {
        return runner(a, key, value, rows, k, v, int(max_query), int(max_key), stream);
    };
    if (dtype == BF16 && width == 64) return run(run_backward<__nv_bfloat16, 64>);
    if (dtype == BF16 && width == 128) return run(run_backward<__nv_bfloat16, 128>);
    if (dtype == FP16 && width == 64) return run(run_backward<__half, 64>);
    if (dtype == FP16 && width == 128) return run(run_backward<__half, 128>);
    return cudaErrorInvalidValue;
}
