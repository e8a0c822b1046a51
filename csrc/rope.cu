// rope: rotate the pairs (i, i + D/2) of each head by the token's angles. With c = cos[i] and s = sin[i]:
//
//     y[i] = x[i] · c - x[i + D/2] · s        y[i + D/2] = x[i + D/2] · c + x[i] · s
//
// The backward is the rotation by the opposite angle: s negated.
//
// Promise: an element's bits depend on its pair and that pair's cos and sin, and equal those of the Triton kernel.
// fp32, both products rounded, one rounding at the end.
// Limits: bf16, fp16, fp32, the tables in a dtype of their own. x has strides of a token and of a head; out is
// contiguous.

#include "common.cuh"

namespace rlspec {

constexpr int HEADS = 2;  // a thread takes this many heads, for one reading of the tables

template <typename T, typename A, int N>
__global__ void __launch_bounds__(256) rotate(T const* x, A const* cos, A const* sin, T* out, int64_t tokens,
                                              unsigned heads, unsigned half, int64_t x_row, int64_t x_head,
                                              int64_t cos_row, int64_t sin_row, bool back, unsigned together) {
    in_turn();
    unsigned const chunks = half / N, groups = (heads + HEADS - 1) / HEADS;
    unsigned const parts = chunks * groups;
    int64_t const token = int64_t(blockIdx.x) * together + threadIdx.x / parts;
    for (unsigned part = threadIdx.x % parts; token < tokens && part < parts; part += blockDim.x) {
        unsigned const pair = part % chunks * N, group = part / chunks;
        Pack<A, N> const c = load<N>(cos + token * cos_row + pair), s = load<N>(sin + token * sin_row + pair);
        Pack<T, N> first[HEADS], second[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            unsigned const head = group + h * groups;
            if (head < heads) {
                T const* const from = x + token * x_row + head * x_head + pair;
                first[h] = load<N>(from);
                second[h] = load<N>(from + half);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; ++h) {
            unsigned const head = group + h * groups;
            if (head >= heads) continue;
            float low_wide[N], high_wide[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float const a = first[h].get(n), b = second[h].get(n);
                float const p = c.get(n), q = back ? -s.get(n) : s.get(n);
                low_wide[n] = __fsub_rn(__fmul_rn(a, p), __fmul_rn(b, q));
                high_wide[n] = __fadd_rn(__fmul_rn(b, p), __fmul_rn(a, q));
            }
            Pack<T, N> low, high;
            low.set(low_wide);
            high.set(high_wide);
            T* const to = out + (token * heads + head) * (2 * int64_t(half)) + pair;
            store<N>(to, low);
            store<N>(to + half, high);
        }
    }
}

template <typename T, typename A, int N>
int launch(void const* x, void const* cos, void const* sin, void* out, int64_t tokens, int64_t heads, int64_t half,
           int64_t x_row, int64_t x_head, int64_t cos_row, int64_t sin_row, bool back, cudaStream_t stream) {
    int64_t const parts = half / N * ceil_div(heads, HEADS);
    // Whole tokens a block, so that no thread divides by more than the parts of a token.
    int64_t const together = parts < 256 ? 256 / parts : 1;
    int64_t const threads = parts < 256 ? together * parts : 256;
    int64_t const blocks = ceil_div(tokens, together);
    if (blocks > INT32_MAX || heads * half > INT32_MAX) return cudaErrorInvalidValue;
    return launch_behind(rotate<T, A, N>, blocks, threads, 0, stream, (T const*)x, (A const*)cos, (A const*)sin,
                         (T*)out, tokens, unsigned(heads), unsigned(half), x_row, x_head, cos_row, sin_row, back,
                         unsigned(together));
}

template <typename T, typename A>
int apply(void const* x, void const* cos, void const* sin, void* out, int64_t tokens, int64_t heads, int64_t half,
          int64_t x_row, int64_t x_head, int64_t cos_row, int64_t sin_row, bool back, cudaStream_t stream) {
    constexpr int N = 16 / sizeof(T);
    bool const packed = aligned(x) && aligned(cos) && aligned(sin) && aligned(out) && half % N == 0 &&
                        x_row % N == 0 && x_head % N == 0 && cos_row % N == 0 && sin_row % N == 0;
    auto const run = packed ? launch<T, A, N> : launch<T, A, 1>;
    return run(x, cos, sin, out, tokens, heads, half, x_row, x_head, cos_row, sin_row, back, stream);
}

}  // namespace rlspec

// x [tokens, heads, 2 · half], cos and sin [tokens, half], columns side by side; out contiguous. `back`: negate s.
extern "C" int rope_rotate(void const* x, void const* cos, void const* sin, void* out, int64_t dtype,
                           int64_t cos_dtype, int64_t sin_dtype, int64_t tokens, int64_t heads, int64_t half,
                           int64_t x_row, int64_t x_head, int64_t cos_row, int64_t sin_row, int64_t back,
                           cudaStream_t stream) {
    using namespace rlspec;
    if (cos_dtype != sin_dtype) return cudaErrorInvalidValue;
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return with_dtype(cos_dtype, [&](auto other) {
            using A = decltype(other);
            return apply<T, A>(x, cos, sin, out, tokens, heads, half, x_row, x_head, cos_row, sin_row, back != 0,
                               stream);
        });
    });
}
