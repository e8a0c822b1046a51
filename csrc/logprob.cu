// Log-probability of one target a row, with one reading of the logits:
//
//     logprob = x[t] - lse        lse = log Σ_j exp(x[j])        d x[j] = dy · ([j = t] - exp(x[j] - lse))
//
//     logprob_stream   one block of threads a row takes tiles of 256 lanes x 8 columns from left to right; each lane
//                      keeps a running maximum and the sum relative to it (online softmax)
//     logprob_spans    cuts the row at multiples of 32768 columns into spans that run side by side, each as above, so
//                      that few rows fill the chip too; `logprob_join` joins them
//
// A thread is a lane. The 8 columns of a lane, the 256 lanes and the spans are added along a tree of neighbours. The
// maximum is exact in any order. Differences are taken before the scaling by log2(e), so the factor of a sum whose
// maximum did not move is exp2(0) = 1 exactly. A maximum of -inf counts as 0, so columns that are all -inf add nothing.
//
// Promise: a row's bits depend on that row, its target and V alone, and equal those of the Triton kernels. fp32, every
// operation rounded by itself. The gradient is formed from the saved maximum and log of the sum, in the logits' dtype.
// Limits: bf16, fp16, fp32. A row of NaN, of only -inf, or with +inf gives NaN, as does a target outside [0, V). Rows
// with the ignored target are not read: 0, and zero gradient.
// Source of the online sum: Milakov and Gimelshein 2018, arXiv:1805.02867.

#include "common.cuh"

namespace rlspec {

constexpr int LANES = 256, COLUMNS = 8, TILE = LANES * COLUMNS;
constexpr int SPAN = 32768;
template <typename T>
constexpr int AHEAD = 8 / sizeof(T);  // tiles whose loads are in flight
constexpr int GRAD_THREADS = 128, PACKS = 8;  // of the gradient; a thread's PACKS loads are in flight together
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

// The maximum to subtract: 0 instead of -inf, since -inf - (-inf) is NaN.
__device__ __forceinline__ float finite(float top) { return top == -infinity() ? 0.0f : top; }

__device__ __forceinline__ float power(float below) { return exponential2(__fmul_rn(below, LOG2E)); }

// A maximum, and the sum of exp(x - maximum).
struct State {
    float top, total;
};

// Add 8 columns: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)).
__device__ __forceinline__ void take(State& state, float const (&x)[COLUMNS]) {
    float high = x[0];
#pragma unroll
    for (int n = 1; n < COLUMNS; ++n) high = fmaxf(high, x[n]);
    high = fmaxf(state.top, high);
    float const base = finite(high), keep = power(__fsub_rn(state.top, base));
    float w[COLUMNS];
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) w[n] = power(__fsub_rn(x[n], base));
#pragma unroll
    for (int step = 1; step < COLUMNS; step *= 2) {
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 2 * step) w[n] = __fadd_rn(w[n], w[n + step]);
    }
    state = {high, __fadd_rn(__fmul_rn(state.total, keep), w[0])};
}

// The log of __nv_logf, which is Triton's, for a total that is not subnormal.
__device__ __forceinline__ float fma_flushed(float a, float b, float c) {
    float y;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
}

__device__ __forceinline__ float logarithm(float x) {
    bool const tiny = x < 1.17549435e-38f;
    x = tiny ? __fmul_rn(x, 8388608.0f) : x;
    int const bits = __float_as_int(x), exponent = (bits - 0x3f2aaaab) & int(0xff800000);
    float const e = fma_flushed(__int2float_rn(exponent), 1.1920929e-7f, tiny ? -23.0f : 0.0f);
    float const m = __fadd_rn(__int_as_float(bits - exponent), -1.0f);
    float p = fma_flushed(__int_as_float(0xbe055027), m, __int_as_float(0x3e1039f6));
    p = fma_flushed(p, m, __int_as_float(0xbdf8cdcc));
    p = fma_flushed(p, m, __int_as_float(0x3e0f2955));
    p = fma_flushed(p, m, __int_as_float(0xbe2ad8b9));
    p = fma_flushed(p, m, __int_as_float(0x3e4ced0b));
    p = fma_flushed(p, m, __int_as_float(0xbe7fff22));
    p = fma_flushed(p, m, __int_as_float(0x3eaaaa78));
    p = fma_flushed(p, m, __int_as_float(0xbf000000));
    float y = fma_flushed(__fmul_rn(m, p), m, m);
    y = fma_flushed(e, __int_as_float(0x3f317218), y);
    if (unsigned(bits) >= 0x7f800000u) y = fma_flushed(x, infinity(), infinity());
    return x == 0.0f ? -infinity() : y;
}

