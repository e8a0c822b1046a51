// Hopper's own instructions, one small function each: barriers in shared memory, the tensor memory accelerator (TMA),
// the warpgroup matrix unit (wgmma), and the descriptors that both read. For sm_90a only.
//
// Tiles in shared memory. A tile is stored in rows of 128 bytes (64 elements of 16 bits), swizzled as TMA writes it
// with CU_TENSOR_MAP_SWIZZLE_128B, and starts at a multiple of 1024 bytes; a wider tile is several such columns of 64
// elements, one after the other. An operand of the matrix unit is one of
//   K-major   the reduced index runs along the 128 bytes: [rows of M or N][64 of K]. Next 16 of K: 32 bytes further.
//   MN-major  M or N runs along the 128 bytes: [rows of K][64 of M or N], one block of rows for each 64 of M or N.
//             Next 16 of K: 16 rows, 2048 bytes further. No transposed copy is made.
//
// Fragments of wgmma, of thread t of the 128 of a warpgroup: row r = 16·(t/32) + (t%32)/4, column c = 2·(t%4).
//   D[64, N]   d[4·j + 0], d[4·j + 1] at (r, 8·j + c), (r, 8·j + c + 1); d[4·j + 2], d[4·j + 3] the same of row r + 8
//   A[64, 16]  a[0] (r, c..c+1), a[1] (r + 8, c..c+1), a[2] (r, c + 8..c + 9), a[3] (r + 8, c + 8..c + 9); low half
//              first
//
// Source: PTX ISA 8.x, sections on mbarrier, cp.async.bulk.tensor, wgmma, setmaxnreg.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "launch.cuh"

namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- barriers in shared memory ----
// A phase ends when all arrivals and all expected bytes have come. wait(parity) returns when the phase of that parity
// has ended; a fresh barrier is in phase 0, so wait(1) returns at once.

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// After all barrier_init of a thread: shows them to TMA.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// For `arrivals` at once.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}

// Arrives, and lets the phase wait for `bytes` more bytes of TMA.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ bool barrier_test(uint64_t* barrier, uint32_t parity) {
    uint32_t ended;
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
    return ended != 0;
}

__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    while (!barrier_test(barrier, parity)) {
    }
}

// Hardware barrier `id` (1 to 15; 0 is __syncthreads) among `threads` threads.
__device__ __forceinline__ void group_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- registers ----

// A whole warpgroup hands registers back (down to N a thread), or waits until it has N.
template <int N>
__device__ __forceinline__ void registers_shrink() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void registers_grow() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- tensor memory accelerator ----
// One thread issues. Coordinates count elements, innermost first; what lies outside the tensor (negative too) is read
// as zeros, and not written. A load always counts the bytes of the whole box on its barrier.

__device__ __forceinline__ void map_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1)
        : "memory");
}

// Of what is read once: it is the first to leave the cache.
__device__ __forceinline__ void tma_load_once(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1) {
    constexpr uint64_t evict_first = 0x12f0000000000000;  // as createpolicy.fractional.L2::evict_first makes it
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "l"(evict_first)
        : "memory");
}

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
            "r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2)
        : "memory");
}

