// swiglu(gate, up) = silu(gate) · up, silu(x) = x / (1 + exp(-x)), and their gradients. With s = 1 / (1 + exp(-x)):
//
//     silu:    dx = dy · (s · (1 + x · (1 - s)))
//     swiglu:  d gate = dy · up · (s · (1 + gate · (1 - s)))        d up = dy · (gate · s)
//
// Promise: an element's bits depend on the elements that it is made of, and equal those of the Triton kernels. fp32,
// every operation rounded by itself, one rounding at the end.
// Limits: bf16, fp16, fp32. Rows may have strides of their own, their columns lie side by side; results are contiguous.

#include "common.cuh"

namespace rlspec {

// d silu / dx
__device__ __forceinline__ float slope(float x, float s) {
    return __fmul_rn(s, __fadd_rn(1.0f, __fmul_rn(x, __fsub_rn(1.0f, s))));
}

struct Silu {
    static constexpr int sources = 1, results = 1;
    static __device__ void of(float const (&in)[1], float (&out)[1]) {
        out[0] = quotient(in[0], one_plus_exponential(in[0]));
    }
};

struct SiluGradient {
    static constexpr int sources = 2, results = 1;  // x, dy
    static __device__ void of(float const (&in)[2], float (&out)[1]) {
        float const s = quotient(1.0f, one_plus_exponential(in[0]));
        out[0] = __fmul_rn(in[1], slope(in[0], s));
    }
};

struct Swiglu {
    static constexpr int sources = 2, results = 1;  // gate, up
    static __device__ void of(float const (&in)[2], float (&out)[1]) {
        out[0] = swiglu(in[0], in[1]);
    }
};

struct SwigluGradient {
    static constexpr int sources = 3, results = 2;  // gate, up, dy
    static __device__ void of(float const (&in)[3], float (&out)[2]) {
        float const s = quotient(1.0f, one_plus_exponential(in[0]));
        out[0] = __fmul_rn(__fmul_rn(in[2], in[1]), slope(in[0], s));
        out[1] = __fmul_rn(in[2], __fmul_rn(in[0], s));
    }
};

template <typename T, typename Formula>
struct Operands {
    T const* source[Formula::sources];
    int64_t row[Formula::sources];
    T* result[Formula::results];
};

// A thread has two loads in flight at least.
template <typename Formula>
constexpr int PACKS = Formula::sources == 1 ? 2 : 1;

// One block of threads a row and stretch of columns, PACKS times N columns a thread.
template <typename T, typename Formula, int N>
__global__ void __launch_bounds__(256) gated(Operands<T, Formula> at, int64_t width, unsigned stretches) {
    in_turn();
    constexpr int packs = PACKS<Formula>;
    int64_t const row = blockIdx.x / stretches, step = int64_t(blockDim.x) * N;
    int64_t const first = int64_t(blockIdx.x % stretches) * step * packs + threadIdx.x * N;
    Pack<T, N> in[packs][Formula::sources], out[Formula::results];
#pragma unroll
    for (int p = 0; p < packs; ++p) {
        if (first + p * step >= width) continue;
#pragma unroll
        for (int i = 0; i < Formula::sources; ++i) {
            in[p][i] = load<N>(at.source[i] + row * at.row[i] + first + p * step);
        }
    }
#pragma unroll
    for (int p = 0; p < packs; ++p) {
        if (first + p * step >= width) continue;
        float found[Formula::results][N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float x[Formula::sources], y[Formula::results];
#pragma unroll
            for (int i = 0; i < Formula::sources; ++i) x[i] = in[p][i].get(n);
            Formula::of(x, y);
#pragma unroll
            for (int i = 0; i < Formula::results; ++i) found[i][n] = y[i];
        }
#pragma unroll
        for (int i = 0; i < Formula::results; ++i) {
            out[i].set(found[i]);
            store<N>(at.result[i] + row * width + first + p * step, out[i]);
        }
    }
}

template <typename T, typename Formula, int N>
int launch(Operands<T, Formula> const& at, int64_t rows, int64_t width, cudaStream_t stream) {
    int64_t const packs = ceil_div(width, N * PACKS<Formula>);
    int64_t const threads = packs < 256 ? ceil_div(packs, 32) * 32 : 256;
    int64_t const stretches = ceil_div(packs, threads);
    if (rows * stretches > INT32_MAX) return cudaErrorInvalidValue;
    return launch_behind(gated<T, Formula, N>, rows * stretches, threads, 0, stream, at, width, unsigned(stretches));
}

template <typename T, typename Formula>
int apply(Operands<T, Formula> const& at, int64_t rows, int64_t width, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    bool dense = true, whole = true;
    for (int i = 0; i < Formula::sources; ++i) {
        dense &= rows == 1 || at.row[i] == width;
        whole &= aligned(at.source[i]) && at.row[i] % N == 0;
    }
    for (int i = 0; i < Formula::results; ++i) whole &= aligned(at.result[i]);
    if (dense) {  // one long row
        width *= rows;
        rows = 1;
    }
    bool const packed = whole && width % N == 0;
    return packed ? launch<T, Formula, N>(at, rows, width, stream) : launch<T, Formula, 1>(at, rows, width, stream);
}

}  // namespace rlspec

using namespace rlspec;

extern "C" {

// x [rows, width], y contiguous.
int silu_forward(void const* x, void* y, int64_t dtype, int64_t rows, int64_t width, int64_t x_row,
                 cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return apply<T, Silu>({{(T const*)x}, {x_row}, {(T*)y}}, rows, width, stream);
    });
}

int silu_backward(void const* x, void const* dy, void* dx, int64_t dtype, int64_t rows, int64_t width, int64_t x_row,
                  int64_t dy_row, cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return apply<T, SiluGradient>({{(T const*)x, (T const*)dy}, {x_row, dy_row}, {(T*)dx}}, rows, width, stream);
    });
}

int swiglu_forward(void const* gate, void const* up, void* y, int64_t dtype, int64_t rows, int64_t width,
                   int64_t gate_row, int64_t up_row, cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return apply<T, Swiglu>({{(T const*)gate, (T const*)up}, {gate_row, up_row}, {(T*)y}}, rows, width, stream);
    });
}

int swiglu_backward(void const* gate, void const* up, void const* dy, void* dgate, void* dup, int64_t dtype,
                    int64_t rows, int64_t width, int64_t gate_row, int64_t up_row, int64_t dy_row,
                    cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return apply<T, SwigluGradient>({{(T const*)gate, (T const*)up, (T const*)dy},
                                         {gate_row, up_row, dy_row},
                                         {(T*)dgate, (T*)dup}},
                                        rows, width, stream);
    });
}

}  // extern "C"
