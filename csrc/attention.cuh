// What the kernels of attention.cu share: borders of splits, places in a fragment, rows of a tile, exact arithmetic.
#pragma once

#include "hopper.cuh"
#include "launch.cuh"

namespace rlspec {

constexpr int KEYS = 64;  // keys (backward: also queries) a block, part of the contract
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;

// Borders between splits: every `early` keys up to position `change`, every `late` keys after it.
struct Schedule {
    int early, change, late;
    __host__ __device__ int of(int position) const {
        return position < change ? position / early : change / early + (position - change) / late;
    }
    __host__ __device__ int start(int split) const {
        return split < change / early ? split * early : change + (split - change / early) * late;
    }
};

// A line of the table of segments.
struct Segment {
    int row, query_start, queries, key_start, keys;
    Segment() = default;
    __device__ explicit Segment(int const* line)
        : row(line[0]), query_start(line[1]), queries(line[2]), key_start(line[3]), keys(line[4]) {}
};

// Strides in elements, of rows, tokens and heads.
struct Strides {
    int64_t row, token, head;
};

// 2^x as the special function unit gives it, subnormal results as 0: the same instruction in every kernel.
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float no_infinity(float top) { return top == -INFINITY ? 0.0f : top; }

// The largest of the four threads that share a row of a fragment.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
}

// Where 16 bytes, number `chunk` of row `row`, stand in a tile of `rows` rows of 64·n elements of 16 bits.
__device__ __forceinline__ int swizzled(int row, int chunk, int rows) {
    return (chunk >> 3) * rows * 128 + row * 128 + ((chunk & 7) ^ (row & 7)) * 16;
}

// A finished split on top of the splits before it; one in which the row saw nothing changes nothing.
struct Factors {
    float before, now;
    bool empty;
    __device__ Factors(float& total_m, float m) : empty(m == -INFINITY) {
        float const top = fmaxf(total_m, m), base = no_infinity(top);
        before = exp2_of(__fsub_rn(total_m, base));
        now = exp2_of(__fsub_rn(m, base));
        total_m = top;
    }
    __device__ Factors of_lane(int lane) const {
        Factors one = *this;
        one.before = __shfl_sync(0xffffffff, before, lane), one.now = __shfl_sync(0xffffffff, now, lane);
        one.empty = __shfl_sync(0xffffffff, empty, lane);
        return one;
    }
    __device__ float operator()(float total, float x) const {
        return empty ? total : __fmaf_rn(total, before, __fmul_rn(x, now));
    }
};

// log2 in the steps of CUDA's own library, which a compiler might contract one way or the other.
__device__ __forceinline__ float log2_of(float x) {
    bool const small = x < 0x1p-126f;
    float const normal = small ? __fmul_rn(x, 0x1p23f) : x;
    int const exponent = (__float_as_int(normal) - 0x3f3504f3) & 0xff800000;
    float const t = __fadd_rn(__int_as_float(__float_as_int(normal) - exponent), -1.0f);
    float y = __fmaf_rn(__int_as_float(0x3dc6b27f), t, __int_as_float(0xbe2c7f30));
    y = __fmaf_rn(y, t, __int_as_float(0x3e2fcf2a));
    y = __fmaf_rn(y, t, __int_as_float(0xbe374e43));
    y = __fmaf_rn(y, t, __int_as_float(0x3e520bf4));
    y = __fmaf_rn(y, t, __int_as_float(0xbe763c8b));
    y = __fmaf_rn(y, t, __int_as_float(0x3e93bf99));
    y = __fmaf_rn(y, t, __int_as_float(0xbeb8aa49));
    y = __fmaf_rn(y, t, __int_as_float(0x3ef6384a));
    y = __fmaf_rn(y, t, __int_as_float(0xbf38aa3b));
    y = __fmaf_rn(t, __int_as_float(0x3fb8aa3b), __fmul_rn(t, __fmul_rn(t, y)));
    y = __fadd_rn(__fmaf_rn(static_cast<float>(exponent), 0x1p-23f, small ? -23.0f : 0.0f), y);
    if (__float_as_uint(normal) >= 0x7f800000) y = __fmaf_rn(normal, INFINITY, INFINITY);
    return normal == 0.0f ? -INFINITY : y;
}

// The end of a row: the factor of its sums, and the log-sum-exp. A sink joins the denominator alone.
struct Finish {
    float before = 1.0f, inverse, lse;
    bool const sunk;
    __device__ Finish(float m, float mass, float const* sink) : sunk(sink != nullptr) {
        if (sunk) {
            float const top = fmaxf(m, __fmul_rn(*sink, LOG2E));
            before = exp2_of(__fsub_rn(m, top));
            mass = __fmaf_rn(mass, before, exp2_of(__fmaf_rn(*sink, LOG2E, -top)));
            m = top;
        }
        inverse = __fdiv_rn(1.0f, mass);
        lse = __fmul_rn(__fadd_rn(m, log2_of(mass)), LN2);
    }
    __device__ float operator()(float x) const { return __fmul_rn(sunk ? __fmul_rn(x, before) : x, inverse); }
};

// What a forward is called with, and how its tiles are dealt.
struct Forward {
    void const *query, *key, *value;
    int const *table, *pages;
    float const* sinks;
    void* out;
    float *lse, *part, *part_m, *part_mass;
    int* taken;  // tiles handed out beyond one a block of threads
    Strides q, k, v;
    int64_t key_rows, key_tokens;
    int64_t slots;  // rows · queries
    float scale;    // holds log2(e) too
    int items, segments, tiles, splits, queries, limit;  // a sample has at most `limit` queries
    int near;  // pairs of a key head and a sample whose tiles are taken side by side
    int listed, page, box, kv, group, width, window;
    int inverse;  // of group, times 65536 and rounded up
    Schedule schedule;
    // A row of a tile belongs to one of its queries, and to a head of the group.
    __device__ __forceinline__ int query_of(int row) const { return row * inverse >> 16; }
    __device__ __forceinline__ int head_of(int row) const { return row - query_of(row) * group; }
};

// The segment that holds a slot, or -1: a warp looks through the table.
__device__ __forceinline__ int segment_of(int const* table, int segments, int row, int token, int column) {
    int found = -1;
    for (int i = threadIdx.x % 32; i < segments; i += 32) {
        int const* const line = table + i * 5;
        // Past L1, for a kernel that has not waited yet: see the fold.
        int const at = __ldcg(line), start = __ldcg(line + column), length = __ldcg(line + column + 1);
        if ((at == row) & (token >= start) & (token < start + length)) found = i;
    }
    return __reduce_max_sync(0xffffffff, found);
}

template <int N>
struct alignas(4 * N) Numbers {
    float of[N];
};

}  // namespace rlspec
