// Linear layers whose bits do not depend on the batch: the products of kernels/det_gemm.py, by hand for Hopper.
//
//     product    out[m, n] = round( Σ_k x[m, k] · weight[n, k] )        weight [N, K], or [K, N] read as it lies
//     resumed    out[m, n] = round( out[m, n] + Σ_k a · b )             the chain goes on from memory
//     folded     the same for weight gradients, of rows that a table names
//     plain      all of these for any strides, and for fp32
//
// Promise. Each element is one fp32 chain: the reduced index ascends in groups of 16 that start at multiples of 16, each
// group one step of the matrix unit; one rounding at the end. No split of the reduced index, no atomics. Tiles, the order
// of operands, stages, clusters and persistence decide who computes an element and when, never this order.
// fp32 is multiplied outside the matrix unit, by fused multiply-adds, k ascending.
//
// Limits. Tensor memory access wants dense rows that start at multiples of 16 bytes; `plain` wants nothing.
//
// Sources: PTX ISA, wgmma and cp.async.bulk.tensor.
#include "gemm.cuh"

namespace rlspec {

using namespace gemm;

// ---- results ----

// [rows, columns], dense; or the other way round if `swap`: then the tile's rows are columns of `data`.
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
            const int inside = (warpgroup * T::HEIGHT + h) * 64 + 16 * warp + lane / 4 + 8 * half;
            const int row = m + inside;
            if (inside >= T::LOADED || row >= (SWAP ? out.columns : out.rows)) continue;
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

// From registers, where tiles are small or no multiple of 128 bytes wide.
template <class T, bool SWAP>
constexpr bool HERE = SWAP || T::LOADED < 64 || T::COLUMNS % 64 != 0;

template <class T, bool SWAP>
constexpr int BUFFERS = HERE<T, SWAP> ? 0 : T::CONSUMERS * 2 * 8192;

template <class T, bool SWAP>
__global__ void __launch_bounds__(T::THREADS, 1)
    product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            const __grid_constant__ CUtensorMap stored, const Result out, const int steps) {
    extern __shared__ uint8_t memory[];
    uint8_t* loaded = aligned(memory);
    if (threadIdx.x == 0) map_prefetch(&a), map_prefetch(&b);
    const Barriers barriers = start<T>(loaded, BUFFERS<T, SWAP>);
    const Walk<T> walk(SWAP ? out.columns : out.rows, SWAP ? out.rows : out.columns);
    const int first = blockIdx.x / T::BLOCKS, stride = gridDim.x / T::BLOCKS;
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        if constexpr (T::CONSUMERS > 1) registers_shrink<40>();
        if (threadIdx.x == 0) {
            for (int tile = first; tile < walk.count; tile += stride) {
                const Place place = walk.at(tile);
                produce<T>(loaded, barriers, ring, &a, &b, place.m * T::LOADED, place.n * T::COLUMNS, steps);
            }
        }
    } else {
        if constexpr (T::CONSUMERS > 1) registers_grow<232>();
        const int warpgroup = threadIdx.x / 128 - 1;
        float acc[T::HEIGHT][T::COLUMNS / 2];
        for (int tile = first; tile < walk.count; tile += stride) {
            const Place place = walk.at(tile);
            const int m = place.m * T::LOADED, n = place.n * T::COLUMNS;
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
    finish<T>();
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
    int steps = static_cast<int>((width - 1) / T::PACE + 1);
    const Walk<T> walk(SWAP ? out.columns : out.rows, SWAP ? out.rows : out.columns);
    void* arguments[] = {&a_map, &b_map, &stored, &out, &steps};
    return launch_steady(reinterpret_cast<const void*>(product<T, SWAP>), walk.count, T::BLOCKS, T::THREADS,
                         shared_bytes<T>(BUFFERS<T, SWAP>), arguments, stream);
}

// ---- resumed ----
// The chain goes on from the stored value; to add two finished sums would be another rounding.

// Calls f(element of acc, its neighbour, where both stand in the result, whether they do), over a thread's accumulators.
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

template <class T>
__global__ void __launch_bounds__(T::THREADS, 1)
    resumed(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b, const Result out,
            const int steps, const int resume) {
    extern __shared__ uint8_t memory[];
    uint8_t* loaded = aligned(memory);
    const Barriers barriers = start<T>(loaded, 0);
    const Walk<T> walk(out.rows, out.columns);
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        registers_shrink<40>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
                const Place place = walk.at(tile);
                produce<T>(loaded, barriers, ring, &a, &b, place.m * T::ROWS, place.n * T::COLUMNS, steps);
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

template <class T>
cudaError_t launch_resumed(Operand a, Operand b, Result out, int64_t reduced, bool resume, cudaStream_t stream) {
    using Element = typename T::Element;
    CUtensorMap a_map, b_map;
    RLSPEC_TRY((map_operand<T::A, Element>(&a_map, a.data, a.lines, reduced, a.stride, a_box<T>())));
    RLSPEC_TRY((map_operand<T::B, Element>(&b_map, b.data, b.lines, reduced, b.stride, b_box<T>())));
    int steps = static_cast<int>((reduced - 1) / T::PACE + 1), goes_on = resume;
    void* arguments[] = {&a_map, &b_map, &out, &steps, &goes_on};
    return launch_steady(reinterpret_cast<const void*>(resumed<T>), Walk<T>(out.rows, out.columns).count, 1, T::THREADS,
                         shared_bytes<T>(0), arguments, stream);
}

// ---- folded ----
// As `resumed`, for the gradient of a weight, which is short of time for its accumulators: they wait in shared memory
// while the tile before is multiplied, and the results of that tile leave from the same place.

// Rows of the operands, 16 a block, block after block; -1 is a row of zeros.
struct Table {
    const int32_t* rows;
    int count, existing;
};

// Boxes of 32 rows, of 16 and of 1.
struct Boxes {
    CUtensorMap whole, block, single;
};

// One box for each 64 of M or N, of rows from `row` on.
template <class T, int LINES>
__device__ __forceinline__ void load_rows(uint8_t* to, const CUtensorMap* map, uint64_t* barrier, int line, int row) {
#pragma unroll
    for (int i = 0; i < LINES / 64; ++i) tma_load(to + i * T::ACROSS_64, map, barrier, line + 64 * i, row);
}

// As `produce`, of rows that a table names; by a warp. Rows that lie together come in one box, of 32 or of 16; else each
// comes in its own. Rows of zeros are read from in front of the tensor.
template <class T>
__device__ __forceinline__ void produce_named(uint8_t* memory, Barriers barriers, Ring<T::STAGES>& ring, const Boxes& a,
                                              const Boxes& b, Table table, int m, int n, int steps, int* missing) {
    static_assert(T::PACE == 32, "a lane a row");
    const int lane = threadIdx.x % 32, inside = lane % GROUP;
    auto named = [&](int entry) { return entry < table.count ? table.rows[entry] : -1; };
    int next = named(lane);
    for (int step = 0; step < steps; ++step) {
        const int row = next;
        next = named((step + 1) * T::PACE + lane);
        if (row < -1 || row >= table.existing) *missing = 1;
        barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);
        __syncwarp();
        uint64_t* full = barriers.full + ring.stage;
        uint8_t *to_a = memory + ring.stage * T::STAGE, *to_b = to_a + T::A_SLAB;
        if (lane == 0) barrier_expect(full, T::STAGE);
        auto load = [&](const CUtensorMap* of_a, const CUtensorMap* of_b, int place, int first) {
            if (lane > 0) return;
            load_rows<T, T::ROWS>(to_a + place * 128, of_a, full, m, first);
            load_rows<T, T::COLUMNS>(to_b + place * 128, of_b, full, n, first);
        };
        const int first = __shfl_sync(~0u, row, 0);
        if (__all_sync(~0u, row == first + lane && row >= 0)) {
            load(&a.whole, &b.whole, 0, first);
        } else {
            const int begins = __shfl_sync(~0u, row, lane - inside);
            const uint32_t follows = __ballot_sync(~0u, row == begins + inside && row >= 0);
            const uint32_t zeros = __ballot_sync(~0u, row == -1);
#pragma unroll 1
            for (int place = 0; place < T::PACE; place += GROUP) {
                const int block = __shfl_sync(~0u, row, place);
                if ((follows >> place & 0xffff) == 0xffff) {
                    load(&a.block, &b.block, place, block);
                } else if ((zeros >> place & 0xffff) == 0xffff) {
                    load(&a.block, &b.block, place, -GROUP);
                } else {
#pragma unroll 1
                    for (int i = place; i < place + GROUP; ++i)
                        load(&a.single, &b.single, i, max(-1, __shfl_sync(~0u, row, i)));
                }
            }
        }
        ring.next();
    }
}

// Where the accumulators of a warpgroup wait: boxes of 8 columns, so that what a warp reads lies in different banks.
template <class T>
constexpr int WAITING = 64 * T::HEIGHT * T::COLUMNS * 4;

__device__ __forceinline__ float2 load_two(uint32_t from) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
    return value;
}

