// Linear layers whose bits do not depend on the batch: the products of kernels/det_gemm.py, by hand for Hopper.
//
//     product    out[m, n] = round( Σ_k x[m, k] · weight[n, k] )        weight [N, K], or [K, N] read as it lies
//     lean       the same for up to 8 rows, and with it swiglu of gates and ups
//     resumed    out[m, n] = round( out[m, n] + Σ_k a · b )             the chain goes on from memory
//     exchanged  the same of fp32, in place; accumulators come and go while the matrix unit works
//     plain      either of the two for any strides, and for fp32
//     place_blocks   says where `resumed` finds the rows that a table names
//
// Promise. Each element is one fp32 chain: the reduced index ascends in groups of 16 that start at multiples of 16,
// each group one step of the matrix unit; one rounding at the end. No split of the reduced index, no atomics. Tiles,
// the order of operands, stages and persistence decide who computes an element and when, never this order.
// fp32 is multiplied outside the matrix unit, by fused multiply-adds, k ascending.
//
// Limits. Tensor memory access wants dense rows that start at multiples of 16 bytes; `plain` wants nothing.
//
// Sources: PTX ISA, wgmma and cp.async.bulk.tensor.
#include "common.cuh"
#include "gemm.cuh"

namespace rlspec {

using namespace gemm;

// ---- results ----

// [rows, columns], dense. With SWAP the weight is the left operand, and a tile's rows are columns of the result.
struct Result {
    void* data;
    Dtype type;
    int rows, columns;
};

template <typename Out>
struct alignas(2 * sizeof(Out)) Two {
    Out first, second;
};

// Calls f(Out()) with the type that `type` names.
template <typename F>
__device__ __forceinline__ void with_type(Dtype type, F f) {
    if (type == BF16) {
        f(__nv_bfloat16());
    } else if (type == FP16) {
        f(__half());
    } else {
        f(float());
    }
}

// From registers, wherever the result begins.
template <class T, bool SWAP, typename Out>
__device__ __forceinline__ void store_here(const float (&acc)[T::HEIGHT][T::COLUMNS / 2], Result out, int m, int n,
                                           int warpgroup) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    Out* data = static_cast<Out*>(out.data);
    const bool even = out.columns % 2 == 0;
#pragma unroll
    for (int h = 0; h < T::HEIGHT; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m + (warpgroup * T::HEIGHT + h) * 64 + 16 * warp + lane / 4 + 8 * half;
            if (row >= (SWAP ? out.columns : out.rows)) continue;
#pragma unroll
            for (int j = 0; j < T::COLUMNS / 8; ++j) {
                const int column = n + 8 * j + 2 * (lane % 4);
                const Out first = rounded<Out>(acc[h][4 * j + 2 * half]);
                const Out second = rounded<Out>(acc[h][4 * j + 2 * half + 1]);
                if constexpr (SWAP) {
                    Out* to = data + static_cast<int64_t>(column) * out.columns + row;
                    if (column < out.rows) to[0] = first;
                    if (column + 1 < out.rows) to[out.columns] = second;
                } else {
                    Out* to = data + static_cast<int64_t>(row) * out.columns + column;
                    if (even && column < out.columns) {
                        *reinterpret_cast<Two<Out>*>(to) = {first, second};
                    } else {
                        if (column < out.columns) to[0] = first;
                        if (column + 1 < out.columns) to[1] = second;
                    }
                }
            }
        }
    }
}

// ---- product ----

// Tiles that are small or no multiple of 128 bytes wide are stored from registers.
template <class T, bool SWAP>
constexpr bool HERE = SWAP || T::COLUMNS % 64 != 0;

template <class T, bool SWAP>
constexpr int BUFFERS = HERE<T, SWAP> ? 0 : T::CONSUMERS * 2 * 8192;

template <class T, bool SWAP>
__global__ void __launch_bounds__(T::THREADS, 1)
    product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            const __grid_constant__ CUtensorMap stored, const Result out, const int steps) {
    extern __shared__ uint8_t memory[];
    uint8_t* loaded = gemm::aligned(memory);
    if (threadIdx.x == 0) map_prefetch(&a), map_prefetch(&b);
    const Barriers barriers = start<T>(loaded, BUFFERS<T, SWAP>);
    const Walk<T> walk(SWAP ? out.columns : out.rows, SWAP ? out.rows : out.columns);
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        if constexpr (T::CONSUMERS > 1) registers_shrink<40>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
                const Place place = walk.at(tile);
                produce<T>(loaded, barriers, ring, &a, &b, place.m * T::ROWS, place.n * T::COLUMNS, steps);
            }
        }
    } else {
        if constexpr (T::CONSUMERS > 1) registers_grow<232>();
        const int warpgroup = threadIdx.x / 128 - 1;
        float acc[T::HEIGHT][T::COLUMNS / 2];
        for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
            const Place place = walk.at(tile);
            const int m = place.m * T::ROWS, n = place.n * T::COLUMNS;
            chain<T>(acc, loaded, barriers, ring, warpgroup, steps, false);
            with_type(out.type, [&](auto type) {
                using Out = decltype(type);
                if constexpr (HERE<T, SWAP>) {
                    store_here<T, SWAP, Out>(acc, out, m, n, warpgroup);
                } else {
                    store_through<T, Out>(acc, &stored, loaded + T::RING, m, n, warpgroup);
                }
            });
        }
        if (!HERE<T, SWAP> && threadIdx.x % 128 == 0) tma_store_wait<0>();
    }
}

struct Operand {
    const void* data;
    int64_t lines, stride;
};

