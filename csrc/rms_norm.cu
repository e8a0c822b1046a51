// Root-mean-square norm over the last dimension; as QK-norm, over the heads of [tokens, heads, width].
//
//     r = 1 / √(mean(x²) + eps)          y = round(x · r · w)
//     n = x · r, g = dy · w              dx = round(r · (g - n · mean(g · n)))
//     dw = Σ_rows dy · n                 in blocks of 16 positions: a fixed tree inside a block, then blocks ascending,
//                                        one addition a block, resumed from an fp32 accumulator
//
// Promise. A row's bits depend on the row, the weight and constants of (width, dtype), and equal those of the Triton
// kernels (seen with Triton 3.6). Their tree, written out: a row is filled up with zeros to `block`, the next power of
// two, and dealt to `lanes` lanes of each of `warps` warps in packs of `vec` numbers, round after round. A lane adds
// its numbers in ascending order by fma, the first two as fma(a, a, b · b); lanes, then warps, are joined by a
// butterfly, the far half first. Square root and quotient are the IEEE ones; mean(s) is s · round(1 / width),
// contracted with eps.
//
// Limits. bf16, fp16, fp32; width up to 65536; fewer than 2³¹ rows. x and dy have strides of a position and of a head,
// columns side by side. Not held against Triton: width 1, which has no second number, and weight gradients of fp32 rows
// narrower than 512, where its compiler contracts the first two products of some rows the other way round.
// Source. Zhang and Sennrich, "Root mean square layer normalization", 2019.

#include "common.cuh"

namespace rlspec {

constexpr int GROUP = 16;
constexpr int TIMES_OF_SHORT = 2;

// How many blocks should fit on a multiprocessor, from the threads that there should be for numbers of 16 bits.
constexpr int resident(int threads, size_t size, int most) {
    int const blocks = threads * 2 / int(size) / most;
    return blocks < 1 ? 1 : blocks;
}

// How the row of a block is dealt: vec · lanes · warps · rounds = block, all of them powers of two. across = lanes ·
// warps.
struct Spread {
    int block, vec, lanes, warps, rounds, across_bits;
};

// [outer, inner, width] with two strides; where one stride does for all rows, the inner rows are all of them.
template <typename T>
struct Rows {
    T const* data;
    int64_t outer, inner;

    __device__ __forceinline__ T const* at(unsigned row, unsigned inner_rows) const {
        if (inner_rows == 0) return data + int64_t(row) * inner;
        return data + int64_t(row / inner_rows) * outer + int64_t(row % inner_rows) * inner;
    }
};

// ---- the tree ----

// Sum over `lanes` neighbouring lanes, the far half first.
__device__ __forceinline__ float butterfly(float x, int lanes) {
#pragma unroll
    for (int far = 16; far > 0; far /= 2) {
        if (far < lanes) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, far));
    }
    return x;
}

// Sum over the lanes and warps of a row. `parts` holds one place a warp of the block and is used for nothing else.
// FULL: a row has all lanes of a warp.
template <bool FULL>
__device__ __forceinline__ float join(float x, Spread const& spread, float* parts) {
    x = butterfly(x, FULL ? 32 : spread.lanes);
    if (spread.warps == 1) return x;
    int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) parts[warp] = x;
    __syncthreads();
    return butterfly(parts[(warp & -spread.warps) | (lane & (spread.warps - 1))], spread.warps);
}

__device__ __forceinline__ float root(float squares, float eps, float per_width) {
    return __frcp_rn(__fsqrt_rn(__fmaf_rn(squares, per_width, eps)));
}

// The ordered sum of products of a lane's numbers, begun by the first two.
struct Chain {
    float sum, first_a, first_b;
    int count = 0;

    __device__ __forceinline__ void add(float a, float b) {
        if (count == 0) {
            first_a = a;
            first_b = b;
        } else if (count == 1) {
            sum = __fmaf_rn(first_a, first_b, __fmul_rn(a, b));
        } else {
            sum = __fmaf_rn(a, b, sum);
        }
        ++count;
    }

    __device__ __forceinline__ float value() const { return count == 1 ? __fmul_rn(first_a, first_b) : sum; }
};

// N numbers from a column, which are 0 beyond the width; a pack lies inside or outside as one.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> take(T const* row, int column, int width) {
    if (column < width) return load<N>(row + column);
    Pack<T, N> none;
    none.zero();
    return none;
}

template <typename T>
__device__ __forceinline__ float take_one(T const* row, int column, int width) {
    return column < width ? widen(row[column]) : 0.0f;
}

template <int ROUNDS, int N, typename T>
__device__ __forceinline__ float squares(Pack<T, N> const (&value)[ROUNDS]) {
    Chain chain;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
        for (int n = 0; n < N; ++n) chain.add(value[r].get(n), value[r].get(n));
    }
    return chain.value();
}

// ---- forward and data gradient ----
// A block of threads has rows side by side, and TIMES such sets one after the other, whose loads go out together.
// THREADS is the most that a block may have: the fewer, the more registers. Blocks that stay and walk over the rows,
// with the loads of the next row under way, were slower.

// TIMES rows of a thread, as they are in memory.
template <typename T, int ROUNDS, int TIMES>
struct Taken {
    static constexpr int N = 16 / sizeof(T);
    Pack<T, N> row[TIMES][ROUNDS];