__device__ __forceinline__ void store_two(uint32_t to, float x, float y) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}

// Takes accumulators, and gives results at the same place if GIVE. A few at a time, for want of registers.
template <class T, bool GIVE>
__device__ __forceinline__ void exchange(float (&acc)[T::HEIGHT][T::COLUMNS / 2], uint8_t* waiting) {
    static_assert(T::HEIGHT == 1);
    constexpr int FEW = 8;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const uint32_t mine = shared_address(waiting) + (16 * warp + lane / 4) * 32 + lane % 4 * 8;
#pragma unroll
    for (int first = 0; first < T::COLUMNS / 4; first += FEW) {
        float2 taken[FEW];
#pragma unroll
        for (int k = 0; k < FEW; ++k) taken[k] = load_two(mine + (first + k) / 2 * (64 * 32) + k % 2 * (8 * 32));
#pragma unroll
        for (int k = 0; k < FEW; ++k) {
            float &x = acc[0][2 * (first + k)], &y = acc[0][2 * (first + k) + 1];
            if (GIVE) store_two(mine + (first + k) / 2 * (64 * 32) + k % 2 * (8 * 32), x, y);
            x = taken[k].x;
            y = taken[k].y;
        }
    }
    async_fence();
}

// Brings the accumulators of one tile after the other, and takes the results away; a thread a warpgroup. `brought` ends
// when the place is full or, at the very end, free; `taken` when the warpgroup has exchanged what is there.
template <class T>
__device__ __forceinline__ void carry(const CUtensorMap* map, uint8_t* waiting, uint64_t* brought, uint64_t* taken,
                                      const Walk<T>& walk, int warpgroup) {
    uint32_t parity = 0;
    Place before = {-1, 0};
    auto take_away = [&]() {
#pragma unroll 1
        for (int j = 0; j < T::COLUMNS / 8; ++j)
            tma_store(map, waiting + j * (64 * 32), before.n * T::COLUMNS + 8 * j, before.m * T::ROWS + 64 * warpgroup);
        tma_store_commit();
    };
    for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
        const Place place = walk.at(tile);
        barrier_expect(brought, WAITING<T>);
#pragma unroll 1
        for (int j = 0; j < T::COLUMNS / 8; ++j)
            tma_load(waiting + j * (64 * 32), map, brought, place.n * T::COLUMNS + 8 * j, place.m * T::ROWS + 64 * warpgroup);
        barrier_wait(taken, parity);
        parity ^= 1;
        if (before.m >= 0) take_away();
        tma_store_wait_read<0>();
        before = place;
    }
    barrier_arrive(brought);
    barrier_wait(taken, parity);
    take_away();
    tma_store_wait<0>();
}