template <class T, bool SWAP>
cudaError_t launch_product(Operand x, Operand weight, Result out, int64_t width, cudaStream_t stream) {
    using Element = typename T::Element;
    const Operand a = SWAP ? weight : x, b = SWAP ? x : weight;
    CUtensorMap a_map, b_map, stored = {};
    RLSPEC_TRY((map_operand<T::A, Element>(&a_map, a.data, a.lines, width, a.stride, a_box<T>())));
    RLSPEC_TRY((map_operand<T::B, Element>(&b_map, b.data, b.lines, width, b.stride, b_box<T>())));
    if (!HERE<T, SWAP>) {
        const int size = out.type == FP32 ? 4 : 2;
        const uint64_t sizes[2] = {static_cast<uint64_t>(out.columns), static_cast<uint64_t>(out.rows)};
        const uint64_t strides[1] = {static_cast<uint64_t>(out.columns) * size};
        const uint32_t box[2] = {128u / size, 64};
        const CUtensorMapDataType types[3] = {CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                                              CU_TENSOR_MAP_DATA_TYPE_FLOAT32};
        RLSPEC_TRY(map_tensor(&stored, types[out.type], 2, out.data, sizes, strides, box));
    }
    const int steps = static_cast<int>((width - 1) / T::PACE + 1);
    const Walk<T> walk(SWAP ? out.columns : out.rows, SWAP ? out.rows : out.columns);
    constexpr int shared = shared_bytes<T>(BUFFERS<T, SWAP>);
    int blocks = 0;
    RLSPEC_TRY(steady_blocks(reinterpret_cast<const void*>(product<T, SWAP>), walk.count, shared, &blocks));
    product<T, SWAP><<<blocks, T::THREADS, shared, stream>>>(a_map, b_map, stored, out, steps);
    return cudaGetLastError();
}

// ---- product of up to 8 rows ----
// All that counts is that the weight comes without a stop. So these are launched behind the kernel before them
// (launch.cuh); `product` is not: where it leaves multiprocessors free, the blocks of a next one would crowd there. At
// its start a block loads what fits into its ring of a weight that is `at_rest`, which no kernel that may still be at
// work writes; x follows in its turn. When its last load is under way, the next kernel may start.
//
// GATED: the weight has a row for each gate, then one for each up. Of a tile half the columns are gates, half are ups
// of the same numbers, so a thread has both, and activated = swiglu(gate, up) of the rounded results.

constexpr int LEAN_THREADS = 160;  // four warps that multiply and one that loads

template <class T, bool GATED>
constexpr int WIDE = GATED ? T::COLUMNS / 2 : T::COLUMNS;  // rows of the weight side by side

// One number and the next of a row, of which `left` are inside.
template <typename Out>
__device__ __forceinline__ void store_two(Out* to, Out first, Out second, int left, bool even) {
    if (even && left > 1) {
        *reinterpret_cast<Two<Out>*>(to) = {first, second};
    } else {
        if (left > 0) to[0] = first;
        if (left > 1) to[1] = second;
    }
}

// A tile from registers. The 64 rows of the matrix unit are 8 times the same 8: a warp stores every fourth 8 columns.
template <class T, bool GATED, typename Out>
__device__ __forceinline__ void store_lean(const float (&acc)[T::COLUMNS / 2], Result out, void* activated, int n) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4;
    const int columns = GATED ? out.columns / 2 : out.columns;
    if (row >= out.rows) return;
    Out* of_row = static_cast<Out*>(out.data) + static_cast<int64_t>(row) * out.columns;
#pragma unroll
    for (int j = 0; j < WIDE<T, GATED> / 8; ++j) {
        if (j % 4 != warp) continue;
        const int column = n + 8 * j + 2 * (lane % 4), left = columns - column;
        const Out first = rounded<Out>(acc[4 * j]), second = rounded<Out>(acc[4 * j + 1]);
        store_two(of_row + column, first, second, left, columns % 2 == 0);
        if constexpr (GATED) {
            const float* up = acc + WIDE<T, GATED> / 2 + 4 * j;
            const Out third = rounded<Out>(up[0]), fourth = rounded<Out>(up[1]);
            store_two(of_row + columns + column, third, fourth, left, columns % 2 == 0);
            store_two(static_cast<Out*>(activated) + static_cast<int64_t>(row) * columns + column,
                      rounded<Out>(swiglu(widen(first), widen(third))),
                      rounded<Out>(swiglu(widen(second), widen(fourth))), left, columns % 2 == 0);
        }
    }
}

template <class T, bool GATED>
__global__ void __launch_bounds__(LEAN_THREADS, 1)
    lean(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Result out,
         void* activated, const int steps, const int tiles, const int at_rest) {
    extern __shared__ uint8_t memory[];
    uint8_t* loaded = gemm::aligned(memory);
    const bool loads = threadIdx.x == 128;
    if (loads) map_prefetch(&a), map_prefetch(&b);
    const Barriers barriers = start<T>(loaded, 0);
    Ring<T::STAGES> ring;
    const auto load_x = [&](int step) {
        uint8_t* to = loaded + ring.stage * T::STAGE;
#pragma unroll
        for (int i = 0; i < T::SLABS; ++i) {
            tma_load(to + i * T::A_SLAB, &a, barriers.full + ring.stage, step * T::PACE + i * SLAB, 0);
        }
    };
    const auto load_weight = [&](int step, int n) {
        uint8_t* to = loaded + ring.stage * T::STAGE + T::SLABS * T::A_SLAB;
        barrier_expect(barriers.full + ring.stage, T::STAGE);
#pragma unroll
        for (int i = 0; i < T::SLABS * (GATED ? 2 : 1); ++i) {
            const int slab = GATED ? i / 2 : i, line = GATED && i % 2 ? out.columns / 2 + n : n;
            tma_load_once(to + i * WIDE<T, GATED> * SLAB * 2, &b, barriers.full + ring.stage,
                          step * T::PACE + slab * SLAB, line);
        }
    };
    if (threadIdx.x >= 128) {
        if (!loads) return;
        const int early = at_rest ? min(steps, T::STAGES) : 0;
        for (int step = 0; step < early; ++step, ring.next()) load_weight(step, blockIdx.x * WIDE<T, GATED>);
        wait_for_previous();
        ring = {};
        for (int step = 0; step < early; ++step, ring.next()) load_x(step);
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            for (int step = tile == blockIdx.x ? early : 0; step < steps; ++step, ring.next()) {
                barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);
                load_weight(step, tile * WIDE<T, GATED>);
                load_x(step);
            }
        }
        next_may_start();
    } else {
        wait_for_previous();  // the result may take the place of what an earlier kernel reads
        float acc[1][T::COLUMNS / 2];
        for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
            registers_fence(acc[0]);
            for (int step = 0; step < steps; ++step, ring.next()) {
                barrier_wait(barriers.full + ring.stage, ring.parity);
                multiply_stage<T>(acc, loaded + ring.stage * T::STAGE, 0, step > 0);
                wgmma_wait<0>();
                release(barriers, ring.stage);  // at once: loads under way count for more than the matrix unit
            }
            registers_fence(acc[0]);
            with_type(out.type, [&](auto type) {
                store_lean<T, GATED, decltype(type)>(acc[0], out, activated, tile * WIDE<T, GATED>);
            });
            __syncwarp();
        }
    }
}

