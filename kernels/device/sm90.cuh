// Hopper's own instructions: barriers in shared memory, bulk tensor copies, warpgroup products.
//
// The PTX manual describes them under mbarrier, cp.async.bulk.tensor and wgmma. Only code for
// sm_90a may use them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace qshard::cuda::sm90 {

/// The address of shared memory, the same for all lanes as far as the compiler knows: it then keeps
/// what depends on it in uniform registers, and computes it once.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  return __shfl_sync(0xffffffffu, address, 0);
}

__device__ __forceinline__ float load_shared(uint32_t at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t at) {
  float2 pair;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(pair.x), "=f"(pair.y)
               : "r"(at)
               : "memory");
  return pair;
}
__device__ __forceinline__ int4 load_shared_words(uint32_t at) {
  int4 words;
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(at)
               : "memory");
  return words;
}
__device__ __forceinline__ void store_shared_words(uint32_t at, int4 words) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words.x), "r"(words.y),
               "r"(words.z), "r"(words.w)
               : "memory");
}

/// Four matrices of 8 rows of 16 bytes, as elements of two bytes: each transposed. Lanes give rows'
/// addresses, 8 lanes those of one matrix; lane i holds elements 2i % 8 and the next of row i / 4.
__device__ __forceinline__ void load_transposed(uint32_t (&words)[4], uint32_t row_at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(row_at)
               : "memory");
}
/// Four such matrices as lanes hold them, not transposed.
__device__ __forceinline__ void store_matrices(uint32_t row_at, const uint32_t (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_at),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// ----------------------------------------------------------------------------------- barriers

/// By its address in shared memory, 8 bytes. A phase of it ends when `count` threads have arrived
/// and all bytes expected have come.
struct Barrier {
  uint32_t at;

  __device__ void init(uint32_t count) const {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count));
  }
  __device__ void arrive() const {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
  }
  __device__ void arrive_and_expect(uint32_t bytes) const {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
                 : "memory");
  }
  /// Whether the phase of this parity has ended.
  __device__ bool has_ended(uint32_t parity) const {
    uint32_t ended;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(ended)
        : "r"(at), "r"(parity)
        : "memory");
    return ended != 0;
  }
  /// Until the phase of this parity has ended. An acquire as wide as the cluster would empty L1,
  /// and what is waited for, copies and reads that ended, needs none.
  __device__ void wait(uint32_t parity) const {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(at),
        "r"(parity)
        : "memory");
  }
};

/// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ------------------------------------------------------------------------------------- copies

/// Copies the map's box at (column, row) to shared memory; `barrier` counts the bytes.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int32_t column,
                                          int32_t row, Barrier barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier.at)
      : "memory");
}

/// The same of a map of matrices.
__device__ __forceinline__ void copy_tile(uint32_t to, const CUtensorMap& map, int32_t column,
                                          int32_t row, int32_t matrix, Barrier barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(matrix), "r"(barrier.at)
      : "memory");
}

// ----------------------------------------------------------------------------------- products

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// Describes rows of 128 bytes in shared memory, as copies with a swizzle of 128 bytes leave them:
/// 8 rows of one pattern take 1024 bytes, to which the first row is aligned. `at` counts in 16
/// bytes, and may be that of a row's later bytes.
__device__ __forceinline__ uint64_t swizzled_rows(uint32_t at) {
  constexpr uint32_t kPattern = 1u << 30 | 1024 >> 4;
  return static_cast<uint64_t>(kPattern) << 32 | at;
}

constexpr int kProductRows = 64;
constexpr int kProductColumns = 128;
constexpr int kProductDepth = 32;  // bytes of each operand's row
constexpr int kSums = 64;          // how many a thread holds

#define QSHARD_EIGHT_SUMS(i)                                                                 \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3]), "+f"(sums[i + 4]), \
      "+f"(sums[i + 5]), "+f"(sums[i + 6]), "+f"(sums[i + 7])
#define QSHARD_ALL_SUMS                                                                     \
  QSHARD_EIGHT_SUMS(0), QSHARD_EIGHT_SUMS(8), QSHARD_EIGHT_SUMS(16), QSHARD_EIGHT_SUMS(24), \
      QSHARD_EIGHT_SUMS(32), QSHARD_EIGHT_SUMS(40), QSHARD_EIGHT_SUMS(48), QSHARD_EIGHT_SUMS(56)

/// Lets products read what this thread stored in shared memory.
__device__ __forceinline__ void publish_stores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/// Before products that the warpgroup starts.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

#define QSHARD_START_PRODUCT(codes)                                                       \
  asm volatile(                                                                           \
      "{\n.reg .pred adds;\n"                                                             \
      "setp.ne.b32 adds, %66, 0;\n"                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k32.f32." codes                                \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "%64, %65, adds, 1, 1;\n}"                                                          \
      : QSHARD_ALL_SUMS                                                                   \
      : "l"(a), "l"(b), "r"(adds))

/// Starts sums (64, 128) = a (64, 32) b (128, 32)^T, `adds` to them or not. b is of E4M3, a of E5M2
/// or E4M3.
template <bool kWideA>
__device__ __forceinline__ void start_product(float (&sums)[kSums], uint64_t a, uint64_t b,
                                              int adds) {
  if constexpr (kWideA) {
    QSHARD_START_PRODUCT("e5m2.e4m3");
  } else {
    QSHARD_START_PRODUCT("e4m3.e4m3");
  }
}
#undef QSHARD_START_PRODUCT

/// Until all products committed are in `sums`: names them, lest the compiler read them before; and
/// `later` two, lest it wait for those before it starts the products.
__device__ __forceinline__ void finish_products(float (&sums)[kSums], float (&later)[2]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;"
               : QSHARD_ALL_SUMS, "+f"(later[0]), "+f"(later[1])::"memory");
}

#undef QSHARD_ALL_SUMS
#undef QSHARD_EIGHT_SUMS

}  // namespace qshard::cuda::sm90