// Without a table, rows follow one another.
template <class T>
__global__ void __launch_bounds__(T::THREADS, 1)
    folded(const __grid_constant__ Boxes a, const __grid_constant__ Boxes b,
           const __grid_constant__ CUtensorMap accumulators, const Result out, const Table table, const int steps) {
    extern __shared__ uint8_t memory[];
    __shared__ int missing;
    __shared__ uint64_t brought[T::CONSUMERS], taken[T::CONSUMERS];
    uint8_t *loaded = aligned(memory), *waiting = loaded + T::RING;
    if (threadIdx.x == 0) {
        missing = 0;
        for (int i = 0; i < T::CONSUMERS; ++i) {
            barrier_init(brought + i, 1);
            barrier_init(taken + i, 4);
        }
    }
    const Barriers barriers = start<T>(loaded, T::CONSUMERS * WAITING<T>);
    const Walk<T> walk(out.rows, out.columns);
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        registers_shrink<40>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) {
            for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
                const Place place = walk.at(tile);
                const int m = place.m * T::ROWS, n = place.n * T::COLUMNS;
                if (table.rows != nullptr) {
                    produce_named<T>(loaded, barriers, ring, a, b, table, m, n, steps, &missing);
                } else if (threadIdx.x == 0) {
                    produce<T>(loaded, barriers, ring, &a.whole, &b.whole, m, n, steps);
                }
            }
        } else if (threadIdx.x % 32 == 0 && warp <= T::CONSUMERS) {
            const int i = warp - 1;
            carry<T>(&accumulators, waiting + i * WAITING<T>, brought + i, taken + i, walk, i);
        }
    } else {
        registers_grow<232>();
        const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
        uint8_t* mine = waiting + warpgroup * WAITING<T>;
        uint32_t parity = 0;
        float acc[T::HEIGHT][T::COLUMNS / 2];
        auto told = [&]() {
            __syncwarp();
            if (lane == 0) barrier_arrive(taken + warpgroup);
            parity ^= 1;
        };
        barrier_wait(brought + warpgroup, parity);
        exchange<T, false>(acc, mine);
        told();
        for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
            chain<T>(acc, loaded, barriers, ring, warpgroup, steps, true);
            if (missing) {
                // A row that does not exist must show: the host cannot look at a table on the device.
#pragma unroll
                for (int i = 0; i < T::COLUMNS / 2; ++i) acc[0][i] = __int_as_float(0x7fc00000);
            }
            // What is taken after the last tile is nothing.
            barrier_wait(brought + warpgroup, parity);
            exchange<T, true>(acc, mine);
            told();
        }
    }
}