    __device__ __forceinline__ Taken(Rows<T> const& from, unsigned first, unsigned together, unsigned rows,
                                     unsigned inner, int place, int step, int width) {
#pragma unroll
        for (int t = 0; t < TIMES; ++t) {
            unsigned const number = first + t * together;
            T const* const at = from.at(number < rows ? number : 0, inner);
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) row[t][r] = take<N>(at, place + r * step, number < rows ? width : 0);
        }
    }

    __device__ __forceinline__ void keep_narrow(int t) {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) rlspec::keep_narrow(row[t][r]);
    }
};

template <typename T, int ROUNDS, int TIMES, int THREADS, bool ROUND_FIRST>
__global__ void __launch_bounds__(THREADS, resident(1024, sizeof(T), THREADS))
    norm(Rows<T> x, T const* weight, T* y, unsigned rows, unsigned inner, int width, float eps, float per_width,
         Spread spread) {
    in_turn();
    constexpr int N = 16 / sizeof(T);
    __shared__ float parts[TIMES][32];
    unsigned const together = blockDim.x >> spread.across_bits;
    unsigned const first = blockIdx.x * together * TIMES + (threadIdx.x >> spread.across_bits);
    int const step = N << spread.across_bits, place = threadIdx.x * N & (step - 1);
    Taken<T, ROUNDS, TIMES> value(x, first, together, rows, inner, place, step, width);
    Pack<T, N> w[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) w[r] = take<N>(weight, place + r * step, width);
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
        unsigned const row = first + t * together;
        float const scale = root(join<(ROUNDS > 1)>(squares(value.row[t]), spread, parts[t]), eps, per_width);
        value.keep_narrow(t);
        if (row >= rows) continue;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            float found[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float normed = __fmul_rn(value.row[t][r].get(n), scale);
                if (ROUND_FIRST) normed = widen(narrow<T>(normed));
                found[n] = __fmul_rn(normed, w[r].get(n));
            }
            Pack<T, N> out;
            out.set(found);
            if (place + r * step < width) store<N>(y + int64_t(row) * width + place + r * step, out);
        }
    }
}

template <typename T, int ROUNDS, int TIMES, int THREADS>
__global__ void __launch_bounds__(THREADS, resident(512, sizeof(T), THREADS))
    norm_data_gradient(Rows<T> x, T const* weight, Rows<T> dy, T* dx, unsigned rows, unsigned inner, int width,
                       float eps, float per_width, Spread spread) {
    in_turn();
    constexpr int N = 16 / sizeof(T);
    __shared__ float parts[2 * TIMES][32];
    unsigned const together = blockDim.x >> spread.across_bits;
    unsigned const first = blockIdx.x * together * TIMES + (threadIdx.x >> spread.across_bits);
    int const step = N << spread.across_bits, place = threadIdx.x * N & (step - 1);
    Taken<T, ROUNDS, TIMES> value(x, first, together, rows, inner, place, step, width);
    Taken<T, ROUNDS, TIMES> upstream(dy, first, together, rows, inner, place, step, width);
    Pack<T, N> w[ROUNDS];
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) w[r] = take<N>(weight, place + r * step, width);
#pragma unroll
    for (int t = 0; t < TIMES; ++t) {
        unsigned const row = first + t * together;
        float const scale = root(join<(ROUNDS > 1)>(squares(value.row[t]), spread, parts[2 * t]), eps, per_width);
        value.keep_narrow(t);
        Chain products;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float const g = __fmul_rn(upstream.row[t][r].get(n), w[r].get(n));
                products.add(g, __fmul_rn(value.row[t][r].get(n), scale));
            }
        }
        float const mean = __fmul_rn(join<(ROUNDS > 1)>(products.value(), spread, parts[2 * t + 1]), per_width);
        value.keep_narrow(t);
        upstream.keep_narrow(t);
        if (row >= rows) continue;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            keep_narrow(w[r]);
            float found[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                float const g = __fmul_rn(upstream.row[t][r].get(n), w[r].get(n));
                float const normed = __fmul_rn(value.row[t][r].get(n), scale);
                found[n] = __fmul_rn(scale, __fmaf_rn(-normed, mean, g));
            }
            Pack<T, N> out;
            out.set(found);
            if (place + r * step < width) store<N>(dx + int64_t(row) * width + place + r * step, out);
        }
    }
}

// The same for any width and alignment, number by number, from memory each time.
template <typename T>
__global__ void __launch_bounds__(1024) norm_any(Rows<T> x, T const* weight, T* y, unsigned rows, unsigned inner,
                                                 int width, float eps, float per_width, bool round_before_weight,
                                                 Spread spread) {
    in_turn();
    __shared__ float parts[32];
    unsigned const across = spread.lanes * spread.warps;
    unsigned const row = blockIdx.x * (blockDim.x / across) + threadIdx.x / across, along = threadIdx.x % across;
    int const reach = row < rows ? width : 0;
    T const* const from = x.at(row < rows ? row : 0, inner);
    Chain chain;
    for (int r = 0; r < spread.rounds; ++r) {
        for (int n = 0; n < spread.vec; ++n) {
            float const value = take_one(from, (r * across + along) * spread.vec + n, reach);
            chain.add(value, value);
        }
    }
    float const scale = root(join<false>(chain.value(), spread, parts), eps, per_width);
    for (int column = along; column < reach; column += across) {
        float normed = __fmul_rn(widen(from[column]), scale);
        if (round_before_weight) normed = widen(narrow<T>(normed));
        y[int64_t(row) * width + column] = narrow<T>(__fmul_rn(normed, widen(weight[column])));
    }
}

