// residual_add(residual, x) = residual + x in fp32, rounded once to the dtype of the residual.
//
// Promise: an element's bits depend on the two elements that it is made of, and equal those of the Triton kernel.
// Limits: bf16, fp16, fp32; x as the residual, or narrower than a residual of fp32. Rows may have strides of their own.

#include "common.cuh"

namespace rlspec {

template <typename R, typename T, int N>
__global__ void __launch_bounds__(256) residual_sum(R const* residual, T const* x, R* out, int64_t width,
                                                    int64_t residual_row, int64_t x_row, unsigned stretches) {
    in_turn();
    int64_t const row = blockIdx.x / stretches;
    int64_t const column = (int64_t(blockIdx.x % stretches) * blockDim.x + threadIdx.x) * N;
    if (column >= width) return;
    Pack<R, N> const a = load<N>(residual + row * residual_row + column);
    Pack<T, N> const b = load<N>(x + row * x_row + column);
    float sum[N];
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] = __fadd_rn(a.get(n), b.get(n));
    Pack<R, N> rounded;
    rounded.set(sum);
    store<N>(out + row * width + column, rounded);
}

template <typename R, typename T, int N>
int launch(void const* residual, void const* x, void* out, int64_t rows, int64_t width, int64_t residual_row,
           int64_t x_row, cudaStream_t stream) {
    int64_t const packs = ceil_div(width, N);
    int64_t const threads = packs < 256 ? ceil_div(packs, 32) * 32 : 256;
    int64_t const stretches = ceil_div(packs, threads);
    if (rows * stretches > INT32_MAX) return cudaErrorInvalidValue;
    return launch_behind(residual_sum<R, T, N>, rows * stretches, threads, 0, stream, (R const*)residual, (T const*)x,
                         (R*)out, width, residual_row, x_row, unsigned(stretches));
}

template <typename R, typename T>
int apply(void const* residual, void const* x, void* out, int64_t rows, int64_t width, int64_t residual_row,
          int64_t x_row, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(R);
    if (rows == 1 || (residual_row == width && x_row == width)) {  // one long row
        width *= rows;
        rows = 1;
    }
    bool const packed = aligned(residual) && aligned(x) && aligned(out) && residual_row % N == 0 && x_row % N == 0 &&
                        width % N == 0;
    auto const run = packed ? launch<R, T, N> : launch<R, T, 1>;
    return run(residual, x, out, rows, width, residual_row, x_row, stream);
}

}  // namespace rlspec

// residual and x [rows, width], out contiguous.
extern "C" int residual_add_forward(void const* residual, void const* x, void* out, int64_t dtype, int64_t x_dtype,
                                    int64_t rows, int64_t width, int64_t residual_row, int64_t x_row,
                                    cudaStream_t stream) {
    using namespace rlspec;
    return with_dtype(dtype, [&](auto zero) {
        using R = decltype(zero);
        return with_dtype(x_dtype, [&](auto other) {
            using T = decltype(other);
            if constexpr (std::is_same_v<R, T> || std::is_same_v<R, float>) {
                return apply<R, T>(residual, x, out, rows, width, residual_row, x_row, stream);
            } else {
                return int(cudaErrorInvalidValue);
            }
        });
    });
}