template <class T>
cudaError_t map_boxes(Boxes* boxes, Operand from, int64_t rows) {
    using Element = typename T::Element;
    RLSPEC_TRY((map_operand<MN_MAJOR, Element>(&boxes->whole, from.data, from.lines, rows, from.stride, T::PACE)));
    RLSPEC_TRY((map_operand<MN_MAJOR, Element>(&boxes->block, from.data, from.lines, rows, from.stride, GROUP)));
    return map_operand<MN_MAJOR, Element>(&boxes->single, from.data, from.lines, rows, from.stride, 1);
}

template <class T>
cudaError_t launch_folded(Operand a, Operand b, Result out, Table table, int64_t reduced, cudaStream_t stream) {
    const int64_t rows = table.rows != nullptr ? table.existing : reduced;
    Boxes a_boxes, b_boxes;
    RLSPEC_TRY(map_boxes<T>(&a_boxes, a, rows));
    RLSPEC_TRY(map_boxes<T>(&b_boxes, b, rows));
    CUtensorMap accumulators;
    const float* data = static_cast<const float*>(out.data);
    RLSPEC_TRY(map_matrix(&accumulators, data, out.rows, out.columns, out.columns, 64, 8, CU_TENSOR_MAP_SWIZZLE_NONE));
    int steps = static_cast<int>((reduced - 1) / T::PACE + 1);
    void* arguments[] = {&a_boxes, &b_boxes, &accumulators, &out, &table, &steps};
    return launch_steady(reinterpret_cast<const void*>(folded<T>), Walk<T>(out.rows, out.columns).count, 1,
                         T::THREADS, shared_bytes<T>(T::CONSUMERS * WAITING<T>), arguments, stream);
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
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
        } else {
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
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
    const Place place = grouped(blockIdx.x, (out.rows + 63) / 64, (out.columns + 63) / 64);
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
// TILES in rlspec/device/cuda_gemm.py names them by these numbers and says when which is taken.

using bf16 = __nv_bfloat16;

#define FORWARD(NUMBER, SWAP, ...) \
    case NUMBER:                   \
        return launch_product<Tile<__VA_ARGS__>, SWAP>(x, weight, out, width, stream);

inline cudaError_t forward_bf16(int64_t tile, Operand x, Operand weight, Result out, int64_t width,
                                cudaStream_t stream) {
    switch (tile) {
        //       swap   element rows columns loaded slabs stages
        FORWARD(0, false, bf16, 64, 32, 16, 4, 8)
        FORWARD(1, false, bf16, 64, 48, 16, 4, 6)
        FORWARD(2, false, bf16, 64, 192, 16, 2, 4)
        FORWARD(3, false, bf16, 64, 32, 32, 4, 6)
        FORWARD(4, false, bf16, 64, 48, 32, 4, 5)
        FORWARD(5, false, bf16, 64, 192, 32, 2, 3)
        FORWARD(6, true, bf16, 64, 16, 64, 4, 5)
        FORWARD(7, false, bf16, 64, 32, 64, 2, 8, ACROSS)
        FORWARD(8, false, bf16, 64, 64, 64, 2, 6)
        FORWARD(9, false, bf16, 64, 64, 64, 2, 6, DOWN)
        FORWARD(10, false, bf16, 64, 96, 64, 2, 5, DOWN)
        FORWARD(11, false, bf16, 64, 192, 64, 1, 6, DOWN)
        FORWARD(12, false, bf16, 64, 128, 64, 2, 4, DOWN)
        FORWARD(13, false, bf16, 128, 192, 128, 1, 4)
        FORWARD(14, false, bf16, 128, 192, 128, 1, 4, DOWN)
        FORWARD(15, false, bf16, 128, 128, 128, 1, 6, DOWN)
        FORWARD(16, false, bf16, 128, 256, 128, 1, 4)
        FORWARD(17, false, bf16, 128, 256, 128, 1, 4, DOWN)
        FORWARD(18, false, bf16, 256, 192, 256, 1, 3)
        FORWARD(19, false, bf16, 256, 192, 256, 1, 3, DOWN)
        FORWARD(20, false, bf16, 256, 128, 256, 1, 4)
        FORWARD(21, false, bf16, 64, 192, 64, 1, 6)
        FORWARD(22, false, bf16, 64, 128, 64, 2, 4)
        FORWARD(23, false, bf16, 64, 96, 64, 2, 5)
        FORWARD(24, false, bf16, 128, 96, 128, 1, 7)
        FORWARD(25, false, bf16, 128, 96, 128, 1, 7, DOWN)
        FORWARD(26, false, bf16, 128, 96, 128, 1, 7, ACROSS)
        FORWARD(27, false, bf16, 128, 48, 128, 2, 4, ACROSS)
        FORWARD(28, false, bf16, 64, 96, 64, 2, 5, ACROSS)
        FORWARD(29, false, bf16, 128, 64, 128, 2, 4)
        FORWARD(30, false, bf16, 128, 128, 128, 1, 6)
    }
    return cudaErrorInvalidValue;
}

inline cudaError_t forward_fp16(int64_t tile, Operand x, Operand weight, Result out, int64_t width,
                                cudaStream_t stream) {
    switch (tile) {
        FORWARD(0, false, __half, 64, 32, 16, 4, 8)
        FORWARD(8, false, __half, 64, 64, 64, 2, 6)
        FORWARD(16, false, __half, 128, 256, 128, 1, 4)
    }
    return cudaErrorInvalidValue;
}

inline cudaError_t along_bf16(int64_t tile, Operand x, Operand weight, Result out, int64_t width, cudaStream_t stream) {
    switch (tile) {
        FORWARD(8, false, bf16, 64, 64, 64, 2, 6, ALONE, K_MAJOR, MN_MAJOR)
        FORWARD(12, false, bf16, 64, 128, 64, 2, 4, DOWN, K_MAJOR, MN_MAJOR)
        FORWARD(15, false, bf16, 128, 128, 128, 1, 6, DOWN, K_MAJOR, MN_MAJOR)
        FORWARD(16, false, bf16, 128, 256, 128, 1, 4, ALONE, K_MAJOR, MN_MAJOR)
        FORWARD(17, false, bf16, 128, 256, 128, 1, 4, DOWN, K_MAJOR, MN_MAJOR)
        FORWARD(18, false, bf16, 256, 192, 256, 1, 3, ALONE, K_MAJOR, MN_MAJOR)
        FORWARD(20, false, bf16, 256, 128, 256, 1, 4, ALONE, K_MAJOR, MN_MAJOR)
        FORWARD(22, false, bf16, 64, 128, 64, 2, 4, ALONE, K_MAJOR, MN_MAJOR)
        FORWARD(30, false, bf16, 128, 128, 128, 1, 6, ALONE, K_MAJOR, MN_MAJOR)
    }
    return cudaErrorInvalidValue;
}

inline cudaError_t along_fp16(int64_t tile, Operand x, Operand weight, Result out, int64_t width, cudaStream_t stream) {
    switch (tile) {
        FORWARD(8, false, __half, 64, 64, 64, 2, 6, ALONE, K_MAJOR, MN_MAJOR)
        FORWARD(16, false, __half, 128, 256, 128, 1, 4, ALONE, K_MAJOR, MN_MAJOR)
    }
    return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t resumed_of(Operand a, Operand b, Result out, Table table, int64_t reduced, bool across, bool resume,
                       cudaStream_t stream) {
    using Along = Tile<Element, 128, 256, 128, 1, 4, ALONE, K_MAJOR, MN_MAJOR>;
    using Across = Tile<Element, 128, 256, 128, 1, 4, ALONE, MN_MAJOR, MN_MAJOR>;
    using Folded = Tile<Element, 128, 256, 128, 1, 4, ALONE, MN_MAJOR, MN_MAJOR, 32>;
    if (!across) return launch_resumed<Along>(a, b, out, reduced, resume, stream);
    if (!resume) return launch_resumed<Across>(a, b, out, reduced, false, stream);
    return launch_folded<Folded>(a, b, out, table, reduced, stream);
}

}  // namespace rlspec

// ---- launchers ----

using namespace rlspec;

// out [rows, columns] = x [rows, width] · weightᵀ; weight [columns, width], or [width, columns] if `along`.
extern "C" int det_gemm_product(void const* x, void const* weight, void* out, int64_t type, int64_t out_type,
                                int64_t rows, int64_t columns, int64_t width, int64_t x_stride, int64_t weight_stride,
                                int64_t along, int64_t tile, cudaStream_t stream) {
    const Operand left = {x, rows, x_stride}, right = {weight, columns, weight_stride};
    const Result result = {out, static_cast<Dtype>(out_type), static_cast<int>(rows), static_cast<int>(columns)};
    if (type == BF16)
        return along ? along_bf16(tile, left, right, result, width, stream)
                     : forward_bf16(tile, left, right, result, width, stream);
    if (type == FP16)
        return along ? along_fp16(tile, left, right, result, width, stream)
                     : forward_fp16(tile, left, right, result, width, stream);
    return cudaErrorInvalidValue;
}

// out [rows, columns] (+)= a · b over `reduced` rows of b [reduced, columns]; a [reduced, rows] if `across`, else
// [rows, reduced]. With a table of `reduced` rows, a and b have `existing` rows, and `across` and `resume` must be set.
// columns are even, and multiples of 4 if both `across` and `resume` are set.
extern "C" int det_gemm_resumed(void const* a, void const* b, void* out, void const* table, int64_t type,
                                int64_t out_type, int64_t rows, int64_t columns, int64_t reduced, int64_t existing,
                                int64_t a_stride, int64_t b_stride, int64_t across, int64_t resume,
                                cudaStream_t stream) {
    const Operand left = {a, rows, a_stride}, right = {b, columns, b_stride};
    const Result result = {out, static_cast<Dtype>(out_type), static_cast<int>(rows), static_cast<int>(columns)};
    const Table named = {static_cast<const int32_t*>(table), static_cast<int>(reduced), static_cast<int>(existing)};
    if ((resume && out_type != FP32) || (table != nullptr && !(across && resume))) return cudaErrorInvalidValue;
    if (type == BF16) return resumed_of<__nv_bfloat16>(left, right, result, named, reduced, across, resume, stream);
    if (type == FP16) return resumed_of<__half>(left, right, result, named, reduced, across, resume, stream);
    return cudaErrorInvalidValue;
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
