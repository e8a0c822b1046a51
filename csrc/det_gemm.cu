// Linear layers whose bits do not depend on the batch: the products of kernels/det_gemm.py, by hand for Hopper.
//
//     product    out[m, n] = round( Σ_k x[m, k] · weight[n, k] )        weight [N, K], or [K, N] read as it lies
//     resumed    out[m, n] = round( out[m, n] + Σ_k a · b )             the chain goes on from memory
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
constexpr bool HERE = SWAP || T::COLUMNS % 64 != 0 || T::LINES < T::ROWS;

template <class T, bool SWAP>
constexpr int BUFFERS = HERE<T, SWAP> ? 0 : T::CONSUMERS * 2 * 8192;

// Products of up to 8 rows are launched behind the kernel before them (launch.cuh). Others are not: where they leave
// multiprocessors free, the blocks of a next one would crowd there. `at_rest`: no kernel that may still be at work
// writes the weight, so what fits into the ring of it is loaded before their turn.
template <class T>
constexpr bool BEHIND = T::LINES < T::ROWS;

template <class T, bool SWAP>
__global__ void __launch_bounds__(T::THREADS, 1)
    product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
            const __grid_constant__ CUtensorMap stored, const Result out, const int steps, const int at_rest) {
    extern __shared__ uint8_t memory[];
    uint8_t* loaded = aligned(memory);
    if (BEHIND<T> && threadIdx.x == 0) next_may_start();
    if (threadIdx.x == 0) map_prefetch(&a), map_prefetch(&b);
    const Barriers barriers = start<T>(loaded, BUFFERS<T, SWAP>);
    const Walk<T> walk(SWAP ? out.columns : out.rows, SWAP ? out.rows : out.columns);
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        if constexpr (T::CONSUMERS > 1) registers_shrink<40>();
        if (threadIdx.x == 0) {
            int early = 0;
            if constexpr (BEHIND<T>) {
                static_assert(!SWAP);
                const Place first = walk.at(blockIdx.x);
                const int m = first.m * T::ROWS, n = first.n * T::COLUMNS;
                early = at_rest ? min(steps, T::STAGES) : 0;
                for (int step = 0; step < early; ++step) {
                    barrier_expect(barriers.full + step, T::STAGE);
                    load_stage<T>(loaded + step * T::STAGE, barriers.full + step, nullptr, &b, m, n, step);
                }
                wait_for_previous();
                for (int step = 0; step < early; ++step, ring.next()) {
                    load_stage<T>(loaded + step * T::STAGE, barriers.full + step, &a, nullptr, m, n, step);
                }
            }
            for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
                const Place place = walk.at(tile);
                produce<T>(loaded, barriers, ring, &a, &b, place.m * T::ROWS, place.n * T::COLUMNS, steps,
                           tile == blockIdx.x ? early : 0);
            }
        }
    } else {
        if constexpr (T::CONSUMERS > 1) registers_grow<232>();
        if (BEHIND<T>) wait_for_previous();  // the result may take the place of what an earlier kernel reads
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
cudaError_t launch_product(Operand x, Operand weight, Result out, int64_t width, bool at_rest, cudaStream_t stream) {
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
    const int rests = at_rest;
    int blocks = 0;
    RLSPEC_TRY(steady_blocks(reinterpret_cast<const void*>(product<T, SWAP>), walk.count, shared, &blocks));
    if constexpr (BEHIND<T>) {
        return launch_behind(product<T, SWAP>, blocks, T::THREADS, shared, stream, a_map, b_map, stored, out, steps,
                             rests);
    } else {
        product<T, SWAP><<<blocks, T::THREADS, shared, stream>>>(a_map, b_map, stored, out, steps, rests);
        return cudaGetLastError();
    }
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

// As `produce`, of blocks of 16 rows that lie at `starts`, or, where that is negative, at their place in the copy.
template <class T>
__device__ __forceinline__ void produce_blocks(uint8_t* memory, Barriers barriers, Ring<T::STAGES>& ring,
                                               const Source& a, const Source& b, const int4* starts, int m, int n,
                                               int steps) {
    static_assert(T::PACE == 4 * GROUP && T::SLABS == 1 && T::A == MN_MAJOR && T::B == MN_MAJOR);
    int4 next = starts[0];
    for (int step = 0; step < steps; ++step) {
        const int start[4] = {next.x, next.y, next.z, next.w};
        if (step + 1 < steps) next = starts[step + 1];
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
    uint8_t* loaded = aligned(memory);
    if (threadIdx.x == 0) map_prefetch(&a.whole), map_prefetch(&b.whole);
    const Barriers barriers = start<T>(loaded, 0);
    const Walk<T> walk(out.rows, out.columns);
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        registers_shrink<40>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
                const Place place = walk.at(tile);
                const int m = place.m * T::ROWS, n = place.n * T::COLUMNS;
                if constexpr (T::A == MN_MAJOR) {
                    if (starts != nullptr) {
                        produce_blocks<T>(loaded, barriers, ring, a, b, starts, m, n, steps);
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
// TILES in rlspec/device/cuda_gemm.py has the same numbers, and says which is taken when.

#define TILE(NUMBER, SWAP, ...) \
    case NUMBER:                \
        return launch_product<Tile<Element, __VA_ARGS__>, SWAP>(x, weight, out, width, at_rest, stream);

// Up to 8 rows.
#define LEAN(NUMBER, COLUMNS, SLABS, STAGES) TILE(NUMBER, false, 64, COLUMNS, SLABS, STAGES, K_MAJOR, K_MAJOR, 8)

template <typename Element>
cudaError_t forward(int64_t tile, Operand x, Operand weight, Result out, int64_t width, bool at_rest,
                    cudaStream_t stream) {
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
        //   columns slabs stages
        LEAN(10, 32, 4, 10)
        LEAN(11, 48, 4, 7)
        LEAN(12, 96, 2, 8)
        LEAN(13, 192, 1, 8)
    }
    return cudaErrorInvalidValue;
}

template <typename Element>
cudaError_t along(int64_t tile, Operand x, Operand weight, Result out, int64_t width, bool at_rest,
                  cudaStream_t stream) {
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
    return across ? launch_resumed<Across>(a, b, out, blocks, reduced, resume, stream)
                  : launch_resumed<Along>(a, b, out, blocks, reduced, resume, stream);
}

}  // namespace rlspec

// ---- launchers ----

using namespace rlspec;

// out [rows, columns] = x [rows, width] · weightᵀ; weight [columns, width], or [width, columns] if `across`. `at_rest`:
// the weight was written before a kernel that nothing overtakes, so products of up to 8 rows may read it ahead.
extern "C" int det_gemm_product(void const* x, void const* weight, void* out, int64_t type, int64_t out_type,
                                int64_t rows, int64_t columns, int64_t width, int64_t x_stride, int64_t weight_stride,
                                int64_t across, int64_t tile, int64_t at_rest, cudaStream_t stream) {
    const Operand left = {x, rows, x_stride}, right = {weight, columns, weight_stride};
    const Result result = {out, static_cast<Dtype>(out_type), static_cast<int>(rows), static_cast<int>(columns)};
    if (type == BF16)
        return across ? along<__nv_bfloat16>(tile, left, right, result, width, at_rest, stream)
                      : forward<__nv_bfloat16>(tile, left, right, result, width, at_rest, stream);
    if (type == FP16)
        return across ? along<__half>(tile, left, right, result, width, at_rest, stream)
                      : forward<__half>(tile, left, right, result, width, at_rest, stream);
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