template <typename T>
__global__ void __launch_bounds__(1024) norm_data_gradient_any(Rows<T> x, T const* weight, Rows<T> dy, T* dx,
                                                               unsigned rows, unsigned inner, int width, float eps,
                                                               float per_width, Spread spread) {
    in_turn();
    __shared__ float parts[2][32];
    unsigned const across = spread.lanes * spread.warps;
    unsigned const row = blockIdx.x * (blockDim.x / across) + threadIdx.x / across, along = threadIdx.x % across;
    int const reach = row < rows ? width : 0;
    T const *const from = x.at(row < rows ? row : 0, inner), *const above = dy.at(row < rows ? row : 0, inner);
    Chain chain, products;
    for (int r = 0; r < spread.rounds; ++r) {
        for (int n = 0; n < spread.vec; ++n) {
            float const value = take_one(from, (r * across + along) * spread.vec + n, reach);
            chain.add(value, value);
        }
    }
    float const scale = root(join<false>(chain.value(), spread, parts[0]), eps, per_width);
    for (int r = 0; r < spread.rounds; ++r) {
        for (int n = 0; n < spread.vec; ++n) {
            int const column = (r * across + along) * spread.vec + n;
            float const g = __fmul_rn(take_one(above, column, reach), take_one(weight, column, width));
            products.add(g, __fmul_rn(take_one(from, column, reach), scale));
        }
    }
    float const mean = __fmul_rn(join<false>(products.value(), spread, parts[1]), per_width);
    for (int column = along; column < reach; column += across) {
        float const g = __fmul_rn(widen(above[column]), widen(weight[column]));
        float const normed = __fmul_rn(widen(from[column]), scale);
        dx[int64_t(row) * width + column] = narrow<T>(__fmul_rn(scale, __fmaf_rn(-normed, mean, g)));
    }
}

// ---- several operators at once ----
// What stands one behind the other wherever a token goes through a model, in one kernel, as the way from kernel to
// kernel is longer than their work on one token. Each result is rounded where its operator rounds it: the bits are
// those of the operators one after the other.

// total = residual + x, in the dtype of the residual; y = norm(round(total)). A row of a thread at a time. `at_rest`:
// no kernel that may still be at work writes residual or weight, so they are loaded ahead of the turn, and before the
// loads of a next kernel, which may ask the memory for as much as it gives in 6 µs.
template <typename R, typename T, int ROUNDS, int THREADS, bool ROUND_FIRST>
__global__ void __launch_bounds__(THREADS, resident(512, sizeof(T), THREADS))
    norm_of_sum(R const* residual, T const* x, T const* weight, R* total, T* y, unsigned rows, int64_t residual_row,
                int64_t x_row, int width, float eps, float per_width, Spread spread, bool at_rest) {
    constexpr int N = 16 / sizeof(T);
    __shared__ float parts[32];
    unsigned const row = blockIdx.x * (blockDim.x >> spread.across_bits) + (threadIdx.x >> spread.across_bits);
    int const step = N << spread.across_bits, place = threadIdx.x * N & (step - 1), reach = row < rows ? width : 0;
    Pack<R, N> before[ROUNDS];
    Pack<T, N> value[1][ROUNDS], w[ROUNDS];
    auto const load_others = [&] {
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            before[r] = take<N>(residual + row * residual_row, place + r * step, reach);
            w[r] = take<N>(weight, place + r * step, width);
        }
    };
    if (at_rest) load_others();
    in_turn();
    if (!at_rest) load_others();
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) value[0][r] = take<N>(x + row * x_row, place + r * step, reach);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        float sum[N];
#pragma unroll
        for (int n = 0; n < N; ++n) sum[n] = __fadd_rn(before[r].get(n), value[0][r].get(n));
        before[r].set(sum);
        if (place + r * step < reach) store<N>(total + int64_t(row) * width + place + r * step, before[r]);
#pragma unroll
        for (int n = 0; n < N; ++n) sum[n] = before[r].get(n);
        value[0][r].set(sum);
    }
    float const scale = root(join<(ROUNDS > 1)>(squares(value[0]), spread, parts), eps, per_width);
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
        float found[N];
#pragma unroll
        for (int n = 0; n < N; ++n) {
            float normed = __fmul_rn(value[0][r].get(n), scale);
            if (ROUND_FIRST) normed = widen(narrow<T>(normed));
            found[n] = __fmul_rn(normed, w[r].get(n));
        }
        Pack<T, N> out;
        out.set(found);
        if (place + r * step < reach) store<N>(y + int64_t(row) * width + place + r * step, out);
    }
}

// Heads of queries or of keys: [tokens, heads, width] with strides of a token and of a head; results contiguous.
template <typename T>
struct Heads {
    T const *x, *weight;
    T *normed, *rotated;
    int64_t token, head;
    int count;
};

