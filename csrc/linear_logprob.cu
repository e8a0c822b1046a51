// Log-probabilities of target tokens straight from hidden states, for kernels/linear_logprob.py, by hand for Hopper.
//
//     partial   of each row and 256 columns of logits: peak = max logit, sum = Σ exp(logit − peak); the target's logit
//     join      the peaks and sums of a row, from the first columns to the last, into log-prob and log-sum-exp
//     dlogits   g · ([column = target] − exp(logit − lse)), rounded once
//
// Logits are those of det_gemm with fp32 output, and never in memory. The rest of the backward is `det_gemm_resumed`.
//
// Promise. The bits of kernels/linear_logprob.py. Its sums are cut at the same 256 columns, and inside at 128. Of 128
// columns a thread of the matrix unit holds 32 of each row, the pairs at 8·j + 2·(t%4): it adds them ascending, then
// come its neighbours at distance 2 and 1. `join` adds columns t, t + 128, t + 256, ... in thread t, then threads at
// distance 16, 8, 4, 2, 1, then warps at 2, 1. Every operation is spelled out, because a compiler may contract a
// product and a sum.
//
// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
#include "gemm.cuh"

namespace rlspec {

using namespace gemm;

constexpr float LOG2E = 1.4426950408889634f;

template <typename Element>
using Logits = Tile<Element, 128, 256, 1, 4>;

// 2^x by the special function unit.
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// exp(x − base). Subtract first: the largest term is then exactly 1.
__device__ __forceinline__ float exponential(float x, float base) {
    return power_of_2(__fmul_rn(__fsub_rn(x, base), LOG2E));
}

// A tile of nothing but -inf counts for nothing; -inf − -inf would be NaN.
__device__ __forceinline__ float finite(float peak) { return peak == -INFINITY ? 0.0f : peak; }

struct Vocabulary {
    int rows, columns, tiles;
};

struct Partial {
    float *picked, *peaks, *sums;
};

// One of the two rows of a thread's accumulators. WHOLE: all columns of the tile are in the vocabulary.
template <class T, int HALF, bool WHOLE>
__device__ __forceinline__ void reduce_row(const float (&acc)[T::COLUMNS / 2], const int64_t* targets, Partial out,
                                           Vocabulary size, int m, int n) {
    constexpr int MINE = T::COLUMNS / 4;
    const int lane = threadIdx.x % 32, row = m + (threadIdx.x / 32 - 4) * 16 + lane / 4 + 8 * HALF;
    const int column = n + 2 * (lane % 4), left = size.columns - column;
    float peak = -INFINITY;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const float logit = acc[4 * (i / 2) + 2 * HALF + i % 2];
        peak = fmaxf(peak, WHOLE || 8 * (i / 2) + i % 2 < left ? logit : -INFINITY);
    }
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    const float base = finite(peak);
    float sums[2];
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const float term = exponential(acc[4 * (i / 2) + 2 * HALF + i % 2], base);
        const float counted = WHOLE || 8 * (i / 2) + i % 2 < left ? term : 0.0f;
        sums[i / (MINE / 2)] = i % (MINE / 2) == 0 ? counted : __fadd_rn(sums[i / (MINE / 2)], counted);
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
        sums[side] = __fadd_rn(sums[side], __shfl_xor_sync(~0u, sums[side], 2));
        sums[side] = __fadd_rn(sums[side], __shfl_xor_sync(~0u, sums[side], 1));
    }
    if (row >= size.rows) return;
    const int64_t apart = targets[row] - column;
    if (apart >= 0 && apart < T::COLUMNS && apart < left && apart % 8 < 2) {
#pragma unroll
        for (int i = 0; i < MINE; ++i) {
            // + 0: as a sum of zeros and the logit.
            if (8 * (i / 2) + i % 2 == apart)
                out.picked[row] = __fadd_rn(acc[4 * (i / 2) + 2 * HALF + i % 2], 0.0f);
        }
    }
    if (lane % 4 == 0) {
        const int64_t place = static_cast<int64_t>(row) * size.tiles + n / T::COLUMNS;
        out.peaks[place] = peak;
        out.sums[place] = __fadd_rn(sums[0], sums[1]);
    }
}

