// Small pieces of the row kernels: numbers of a row in packs of 16 bytes, sums in a fixed order, Triton's arithmetic.
//
// Where the bits of a result must be those of the Triton kernels, every operation is spelt out (__fmul_rn and the like
// are never contracted), and exp, exp2, quotient and logarithm are the instructions that Triton 3.6 makes of them.

#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "launch.cuh"

namespace rlspec {

using bf16 = __nv_bfloat16;
using fp16 = __half;

__device__ __forceinline__ float widen(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float widen(fp16 x) { return __half2float(x); }
__device__ __forceinline__ float widen(float x) { return x; }

// Round to nearest even, once.
template <typename T>
__device__ __forceinline__ T narrow(float x) {
    if constexpr (sizeof(T) == 4) {
        return x;
    } else if constexpr (std::is_same_v<T, bf16>) {
        return __float2bfloat16_rn(x);
    } else {
        return __float2half_rn(x);
    }
}

// N numbers side by side, moved at once where they are 16 bytes. Those of 16 bits stay in pairs, two in a register,
// until they are needed.
template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
    static constexpr bool PAIRS = sizeof(T) == 2 && N % 2 == 0;
    using Word = std::conditional_t<PAIRS, uint32_t, T>;
    Word word[PAIRS ? N / 2 : N];

    __device__ __forceinline__ float get(int n) const {
        if constexpr (!PAIRS) {
            return widen(word[n]);
        } else if constexpr (std::is_same_v<T, bf16>) {
            return __uint_as_float(n % 2 ? word[n / 2] & 0xffff0000u : word[n / 2] << 16);
        } else {
            return __half2float(__ushort_as_half(static_cast<unsigned short>(word[n / 2] >> (n % 2 * 16))));
        }
    }

    // Rounds each number once.
    __device__ __forceinline__ void set(float const (&x)[N]) {
#pragma unroll
        for (int i = 0; i < (PAIRS ? N / 2 : N); ++i) {
            if constexpr (!PAIRS) {
                word[i] = narrow<T>(x[i]);
            } else if constexpr (std::is_same_v<T, bf16>) {
                __nv_bfloat162 const pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
                word[i] = reinterpret_cast<uint32_t const&>(pair);
            } else {
                __half2 const pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
                word[i] = reinterpret_cast<uint32_t const&>(pair);
            }
        }
    }

    __device__ __forceinline__ void zero() {
#pragma unroll
        for (int i = 0; i < (PAIRS ? N / 2 : N); ++i) word[i] = Word(0.0f);
    }
};

template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(T const* from) {
    return *reinterpret_cast<Pack<T, N> const*>(from);
}

template <int N, typename T>
__device__ __forceinline__ void store(T* to, Pack<T, N> const& pack) {
    *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// Makes the compiler widen the numbers again where they are used next, instead of keeping them wide in registers.
template <typename T, int N>
__device__ __forceinline__ void keep_narrow(Pack<T, N>& pack) {
    if constexpr (Pack<T, N>::PAIRS) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) asm volatile("" : "+r"(pack.word[i]));
    }
}

// ---- Triton's arithmetic ----

// tl.exp: exp2 of x · log2(e), both rounded.
__device__ __forceinline__ float exponential(float x) {
    float y;
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(__fmul_rn(x, 1.4426950408889634f)));
    return y;
}

// tl.exp2, which flushes subnormal results to zero.
__device__ __forceinline__ float exponential2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The quotient of `a / b` in Triton: the full range, not always the last bit.
__device__ __forceinline__ float quotient(float a, float b) {
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}

// s = 1 / (1 + exp(-x)); exp(-x) overflows to inf for x < -88, and 1 / inf is the 0 that it should be.
__device__ __forceinline__ float one_plus_exponential(float x) {
    return __fadd_rn(1.0f, exponential(__fsub_rn(0.0f, x)));
}

// silu(gate) · up
__device__ __forceinline__ float swiglu(float gate, float up) {
    return __fmul_rn(quotient(gate, one_plus_exponential(gate)), up);
}

// ---- launches ----

// Call `body` with a zero of the type that a dtype names; it returns an error code.
template <typename Body>
int with_dtype(int64_t dtype, Body body) {
    switch (dtype) {
        case BF16: return body(bf16());
        case FP16: return body(fp16());
        case FP32: return body(0.0f);
        default: return cudaErrorInvalidValue;
    }
}

inline bool aligned(void const* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace rlspec