// A layer of a cache, [blocks, heads, places, width] twice with the same strides, and `places` [2, tokens]: in which
// block and place each token is stored, block -1: nowhere.
template <typename T>
struct Stored {
    T *keys, *values;
    int64_t const* places;
    int64_t block, head, place;
};

// normed = norm(x), rotated = rope(normed), for the heads of queries and keys together. A head has width / N
// neighbouring lanes, of which the other half holds the second numbers of the pairs. With a cache, rotated keys go
// there too, and values (of which x alone is given) as they are.
template <typename T, typename A, bool ROUND_FIRST>
__global__ void __launch_bounds__(256)
    rotated_heads(Heads<T> query, Heads<T> key, Heads<T> value, Stored<T> stored, A const* cos, A const* sin,
                  int64_t cos_row, int64_t sin_row, int64_t tokens, int width, float eps, float per_width,
                  Spread spread) {
    constexpr int N = 16 / sizeof(T);
    int const heads = query.count + key.count + value.count, half = width / 2;
    int64_t const number = int64_t(blockIdx.x) * (256 / spread.lanes) + threadIdx.x / spread.lanes;
    int64_t const token = number / heads < tokens ? number / heads : 0;
    int const any = int(number % heads), lane = threadIdx.x & (spread.lanes - 1), column = lane * N;
    bool const of_query = any < query.count, of_key = any < query.count + key.count;
    bool const live = number < tokens * heads, low = column < half;
    Heads<T> const of{of_query ? query.x : of_key ? key.x : value.x,
                      of_query ? query.weight : key.weight,
                      of_query ? query.normed : key.normed,
                      of_query ? query.rotated : key.rotated,
                      of_query ? query.token : of_key ? key.token : value.token,
                      of_query ? query.head : of_key ? key.head : value.head,
                      of_query ? query.count : key.count};
    int const head = of_query ? any : of_key ? any - query.count : any - query.count - key.count;
    int const pair = low ? column : column - half;
    fetch_ahead(of.weight + column);
    in_turn();
    Pack<T, N> const x[1] = {load<N>(of.x + token * of.token + head * of.head + column)};
    Pack<T, N> const w = load<N>(of.weight + column);
    Pack<A, N> const c = load<N>(cos + token * cos_row + pair), s = load<N>(sin + token * sin_row + pair);
    bool const kept = stored.keys != nullptr && !of_query;
    int64_t const block = kept ? stored.places[token] : -1, place = kept ? stored.places[tokens + token] : 0;
    float const scale = root(butterfly(squares(x), spread.lanes), eps, per_width);
    float found[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float normed = __fmul_rn(x[0].get(n), scale);
        if (ROUND_FIRST) normed = widen(narrow<T>(normed));
        found[n] = __fmul_rn(normed, w.get(n));
    }
    Pack<T, N> normed;
    normed.set(found);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float const own = normed.get(n), other = __shfl_xor_sync(~0u, own, spread.lanes / 2);
        found[n] = low ? __fsub_rn(__fmul_rn(own, c.get(n)), __fmul_rn(other, s.get(n)))
                       : __fadd_rn(__fmul_rn(own, c.get(n)), __fmul_rn(other, s.get(n)));
    }
    Pack<T, N> rotated;
    rotated.set(found);
    if (!live) return;
    int64_t const in_cache = block * stored.block + head * stored.head + place * stored.place + column;
    if (block >= 0) store<N>((of_key ? stored.keys : stored.values) + in_cache, of_key ? rotated : x[0]);
    if (!of_query && !of_key) return;
    int64_t const to = (token * of.count + head) * width + column;
    store<N>(of.normed + to, normed);
    store<N>(of.rotated + to, rotated);
}

// ---- weight gradient ----
// sums [blocks, width] = Σ dy · n over the 16 positions of each block and their heads, position-major. `partial`
// partial sums take every partial-th row each, in order. They stand in `deep` sets of rows side by side: a thread adds
// its `deep` partial sums in order, then a butterfly joins the rows of a warp, then one the rows of the warps.

struct Partials {
    int partial, deep, lane_rows, warp_rows;
};

// The rows of one block, for a thread whose row in a set is `own`.
template <typename T>
struct Listed {
    Rows<T> x, dy;
    int32_t const* table;
    int rows, heads;

    struct Row {
        T const *value, *upstream;
        bool live;
        float dead;
    };

    // The positions of the block, once for all threads.
    __device__ __forceinline__ void name(int (&named)[GROUP]) const {
        int const place = threadIdx.x, position = blockIdx.x * GROUP + place;
        if (place < GROUP) named[place] = table != nullptr ? table[position] : position < rows ? position : -1;
        __syncthreads();
    }

    // -1 is a zero row. A row that does not exist must show: the host cannot look at a table on the device.
    __device__ __forceinline__ Row at(int const (&named)[GROUP], int listed, bool counted) const {
        int const of_block = heads == 1 ? listed : listed / heads;
        int const row = counted && listed < GROUP * heads ? named[of_block] : -1;
        bool const live = row >= 0 && row < rows;
        int64_t const outer = live ? row : 0, head = live ? listed - of_block * heads : 0;
        return {x.data + outer * x.outer + head * x.inner, dy.data + outer * dy.outer + head * dy.inner, live,
                row == -1 ? 0.0f : __int_as_float(0x7fc00000)};
    }
};

