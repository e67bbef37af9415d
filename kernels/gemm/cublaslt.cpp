#include <ATen/Context.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <cublasLt.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernels/gemm/gemm.h"

namespace qshard {
namespace {

constexpr size_t kWorkspaceBytes = 32u << 20;  // NVIDIA's recommendation for Hopper
constexpr size_t kMaxPlans = 4096;             // ragged token counts make new ones

// Timing its candidates takes up to 70 ms or 32 runs of a GEMM: for those large enough to gain by
// it, and not for ever new token counts.
constexpr int kCandidates = 8;
constexpr int kTimedRounds = 2;
constexpr float kBurstMilliseconds = 4.f;
constexpr float kFarBehind = 1.25f;
constexpr double kMinTunedMultiplies = 1ull << 32;
constexpr int kMaxTunedPlans = 256;
constexpr float kClearlyFaster = 0.97f;

void check(cublasStatus_t status, const char* call) {
  TORCH_CHECK(status == CUBLAS_STATUS_SUCCESS, "cuBLASLt: ", cublasLtGetStatusString(status),
              " in ", call);
}
#define QSHARD_CUBLAS_CHECK(call) check(call, #call)

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kFloat8E4M3:
      return CUDA_R_8F_E4M3;
    case DType::kFloat8E5M2:
      return CUDA_R_8F_E5M2;
    case DType::kFloat4E2M1:
      return CUDA_R_4F_E2M1;
    case DType::kFloat8E8M0:  // of scales, whose layout has a mode of its own
      break;
  }
  TORCH_CHECK(false, "qshard: unknown dtype");
}

cublasLtMatmulMatrixScale_t cublas_scale_mode(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kRow:
      return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case ScaleMode::kBlock1x128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::kBlock128x128:
      return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
    case ScaleMode::kBlock1x32:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScaleMode::kBlock1x16:
      return CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3;
    case ScaleMode::kTensor:
      break;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

int64_t codes_per_row(const ScaledOperand& operand) {
  return operand.dtype == DType::kFloat4E2M1 ? 2 * operand.ld : operand.ld;
}

uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256u;
  return static_cast<uint32_t>(address & (~address + 1));
}

// Steps of the epilogue that change a product before it is written.
enum class Epilogue : uint8_t { kNone, kBias, kAdded };

Epilogue epilogue_of(const ScaledGemm& gemm) {
  if (gemm.added != nullptr) return Epilogue::kAdded;
  return gemm.bias != nullptr ? Epilogue::kBias : Epilogue::kNone;
}

/// What cuBLASLt calls C; read if something is added.
const void* c_of(const ScaledGemm& gemm) { return gemm.added != nullptr ? gemm.added : gemm.out; }

// Everything the choice of an algorithm depends on; compared and hashed as bytes.
struct PlanKey {
  int64_t rows_a, rows_b, k, ld_a, ld_b;
  uint32_t align_a, align_b, align_out;
  int32_t device;
  DType dtype_a, dtype_b, dtype_out;
  ScaleMode scale_a, scale_b;
  Epilogue epilogue;
  bool fast_accumulate, device_alpha;

  bool operator==(const PlanKey& other) const {
    return std::memcmp(this, &other, sizeof(*this)) == 0;
  }
};
static_assert(sizeof(PlanKey) == 5 * 8 + 4 * 4 + 8, "no padding: the key is hashed as bytes");

struct PlanHash {
  size_t operator()(const PlanKey& key) const {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(&key), sizeof(key)});
  }
};

// cuBLASLt is column-major: our row-major out (a.rows, b.rows) is its D (b.rows x a.rows), so its A
// is our b. FP8 on Hopper and FP4 take A transposed and B not, which is both operands with k
// contiguous.
struct Descriptors {
  cublasLtMatmulDescOpaque_t matmul;
  cublasLtMatrixLayoutOpaque_t a, b, d;

  explicit Descriptors(const ScaledGemm& gemm) {
    QSHARD_CUBLAS_CHECK(cublasLtMatmulDescInit(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_TRANSB, CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, static_cast<int8_t>(gemm.fast_accumulate));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, cublas_scale_mode(gemm.b.scale_mode));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, cublas_scale_mode(gemm.a.scale_mode));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, gemm.b.scale_inv);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, gemm.a.scale_inv);
    if (gemm.alpha_zero != nullptr) {
      set(CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    }
    if (gemm.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, gemm.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, cuda_type(gemm.out_dtype));
    }
    QSHARD_CUBLAS_CHECK(cublasLtMatrixLayoutInit(&a, cuda_type(gemm.b.dtype), gemm.k, gemm.b.rows,
                                                 codes_per_row(gemm.b)));
    QSHARD_CUBLAS_CHECK(cublasLtMatrixLayoutInit(&b, cuda_type(gemm.a.dtype), gemm.k, gemm.a.rows,
                                                 codes_per_row(gemm.a)));
    QSHARD_CUBLAS_CHECK(cublasLtMatrixLayoutInit(&d, cuda_type(gemm.out_dtype), gemm.b.rows,
                                                 gemm.a.rows, gemm.b.rows));
  }

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    QSHARD_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&matmul, attribute, &value, sizeof(value)));
  }
};