template <class T, bool GATED>
cudaError_t launch_lean(Operand x, Operand weight, Result out, void* activated, int64_t width, bool at_rest,
                        cudaStream_t stream) {
    using Element = typename T::Element;
    CUtensorMap a_map, b_map;
    RLSPEC_TRY((map_operand<K_MAJOR, Element>(&a_map, x.data, x.lines, width, x.stride, T::LINES)));
    // The cache must not fetch more than it is asked for: neighbours of 128 bytes come soon enough, and once.
    RLSPEC_TRY(map_matrix(&b_map, static_cast<const Element*>(weight.data), weight.lines, width, weight.stride,
                          WIDE<T, GATED>, SLAB, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE));
    const int steps = static_cast<int>((width - 1) / T::PACE + 1), rests = at_rest;
    const int tiles = ((GATED ? out.columns / 2 : out.columns) - 1) / WIDE<T, GATED> + 1;
    constexpr int shared = shared_bytes<T>(0);
    int blocks = 0;
    RLSPEC_TRY(steady_blocks(reinterpret_cast<const void*>(lean<T, GATED>), tiles, shared, &blocks));
    return launch_behind(lean<T, GATED>, blocks, LEAN_THREADS, shared, stream, a_map, b_map, out, activated, steps,
                         tiles, rests);
}

// ---- resumed ----
// The chain goes on from the stored value; to add two finished sums would be another rounding.

// Calls f(element of acc, its neighbour, where both stand in the result, whether they do) over a thread's accumulators.
// The result has an even number of columns.
template <class T, typename Out, typename F>
__device__ __forceinline__ void with_pairs(float (&acc)[T::HEIGHT][T::COLUMNS / 2], Result out, int m, int n,
                                           int warpgroup, F f) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int column = n + 2 * (lane % 4), left = out.columns - column;
#pragma unroll
    for (int h = 0; h < T::HEIGHT; ++h) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m + (warpgroup * T::HEIGHT + h) * 64 + 16 * warp + lane / 4 + 8 * half;
            Out* of_row = static_cast<Out*>(out.data) + static_cast<int64_t>(row) * out.columns + column;
#pragma unroll
            for (int j = 0; j < T::COLUMNS / 8; ++j) {
                f(acc[h][4 * j + 2 * half], acc[h][4 * j + 2 * half + 1], reinterpret_cast<Two<Out>*>(of_row + 8 * j),
                  row < out.rows && 8 * j < left);
            }
        }
    }
}

// An operand whose reduced index runs along the rows: boxes of 64 rows, of 16, and of 16 of a copy.
struct Source {
    CUtensorMap whole, block, copied;
};

// As `produce`, of blocks of 16 rows that lie at `starts`, or, where that is negative, at their place in the copy. The
// starts of a step are read one step before, those of a tile's first with the last tile's last: `next`.
template <class T>
__device__ __forceinline__ void produce_blocks(uint8_t* memory, Barriers barriers, Ring<T::STAGES>& ring,
                                               const Source& a, const Source& b, const int4* starts, int4& next,
                                               int m, int n, int first, int last, int steps) {
    static_assert(T::PACE == 4 * GROUP && T::SLABS == 1 && T::A == MN_MAJOR && T::B == MN_MAJOR);
    for (int step = first; step < last; ++step) {
        const int start[4] = {next.x, next.y, next.z, next.w};
        next = starts[step + 1 < steps ? step + 1 : 0];
        barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);
        uint64_t* full = barriers.full + ring.stage;
        uint8_t *to_a = memory + ring.stage * T::STAGE, *to_b = to_a + T::A_SLAB;
        barrier_expect(full, T::STAGE);
        const bool whole = start[0] >= 0 && start[1] == start[0] + GROUP && start[2] == start[1] + GROUP &&
                           start[3] == start[2] + GROUP;
        if (whole) {
            load_slab<MN_MAJOR, T::ROWS>(to_a, &a.whole, full, m, start[0]);
            load_slab<MN_MAJOR, T::COLUMNS>(to_b, &b.whole, full, n, start[0]);
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const bool stays = start[i] >= 0;
                const int row = stays ? start[i] : (4 * step + i) * GROUP;
                const CUtensorMap *of_a = stays ? &a.block : &a.copied, *of_b = stays ? &b.block : &b.copied;
                load_slab<MN_MAJOR, T::ROWS>(to_a + i * GROUP * 128, of_a, full, m, row);
                load_slab<MN_MAJOR, T::COLUMNS>(to_b + i * GROUP * 128, of_b, full, n, row);
            }
        }
        ring.next();
    }
}

template <class T>
__global__ void __launch_bounds__(T::THREADS, 1)
    resumed(const __grid_constant__ Source a, const __grid_constant__ Source b, const Result out, const int4* starts,
            const int steps, const int resume) {
    extern __shared__ uint8_t memory[];
    uint8_t* loaded = gemm::aligned(memory);
    if (threadIdx.x == 0) map_prefetch(&a.whole), map_prefetch(&b.whole);
    const Barriers barriers = start<T>(loaded, 0);
    const Walk<T> walk(out.rows, out.columns);
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        registers_shrink<40>();
        if (threadIdx.x == 0) {
            int4 next = starts == nullptr ? int4{} : starts[0];
            for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
                const Place place = walk.at(tile);
                const int m = place.m * T::ROWS, n = place.n * T::COLUMNS;
                if constexpr (T::A == MN_MAJOR) {
                    if (starts != nullptr) {
                        produce_blocks<T>(loaded, barriers, ring, a, b, starts, next, m, n, 0, steps, steps);
                        continue;
                    }
                }
                produce<T>(loaded, barriers, ring, &a.whole, &b.whole, m, n, steps);
            }
        }
    } else {
        registers_grow<232>();
        const int warpgroup = threadIdx.x / 128 - 1;
        float acc[T::HEIGHT][T::COLUMNS / 2];
        for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
            const Place place = walk.at(tile);
            const int m = place.m * T::ROWS, n = place.n * T::COLUMNS;
            with_pairs<T, float>(acc, out, m, n, warpgroup, [&](float& x, float& y, Two<float>* from, bool inside) {
                const Two<float> both = resume && inside ? *from : Two<float>{0.0f, 0.0f};
                x = both.first;
                y = both.second;
            });
            chain<T>(acc, loaded, barriers, ring, warpgroup, steps, true);
            with_type(out.type, [&](auto type) {
                using Out = decltype(type);
                with_pairs<T, Out>(acc, out, m, n, warpgroup, [&](float x, float y, Two<Out>* to, bool inside) {
                    if (inside) *to = {rounded<Out>(x), rounded<Out>(y)};
                });
            });
        }
    }
}