// Where a thread stands: among the threads of a row, and among the rows of a set.
struct Place {
    int along, own;
    bool leads;  // of its column, the first row of its warp

    __device__ Place(Spread const& spread, Partials const& partials) {
        int const lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        along = warp % spread.warps * spread.lanes + lane % spread.lanes;
        own = warp / spread.warps * partials.lane_rows + lane / spread.lanes;
        leads = lane < spread.lanes;
    }
};

// The sum over the rows of a set, for one column; `joined` has a row of `block` numbers for each row of warps.
__device__ __forceinline__ void hand_in(float sum, int column, int width, float* to, float* joined, bool leads,
                                        Spread const& spread, Partials const& partials) {
    for (int far = partials.lane_rows / 2; far > 0; far /= 2) {
        sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, far * spread.lanes));
    }
    int const warp_row = threadIdx.x / 32 / spread.warps;
    if (!leads || column >= width || warp_row >= partials.warp_rows) return;
    if (partials.warp_rows > 1) {
        joined[warp_row * spread.block + column] = sum;
    } else {
        to[column] = sum;
    }
}

__device__ __forceinline__ void join_warps(float* to, float* joined, int width, Spread const& spread,
                                           Partials const& partials) {
    if (partials.warp_rows == 1) return;
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        for (int far = partials.warp_rows / 2; far > 0; far /= 2) {
            for (int i = 0; i < far; ++i) {
                float* const one = joined + i * spread.block + column;
                *one = __fadd_rn(*one, one[far * spread.block]);
            }
        }
        to[column] = joined[column];
    }
}

// ONE: there is one set, so no partial sums are joined within a thread.
template <typename T, int ROUNDS, int THREADS, bool ONE>
__global__ void __launch_bounds__(THREADS, resident(512, sizeof(T), THREADS))
    norm_block_sums(Listed<T> list, float* sums, int width, float eps, float per_width, Spread spread,
                    Partials partials) {
    constexpr int N = 16 / sizeof(T);
    extern __shared__ float joined[];
    __shared__ float parts[2][32];
    __shared__ int named[GROUP];
    list.name(named);
    Place const place(spread, partials);
    int const step = spread.lanes * spread.warps * N, all = GROUP * list.heads, side = partials.partial / partials.deep;
    bool const counted = place.own < partials.partial;
    Pack<T, N> value[ROUNDS], upstream[ROUNDS], next_value[ROUNDS], next_upstream[ROUNDS];
    bool live, next_live;
    float dead, next_dead;
    auto const fetch = [&](int first) {
        auto const row = list.at(named, first + place.own, counted);
        next_live = row.live;
        next_dead = row.dead;
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
            next_value[r] = take<N>(row.value, place.along * N + r * step, row.live ? width : 0);
            next_upstream[r] = take<N>(row.upstream, place.along * N + r * step, row.live ? width : 0);
        }
    };
    float total[ROUNDS][N];
    int flip = 0;
    fetch(0);
    for (int set = 0; set < (ONE ? 1 : partials.deep); ++set) {
        float acc[ROUNDS][N] = {};
#pragma unroll 1
        for (int first = set * side; first < all; first += partials.partial, flip ^= 1) {
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                value[r] = next_value[r];
                upstream[r] = next_upstream[r];
            }
            live = next_live;
            dead = next_dead;
            int const after = first + partials.partial;
            fetch(ONE || after < all ? after : (set + 1) * side);  // past the end: zero rows, which are not read
            float const scale = root(join<(ROUNDS > 1)>(squares(value), spread, parts[flip]), eps, per_width);
#pragma unroll
            for (int r = 0; r < ROUNDS; ++r) {
                keep_narrow(value[r]);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float const normed = __fmul_rn(value[r].get(n), scale);
                    float const term = __fmul_rn(upstream[r].get(n), normed);
                    acc[r][n] = __fadd_rn(acc[r][n], live ? term : dead);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
            for (int n = 0; n < N; ++n) {
                total[r][n] = ONE || set == 0 ? acc[r][n] : __fadd_rn(total[r][n], acc[r][n]);
            }
        }
    }
    float* const to = sums + int64_t(blockIdx.x) * width;
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            hand_in(total[r][n], place.along * N + r * step + n, width, to, joined, place.leads, spread, partials);
        }
    }
    join_warps(to, joined, width, spread, partials);
}