using Algorithms = std::vector<cublasLtMatmulAlgo_t>;

// What cuBLASLt offers for a key, its own favourite first; empty if it has no kernel.
Algorithms find_algorithms(cublasLtHandle_t handle, const PlanKey& key, Descriptors& descriptors) {
  cublasLtMatmulPreferenceOpaque_t preference;
  QSHARD_CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    QSHARD_CUBLAS_CHECK(
        cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspaceBytes));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_b);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_a);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_out);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_out);
  cublasLtMatmulHeuristicResult_t results[kCandidates] = {};
  int found = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
      handle, &descriptors.matmul, &descriptors.a, &descriptors.b, &descriptors.d, &descriptors.d,
      &preference, kCandidates, results, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
      status == CUBLAS_STATUS_ARCH_MISMATCH) {
    return {};
  }
  QSHARD_CUBLAS_CHECK(status);
  Algorithms algorithms;
  for (int i = 0; i < found; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(results[i].algo);
  }
  return algorithms;
}

// One GEMM with all that its algorithms need.
struct Launch {
  cublasLtHandle_t handle;
  const ScaledGemm& gemm;
  Descriptors& descriptors;
  void* workspace;
  c10::cuda::CUDAStream stream;

  // NOT_SUPPORTED: nothing was launched.
  cublasStatus_t operator()(const cublasLtMatmulAlgo_t& algorithm) const {
    static constexpr float kOneZero[] = {1.f, 0.f};
    const float* alpha = gemm.alpha_zero != nullptr ? gemm.alpha_zero : kOneZero;
    const float* beta = gemm.added != nullptr ? kOneZero : alpha + 1;
    return cublasLtMatmul(handle, &descriptors.matmul, alpha, gemm.b.codes, &descriptors.a,
                          gemm.a.codes, &descriptors.b, beta, c_of(gemm), &descriptors.d, gemm.out,
                          &descriptors.d, &algorithm, workspace, kWorkspaceBytes, stream);
  }
};

// Milliseconds of `count` runs back to back on the device, infinity if the algorithm refuses.
float time_of(const Launch& launch, const cublasLtMatmulAlgo_t& algorithm, int count) {
  at::cuda::CUDAEvent start(cudaEventDefault);
  at::cuda::CUDAEvent stop(cudaEventDefault);
  start.record(launch.stream);
  for (int i = 0; i < count; ++i) {
    if (launch(algorithm) != CUBLAS_STATUS_SUCCESS) return std::numeric_limits<float>::infinity();
  }
  stop.record(launch.stream);
  stop.synchronize();
  return start.elapsed_time(stop);
}

// The fastest of several algorithms, cuBLASLt's favourite unless another is clearly faster. In
// bursts that last, as training does: one run alone sees a clock that rises or falls, and at the
// power limit the algorithm that takes the least energy is the fastest. Bursts take turns; runs
// before them warm up and leave out what is far behind.
cublasLtMatmulAlgo_t fastest(const Algorithms& algorithms, const Launch& launch) {
  std::vector<float> alone(algorithms.size(), std::numeric_limits<float>::infinity());
  for (int round = 0; round < 2; ++round) {
    for (size_t i = 0; i < algorithms.size(); ++i) alone[i] = time_of(launch, algorithms[i], 1);
  }
  const float least = *std::min_element(alone.begin(), alone.end());
  if (!std::isfinite(least)) return algorithms[0];
  const int count =
      std::clamp(static_cast<int>(kBurstMilliseconds / std::max(least, 1e-3f)), 2, 256);
  std::vector<float> sums(algorithms.size(), 0.f);
  for (int round = 0; round < kTimedRounds; ++round) {
    for (size_t i = 0; i < algorithms.size(); ++i) {
      sums[i] += i == 0 || alone[i] < kFarBehind * least ? time_of(launch, algorithms[i], count)
                                                         : std::numeric_limits<float>::infinity();
    }
  }
  const auto winner = std::min_element(sums.begin(), sums.end());
  return algorithms[*winner < kClearlyFaster * sums[0] ? winner - sums.begin() : 0];
}

