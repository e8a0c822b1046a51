// What every launcher needs: the names of errors, one way to pass them on, kernels that start behind one another
// without a gap, and descriptors for the copy engine (TMA).
//
// A launcher is extern "C", takes pointers, int64_t sizes, float numbers and at its end a stream, checks every code
// that CUDA returns with RLSPEC_TRY, and returns the error of its launches. rlspec/device/native.py calls it. Kernels
// live in namespace rlspec.

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

// ---- one kernel behind the other ----
// A kernel that is launched with `launch_behind` may start while the one before it in the stream is still at work, so
// that the way to its first instruction is gone by when that one ends. Behind `wait_for_previous` all earlier kernels
// of the stream have ended, and what they wrote is there. Every thread that touches memory calls it: a kernel that
// could end without would let the next one run beside the one before. Nothing is written before it, and read is only
// what no kernel that may still be at work writes.
//
// `next_may_start`, called by any thread of each block: now the next kernel may start; without it, when this one has
// ended. There are two ways to know what is safe to read ahead of one's turn. A kernel without `next_may_start`, as
// `gather` in embedding.cu is, is one that nothing overtakes: when a later kernel starts, whatever was written before
// that one is there, and so `lean` in det_gemm.cu reads weights where it is told to. A kernel that calls it behind its
// own `wait_for_previous` lets the next one start when what was written before it is there, and so the fold of
// attention reads the table that the kernel before it read.

__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void next_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Into the cache of the device, where no write of another kernel can make it stale: may be asked for before one's turn.
__device__ __forceinline__ void fetch_ahead(void const* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// What a kernel begins with that has nothing to do before its turn.
__device__ __forceinline__ void in_turn() {
    next_may_start();
    wait_for_previous();
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_behind(void (*kernel)(Parameters...), dim3 blocks, int64_t threads, size_t shared,
                          cudaStream_t stream, Arguments... arguments) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    RLSPEC_TRY(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
    return cudaGetLastError();
}

// ---- tensor memory access ----

// A descriptor for tiles of a tensor of `rank` dimensions, the fastest first; `strides` in bytes, of all but the
// fastest. Places outside the tensor read as zero. The driver is asked for the encoder, so nothing is linked with
// libcuda.
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
        RLSPEC_TRY(
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &known));
        if (known != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        encode = reinterpret_cast<Encode>(found);
    }
    uint32_t const steps[5] = {1, 1, 1, 1, 1};
    // The driver describes tensors in the context of the thread, and a thread of autograd may not have one yet.
    int device = 0;
    RLSPEC_TRY(cudaGetDevice(&device));
    RLSPEC_TRY(cudaSetDevice(device));
    CUresult const code =
        encode(map, type, rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace rlspec
