// embedding: y[r] = weight[tokens[r]]; in the backward, row v of the gradient is the sum of dy[r] over tokens[r] = v.
//
// The sum of one id is a serial chain in fp32, one row after the other in the order given, rounded once at the end. The
// caller sorts the places by id, stably, so that the rows of an id stand side by side in their order; the threads of
// the first of them walk to the last. No atomics.
//
// Promise: a row of y is a copy; a row of the gradient depends on the rows of that id and their order alone, and has
// the bits of the Triton kernel.
// Limits: bf16, fp16, fp32. The row of an id outside [0, V) is NaN, and its dy goes nowhere.

#include "common.cuh"

namespace rlspec {

// The NaN of torch.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> not_a_number() {
    Pack<T, N> pack;
    uint32_t const bits = sizeof(T) == 4 ? 0x7fc00000 : std::is_same_v<T, bf16> ? 0x7fc07fc0 : 0x7e007e00;
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(&pack);
#pragma unroll
    for (int i = 0; i < int(sizeof(pack)); ++i) bytes[i] = uint8_t(bits >> (i % 4 * 8));
    return pack;
}

constexpr int PACKS = 4;  // loads of a thread that are in flight together

// One block of threads a row and stretch of columns, PACKS times N columns a thread.
template <typename T, int N>
__global__ void __launch_bounds__(128) gather(int64_t const* tokens, T const* weight, T* out, int64_t vocabulary,
                                              int64_t width, int64_t weight_row, unsigned stretches) {
    // Without `next_may_start`: nothing overtakes the first kernel of a model, so behind it the weights are at rest.
    wait_for_previous();
    int64_t const row = blockIdx.x / stretches;
    int64_t const step = int64_t(blockDim.x) * N;
    int64_t const first = int64_t(blockIdx.x % stretches) * step * PACKS + threadIdx.x * N;
    int64_t const token = tokens[row];
    bool const known = token >= 0 && token < vocabulary;
    Pack<T, N> value[PACKS];
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        if (known && first + p * step < width) value[p] = load<N>(weight + token * weight_row + first + p * step);
    }
#pragma unroll
    for (int p = 0; p < PACKS; ++p) {
        if (!known) value[p] = not_a_number<T, N>();
        if (first + p * step < width) store<N>(out + row * width + first + p * step, value[p]);
    }
}

// `ids` ascending, where the run of each ends, and the row of dy for each. `total` is resumed, or begun at 0.
template <typename T, typename D, int N>
__global__ void __launch_bounds__(128) scatter(T* total, int64_t const* ids, int64_t const* ends, int32_t const* rows,
                                               D const* dy, int64_t vocabulary, int64_t width, int64_t dy_row,
                                               bool resume, unsigned stretches) {
    constexpr int FLIGHT = 16;  // rows whose loads wait for no sum
    int64_t at = blockIdx.x / stretches;
    int64_t const token = ids[at];
    if ((at > 0 && ids[at - 1] == token) || token < 0 || token >= vocabulary) return;
    int64_t const column = (int64_t(blockIdx.x % stretches) * blockDim.x + threadIdx.x) * N;
    if (column >= width) return;
    T* const to = total + token * width + column;
    float sum[N] = {};
    if (resume) {
        Pack<T, N> const before = load<N>(to);
#pragma unroll
        for (int n = 0; n < N; ++n) sum[n] = before.get(n);
    }
    int64_t const end = ends[at];
    for (; at + FLIGHT <= end; at += FLIGHT) {
        Pack<D, N> next[FLIGHT];
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) next[i] = load<N>(dy + int64_t(rows[at + i]) * dy_row + column);
#pragma unroll
        for (int i = 0; i < FLIGHT; ++i) {
#pragma unroll
            for (int n = 0; n < N; ++n) sum[n] = __fadd_rn(sum[n], next[i].get(n));
        }
    }
    for (; at < end; ++at) {
        Pack<D, N> const next = load<N>(dy + int64_t(rows[at]) * dy_row + column);
#pragma unroll
        for (int n = 0; n < N; ++n) sum[n] = __fadd_rn(sum[n], next.get(n));
    }
    Pack<T, N> out;
    out.set(sum);
    store<N>(to, out);
}

struct Grid {
    unsigned blocks, threads, stretches;
    bool fits;

    Grid(int64_t rows, int64_t packs, int64_t most) {
        threads = unsigned(packs < most ? ceil_div(packs, 32) * 32 : most);
        stretches = unsigned(ceil_div(packs, threads));
        fits = rows * stretches <= INT32_MAX;
        blocks = unsigned(rows * stretches);
    }
};

}  // namespace rlspec

using namespace rlspec;

extern "C" {

// tokens int64 [rows], weight [vocabulary, width] -> out contiguous.
int embedding_forward(int64_t const* tokens, void const* weight, void* out, int64_t dtype, int64_t rows,
                      int64_t vocabulary, int64_t width, int64_t weight_row, cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = 16 / sizeof(T);
        bool const packed = aligned(weight) && aligned(out) && width % N == 0 && weight_row % N == 0;
        Grid const grid(rows, ceil_div(width, (packed ? N : 1) * PACKS), 128);
        if (!grid.fits) return int(cudaErrorInvalidValue);
        auto const kernel = packed ? gather<T, N> : gather<T, 1>;
        return int(launch_behind(kernel, grid.blocks, grid.threads, 0, stream, tokens, (T const*)weight, (T*)out,
                                 vocabulary, width, weight_row, grid.stretches));
    });
}

// total [vocabulary, width] contiguous += rows of dy [any, width]: of `places` places sorted by id, the id, where its
// run ends, and the row.
int embedding_add(void* total, int64_t const* ids, int64_t const* ends, int32_t const* rows, void const* dy,
                  int64_t dtype, int64_t dy_dtype, int64_t places, int64_t vocabulary, int64_t width, int64_t dy_row,
                  int64_t resume, cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        return with_dtype(dy_dtype, [&](auto other) {
            using D = decltype(other);
            constexpr int N = 4;
            bool const packed = aligned(total) && aligned(dy) && width % N == 0 && dy_row % N == 0;
            Grid const grid(places, packed ? width / N : width, 128);
            if (!grid.fits) return int(cudaErrorInvalidValue);
            auto const kernel = packed ? scatter<T, D, N> : scatter<T, D, 1>;
            kernel<<<grid.blocks, grid.threads, 0, stream>>>((T*)total, ids, ends, rows, (D const*)dy, vocabulary,
                                                             width, dy_row, resume != 0, grid.stretches);
            return int(cudaGetLastError());
        });
    });
}

}  // extern "C"