// The 8 columns of a lane, kept as they are in memory until they are needed.
template <typename T>
struct Chunk {
    static constexpr int N = 16 / sizeof(T);
    Pack<T, N> pack[COLUMNS / N];

    __device__ __forceinline__ void read(T const* from) {
#pragma unroll
        for (int i = 0; i < COLUMNS / N; ++i) pack[i] = load<N>(from + i * N);
    }

    __device__ __forceinline__ void widened(float (&x)[COLUMNS]) const {
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) x[n] = pack[n / N].get(n % N);
    }
};

// Maximum and sum of the columns from `first` to `last`, for every thread of the block. PACKED: rows start at multiples
// of 16 bytes. The last tile, if it is not whole, is filled up with -inf.
template <typename T, bool PACKED>
__device__ __forceinline__ State read(T const* x, int64_t first, int64_t last) {
    __shared__ float tops[LANES / 32], totals[LANES / 32];
    T const* const own = x + first + threadIdx.x * COLUMNS;
    int const whole = int((last - first) / TILE), left = int((last - first) % TILE);
    State state{-infinity(), 0.0f};
    float value[COLUMNS];
    int tile = 0;
    if constexpr (PACKED) {
        constexpr int flight = AHEAD<T>;
        Chunk<T> ahead[flight];
#pragma unroll
        for (int i = 0; i < flight; ++i) {
            if (i < whole) ahead[i].read(own + int64_t(i) * TILE);
        }
        T const* next = own + flight * TILE;
        for (; tile + 2 * flight <= whole; tile += flight, next += flight * TILE) {
#pragma unroll
            for (int i = 0; i < flight; ++i) {
                ahead[i].widened(value);
                ahead[i].read(next + i * TILE);
                take(state, value);
            }
        }
        for (; tile < whole; tile += flight) {
#pragma unroll
            for (int i = 0; i < flight; ++i) {
                if (tile + i >= whole) break;
                ahead[i].widened(value);
                if (tile + i + flight < whole) ahead[i].read(own + int64_t(tile + i + flight) * TILE);
                take(state, value);
            }
        }
    } else {
        for (; tile < whole; ++tile) {
#pragma unroll
            for (int n = 0; n < COLUMNS; ++n) value[n] = widen(own[int64_t(tile) * TILE + n]);
            take(state, value);
        }
    }
    if (left > 0) {
        int const reach = left - int(threadIdx.x) * COLUMNS;
#pragma unroll
        for (int n = 0; n < COLUMNS; ++n) value[n] = n < reach ? widen(own[int64_t(whole) * TILE + n]) : -infinity();
        take(state, value);
    }
    // All factors from the exact maximum of all lanes, then the tree over neighbours.
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float high = state.top;
#pragma unroll
    for (int far = 16; far > 0; far /= 2) high = fmaxf(high, __shfl_xor_sync(~0u, high, far));
    if (lane == 0) tops[warp] = high;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < LANES / 32; ++i) high = fmaxf(high, tops[i]);
    float total = __fmul_rn(state.total, power(__fsub_rn(state.top, finite(high))));
#pragma unroll
    for (int near = 1; near < 32; near *= 2) total = __fadd_rn(total, __shfl_xor_sync(~0u, total, near));
    if (lane == 0) totals[warp] = total;
    __syncthreads();
    float sum[LANES / 32];
#pragma unroll
    for (int i = 0; i < LANES / 32; ++i) sum[i] = totals[i];
#pragma unroll
    for (int step = 1; step < LANES / 32; step *= 2) {
#pragma unroll
        for (int i = 0; i < LANES / 32; i += 2 * step) sum[i] = __fadd_rn(sum[i], sum[i + step]);
    }
    return {high, sum[0]};
}