// The logits of one tile after the other, by the warpgroups that multiply; f(acc, m, n) with the tile's first row and
// column and the row of the thread in it.
template <class T, typename F>
__device__ __forceinline__ void over_tiles(const CUtensorMap* x, const CUtensorMap* weight, int rows, int columns,
                                           int first, int steps, int buffers, F f) {
    extern __shared__ uint8_t memory[];
    uint8_t* loaded = aligned(memory);
    const Barriers barriers = start<T>(loaded, buffers);
    const Walk<T> walk(rows, columns);
    Ring<T::STAGES> ring;
    if (threadIdx.x < 128) {
        registers_shrink<40>();
        if (threadIdx.x == 0) {
            for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
                const Place place = walk.at(tile);
                produce<T>(loaded, barriers, ring, x, weight, place.m * T::ROWS, first + place.n * T::COLUMNS, steps);
            }
        }
    } else {
        registers_grow<232>();
        float acc[T::HEIGHT][T::COLUMNS / 2];
        for (int tile = blockIdx.x; tile < walk.count; tile += gridDim.x) {
            const Place place = walk.at(tile);
            chain<T>(acc, loaded, barriers, ring, threadIdx.x / 128 - 1, steps, false);
            f(acc, place.m * T::ROWS, place.n * T::COLUMNS, loaded + T::RING);
        }
    }
}

template <class T>
__global__ void __launch_bounds__(T::THREADS, 1)
    partial(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight, const int64_t* targets,
            const Partial out, const Vocabulary size, const int steps) {
    over_tiles<T>(&x, &weight, size.rows, size.columns, 0, steps, 0, [&](auto& acc, int m, int n, uint8_t*) {
        if (n + T::COLUMNS <= size.columns) {
            reduce_row<T, 0, true>(acc[0], targets, out, size, m, n);
            reduce_row<T, 1, true>(acc[0], targets, out, size, m, n);
        } else {
            reduce_row<T, 0, false>(acc[0], targets, out, size, m, n);
            reduce_row<T, 1, false>(acc[0], targets, out, size, m, n);
        }
    });
}

// Over the lanes of a warp that differ in the bits below `from`, the highest first.
template <typename F>
__device__ __forceinline__ float butterfly(float value, int from, F f) {
    for (int distance = from; distance > 0; distance /= 2)
        value = f(value, __shfl_xor_sync(~0u, value, distance));
    return value;
}

// A row a block of 128 threads. `width`: the tiles of a row, rounded up to a power of 2.
__global__ void __launch_bounds__(128)
    join(const int64_t* targets, const Partial in, float* logprob, float* lse, const int tiles, const int width,
         const int64_t ignored) {
    __shared__ float shared[2][4];
    const int64_t row = blockIdx.x;
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const int lanes = min(width, 32), warps = max(1, min(width / 32, 4)), each = max(1, width / 128);
    const float *peaks = in.peaks + row * tiles, *sums = in.sums + row * tiles;
    auto larger = [](float x, float y) { return fmaxf(x, y); };
    auto add = [](float x, float y) { return __fadd_rn(x, y); };
    auto peak_at = [&](int i) { return i < tiles ? peaks[i] : -INFINITY; };
    auto sum_at = [&](int i) { return i < tiles ? sums[i] : 0.0f; };

    const int mine = thread % width;
    float top = peak_at(mine);
    for (int i = 1; i < each; ++i) top = fmaxf(top, peak_at(mine + 128 * i));
    top = butterfly(top, lanes / 2, larger);
    if (lane == 0) shared[0][warp] = top;
    __syncthreads();
    top = shared[0][0];
    for (int i = 1; i < warps; ++i) top = fmaxf(top, shared[0][i]);
    const float base = finite(top);

    auto factor = [&](int i) { return exponential(peak_at(i), base); };
    float total;
    int distance = lanes / 2;
    if (each > 1) {
        total = __fmul_rn(factor(mine + 128), sum_at(mine + 128));
        for (int i = 0; i < each; ++i)
            if (i != 1) total = __fmaf_rn(factor(mine + 128 * i), sum_at(mine + 128 * i), total);
    } else {
        // The first step of the tree takes its own product unrounded.
        const float scale = factor(mine), sum = sum_at(mine);
        total = __fmul_rn(scale, sum);
        if (distance > 0) {
            total = __fmaf_rn(scale, sum, __shfl_xor_sync(~0u, total, distance));
            distance /= 2;
        }
    }
    total = butterfly(total, distance, add);
    if (lane == 0) shared[1][warp] = total;
    __syncthreads();
    if (warp > 0) return;
    total = butterfly(lane < warps ? shared[1][lane] : 0.0f, warps / 2, add);
    if (lane > 0) return;
    const float whole = __fadd_rn(base, logf(total));
    // `picked` was NaN before: a target outside the vocabulary stays NaN.
    logprob[row] = targets[row] == ignored ? 0.0f : __fsub_rn(in.picked[row], whole);
    lse[row] = whole;
}