// The same for any width and alignment: 64 numbers a thread at most, in local memory.
template <typename T>
__global__ void __launch_bounds__(1024) norm_block_sums_any(Listed<T> list, float* sums, int width, float eps,
                                                            float per_width, Spread spread, Partials partials) {
    extern __shared__ float joined[];
    __shared__ float parts[2][32];
    __shared__ int named[GROUP];
    list.name(named);
    Place const place(spread, partials);
    int const across = spread.lanes * spread.warps, all = GROUP * list.heads;
    int const side = partials.partial / partials.deep, own = spread.rounds * spread.vec;
    bool const counted = place.own < partials.partial;
    auto const column = [&](int i) { return (i / spread.vec * across + place.along) * spread.vec + i % spread.vec; };
    float total[64];
    int flip = 0;
    for (int set = 0; set < partials.deep; ++set) {
        float acc[64];
        for (int i = 0; i < own; ++i) acc[i] = 0.0f;
        for (int first = set * side; first < all; first += partials.partial, flip ^= 1) {
            auto const row = list.at(named, first + place.own, counted);
            int const reach = row.live ? width : 0;
            Chain chain;
            for (int i = 0; i < own; ++i) {
                float const value = take_one(row.value, column(i), reach);
                chain.add(value, value);
            }
            float const scale = root(join<false>(chain.value(), spread, parts[flip]), eps, per_width);
            for (int i = 0; i < own; ++i) {
                float const normed = __fmul_rn(take_one(row.value, column(i), reach), scale);
                float const term = __fmul_rn(take_one(row.upstream, column(i), reach), normed);
                acc[i] = __fadd_rn(acc[i], row.live ? term : row.dead);
            }
        }
        for (int i = 0; i < own; ++i) total[i] = set == 0 ? acc[i] : __fadd_rn(total[i], acc[i]);
    }
    float* const to = sums + int64_t(blockIdx.x) * width;
    for (int i = 0; i < own; ++i) {
        hand_in(total[i], column(i), width, to, joined, place.leads, spread, partials);
    }
    join_warps(to, joined, width, spread, partials);
}

// accumulator += sums[0], then += sums[1], ...: a chain, so that any cut into calls has the same bits. Eight warps
// fetch the next rows while the first one adds.
constexpr int FETCHED = 128;

__global__ void __launch_bounds__(256) norm_chain(float const* sums, float* accumulator, int64_t blocks, int width) {
    __shared__ float held[2][FETCHED][32];
    int const lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    bool const inside = column < width;
    float next[FETCHED / 8];
    auto const fetch = [&](int64_t first) {
#pragma unroll
        for (int i = 0; i < FETCHED / 8; ++i) {
            int64_t const block = first + i * 8 + warp;
            next[i] = inside && block < blocks ? sums[block * width + column] : -0.0f;  // -0 leaves a sum as it is
        }
    };
    float sum = inside ? accumulator[column] : 0.0f;
    fetch(0);
    int flip = 0;
    for (int64_t first = 0; first < blocks; first += FETCHED, flip ^= 1) {
#pragma unroll
        for (int i = 0; i < FETCHED / 8; ++i) held[flip][i * 8 + warp][lane] = next[i];
        __syncthreads();
        if (first + FETCHED < blocks) fetch(first + FETCHED);
        if (warp > 0) continue;
#pragma unroll 32
        for (int i = 0; i < FETCHED; ++i) sum = __fadd_rn(sum, held[flip][i][lane]);
    }
    if (warp == 0 && inside) accumulator[column] = sum;
}

// ---- how a row is dealt ----

inline int power_of_two(int64_t x) {
    int block = 1;
    while (block < x) block *= 2;
    return block;
}

inline int bits(int power) {
    int count = 0;
    while (1 << count < power) ++count;
    return count;
}

inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

inline Spread spread_of(int block, int vec, int warps) {
    int const lanes = clamp(block / vec, 1, 32), along = clamp(block / (vec * lanes), 1, warps);
    int const rounds = block / (vec * lanes * along);
    return {block, vec, lanes, along, rounds < 1 ? 1 : rounds, bits(lanes * along)};
}

// A program of the Triton kernel has `rows` rows, about 2048 numbers or one row, and a warp for 1024 numbers.
inline int warps_of(int block, int rows) { return clamp(int(int64_t(block) * rows / 1024), 4, 32); }

// Calls `body` with rounds and threads as constants; false where there is no kernel for them.
template <typename T, typename Body>
bool with_rounds(Spread const& spread, Body body) {
    bool const wide = spread.lanes * spread.warps > 256;
    auto const run = [&](auto rounds, auto threads) {
        body(rounds, threads);
        return true;
    };
    std::integral_constant<int, 256> few;
    std::integral_constant<int, 512> many;
    std::integral_constant<int, 64 / (16 / sizeof(T)) / 2> most;  // 32 numbers a thread
    if (wide) return spread.rounds == most && spread.lanes * spread.warps <= 512 && run(most, many);
    if (spread.rounds == 1) return run(std::integral_constant<int, 1>(), few);
    if (spread.rounds == 2) return run(std::integral_constant<int, 2>(), few);
    if (spread.rounds == 4) return run(std::integral_constant<int, 4>(), few);
    return spread.rounds == most && run(most, few);
}

template <typename T>
bool packed(Rows<T> const& rows, int64_t width) {
    constexpr int N = 16 / sizeof(T);
    return aligned(rows.data) && rows.outer % N == 0 && rows.inner % N == 0 && width % N == 0;
}

inline bool refused(int64_t rows, int64_t width) { return rows < 1 || rows > INT32_MAX || width < 1 || width > 65536; }

}  // namespace rlspec

using namespace rlspec;

