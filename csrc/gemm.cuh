// The chain of products that det_gemm.cu and linear_logprob.cu share: D[m, n] += Σ_k a[m, k] · b[n, k], k ascending in
// groups of 16, one fp32 accumulator an element. One warpgroup loads (one thread of it asks TMA), one or two multiply.
#pragma once

#include "hopper.cuh"

namespace rlspec::gemm {

using namespace hopper;

constexpr int GROUP = 16;        // of the reduced index: one step of the matrix unit
constexpr int SLAB = 64;         // of the reduced index: 128 bytes where it runs along them
constexpr int BOX = SLAB * 128;  // bytes of a slab for 64 of M or N

// ROWS × COLUMNS of D a block; a ring of STAGES, each SLABS slabs of 64 of the reduced index. Of a, LINES rows are
// loaded: all, or 8, which the matrix unit then reads as each 8 of its 64 rows, as there are no more.
template <typename Element_, int ROWS_, int COLUMNS_, int SLABS_, int STAGES_, Major A_ = K_MAJOR, Major B_ = K_MAJOR,
          int LINES_ = ROWS_>
struct Tile {
    using Element = Element_;
    static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, SLABS = SLABS_, STAGES = STAGES_, LINES = LINES_;
    static constexpr Major A = A_, B = B_;
    static constexpr int PACE = SLABS * SLAB;               // of the reduced index a stage
    static constexpr int CONSUMERS = ROWS == 64 ? 1 : 2;    // warpgroups that multiply
    static constexpr int HEIGHT = ROWS / (64 * CONSUMERS);  // products of 64 rows each of them makes
    static constexpr int THREADS = 128 * (1 + CONSUMERS);
    static constexpr int A_SLAB = LINES * SLAB * 2, B_SLAB = COLUMNS * SLAB * 2;  // bytes
    static constexpr int STAGE = SLABS * (A_SLAB + B_SLAB), RING = STAGES * STAGE;
    static_assert(ROWS == 64 * CONSUMERS * HEIGHT && COLUMNS % 8 == 0);
    static_assert(LINES == ROWS || (LINES == 8 && ROWS == 64 && A == K_MAJOR));
};

constexpr uint64_t OF_8_ROWS = uint64_t(1024 / 16) << 32;  // of a K-major descriptor: from 8 rows to the next 8

struct Barriers {
    uint64_t *full, *empty;
};

// Where the next stage of the ring is; its parity turns at each round.
template <int STAGES>
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// Shared memory: the ring (from a multiple of 1024 bytes on), `more` bytes for the caller, the barriers.
template <class T>
constexpr int shared_bytes(int more) {
    return 1024 + T::RING + more + 2 * T::STAGES * 8;
}

__device__ __forceinline__ uint8_t* aligned(uint8_t* memory) {
    return memory + ((1024 - (shared_address(memory) & 1023)) & 1023);
}

template <class T>
__device__ __forceinline__ Barriers start(uint8_t* ring, int more) {
    const Barriers barriers = {reinterpret_cast<uint64_t*>(ring + T::RING + more),
                               reinterpret_cast<uint64_t*>(ring + T::RING + more) + T::STAGES};
    if (threadIdx.x == 0) {
        for (int i = 0; i < T::STAGES; ++i) {
            barrier_init(barriers.full + i, 1);
            barrier_init(barriers.empty + i, 4 * T::CONSUMERS);  // a warp each
        }
        barrier_init_fence();
    }
    __syncthreads();
    return barriers;
}

struct Place {
    int m, n;  // of the tile of D, in tiles
};

// `tall` tiles down before one to the right: blocks that run together share rows of a and b in the cache.
__device__ __forceinline__ Place grouped(int tile, int tiles_m, int tiles_n, int tall) {
    const int of_group = tall * tiles_n, first = tile / of_group * tall, height = min(tiles_m - first, tall);
    return {first + tile % of_group % height, tile % of_group / height};
}

// Weight gradients: TALL so that the 132 multiprocessors of a Hopper GPU are at work on 12 by 11 tiles. With TURNS groups
// of 16 go from left to right and from right to left in turn, so that what was read last is read first again, and the
// blocks that `even_blocks` gives, 128 for the layers of an 8B model, are at work on 16 by 8.
template <class T, bool TURNS = false>
struct Walk {
    static constexpr int TALL = TURNS ? 16 : T::A == MN_MAJOR ? 12 : 8;
    int tiles_m, tiles_n, count;
    __host__ __device__ Walk(int rows, int columns)
        : tiles_m((rows - 1) / T::ROWS + 1), tiles_n((columns - 1) / T::COLUMNS + 1), count(tiles_m * tiles_n) {}
    __device__ __forceinline__ Place at(int tile) const {
        const Place place = grouped(tile, tiles_m, tiles_n, TALL);
        const bool back = TURNS && place.m / TALL % 2;
        return {place.m, back ? tiles_n - 1 - place.n : place.n};
    }
};

// Rows of a box of TMA.
template <class T>
constexpr int a_box() {
    return T::A == K_MAJOR ? T::LINES : SLAB;
}
template <class T>
constexpr int b_box() {
    return T::B == K_MAJOR ? T::COLUMNS : SLAB;
}

// One operand of one slab: LINES of M or N from `line` on, of the reduced index from `k` on.
template <Major MAJOR, int LINES>
__device__ __forceinline__ void load_slab(uint8_t* to, const CUtensorMap* map, uint64_t* barrier, int line, int k) {
    if constexpr (MAJOR == K_MAJOR) {
        tma_load(to, map, barrier, k, line);
    } else {
#pragma unroll
        for (int i = 0; i < LINES / 64; ++i) tma_load(to + i * BOX, map, barrier, line + 64 * i, k);
    }
}

// What a stage holds of one step; null is the operand that is not loaded now.
template <class T>
__device__ __forceinline__ void load_stage(uint8_t* to, uint64_t* full, const CUtensorMap* a, const CUtensorMap* b,
                                           int m, int n, int step) {
#pragma unroll
    for (int i = 0; i < T::SLABS; ++i) {
        const int k = step * T::PACE + i * SLAB;
        uint8_t *to_a = to + i * T::A_SLAB, *to_b = to + T::SLABS * T::A_SLAB + i * T::B_SLAB;
        if (a != nullptr) load_slab<T::A, T::ROWS>(to_a, a, full, m, k);
        if (b != nullptr) load_slab<T::B, T::COLUMNS>(to_b, b, full, n, k);
    }
}

// The loads of one tile from step `first` on, by one thread.
template <class T>
__device__ __forceinline__ void produce(uint8_t* memory, Barriers barriers, Ring<T::STAGES>& ring, const CUtensorMap* a,
                                        const CUtensorMap* b, int m, int n, int steps, int first = 0) {
    for (int step = first; step < steps; ++step) {
        barrier_wait(barriers.empty + ring.stage, ring.parity ^ 1);
        uint64_t* full = barriers.full + ring.stage;
        barrier_expect(full, T::STAGE);
        load_stage<T>(memory + ring.stage * T::STAGE, full, a, b, m, n, step);
        ring.next();
    }
}

// One lane of each warp tells that its warp has read a stage.
__device__ __forceinline__ void release(Barriers barriers, int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.empty + stage);
}