// (x[t] - top) - log(total) keeps more digits than x[t] - lse, for a large maximum above all.
template <typename T>
__device__ __forceinline__ void finish(T const* x, int64_t target, int64_t row, int64_t width, State const& state,
                                       float* found, float* tops, float* scales) {
    float const nan = __int_as_float(0x7fc00000);
    bool const known = target >= 0 && target < width;
    float const logit = known ? widen(x[target]) : nan, scale = logarithm(state.total);
    found[row] = __fsub_rn(__fsub_rn(logit, state.top), scale);
    tops[row] = state.top;
    scales[row] = known ? scale : nan;
}

template <typename T, bool PACKED>
__global__ void __launch_bounds__(LANES, 4) stream_rows(T const* x, int64_t const* targets, float* found, float* tops,
                                                     float* scales, int64_t x_row, int64_t width, int64_t ignored) {
    in_turn();
    int64_t const row = blockIdx.x, target = targets[row];
    if (target == ignored) {
        if (threadIdx.x == 0) found[row] = 0.0f;
        return;
    }
    State const state = read<T, PACKED>(x + row * x_row, 0, width);
    if (threadIdx.x == 0) finish(x + row * x_row, target, row, width, state, found, tops, scales);
}

template <typename T, bool PACKED>
__global__ void __launch_bounds__(LANES, 4) read_spans(T const* x, int64_t const* targets, float* highs, float* totals,
                                                    int64_t x_row, int64_t width, unsigned spans, int64_t ignored) {
    in_turn();
    int64_t const row = blockIdx.x / spans, first = int64_t(blockIdx.x % spans) * SPAN;
    if (targets[row] == ignored) return;
    State const state = read<T, PACKED>(x + row * x_row, first, first + SPAN < width ? first + SPAN : width);
    if (threadIdx.x == 0) {
        highs[blockIdx.x] = state.top;
        totals[blockIdx.x] = state.total;
    }
}

// The spans of one row, by one thread: neighbours, then neighbouring pairs, and so on, in `places`, a power of two that
// is filled up with empty spans, whose maximum is -inf and whose sum is 0.
template <typename T>
__global__ void __launch_bounds__(128) join_spans(T const* x, int64_t const* targets, float const* highs, float* totals,
                                                  float* found, float* tops, float* scales, int64_t rows,
                                                  int64_t x_row, int64_t width, int spans, int64_t ignored) {
    in_turn();
    int64_t const row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int64_t const target = targets[row];
    if (target == ignored) {
        found[row] = 0.0f;
        return;
    }
    float const* const own = highs + row * spans;
    float high = own[0];
    for (int i = 1; i < spans; ++i) high = fmaxf(high, own[i]);
    float const base = finite(high);
    float* const sum = totals + row * spans;
    for (int i = 0; i < spans; ++i) sum[i] = __fmul_rn(sum[i], power(__fsub_rn(own[i], base)));
    for (int step = 1; step < spans; step *= 2) {
        // An empty span adds 0, or -inf - base, of which exp2 is 0: the sum, which is not -0, stays as it is.
        for (int i = 0; i + step < spans; i += 2 * step) sum[i] = __fadd_rn(sum[i], sum[i + step]);
    }
    finish(x + row * x_row, target, row, width, {high, sum[0]}, found, tops, scales);
}