// ---- exchanged ----
// Between two tiles `resumed` stores and fetches accumulators, and the matrix unit stands still: 13 000 clocks beside
// the 65 000 that 4096 of the reduced index take. Here accumulators pass through shared memory, in boxes of 64 rows ×
// 32 columns. What the next tile starts from is asked for while this one is multiplied: KEPT boxes a warpgroup into a
// place of their own, half a tile ahead, the others into the ring, as its next stages. Then each thread takes its
// elements out and leaves those of the tile that is done where they were. A warp of those that do not multiply stores
// them from there and hands the place on. There is one exchange more than tiles: of the first nothing is stored, and
// nothing comes with the last.
//
// Of each 8 rows of a box, row r lies at 2·r, or 2·r - 7 from 4 on: what half a warp reads at once, 32 bytes of four
// rows, then lies in different banks.

template <class T>
struct Exchange {
    static constexpr int KEPT = 2, OF_STAGE = T::STAGE / BOX / T::CONSUMERS;  // boxes a warpgroup
    static constexpr int PARTS = 3;                                           // the place kept, and stages of the ring
    static constexpr int HELD = T::CONSUMERS * KEPT * BOX, MORE = HELD + (PARTS + 2) * 8;  // bytes
    static_assert(T::HEIGHT == 1 && T::COLUMNS / 32 == KEPT + (PARTS - 1) * OF_STAGE);
    static __host__ __device__ constexpr int count(int part) { return part == 0 ? KEPT : OF_STAGE; }
    static __host__ __device__ constexpr int first(int part) { return part == 0 ? 0 : KEPT + (part - 1) * OF_STAGE; }
};

// Of part `part`, f(place, column, row) for each box of each warpgroup; place counts from 0.
template <class T, typename F>
__device__ __forceinline__ void with_boxes(int part, int m, int n, F f) {
    using X = Exchange<T>;
    const int count = X::count(part);
#pragma unroll 1
    for (int i = 0; i < T::CONSUMERS * count; ++i) f(i, n + 32 * (X::first(part) + i % count), m + i / count * 64);
}

// Columns `first` to first + 31 of acc for what lies in the box. `zero` is 0, which the compiler does not know: values
// are taken over with it, and the next box is left at addresses that need all of them. Else it would put that off until
// those of a whole tile wait beside acc, for which there are not enough registers.
template <int N>
__device__ __forceinline__ void exchange(float (&acc)[N], int first, uint8_t* box, uint32_t& zero) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, row = lane / 16 + lane / 4 % 4 * 2;
    const uint32_t mine = shared_address(box) + (16 * warp + row) * 128 + (lane % 4 / 2 ^ row) * 16 + lane % 2 * 8;
    const uint32_t there = mine ^ zero;
    float2 fresh[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                     : "=f"(fresh[i].x), "=f"(fresh[i].y)
                     : "r"((mine ^ i % 4 * 32) + i / 4 * 1024)
                     : "memory");
    }
    uint32_t all = zero;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float* d = acc + first / 2 + 4 * (i % 4) + 2 * (i / 4);
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"((there ^ i % 4 * 32) + i / 4 * 1024), "f"(d[0]), "f"(d[1])
                     : "memory");
        const uint32_t x = __float_as_uint(fresh[i].x) ^ zero, y = __float_as_uint(fresh[i].y) ^ zero;
        d[0] = __uint_as_float(x);
        d[1] = __uint_as_float(y);
        all &= x & y;
    }
    zero = all;
}