// The host waits while algorithms are timed, which a capture forbids; and a user who
// asks for deterministic algorithms wants the same one in every run.
bool may_tune(const ScaledGemm& gemm) {
  const double multiplies = static_cast<double>(gemm.a.rows) * gemm.b.rows * gemm.k;
  if (multiplies < kMinTunedMultiplies || at::globalContext().deterministicAlgorithms()) {
    return false;
  }
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
}

// The same for a GEMM that adds to its own output: there, each timed run would add once more.
cublasLtMatmulAlgo_t fastest_on_scratch(const Algorithms& algorithms, const Launch& launch) {
  ScaledGemm gemm = launch.gemm;
  const auto scratch = c10::cuda::CUDACachingAllocator::get()->allocate(gemm.a.rows * gemm.b.rows *
                                                                        value_size(gemm.out_dtype));
  gemm.out = scratch.get();
  gemm.added = gemm.out;
  return fastest(algorithms,
                 {launch.handle, gemm, launch.descriptors, launch.workspace, launch.stream});
}

struct Plan {
  std::shared_ptr<const Algorithms> algorithms;  // one once tuned; none: no kernel
  bool is_tuned = false;                         // or another thread tunes it
};

// The plans of this process; backward runs in threads of its own.
class PlanCache {
 public:
  /// The plan of a key, made by make() the first time; and whether the caller is to tune it.
  template <typename Make>
  std::pair<Plan, bool> find(const PlanKey& key, bool may_be_tuned, const Make& make) {
    const std::lock_guard lock(mutex_);
    auto found = plans_.find(key);
    if (found == plans_.end()) {
      if (plans_.size() >= kMaxPlans) {
        plans_.clear();
        tuned_ = 0;
      }
      auto algorithms = std::make_shared<const Algorithms>(make());
      const bool has_choice = algorithms->size() > 1;
      found = plans_.emplace(key, Plan{std::move(algorithms), !has_choice}).first;
    }
    Plan& plan = found->second;
    const bool tunes = may_be_tuned && !plan.is_tuned && tuned_ < kMaxTunedPlans;
    if (tunes) {
      plan.is_tuned = true;  // others run cuBLASLt's favourite meanwhile
      ++tuned_;
    }
    return {plan, tunes};
  }

  void set_tuned(const PlanKey& key, std::shared_ptr<const Algorithms> algorithms) {
    const std::lock_guard lock(mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) found->second.algorithms = std::move(algorithms);
  }

 private:
  std::mutex mutex_;
  std::unordered_map<PlanKey, Plan, PlanHash> plans_;
  int tuned_ = 0;  // of them
};

std::shared_ptr<const Algorithms> choose_algorithms(const PlanKey& key, const Launch& launch) {
  static PlanCache cache;
  auto [plan, tunes] = cache.find(key, may_tune(launch.gemm), [&] {
    return find_algorithms(launch.handle, key, launch.descriptors);
  });
  if (!tunes) return plan.algorithms;
  const auto tuned = std::make_shared<const Algorithms>(
      1, launch.gemm.added == launch.gemm.out ? fastest_on_scratch(*plan.algorithms, launch)
                                              : fastest(*plan.algorithms, launch));
  cache.set_tuned(key, tuned);
  return tuned;
}

}  // namespace

bool scaled_gemm(const ScaledGemm& gemm) {
  if (gemm.a.rows == 0 || gemm.b.rows == 0) return true;
  TORCH_CHECK(gemm.added == nullptr || (gemm.bias == nullptr && gemm.alpha_zero == nullptr),
              "qshard: a GEMM that adds something takes neither a bias nor an alpha");
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  const PlanKey key{gemm.a.rows,
                    gemm.b.rows,
                    gemm.k,
                    gemm.a.ld,
                    gemm.b.ld,
                    alignment_of(gemm.a.codes),
                    alignment_of(gemm.b.codes),
                    std::min(alignment_of(gemm.out), alignment_of(c_of(gemm))),
                    stream.device_index(),
                    gemm.a.dtype,
                    gemm.b.dtype,
                    gemm.out_dtype,
                    gemm.a.scale_mode,
                    gemm.b.scale_mode,
                    epilogue_of(gemm),
                    gemm.fast_accumulate,
                    gemm.alpha_zero != nullptr};
  Descriptors descriptors(gemm);
  const auto workspace = c10::cuda::CUDACachingAllocator::get()->allocate(kWorkspaceBytes);
  const Launch launch{handle, gemm, descriptors, workspace.get(), stream};
  // Some algorithms are found not to be supported only when they are launched.
  const auto algorithms = choose_algorithms(key, launch);
  for (const auto& algorithm : *algorithms) {
    const cublasStatus_t status = launch(algorithm);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) continue;
    check(status, "cublasLtMatmul");
    return true;
  }
  return false;
}

}  // namespace qshard