struct Upstream {
    const int64_t* targets;
    const float *lse, *gradient;
    int64_t ignored;
};

// `size.columns` columns of the vocabulary from `first` on.
template <class T>
__global__ void __launch_bounds__(T::THREADS, 1)
    dlogits(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap weight,
            const __grid_constant__ CUtensorMap stored, const Upstream from, const Vocabulary size, const int first,
            const int vocabulary, const int steps) {
    const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128 - 1;
    constexpr int BUFFERS = T::CONSUMERS * 2 * 8192;
    auto give = [&](auto& acc, int m, int n, uint8_t* to) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = m + (threadIdx.x / 32 - 4) * 16 + lane / 4 + 8 * half;
            const int64_t target = row < size.rows ? from.targets[row] : from.ignored;
            const float whole = row < size.rows ? from.lse[row] : 0.0f;
            float g = row < size.rows ? from.gradient[row] : 0.0f;
            // A target that does not exist made the log-probability NaN; its gradient is NaN too.
            if (target < 0 || target >= vocabulary) g = __int_as_float(0x7fc00000);
            const int64_t apart = target - (first + n + 2 * (lane % 4));
#pragma unroll
            for (int i = 0; i < T::COLUMNS / 4; ++i) {
                float& logit = acc[0][4 * (i / 2) + 2 * half + i % 2];
                const float here = 8 * (i / 2) + i % 2 == apart ? 1.0f : 0.0f;
                const float value = __fmul_rn(g, __fsub_rn(here, exponential(logit, whole)));
                // By a select: 0 · NaN is NaN, and ignored rows may hold anything.
                logit = target == from.ignored ? 0.0f : value;
            }
        }
        store_through<T, typename T::Element>(acc, &stored, to, m, n, warpgroup);
    };
    over_tiles<T>(&x, &weight, size.rows, size.columns, first, steps, BUFFERS, give);
    if (threadIdx.x >= 128 && threadIdx.x % 128 == 0) tma_store_wait<0>();
}

struct Matrix {
    const void* data;
    int64_t rows, stride;
};

template <class T>
cudaError_t map_both(CUtensorMap* x_map, CUtensorMap* weight_map, Matrix x, Matrix weight, int64_t width) {
    using Element = typename T::Element;
    RLSPEC_TRY((map_operand<K_MAJOR, Element>(x_map, x.data, x.rows, width, x.stride, a_box<T>())));
    return map_operand<K_MAJOR, Element>(weight_map, weight.data, weight.rows, width, weight.stride, b_box<T>());
}

template <typename Element>
cudaError_t launch_partial(Matrix x, Matrix weight, const int64_t* targets, Partial out, Vocabulary size, int64_t width,
                           cudaStream_t stream) {
    using T = Logits<Element>;
    CUtensorMap x_map, weight_map;
    RLSPEC_TRY(map_both<T>(&x_map, &weight_map, x, weight, width));
    int steps = static_cast<int>((width - 1) / T::PACE + 1);
    void* arguments[] = {&x_map, &weight_map, &targets, &out, &size, &steps};
    return launch_steady(reinterpret_cast<const void*>(partial<T>), Walk<T>(size.rows, size.columns).count,
                         T::THREADS, shared_bytes<T>(0), arguments, stream);
}