extern "C" {

// x [rows / inner, inner, width] -> y contiguous.
int rms_norm_forward(void const* x, void const* weight, void* y, int64_t dtype, int64_t rows, int64_t inner,
                     int64_t width, int64_t x_outer, int64_t x_inner, float eps, int64_t round_before_weight,
                     cudaStream_t stream) {
    if (refused(rows, width)) return cudaErrorInvalidValue;
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        int const block = power_of_two(width);
        Spread const spread = spread_of(block, 16 / sizeof(T), warps_of(block, clamp(2048 / block, 1, 2048)));
        Rows<T> const from{(T const*)x, x_outer, x_inner};
        bool const flat = x_outer == inner * x_inner || rows == inner;
        int const across = spread.lanes * spread.warps, threads = across < 128 ? 128 : across;
        unsigned const inner_rows = flat ? 0 : unsigned(inner);
        auto const launch = [&](auto kernel, int times, auto... more) {
            int64_t const blocks = ceil_div(rows, int64_t(threads / across) * times);
            return launch_behind(kernel, blocks, threads, 0, stream, from, (T const*)weight, (T*)y, unsigned(rows),
                                 inner_rows, int(width), eps, 1.0f / float(width), more..., spread);
        };
        cudaError_t code = cudaSuccess;
        bool const whole = packed(from, width) && aligned(weight) && aligned(y);
        if (!whole || !with_rounds<T>(spread, [&](auto rounds, auto most) {
                constexpr int times = rounds == 1 ? TIMES_OF_SHORT : 1;
                auto const kernel =
                    round_before_weight ? norm<T, rounds, times, most, true> : norm<T, rounds, times, most, false>;
                code = launch(kernel, times);
            })) {
            code = launch(norm_any<T>, 1, round_before_weight != 0);
        }
        return int(code);
    });
}

// residual and x [rows, width] -> total in `residual_dtype` and y, contiguous. Addresses are multiples of 16 bytes,
// rows of as many numbers as x has in 16 bytes. `at_rest`: when this kernel starts, what was written before the one in
// front of it is there, and that one does not write residual or weight.
int rms_norm_of_sum(void const* residual, void const* x, void const* weight, void* total, void* y,
                    int64_t residual_dtype, int64_t dtype, int64_t rows, int64_t width, int64_t residual_row,
                    int64_t x_row, float eps, int64_t round_before_weight, int64_t at_rest, cudaStream_t stream) {
    if (refused(rows, width)) return cudaErrorInvalidValue;
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = 16 / sizeof(T);
        int const block = power_of_two(width);
        Spread const spread = spread_of(block, N, warps_of(block, clamp(2048 / block, 1, 2048)));
        int const across = spread.lanes * spread.warps, threads = across < 128 ? 128 : across;
        bool const whole = aligned(residual) && aligned(x) && aligned(weight) && aligned(total) && aligned(y) &&
                           residual_row % N == 0 && x_row % N == 0 && width % N == 0;
        cudaError_t code = cudaErrorInvalidValue;
        auto const launch = [&](auto other, auto rounds, auto most) {
            using R = decltype(other);
            code = launch_behind(round_before_weight ? norm_of_sum<R, T, rounds, most, true>
                                                     : norm_of_sum<R, T, rounds, most, false>,
                                 ceil_div(rows, threads / across), threads, 0, stream, (R const*)residual, (T const*)x,
                                 (T const*)weight, (R*)total, (T*)y, unsigned(rows), residual_row, x_row, int(width),
                                 eps, 1.0f / float(width), spread, at_rest != 0);
        };
        if (whole) {
            with_rounds<T>(spread, [&](auto rounds, auto most) {
                if (residual_dtype == FP32) {
                    launch(0.0f, rounds, most);
                } else if (residual_dtype == dtype) {
                    launch(T(), rounds, most);
                }
            });
        }
        return int(code);
    });
}

// query and key [tokens, heads, width] with strides of a token and a head -> normed and rotated, contiguous; cos and
// sin [tokens, width / 2]. A head is 2 to 32 packs of 16 bytes, a power of two; addresses and strides are multiples of
// that. `cached_keys` null: no cache. Else see `Stored`; `value` is as key.
int rms_norm_rotated(void const* query, void const* key, void const* query_weight, void const* key_weight,
                     void const* cos, void const* sin, void* query_normed, void* key_normed, void* query_rotated,
                     void* key_rotated, void const* value, void* cached_keys, void* cached_values,
                     int64_t const* places, int64_t dtype, int64_t table_dtype, int64_t tokens, int64_t query_heads,
                     int64_t key_heads, int64_t width, int64_t query_token, int64_t query_head, int64_t key_token,
                     int64_t key_head, int64_t value_token, int64_t value_head, int64_t cached_block,
                     int64_t cached_head, int64_t cached_place, int64_t cos_row, int64_t sin_row, float eps,
                     int64_t round_before_weight, cudaStream_t stream) {
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = 16 / sizeof(T);
        int const block = power_of_two(width);
        Spread const spread = spread_of(block, N, warps_of(block, clamp(2048 / block, 1, 2048)));
        if (block != width || spread.lanes * N != width || spread.lanes < 2) return int(cudaErrorInvalidValue);
        int64_t const value_heads = cached_keys == nullptr ? 0 : key_heads;
        int64_t const blocks = ceil_div(tokens * (query_heads + key_heads + value_heads), 256 / spread.lanes);
        if (blocks > INT32_MAX) return int(cudaErrorInvalidValue);
        Heads<T> const queries{(T const*)query, (T const*)query_weight, (T*)query_normed, (T*)query_rotated,
                               query_token, query_head, int(query_heads)};
        Heads<T> const keys{(T const*)key, (T const*)key_weight, (T*)key_normed, (T*)key_rotated,
                            key_token, key_head, int(key_heads)};
        Heads<T> const values{(T const*)value, nullptr, nullptr, nullptr, value_token, value_head, int(value_heads)};
        Stored<T> const stored{(T*)cached_keys, (T*)cached_values, places, cached_block, cached_head, cached_place};
        return with_dtype(table_dtype, [&](auto other) {
            using A = decltype(other);
            return int(launch_behind(round_before_weight ? rotated_heads<T, A, true> : rotated_heads<T, A, false>,
                                     blocks, 256, 0, stream, queries, keys, values, stored, (A const*)cos,
                                     (A const*)sin, cos_row, sin_row, tokens, int(width), eps, 1.0f / float(width),
                                     spread));
        });
    });
}