template <class T>
__global__ void __launch_bounds__(T::THREADS, 1)
    exchanged(const __grid_constant__ Source a, const __grid_constant__ Source b,
              const __grid_constant__ CUtensorMap total, const Result out, const int4* starts, const int steps,
              const uint32_t nothing) {
    using X = Exchange<T>;
    extern __shared__ uint8_t memory[];
    uint8_t *loaded = gemm::aligned(memory), *kept = loaded + T::RING;
    // In turn: accumulators that were left are in `left`; those of the next tile are in the place kept; it is free.
    uint64_t *left = reinterpret_cast<uint64_t*>(kept + X::HELD), *come = left + X::PARTS, *free = come + 1;
    if (threadIdx.x == 0) {
        map_prefetch(&a.whole), map_prefetch(&b.whole), map_prefetch(&total);
        for (int part = 0; part < X::PARTS; ++part) barrier_init(left + part, 4 * T::CONSUMERS);
        barrier_init(come, 1), barrier_init(free, 1);
    }
    const Barriers barriers = start<T>(loaded, X::MORE);
    wait_for_previous();  // launched behind what is before it, which may have written any of its operands
    const Walk<T, true> walk(out.rows, out.columns);
    const int tiles = (walk.count - 1 - static_cast<int>(blockIdx.x)) / static_cast<int>(gridDim.x) + 1;
    const auto place_of = [&](int i) {
        const Place place = walk.at(blockIdx.x + i * gridDim.x);
        return Place{place.m * T::ROWS, place.n * T::COLUMNS};
    };
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        registers_shrink<40>();
        const int warp = threadIdx.x / 32;
        if (threadIdx.x == 0) {
            const auto fetch = [&](int part, uint8_t* to, uint64_t* full, Place at) {
                barrier_expect(full, T::CONSUMERS * X::count(part) * BOX);
                with_boxes<T>(part, at.m, at.n, [&](int place, int column, int row) {
                    tma_load(to + place * BOX, &total, full, column, 0, 0, row / 8);
                });
            };
            int4 next = starts == nullptr ? int4{} : starts[0];
            const auto multiplied = [&](Place at, int first, int last) {
                if (starts != nullptr) {
                    produce_blocks<T>(loaded, barriers, ring, a, b, starts, next, at.m, at.n, first, last, steps);
                } else {
                    produce<T>(loaded, barriers, ring, &a.whole, &b.whole, at.m, at.n, last, first);
                }
            };
            fetch(0, kept, come, place_of(0));
            for (int i = 0; i <= tiles; ++i) {
                const Place at = place_of(min(i, tiles - 1));
                for (int part = 1; part < X::PARTS; ++part, ring.next()) {
                    uint64_t* full = barriers.full + ring.stage;
                    barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);
                    if (i < tiles) {
                        fetch(part, loaded + ring.stage * T::STAGE, full, at);
                    } else {
                        barrier_arrive(full);
                    }
                }
                if (i == tiles) break;
                multiplied(at, 0, steps / 2);
                if (i + 1 < tiles) {
                    barrier_wait(free, i % 2);
                    fetch(0, kept, come, place_of(i + 1));
                }
                multiplied(at, steps / 2, steps);
            }
        } else if (threadIdx.x % 32 == 0) {
            const int part = warp - 1;
            for (int i = 0; i <= tiles; ++i) {
                const int stage = (ring.stage + part + T::STAGES - 1) % T::STAGES;
                const uint8_t* from = part == 0 ? kept : loaded + stage * T::STAGE;
                barrier_wait(left + part, i % 2);
                if (i > 0) {
                    const Place at = place_of(i - 1);
                    with_boxes<T>(part, at.m, at.n, [&](int place, int column, int row) {
                        tma_store(&total, from + place * BOX, column, 0, 0, row / 8);
                    });
                    tma_store_commit();
                    tma_store_wait_read<0>();
                }
                if (part == 0) {
                    barrier_arrive(free);
                } else {
                    barrier_arrive(barriers.empty + stage, 4 * T::CONSUMERS);
                }
                ring.stage = (ring.stage + X::PARTS - 1 + steps) % T::STAGES;
            }
            tma_store_wait<0>();
        }
    } else {
        registers_grow<232>();
        const int warpgroup = threadIdx.x / 128 - 1;
        float acc[1][T::COLUMNS / 2] = {};
        uint32_t zero = nothing;
        for (int i = 0;; ++i) {
#pragma unroll
            for (int part = 0; part < X::PARTS; ++part) {
                uint8_t* boxes = part == 0 ? kept : loaded + ring.stage * T::STAGE;
                if (part > 0) {
                    barrier_wait(barriers.full + ring.stage, ring.parity);
                    ring.next();
                } else if (i < tiles) {
                    barrier_wait(come, i % 2);
                } else {
                    barrier_wait(free, (i - 1) % 2);  // nothing comes: at least what was left there has gone
                }
#pragma unroll
                for (int j = 0; j < X::count(part); ++j) {
                    const int box = warpgroup * X::count(part) + j;
                    exchange(acc[0], 32 * (X::first(part) + j), boxes + box * BOX, zero);
                }
                async_fence();
                __syncwarp();
                if (threadIdx.x % 32 == 0) barrier_arrive(left + part);
            }
            if (i == tiles) break;
            chain<T>(acc, loaded, barriers, ring, warpgroup, steps, true);
        }
    }
}

// Where rows of a table come from: `existing` rows of the operands, `copied` rows of their copies.
struct Blocks {
    const int32_t* starts;
    const void *a_copy, *b_copy;
    int64_t existing, copied;
};

template <class T>
cudaError_t map_source(Source* source, Operand from, const void* copy, const Blocks& blocks, int64_t reduced, int box) {
    using Element = typename T::Element;
    const bool anywhere = blocks.starts != nullptr;
    const int64_t rows = anywhere ? blocks.existing : reduced;
    RLSPEC_TRY((map_operand<MN_MAJOR, Element>(&source->whole, from.data, from.lines, rows, from.stride, box)));
    if (!anywhere) return cudaSuccess;
    RLSPEC_TRY((map_operand<MN_MAJOR, Element>(&source->block, from.data, from.lines, rows, from.stride, GROUP)));
    return map_operand<MN_MAJOR, Element>(&source->copied, copy, from.lines, blocks.copied, from.lines, GROUP);
}

template <class T>
cudaError_t launch_resumed(Operand a, Operand b, Result out, Blocks blocks, int64_t reduced, bool resume,
                           cudaStream_t stream) {
    using Element = typename T::Element;
    Source a_source = {}, b_source = {};
    if (T::A == MN_MAJOR) {
        RLSPEC_TRY(map_source<T>(&a_source, a, blocks.a_copy, blocks, reduced, a_box<T>()));
    } else {
        RLSPEC_TRY((map_operand<T::A, Element>(&a_source.whole, a.data, a.lines, reduced, a.stride, a_box<T>())));
    }
    RLSPEC_TRY(map_source<T>(&b_source, b, blocks.b_copy, blocks, reduced, b_box<T>()));
    int steps = static_cast<int>((reduced - 1) / T::PACE + 1), goes_on = resume;
    void* arguments[] = {&a_source, &b_source, &out, &blocks.starts, &steps, &goes_on};
    return launch_steady(reinterpret_cast<const void*>(resumed<T>), Walk<T>(out.rows, out.columns).count,
                         T::THREADS, shared_bytes<T>(0), arguments, stream);
}

// Whether TMA can read and write the result in boxes of whole 8 rows, and a tile has two stages to multiply: with its
// accumulators they are a round of the ring, so no warp leaves accumulators of the next tile in a part of it before all
// have left those of this one.
template <class T>
bool exchangeable(Result out, int64_t reduced) {
    static_assert(Exchange<T>::PARTS - 1 + 2 >= T::STAGES);
    const bool suits = out.columns % 4 == 0 && reinterpret_cast<uintptr_t>(out.data) % 16 == 0;
    return suits && out.type == FP32 && out.rows % 8 == 0 && reduced > T::PACE;
}