// The promise in one place: inside a stage the matrix unit ascends by 16, all into one accumulator.
template <class T>
__device__ __forceinline__ void multiply_stage(float (&acc)[T::HEIGHT][T::COLUMNS / 2], const uint8_t* from,
                                               int warpgroup, bool more) {
    using Unit = Wgmma<typename T::Element, T::COLUMNS, T::A, T::B>;
    constexpr uint64_t a_step = T::A == K_MAJOR ? K_STEP : MN_STEP, b_step = T::B == K_MAJOR ? K_STEP : MN_STEP;
    const uint8_t *from_a = from + warpgroup * T::HEIGHT * BOX, *from_b = from + T::SLABS * T::A_SLAB;
    constexpr uint64_t again = T::LINES == 8 ? OF_8_ROWS : 0;  // the next 8 rows are the same ones
    const uint64_t a = (T::A == K_MAJOR ? k_major(from_a) : mn_major(from_a, BOX)) - again;
    const uint64_t b = T::B == K_MAJOR ? k_major(from_b) : mn_major(from_b, BOX);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < T::SLABS; ++i) {
#pragma unroll
        for (int k = 0; k < SLAB / GROUP; ++k) {
#pragma unroll
            for (int h = 0; h < T::HEIGHT; ++h) {
                Unit::both(acc[h], a + i * (T::A_SLAB / 16) + h * (BOX / 16) + k * a_step,
                           b + i * (T::B_SLAB / 16) + k * b_step, more || i + k > 0);
            }
        }
    }
    wgmma_commit();
}

// Stages ascend, at least one. acc is continued if `resume`, else overwritten. `warpgroup`: of those that multiply, 0
// or 1. The first stage stands alone, so that no other instruction writes acc while products are in flight.
template <class T>
__device__ __forceinline__ void chain(float (&acc)[T::HEIGHT][T::COLUMNS / 2], uint8_t* memory, Barriers barriers,
                                      Ring<T::STAGES>& ring, int warpgroup, int steps, bool resume) {
#pragma unroll
    for (int h = 0; h < T::HEIGHT; ++h) registers_fence(acc[h]);
    barrier_wait(barriers.full + ring.stage, ring.parity);
    multiply_stage<T>(acc, memory + ring.stage * T::STAGE, warpgroup, resume);
    int before = ring.stage;
    ring.next();
    for (int step = 1; step < steps; ++step) {
        barrier_wait(barriers.full + ring.stage, ring.parity);
        multiply_stage<T>(acc, memory + ring.stage * T::STAGE, warpgroup, true);
        wgmma_wait<1>();
        release(barriers, before);
        before = ring.stage;
        ring.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < T::HEIGHT; ++h) registers_fence(acc[h]);
    release(barriers, before);
}