// x and dy [rows / inner, inner, width] -> dx contiguous.
int rms_norm_data_gradient(void const* x, void const* weight, void const* dy, void* dx, int64_t dtype, int64_t rows,
                           int64_t inner, int64_t width, int64_t x_outer, int64_t x_inner, int64_t dy_outer,
                           int64_t dy_inner, float eps, cudaStream_t stream) {
    if (refused(rows, width)) return cudaErrorInvalidValue;
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        int const block = power_of_two(width);
        Spread const spread = spread_of(block, 16 / sizeof(T), warps_of(block, clamp(2048 / block, 1, 2048)));
        Rows<T> const from{(T const*)x, x_outer, x_inner}, above{(T const*)dy, dy_outer, dy_inner};
        bool const flat = rows == inner || (x_outer == inner * x_inner && dy_outer == inner * dy_inner);
        int const across = spread.lanes * spread.warps, threads = across < 128 ? 128 : across;
        cudaError_t code = cudaSuccess;
        auto const launch = [&](auto kernel, int times) {
            int64_t const blocks = ceil_div(rows, int64_t(threads / across) * times);
            code = launch_behind(kernel, blocks, threads, 0, stream, from, (T const*)weight, above, (T*)dx,
                                 unsigned(rows), flat ? 0 : unsigned(inner), int(width), eps, 1.0f / float(width),
                                 spread);
        };
        bool const whole = packed(from, width) && packed(above, width) && aligned(weight) && aligned(dx);
        if (!whole || !with_rounds<T>(spread, [&](auto rounds, auto most) {
                constexpr int times = rounds == 1 ? TIMES_OF_SHORT : 1;
                launch(norm_data_gradient<T, rounds, times, most>, times);
            })) {
            launch(norm_data_gradient_any<T>, 1);
        }
        return int(code);
    });
}

// sums fp32 [blocks, width], over blocks of 16 positions of x and dy [positions, heads, width]: those that the table
// int32 [blocks, 16] names, -1 a zero row; without a table one position after the other.
int rms_norm_block_sums(void const* x, void const* dy, int32_t const* table, float* sums, int64_t dtype, int64_t blocks,
                        int64_t positions, int64_t heads, int64_t width, int64_t x_outer, int64_t x_inner,
                        int64_t dy_outer, int64_t dy_inner, float eps, cudaStream_t stream) {
    if (refused(positions * heads, width) || blocks > INT32_MAX / GROUP) return cudaErrorInvalidValue;
    return with_dtype(dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int N = 16 / sizeof(T);
        int const block = power_of_two(width);
        // The program of the Triton kernel: about 4096 numbers, but no more rows than a block of positions has.
        int const rows = clamp(4096 / block, 1, power_of_two(GROUP * heads)), warps = warps_of(block, rows);
        int const unit = int(width & -width), vec = clamp(block * rows / (32 * warps), 1, unit < N ? unit : N);
        Spread const spread = spread_of(block, vec, warps);
        int const lane_rows = clamp(32 / spread.lanes, 1, rows);
        int const warp_rows = clamp(rows / lane_rows, 1, warps / spread.warps);
        Partials const partials{rows, rows / (lane_rows * warp_rows), lane_rows, warp_rows};
        Listed<T> const list{{(T const*)x, x_outer, x_inner}, {(T const*)dy, dy_outer, dy_inner}, table, int(positions),
                             int(heads)};
        auto const launch = [&](auto kernel) {
            size_t const shared = warp_rows > 1 ? sizeof(float) * warp_rows * block : 0;
            kernel<<<unsigned(blocks), warps * 32, shared, stream>>>(list, sums, int(width), eps, 1.0f / float(width),
                                                                     spread, partials);
        };
        bool const whole = vec == N && packed(list.x, width) && packed(list.dy, width);
        if (!whole || !with_rounds<T>(spread, [&](auto rounds, auto most) {
                constexpr bool full = rounds * N == 32;  // rows so wide that there is one set
                if (full && partials.deep > 1) {
                    launch(norm_block_sums_any<T>);
                } else {
                    launch(norm_block_sums<T, rounds, most, full>);
                }
            })) {
            launch(norm_block_sums_any<T>);
        }
        return int(cudaGetLastError());
    });
}

// accumulator [width] += sums [blocks, width], row after row.
int rms_norm_chain(float const* sums, float* accumulator, int64_t blocks, int64_t width, cudaStream_t stream) {
    norm_chain<<<unsigned(ceil_div(width, 32)), 256, 0, stream>>>(sums, accumulator, blocks, int(width));
    return cudaGetLastError();
}

}  // extern "C"