template <class T>
cudaError_t launch_exchanged(Operand a, Operand b, Result out, Blocks blocks, int64_t reduced, cudaStream_t stream) {
    Source a_source = {}, b_source = {};
    CUtensorMap total;
    RLSPEC_TRY(map_source<T>(&a_source, a, blocks.a_copy, blocks, reduced, a_box<T>()));
    RLSPEC_TRY(map_source<T>(&b_source, b, blocks.b_copy, blocks, reduced, b_box<T>()));
    // Columns, then of each 8 rows: the one 4 further, the next, and the next 8.
    const uint64_t row = static_cast<uint64_t>(out.columns) * 4, strides[3] = {4 * row, row, 8 * row};
    const uint64_t sizes[4] = {static_cast<uint64_t>(out.columns), 2, 4, static_cast<uint64_t>(out.rows) / 8};
    const uint32_t box[4] = {32, 2, 4, 8};
    RLSPEC_TRY(map_tensor(&total, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, out.data, sizes, strides, box));
    const int steps = static_cast<int>((reduced - 1) / T::PACE + 1);
    const int tiles = Walk<T, true>(out.rows, out.columns).count;
    constexpr int shared = shared_bytes<T>(Exchange<T>::MORE);
    int count = 0;
    RLSPEC_TRY(even_blocks(reinterpret_cast<const void*>(exchanged<T>), tiles, shared, &count));
    return launch_behind(exchanged<T>, count, T::THREADS, shared, stream, a_source, b_source, total, out,
                         reinterpret_cast<const int4*>(blocks.starts), steps, 0u);
}

// ---- blocks of rows ----

// A table of 16 rows a block; -1 is a row of zeros. Blocks whose rows lie together are read where they are:
// starts[block] is their first row. Of others starts[block] is -1, and their rows are copied. A row that does not exist
// must show, since the host cannot look at a table on the device: it is copied as NaN. `starts` has a multiple of 4
// entries; those behind the table's blocks lie behind the operand, where TMA reads zeros.
struct Rows {
    const uint16_t* data;
    int64_t stride;
    int chunks;  // of 8 elements a row
    uint16_t* copy;
};

__global__ void __launch_bounds__(256)
    place_blocks(const int32_t* table, const int blocks, const int existing, const Rows a, const Rows b,
                 int32_t* starts, const uint32_t nan) {
    const int block = blockIdx.x, inside = threadIdx.x % GROUP;
    if (block >= blocks) {
        if (threadIdx.x == 0 && blockIdx.y == 0) starts[block] = existing;
        return;
    }
    const int32_t* rows = table + static_cast<int64_t>(block) * GROUP;
    const int first = rows[0];
    const bool mine = first >= 0 && first + GROUP <= existing && rows[inside] == first + inside;
    const bool together = __syncthreads_and(mine);
    if (threadIdx.x == 0 && blockIdx.y == 0) starts[block] = together ? first : -1;
    if (together) return;
    const int chunks = a.chunks + b.chunks;
    for (int i = blockIdx.y * 256 + threadIdx.x; i < GROUP * chunks; i += gridDim.y * 256) {
        const int at = i / chunks, chunk = i % chunks, row = rows[at];
        const bool of_a = chunk < a.chunks;
        const uint16_t* from = of_a ? a.data + row * a.stride : b.data + row * b.stride;
        uint16_t* to = of_a ? a.copy : b.copy;
        const int place = 8 * (of_a ? chunk : chunk - a.chunks), width = 8 * (of_a ? a.chunks : b.chunks);
        const uint32_t missing = row == -1 ? 0 : nan;
        uint4 value = make_uint4(missing, missing, missing, missing);
        if (row >= 0 && row < existing) value = *reinterpret_cast<const uint4*>(from + place);
        *reinterpret_cast<uint4*>(to + (static_cast<int64_t>(block) * GROUP + at) * width + place) = value;
    }
}

// ---- plain ----

// Elements and how they are laid out: `row` from m or n to the next, `step` from k to the next.
template <typename Element>
struct Strided {
    const Element* data;
    int64_t row, step;
};

// 64 rows and 16 of the reduced index from (first, k) on into shared memory; zeros outside.
template <typename Element, int PITCH>
__device__ __forceinline__ void fetch(Element (&to)[64][PITCH], Strided<Element> from, int64_t first, int64_t rows,
                                      int64_t k, int64_t width) {
    for (int i = threadIdx.x; i < 64 * GROUP; i += 128) {
        // Neighbouring threads read along the dense direction, if there is one.
        const int row = from.step == 1 ? i / GROUP : i % 64, step = from.step == 1 ? i % GROUP : i / 64;
        const bool inside = first + row < rows && k + step < width;
        to[row][step] = inside ? from.data[(first + row) * from.row + (k + step) * from.step] : rounded<Element>(0.0f);
    }
}

template <typename Element>
__device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (sizeof(Element) == 2) {
        if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        } else {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                "{%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        }
    }
}