template <typename T, int N>
__global__ void __launch_bounds__(GRAD_THREADS) gradient(T const* x, int64_t const* targets, float const* tops,
                                                float const* scales, float const* dy, T* dx, int64_t x_row,
                                                int64_t width, unsigned stretches, int64_t ignored) {
    int64_t const row = blockIdx.x / stretches;
    int64_t const step = int64_t(blockDim.x) * N;
    int64_t const first = int64_t(blockIdx.x % stretches) * step * PACKS + threadIdx.x * N;
    int64_t const target = targets[row];
    float const top = tops[row], scale = scales[row], upstream = dy[row];
    int const reach = int(width - first < PACKS * step ? width - first : PACKS * step);
    T const* const from = x + row * x_row + first;
    T* const to = dx + row * width + first;
    Pack<T, N> value[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        if (p * int(step) < reach) value[p] = load<N>(from + p * int(step));
    }
    // Else the compiler would read these three after it has waited for the target.
    asm volatile("" ::"f"(top), "f"(scale), "f"(upstream));
    // Where the target is, counted from `first`: beyond it for most threads.
    int const hit_at = target >= first && target < first + reach ? int(target - first) : -1;
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        if (p * int(step) >= reach) continue;
        float slope[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float const chance = power(__fsub_rn(__fsub_rn(value[p].get(n), top), scale));
            float const hit = p * int(step) + n == hit_at ? 1.0f : 0.0f;
            slope[n] = __fmul_rn(upstream, __fsub_rn(hit, chance));
        }
        Pack<T, N> out;
        out.set(slope);
        if (target == ignored) out.zero();
        store<N>(to + p * int(step), out);
    }
}

template <typename T>
bool packed(T const* x, int64_t x_row) {
    return aligned(x) && x_row % (16 / sizeof(T)) == 0;
}

}  // namespace rlspec

using namespace rlspec;

extern "C" {

// logits x [rows, width], targets int64 [rows] -> found, tops, scales fp32 [rows]: the log-prob, the maximum, the log
// of the sum. The last two are not written for ignored rows.
int logprob_stream(void const* x, int64_t const* targets, float* found, float* tops, float* scales, int64_t dtype,
                   int64_t rows, int64_t width, int64_t x_row, int64_t ignored, cudaStream_t stream) {
    if (rows > INT32_MAX || width > INT32_MAX) return cudaErrorInvalidValue;
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        auto const kernel = packed((T const*)x, x_row) ? stream_rows<T, true> : stream_rows<T, false>;
        return int(launch_behind(kernel, rows, LANES, 0, stream, (T const*)x, targets, found, tops, scales, x_row,
                                 width, ignored));
    });
}

// As logprob_stream; highs and totals fp32 [rows · ceil(width / 32768)] are for the spans.
int logprob_spans(void const* x, int64_t const* targets, float* highs, float* totals, float* found, float* tops,
                  float* scales, int64_t dtype, int64_t rows, int64_t width, int64_t x_row, int64_t ignored,
                  cudaStream_t stream) {
    int64_t const spans = ceil_div(width, SPAN);
    if (rows * spans > INT32_MAX || width > INT32_MAX) return cudaErrorInvalidValue;
    return with_dtype(dtype, [&](auto zero) -> int {
        using T = decltype(zero);
        auto const kernel = packed((T const*)x, x_row) ? read_spans<T, true> : read_spans<T, false>;
        RLSPEC_TRY(launch_behind(kernel, rows * spans, LANES, 0, stream, (T const*)x, targets, highs, totals, x_row,
                                 width, unsigned(spans), ignored));
        return int(launch_behind(join_spans<T>, ceil_div(rows, 128), 128, 0, stream, (T const*)x, targets, highs,
                                 totals, found, tops, scales, rows, x_row, width, int(spans), ignored));
    });
}

// dx contiguous, in the dtype of x; dy fp32 [rows].
int logprob_backward(void const* x, int64_t const* targets, float const* tops, float const* scales, float const* dy,
                     void* dx, int64_t dtype, int64_t rows, int64_t width, int64_t x_row, int64_t ignored,
                     cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = 16 / sizeof(T);
        bool const whole = packed((T const*)x, x_row) && aligned(dx) && width % N == 0;
        int64_t const packs = ceil_div(width, (whole ? N : 1) * PACKS);
        int64_t const threads = packs < GRAD_THREADS ? ceil_div(packs, 32) * 32 : GRAD_THREADS;
        int64_t const stretches = ceil_div(packs, threads);
        if (rows * stretches > INT32_MAX) return int(cudaErrorInvalidValue);
        auto const kernel = whole ? gradient<T, N> : gradient<T, 1>;
        kernel<<<unsigned(rows * stretches), unsigned(threads), 0, stream>>>(
            (T const*)x, targets, tops, scales, dy, (T*)dx, x_row, width, unsigned(stretches), ignored);
        return int(cudaGetLastError());
    });
}

}  // extern "C"
