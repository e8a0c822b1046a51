// What every launcher needs: the names of errors, one way to pass them on, and descriptors for the copy engine (TMA).
//
// A launcher is extern "C", takes pointers, int64_t sizes, float numbers and at its end a stream, checks every code that
// CUDA returns with RLSPEC_TRY, and returns the error of its launches. rlspec/device/native.py calls it.
// Kernels live in namespace rlspec.

#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime.h>

#define RLSPEC_TRY(call)                                   \
    do {                                                   \
        cudaError_t const rlspec_code = (call);            \
        if (rlspec_code != cudaSuccess) return rlspec_code; \
    } while (0)

extern "C" inline __attribute__((used, visibility("default"))) char const* rlspec_error_name(int code) {
    return cudaGetErrorName(static_cast<cudaError_t>(code));
}

namespace rlspec {

// As a torch.dtype arrives in a launcher (int64_t): `DTYPES` in rlspec/device/native.py.
enum Dtype : int64_t { BF16 = 0, FP16 = 1, FP32 = 2 };

// A descriptor for tiles of a tensor of `rank` dimensions, the fastest first; `strides` in bytes, of all but the fastest.
// Places outside the tensor read as zero. The driver is asked for the encoder, so nothing is linked with libcuda.
inline cudaError_t encode_tiled(CUtensorMap* map, CUtensorMapDataType type, uint32_t rank, void const* data,
                                uint64_t const* sizes, uint64_t const* strides, uint32_t const* box,
                                CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
                                CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B) {
    using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, cuuint64_t const*,
                                cuuint64_t const*, cuuint32_t const*, cuuint32_t const*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    static Encode encode = nullptr;
    if (encode == nullptr) {
        void* found = nullptr;
        cudaDriverEntryPointQueryResult known;
        RLSPEC_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &known));
        if (known != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        encode = reinterpret_cast<Encode>(found);
    }
    uint32_t const steps[5] = {1, 1, 1, 1, 1};
    CUresult const code =
        encode(map, type, rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace rlspec