// 64 × 64 of the result a block; thread (row, column) of it as a fragment of D of the matrix unit.
template <typename Element>
__global__ void __launch_bounds__(128)
    plain(const Strided<Element> a, const Strided<Element> b, const Result out, const int64_t width, const int resume) {
    constexpr int PITCH = GROUP + 16 / static_cast<int>(sizeof(Element));
    __shared__ alignas(16) Element left[64][PITCH], right[64][PITCH];
    const Place place = grouped(blockIdx.x, (out.rows + 63) / 64, (out.columns + 63) / 64, 8);
    const int m = place.m * 64, n = place.n * 64, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
    float acc[8][4];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int64_t at_m = m + row + 8 * (i % 4 / 2), at_n = n + 8 * (i / 4) + column + i % 2;
        const bool inside = resume && at_m < out.rows && at_n < out.columns;
        acc[i / 4][i % 4] = inside ? static_cast<const float*>(out.data)[at_m * out.columns + at_n] : 0.0f;
    }
    for (int64_t k = 0; k < width; k += GROUP) {
        __syncthreads();
        fetch(left, a, m, out.rows, k, width);
        fetch(right, b, n, out.columns, k, width);
        __syncthreads();
        if constexpr (sizeof(Element) == 2) {
            auto two = [](const Element* from) { return *reinterpret_cast<const uint32_t*>(from); };
            const uint32_t fragment[4] = {two(&left[row][column]), two(&left[row + 8][column]),
                                          two(&left[row][column + 8]), two(&left[row + 8][column + 8])};
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const Element* from = right[8 * j + lane / 4] + column;
                multiply<Element>(acc[j], fragment, two(from), two(from + 8));
            }
        } else {
#pragma unroll
            for (int step = 0; step < GROUP; ++step) {
#pragma unroll
                for (int i = 0; i < 32; ++i) {
                    acc[i / 4][i % 4] = __fmaf_rn(left[row + 8 * (i % 4 / 2)][step],
                                                  right[8 * (i / 4) + column + i % 2][step], acc[i / 4][i % 4]);
                }
            }
        }
    }
    with_type(out.type, [&](auto type) {
        using Out = decltype(type);
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int64_t at_m = m + row + 8 * (i % 4 / 2), at_n = n + 8 * (i / 4) + column + i % 2;
            if (at_m < out.rows && at_n < out.columns)
                static_cast<Out*>(out.data)[at_m * out.columns + at_n] = rounded<Out>(acc[i / 4][i % 4]);
        }
    });
}

template <typename Element>
cudaError_t launch_plain(const void* a, const void* b, Result out, int64_t width, const int64_t (&strides)[4],
                         bool resume, cudaStream_t stream) {
    const int64_t tiles = (int64_t(out.rows) + 63) / 64 * ((int64_t(out.columns) + 63) / 64);
    if (tiles > INT32_MAX) return cudaErrorInvalidValue;
    plain<Element><<<static_cast<unsigned>(tiles), 128, 0, stream>>>(
        {static_cast<const Element*>(a), strides[0], strides[1]},
        {static_cast<const Element*>(b), strides[2], strides[3]}, out, width, resume);
    return cudaGetLastError();
}

// ---- the table of tiles ----
// TILES in rlspec/device/cuda_gemm.py has the same numbers, and says which is taken when.

#define TILE(NUMBER, SWAP, ...) \
    case NUMBER:                \
        return launch_product<Tile<Element, __VA_ARGS__>, SWAP>(x, weight, out, width, stream);

template <typename Element>
cudaError_t forward(int64_t tile, Operand x, Operand weight, Result out, int64_t width, cudaStream_t stream) {
    switch (tile) {
        //  swap  rows columns slabs stages
        TILE(0, true, 64, 16, 4, 5)
        TILE(1, true, 64, 32, 4, 4)
        TILE(2, false, 64, 64, 2, 6)
        TILE(3, false, 64, 96, 2, 5)
        TILE(4, false, 64, 128, 2, 4)
        TILE(5, false, 64, 192, 1, 6)
        TILE(6, false, 128, 128, 1, 6)
        TILE(7, false, 128, 192, 1, 4)
        TILE(8, false, 128, 256, 1, 4)
        TILE(9, false, 256, 192, 1, 3)
    }
    return cudaErrorInvalidValue;
}

// Up to 8 rows.
#define LEAN(NUMBER, ...)                                                                                         \
    case NUMBER: {                                                                                                \
        using T = Tile<Element, 64, __VA_ARGS__, K_MAJOR, K_MAJOR, 8>;                                            \
        return activated == nullptr                                                                               \
                   ? launch_lean<T, false>(x, weight, out, activated, width, at_rest, stream)                     \
                   : launch_lean<T, true>(x, weight, out, activated, width, at_rest, stream);                     \
    }