__device__ __forceinline__ void tma_load(
    void* to, const CUtensorMap* map, uint64_t* barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(c0), "r"(c1)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, const void* from, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(shared_address(from)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most N committed stores of this thread still read shared memory.
template <int N>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// At most N committed stores of this thread are not yet in global memory.
template <int N>
__device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Each thread that wrote shared memory by ordinary stores, before the barrier behind which TMA or wgmma reads it.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warpgroup matrix unit ----

constexpr uint64_t SWIZZLE_128 = 1ull << 62;

// Next 16 of K: + K_STEP; 64 rows further: + 64 · 128 / 16.
__device__ __forceinline__ uint64_t k_major(const void* tile) {
    constexpr uint64_t of_8_rows = 1024 / 16;
    return SWIZZLE_128 | of_8_rows << 32 | 1ull << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}
constexpr uint64_t K_STEP = 32 / 16;

// `block`: bytes from one 64 of M or N to the next. Next 16 of K: + MN_STEP.
__device__ __forceinline__ uint64_t mn_major(const void* tile, uint32_t block) {
    constexpr uint64_t of_8_rows = 1024 / 16;
    const uint64_t apart = block >> 4;
    return SWIZZLE_128 | of_8_rows << 32 | apart << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}
constexpr uint64_t MN_STEP = 2048 / 16;

// Before the first product of a batch, and whenever registers of D or A were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// At most N committed batches are unfinished.
template <int N>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// The compiler may not move reads and writes of these registers across this place.
template <int N>
__device__ __forceinline__ void registers_fence(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

enum Major { K_MAJOR = 0, MN_MAJOR = 1 };

// D[64, N] = A[64, 16] · B[N, 16]ᵀ + (more ? D : 0), fp32. Element: __nv_bfloat16 or __half.
// N: 8 16 24 32 48 64 96 128 192 256.
//   Wgmma<Element, N, major of A, major of B>::both(d, descriptor of A, descriptor of B, more)
//   Wgmma<Element, N, K_MAJOR, major of B>::left(d, fragments of A, descriptor of B, more)
template <typename Element, int N, Major A = K_MAJOR, Major B = K_MAJOR>
struct Wgmma;

// Lists of ten operands: "%50, %51, ... %59," and "+f"(d[50]), ... by their tens digit(s), and shorter ones for the
// end.
#define TEN_NAMES(t) "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define TEN_VALUES(t)                                                                                               \
    "+f"(d[t + 0]), "+f"(d[t + 1]), "+f"(d[t + 2]), "+f"(d[t + 3]), "+f"(d[t + 4]), "+f"(d[t + 5]), "+f"(d[t + 6]), \
        "+f"(d[t + 7]), "+f"(d[t + 8]), "+f"(d[t + 9])
#define TWO_NAMES(t) "%" #t "0,%" #t "1"
#define FOUR_NAMES(t) TWO_NAMES(t) ",%" #t "2,%" #t "3"
#define SIX_NAMES(t) FOUR_NAMES(t) ",%" #t "4,%" #t "5"
#define EIGHT_NAMES(t) SIX_NAMES(t) ",%" #t "6,%" #t "7"
#define TWO_VALUES(t) "+f"(d[t]), "+f"(d[t + 1])
#define FOUR_VALUES(t) TWO_VALUES(t), TWO_VALUES(t + 2)
#define SIX_VALUES(t) FOUR_VALUES(t), TWO_VALUES(t + 4)
#define EIGHT_VALUES(t) FOUR_VALUES(t), FOUR_VALUES(t + 4)

#define TENS_2 TEN_NAMES() TEN_NAMES(1)
#define TENS_4 TENS_2 TEN_NAMES(2) TEN_NAMES(3)
#define TENS_6 TENS_4 TEN_NAMES(4) TEN_NAMES(5)
#define TENS_8 TENS_6 TEN_NAMES(6) TEN_NAMES(7)
#define VALUES_2 TEN_VALUES(0), TEN_VALUES(10)
#define VALUES_4 VALUES_2, TEN_VALUES(20), TEN_VALUES(30)
#define VALUES_6 VALUES_4, TEN_VALUES(40), TEN_VALUES(50)
#define VALUES_8 VALUES_6, TEN_VALUES(60), TEN_VALUES(70)

#define VALUES(...) __VA_ARGS__
// P0 to P6: names of the operands that follow the accumulators.
#define WGMMA(ELEMENT, TYPE, COLUMNS, NAMES, VALUES_OF_D, P0, P1, P2, P3, P4, P5, P6)                                  \
    template <Major A, Major B>                                                                                        \
    struct Wgmma<ELEMENT, COLUMNS, A, B> {                                                                             \
        static __device__ __forceinline__ void both(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, int more) {      \
            asm volatile(                                                                                              \
                "{\n.reg .pred more;\nsetp.ne.b32 more, " P2 ", 0;\n"                                                  \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES "}, " P0 ", " P1      \
                ", more, 1, 1, " P3 ", " P4 ";\n}"                                                                     \
                : VALUES_OF_D                                                                                          \
                : "l"(a), "l"(b), "r"(more), "n"(int(A)), "n"(int(B)));                                                \
        }                                                                                                              \
        static __device__ __forceinline__ void left(                                                                   \
            float (&d)[COLUMNS / 2], const uint32_t (&a)[4], uint64_t b, int more) {                                   \
            static_assert(A == K_MAJOR, "fragments in registers are K-major");                                         \
            asm volatile(                                                                                              \
                "{\n.reg .pred more;\nsetp.ne.b32 more, " P5 ", 0;\n"                                                  \
                "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" NAMES "}, {" P0 "," P1 ","  \
                P2 "," P3 "}, " P4 ", more, 1, 1, " P6 ";\n}"                                                          \
                : VALUES_OF_D                                                                                          \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more), "n"(int(B)));                         \
        }                                                                                                              \
    }

// The names of the tens are pasted behind a "%", so 0 to 9 have an empty one.
#define WGMMA_ALL(ELEMENT, TYPE)                                                                                       \
    WGMMA(ELEMENT, TYPE, 8, FOUR_NAMES(), VALUES(FOUR_VALUES(0)), "%4", "%5", "%6", "%7", "%8", "%9", "%10");          \
    WGMMA(ELEMENT, TYPE, 16, EIGHT_NAMES(), VALUES(EIGHT_VALUES(0)), "%8", "%9", "%10", "%11", "%12", "%13", "%14");   \
    WGMMA(ELEMENT, TYPE, 24, TEN_NAMES() TWO_NAMES(1), VALUES(TEN_VALUES(0), TWO_VALUES(10)), "%12", "%13", "%14",     \
          "%15", "%16", "%17", "%18");                                                                                 \
    WGMMA(ELEMENT, TYPE, 32, TEN_NAMES() SIX_NAMES(1), VALUES(TEN_VALUES(0), SIX_VALUES(10)), "%16", "%17", "%18",     \
          "%19", "%20", "%21", "%22");                                                                                 \
    WGMMA(ELEMENT, TYPE, 48, TENS_2 FOUR_NAMES(2), VALUES(VALUES_2, FOUR_VALUES(20)), "%24", "%25", "%26", "%27",      \
          "%28", "%29", "%30");                                                                                        \
    WGMMA(ELEMENT, TYPE, 64, TENS_2 TEN_NAMES(2) TWO_NAMES(3), VALUES(VALUES_2, TEN_VALUES(20), TWO_VALUES(30)),       \
          "%32", "%33", "%34", "%35", "%36", "%37", "%38");                                                            \
    WGMMA(ELEMENT, TYPE, 96, TENS_4 EIGHT_NAMES(4), VALUES(VALUES_4, EIGHT_VALUES(40)), "%48", "%49", "%50", "%51",    \
          "%52", "%53", "%54");                                                                                        \
    WGMMA(ELEMENT, TYPE, 128, TENS_6 FOUR_NAMES(6), VALUES(VALUES_6, FOUR_VALUES(60)), "%64", "%65", "%66", "%67",     \
          "%68", "%69", "%70");                                                                                        \
    WGMMA(ELEMENT, TYPE, 192, TENS_8 TEN_NAMES(8) SIX_NAMES(9), VALUES(VALUES_8, TEN_VALUES(80), SIX_VALUES(90)),      \
          "%96", "%97", "%98", "%99", "%100", "%101", "%102");                                                         \
    WGMMA(ELEMENT, TYPE, 256, TENS_8 TEN_NAMES(8) TEN_NAMES(9) TEN_NAMES(10) TEN_NAMES(11) EIGHT_NAMES(12),            \
          VALUES(VALUES_8, TEN_VALUES(80), TEN_VALUES(90), TEN_VALUES(100), TEN_VALUES(110), EIGHT_VALUES(120)),       \
          "%128", "%129", "%130", "%131", "%132", "%133", "%134")

WGMMA_ALL(__nv_bfloat16, "bf16");
WGMMA_ALL(__half, "f16");

// ---- elements ----

// Two fp32 rounded to nearest even into one register, the first in the low half: the order of a fragment of A.
__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
}

__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
}