template <typename Element>
cudaError_t launch_dlogits(Matrix x, Matrix weight, Element* out, int64_t out_stride, Upstream from, Vocabulary size,
                           int64_t first, int64_t width, cudaStream_t stream) {
    using T = Logits<Element>;
    CUtensorMap x_map, weight_map, stored;
    RLSPEC_TRY(map_both<T>(&x_map, &weight_map, x, weight, width));
    RLSPEC_TRY(map_matrix(&stored, out, size.rows, size.columns, out_stride, 64, 64));
    int steps = static_cast<int>((width - 1) / T::PACE + 1), begin = static_cast<int>(first);
    int vocabulary = static_cast<int>(weight.rows);
    void* arguments[] = {&x_map, &weight_map, &stored, &from, &size, &begin, &vocabulary, &steps};
    return launch_steady(reinterpret_cast<const void*>(dlogits<T>), Walk<T>(size.rows, size.columns).count,
                         T::THREADS, shared_bytes<T>(T::CONSUMERS * 2 * 8192), arguments, stream);
}

}  // namespace rlspec

// ---- launchers ----

using namespace rlspec;

// picked [rows], peaks and sums [rows, tiles], tiles = columns / 256 rounded up. picked is left alone where there is no
// target.
extern "C" int linear_logprob_partial(void const* x, void const* weight, int64_t const* targets, float* picked,
                                      float* peaks, float* sums, int64_t type, int64_t rows, int64_t columns,
                                      int64_t width, int64_t x_stride, int64_t weight_stride, cudaStream_t stream) {
    const Matrix left = {x, rows, x_stride}, right = {weight, columns, weight_stride};
    const int tiles = static_cast<int>((columns + 255) / 256);
    const Vocabulary size = {static_cast<int>(rows), static_cast<int>(columns), tiles};
    const Partial out = {picked, peaks, sums};
    if (type == BF16) return launch_partial<__nv_bfloat16>(left, right, targets, out, size, width, stream);
    if (type == FP16) return launch_partial<__half>(left, right, targets, out, size, width, stream);
    return cudaErrorInvalidValue;
}

extern "C" int linear_logprob_join(int64_t const* targets, float* picked, float* peaks, float* sums, float* logprob,
                                   float* lse, int64_t rows, int64_t tiles, int64_t ignored, cudaStream_t stream) {
    int width = 1;
    while (width < tiles) width *= 2;
    rlspec::join<<<static_cast<unsigned>(rows), 128, 0, stream>>>(targets, {picked, peaks, sums}, logprob, lse,
                                                           static_cast<int>(tiles), width, ignored);
    return cudaGetLastError();
}

// out [rows, columns]: of the columns from `first` on of a weight of `vocabulary` rows.
extern "C" int linear_logprob_dlogits(void const* x, void const* weight, int64_t const* targets, float const* lse,
                                      float const* gradient, void* out, int64_t type, int64_t rows, int64_t columns,
                                      int64_t first, int64_t width, int64_t vocabulary, int64_t x_stride,
                                      int64_t weight_stride, int64_t out_stride, int64_t ignored, cudaStream_t stream) {
    const Matrix left = {x, rows, x_stride}, right = {weight, vocabulary, weight_stride};
    const Vocabulary size = {static_cast<int>(rows), static_cast<int>(columns), 0};
    const Upstream from = {targets, lse, gradient, ignored};
    auto launch = [&](auto* data) {
        return launch_dlogits(left, right, data, out_stride, from, size, first, width, stream);
    };
    if (type == BF16) return launch(static_cast<__nv_bfloat16*>(out));
    if (type == FP16) return launch(static_cast<__half*>(out));
    return cudaErrorInvalidValue;
}