template <typename Element>
cudaError_t few(int64_t tile, Operand x, Operand weight, Result out, void* activated, int64_t width, bool at_rest,
                cudaStream_t stream) {
    switch (tile) {
        //   columns slabs stages
        LEAN(10, 32, 4, 11)
        LEAN(11, 48, 4, 8)
        LEAN(12, 96, 2, 8)
        LEAN(13, 192, 1, 9)
    }
    return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t along(int64_t tile, Operand x, Operand weight, Result out, int64_t width, cudaStream_t stream) {
    switch (tile) {
        TILE(2, false, 64, 64, 2, 6, K_MAJOR, MN_MAJOR)
        TILE(4, false, 64, 128, 2, 4, K_MAJOR, MN_MAJOR)
        TILE(5, false, 64, 192, 1, 6, K_MAJOR, MN_MAJOR)
        TILE(6, false, 128, 128, 1, 6, K_MAJOR, MN_MAJOR)
        TILE(7, false, 128, 192, 1, 4, K_MAJOR, MN_MAJOR)
        TILE(8, false, 128, 256, 1, 4, K_MAJOR, MN_MAJOR)
        TILE(9, false, 256, 192, 1, 3, K_MAJOR, MN_MAJOR)
    }
    return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t resumed_of(Operand a, Operand b, Result out, Blocks blocks, int64_t reduced, bool across, bool resume,
                       cudaStream_t stream) {
    using Along = Tile<Element, 128, 256, 1, 4, K_MAJOR, MN_MAJOR>;
    using Across = Tile<Element, 128, 256, 1, 4, MN_MAJOR, MN_MAJOR>;
    if (across && resume && exchangeable<Across>(out, reduced))
        return launch_exchanged<Across>(a, b, out, blocks, reduced, stream);
    return across ? launch_resumed<Across>(a, b, out, blocks, reduced, resume, stream)
                  : launch_resumed<Along>(a, b, out, blocks, reduced, resume, stream);
}

}  // namespace rlspec

// ---- launchers ----

using namespace rlspec;

// out [rows, columns] = x [rows, width] · weightᵀ; weight [columns, width], or [width, columns] if `across`.
extern "C" int det_gemm_product(void const* x, void const* weight, void* out, int64_t type, int64_t out_type,
                                int64_t rows, int64_t columns, int64_t width, int64_t x_stride, int64_t weight_stride,
                                int64_t across, int64_t tile, cudaStream_t stream) {
    const Operand left = {x, rows, x_stride}, right = {weight, columns, weight_stride};
    const Result result = {out, static_cast<Dtype>(out_type), static_cast<int>(rows), static_cast<int>(columns)};
    if (type == BF16)
        return across ? along<__nv_bfloat16>(tile, left, right, result, width, stream)
                      : forward<__nv_bfloat16>(tile, left, right, result, width, stream);
    if (type == FP16)
        return across ? along<__half>(tile, left, right, result, width, stream)
                      : forward<__half>(tile, left, right, result, width, stream);
    return cudaErrorInvalidValue;
}

// The same of up to 8 rows, weight [columns, width]. `at_rest`: the weight was written before a kernel that nothing
// overtakes, so it may be read ahead.
extern "C" int det_gemm_lean(void const* x, void const* weight, void* out, int64_t type, int64_t out_type,
                             int64_t rows, int64_t columns, int64_t width, int64_t x_stride, int64_t weight_stride,
                             int64_t tile, int64_t at_rest, cudaStream_t stream) {
    const Operand left = {x, rows, x_stride}, right = {weight, columns, weight_stride};
    const Result result = {out, static_cast<Dtype>(out_type), static_cast<int>(rows), static_cast<int>(columns)};
    if (rows > 8) return cudaErrorInvalidValue;
    if (type == BF16) return few<__nv_bfloat16>(tile, left, right, result, nullptr, width, at_rest, stream);
    if (type == FP16) return few<__half>(tile, left, right, result, nullptr, width, at_rest, stream);
    return cudaErrorInvalidValue;
}

// The same for a weight of as many rows of gates as of ups; activated [rows, columns / 2] = swiglu of them.
extern "C" int det_gemm_gated(void const* x, void const* weight, void* out, void* activated, int64_t type, int64_t rows,
                              int64_t columns, int64_t width, int64_t x_stride, int64_t weight_stride, int64_t tile,
                              int64_t at_rest, cudaStream_t stream) {
    const Operand left = {x, rows, x_stride}, right = {weight, columns, weight_stride};
    const Result result = {out, static_cast<Dtype>(type), static_cast<int>(rows), static_cast<int>(columns)};
    if (rows > 8 || columns % 2) return cudaErrorInvalidValue;
    if (type == BF16) return few<__nv_bfloat16>(tile, left, right, result, activated, width, at_rest, stream);
    if (type == FP16) return few<__half>(tile, left, right, result, activated, width, at_rest, stream);
    return cudaErrorInvalidValue;
}

// out [rows, columns] (+)= a · b over `reduced` rows of b [reduced, columns]; a [reduced, rows] if `across`, else
// [rows, reduced]. columns are even. With `starts` (`across` only), a and b have `existing` rows, and what
// `det_gemm_place_blocks` made of a table of `reduced` rows says which; columns and rows are then multiples of 8.
extern "C" int det_gemm_resumed(void const* a, void const* b, void* out, void const* starts, void const* a_copy,
                                void const* b_copy, int64_t type, int64_t out_type, int64_t rows, int64_t columns,
                                int64_t reduced, int64_t existing, int64_t a_stride, int64_t b_stride, int64_t across,
                                int64_t resume, cudaStream_t stream) {
    const Operand left = {a, rows, a_stride}, right = {b, columns, b_stride};
    const Result result = {out, static_cast<Dtype>(out_type), static_cast<int>(rows), static_cast<int>(columns)};
    const Blocks blocks = {static_cast<const int32_t*>(starts), a_copy, b_copy, existing, reduced};
    if ((resume && out_type != FP32) || (starts != nullptr && !across)) return cudaErrorInvalidValue;
    if (type == BF16) return resumed_of<__nv_bfloat16>(left, right, result, blocks, reduced, across, resume, stream);
    if (type == FP16) return resumed_of<__half>(left, right, result, blocks, reduced, across, resume, stream);
    return cudaErrorInvalidValue;
}

// table [blocks, 16] of rows of a [existing, a_columns] and b [existing, b_columns], columns multiples of 8; starts
// [blocks, rounded up to a multiple of 4]; copies [16 · blocks, columns].
extern "C" int det_gemm_place_blocks(void const* table, void const* a, void const* b, void* starts, void* a_copy,
                                     void* b_copy, int64_t type, int64_t blocks, int64_t existing, int64_t a_columns,
                                     int64_t b_columns, int64_t a_stride, int64_t b_stride, cudaStream_t stream) {
    const Rows left = {static_cast<const uint16_t*>(a), a_stride, static_cast<int>(a_columns / 8),
                       static_cast<uint16_t*>(a_copy)};
    const Rows right = {static_cast<const uint16_t*>(b), b_stride, static_cast<int>(b_columns / 8),
                        static_cast<uint16_t*>(b_copy)};
    if ((type != BF16 && type != FP16) || a_columns % 8 || b_columns % 8) return cudaErrorInvalidValue;
    const dim3 grid(static_cast<unsigned>((blocks + 3) / 4 * 4), 8);
    place_blocks<<<grid, 256, 0, stream>>>(static_cast<const int32_t*>(table), static_cast<int>(blocks),
                                           static_cast<int>(existing), left, right, static_cast<int32_t*>(starts),
                                           type == BF16 ? 0x7fc07fc0u : 0x7e007e00u);
    return cudaGetLastError();
}

// out [rows, columns] (+)= Σ_k a[m, k] · b[n, k], any strides in elements.
extern "C" int det_gemm_plain(void const* a, void const* b, void* out, int64_t type, int64_t out_type, int64_t rows,
                              int64_t columns, int64_t width, int64_t a_row, int64_t a_step, int64_t b_row,
                              int64_t b_step, int64_t resume, cudaStream_t stream) {
    const int64_t strides[4] = {a_row, a_step, b_row, b_step};
    const Result result = {out, static_cast<Dtype>(out_type), static_cast<int>(rows), static_cast<int>(columns)};
    if (resume && out_type != FP32) return cudaErrorInvalidValue;
    if (type == BF16) return launch_plain<__nv_bfloat16>(a, b, result, width, strides, resume, stream);
    if (type == FP16) return launch_plain<__half>(a, b, result, width, strides, resume, stream);
    return launch_plain<float>(a, b, result, width, strides, resume, stream);
}