template <typename Element>
constexpr CUtensorMapDataType map_type();
template <>
constexpr CUtensorMapDataType map_type<__nv_bfloat16>() {
    return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}
template <>
constexpr CUtensorMapDataType map_type<__half>() {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
}
template <>
constexpr CUtensorMapDataType map_type<float>() {
    return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

// ---- host ----

// Describes a tensor to TMA: sizes and box in elements and strides in bytes, innermost first; strides[0] belongs to
// dimension 1 (dimension 0 is dense). Base and strides are multiples of 16 bytes. cudaErrorInvalidValue if it is
// refused.
inline cudaError_t map_tensor(
    CUtensorMap* map, CUtensorMapDataType type, int dimensions, const void* base, const uint64_t* sizes,
    const uint64_t* strides, const uint32_t* box, CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    return rlspec::encode_tiled(map, type, static_cast<uint32_t>(dimensions), base, sizes, strides, box, swizzle,
                                promotion);
}

// [rows, columns], `stride` elements from row to row, read or written in boxes of box_rows × box_columns.
template <typename Element>
cudaError_t map_matrix(
    CUtensorMap* map, const Element* base, int64_t rows, int64_t columns, int64_t stride, int box_rows, int box_columns,
    CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B,
    CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
    const uint64_t sizes[2] = {static_cast<uint64_t>(columns), static_cast<uint64_t>(rows)};
    const uint64_t strides[1] = {static_cast<uint64_t>(stride) * sizeof(Element)};
    const uint32_t box[2] = {static_cast<uint32_t>(box_columns), static_cast<uint32_t>(box_rows)};
    return map_tensor(map, map_type<Element>(), 2, base, sizes, strides, box, swizzle, promotion);
}

}  // namespace hopper

#undef TEN_NAMES
#undef TEN_VALUES
#undef TWO_NAMES
#undef FOUR_NAMES
#undef SIX_NAMES
#undef EIGHT_NAMES
#undef TWO_VALUES
#undef FOUR_VALUES
#undef SIX_VALUES
#undef EIGHT_VALUES
#undef TENS_2
#undef TENS_4
#undef TENS_6
#undef TENS_8
#undef VALUES_2
#undef VALUES_4
#undef VALUES_6
#undef VALUES_8
#undef VALUES
#undef WGMMA
#undef WGMMA_ALL