// ---- results ----

template <typename Out>
__device__ __forceinline__ Out rounded(float value);
template <>
__device__ __forceinline__ float rounded<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __nv_bfloat16 rounded<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ __half rounded<__half>(float value) {
    return __float2half_rn(value);
}

__device__ __forceinline__ void store_matrices(uint32_t to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// 64 rows × 128 bytes of the accumulators from column `first` on, swizzled as the store of TMA expects.
template <typename Out, int N>
__device__ __forceinline__ void lay(const float (&acc)[N], int first, uint8_t* to) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if constexpr (sizeof(Out) == 2) {
        const int row = 16 * warp + lane % 16;
        const uint32_t base = shared_address(to) + row * 128;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const float* d = acc + first / 2 + 8 * q;
            store_matrices(base + ((2 * q + lane / 16) ^ (row % 8)) * 16, pack(d[0], d[1], Out()),
                           pack(d[2], d[3], Out()), pack(d[4], d[5], Out()), pack(d[6], d[7], Out()));
        }
    } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * warp + lane / 4 + 8 * half;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int unit = (2 * j + lane % 4 / 2) ^ (row % 8);
                const float* d = acc + first / 2 + 4 * j + 2 * half;
                *reinterpret_cast<float2*>(to + row * 128 + unit * 16 + lane % 2 * 8) = make_float2(d[0], d[1]);
            }
        }
    }
}

// Through shared memory, 64 rows × 128 bytes at a time, in two buffers a warpgroup.
template <class T, typename Out>
__device__ __forceinline__ void store_through(const float (&acc)[T::HEIGHT][T::COLUMNS / 2], const CUtensorMap* map,
                                              uint8_t* buffers, int m, int n, int warpgroup) {
    constexpr int WIDE = 128 / sizeof(Out);
    uint8_t* mine = buffers + warpgroup * 2 * 8192;
    const bool leads = threadIdx.x % 128 == 0;
#pragma unroll
    for (int h = 0; h < T::HEIGHT; ++h) {
#pragma unroll
        for (int first = 0; first < T::COLUMNS; first += WIDE) {
            const int part = h * (T::COLUMNS / WIDE) + first / WIDE;
            uint8_t* buffer = mine + part % 2 * 8192;
            if (leads && part == 0) tma_store_wait_read<0>();
            if (leads && part > 0) tma_store_wait_read<1>();
            group_sync(1 + warpgroup, 128);
            lay<Out>(acc[h], first, buffer);
            async_fence();
            group_sync(1 + warpgroup, 128);
            if (leads) {
                tma_store(map, buffer, n + first, m + (warpgroup * T::HEIGHT + h) * 64);
                tma_store_commit();
            }
        }
    }
}

// ---- host ----

// One operand [lines, reduced] (K-major) or [reduced, lines], `stride` elements from row to row.
template <Major MAJOR, typename Element>
cudaError_t map_operand(CUtensorMap* map, const void* base, int64_t lines, int64_t reduced, int64_t stride, int box) {
    const Element* typed = static_cast<const Element*>(base);
    return MAJOR == K_MAJOR ? map_matrix(map, typed, lines, reduced, stride, box, 64)
                            : map_matrix(map, typed, reduced, lines, stride, box, 64);
}

// Blocks that stay and walk over tiles: at most as many as the device has multiprocessors.
inline cudaError_t steady_blocks(const void* kernel, int tiles, int shared, int* blocks) {
    int device = 0, processors = 0;
    RLSPEC_TRY(cudaGetDevice(&device));
    RLSPEC_TRY(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    RLSPEC_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    *blocks = tiles < processors ? tiles : processors;
    return cudaSuccess;
}

// No more than are needed for the same number of rounds: blocks then keep step, and share what the cache holds. At worst,
// for one tile more than there are multiprocessors, half of these stand idle in both rounds instead of nearly all in one.
inline cudaError_t even_blocks(const void* kernel, int tiles, int shared, int* blocks) {
    RLSPEC_TRY(steady_blocks(kernel, tiles, shared, blocks));
    const int rounds = (tiles - 1) / *blocks + 1;
    *blocks = (tiles - 1) / rounds + 1;
    return cudaSuccess;
}

inline cudaError_t launch_steady(const void* kernel, int tiles, int threads, int shared, void** arguments,
                                 cudaStream_t stream) {
    int blocks = 0;
    RLSPEC_TRY(steady_blocks(kernel, tiles, shared, &blocks));
    RLSPEC_TRY(cudaLaunchKernel(kernel, dim3(blocks), dim3(threads), arguments, static_cast<size_t>(shared), stream));
    return cudaGetLastError();
}

}  // namespace rlspec::gemm
