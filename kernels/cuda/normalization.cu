// Normalization of rows: some lanes of a CUDA block hold a row in registers, read once and written
// once. Backward's blocks take rows until none are left, and add up gamma's gradient on the way.
#include <algorithm>
#include <bit>

#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/vector_codes.cuh"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 256;  // of a CUDA block, unless a row takes more
constexpr int kMaxThreads = 1024;
constexpr int kVectors = 2;            // of a row, that a thread holds
constexpr int kMultiprocessors = 132;  // an H200's; elsewhere some wait, or a turn is shorter
constexpr int kBlocksAtOnce = 3;       // of kThreads

/// Threads of a row: a power of two of a warp's, or whole warps, which share memory.
template <int kBlockThreads>
class Lanes {
 public:
  using Shared = float[2][2][kBlockThreads / 32];

  __device__ explicit Lanes(Shared& shared) : shared_(shared) {}

  /// Sums over a row's lanes, for each of them. All threads of the block take part.
  template <int kCount>
  __device__ void sum(float (&x)[kCount]) {
#pragma unroll
    for (float& of_lane : x) {
      for (int lane = static_cast<int>(min(blockDim.x, 32u)) / 2; lane > 0; lane /= 2) {
        of_lane += __shfl_xor_sync(0xffffffffu, of_lane, lane);
      }
    }
    if (blockDim.x <= 32) return;
    const int warps = static_cast<int>(blockDim.x / 32);
    const int first = static_cast<int>(threadIdx.y) * warps;
    // Two in turn: who writes to one has seen all threads leave it.
    turn_ ^= 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (threadIdx.x % 32 == 0) shared_[turn_][i][first + threadIdx.x / 32] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = 0.f;
      for (int warp = 0; warp < warps; ++warp) x[i] += shared_[turn_][i][first + warp];
    }
  }
  __device__ float sum(float x) {
    float one[1] = {x};
    sum(one);
    return one[0];
  }

 private:
  Shared& shared_;
  int turn_ = 0;
};

/// The first column of a thread's vector i.
template <typename Value>
__device__ __forceinline__ int column(int i) {
  const auto vector = static_cast<int>(threadIdx.x + i * blockDim.x);
  return vector * Vector<Value>::kSize;
}

/// A thread's vectors of a row; zeros where there are none.
template <typename Value>
struct RowPart {
  Vector<Value> v[kVectors];

  __device__ RowPart(const void* from, int64_t row, const NormTask& task, bool exists) {
    const auto* at = static_cast<const typename Value::Raw*>(from) + row * task.cols;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      v[i] = {};
      const int c = column<Value>(i);
      if (exists && c < task.cols) v[i] = load_vector<Value>(at + c);
    }
  }
  __device__ float value(int i, int k) const {
    return Value::load(v[i].word_of(k), k % Value::kPerWord);
  }
};

template <typename Value>
__device__ __forceinline__ void store_values(void* to, int64_t at,
                                             const float (&x)[Vector<Value>::kSize]) {
  uint4 words;
  if constexpr (Value::kPerWord == 2) {
    words = make_uint4(store2(Value{}, x[0], x[1]), store2(Value{}, x[2], x[3]),
                       store2(Value{}, x[4], x[5]), store2(Value{}, x[6], x[7]));
  } else {
    words =
        make_uint4(Value::store(x[0]), Value::store(x[1]), Value::store(x[2]), Value::store(x[3]));
  }
  store_bytes(static_cast<typename Value::Raw*>(to) + at, words);
}

/// `kSize` parameters from `at` on, in fp32.
template <int kSize>
__device__ __forceinline__ void load_parameters(const void* from, int at, DType dtype,
                                                float (&x)[kSize]) {
  if (dtype == DType::kFloat32) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
      const float4 four =
          __ldg(reinterpret_cast<const float4*>(static_cast<const float*>(from) + at + i));
      x[i] = four.x;
      x[i + 1] = four.y;
      x[i + 2] = four.z;
      x[i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    const uint2 four =
        __ldg(reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(from) + at + i));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t word = k < 2 ? four.x : four.y;
      x[i + k] =
          dtype == DType::kBFloat16 ? BFloat16::load(word, k % 2) : Float16::load(word, k % 2);
    }
  }
}

template <typename Value>
__device__ __forceinline__ void load_gamma(const NormTask& task, int at,
                                           float (&gamma)[Vector<Value>::kSize]) {
  load_parameters(task.gamma, at, task.gamma_dtype, gamma);
  if (!task.zero_centered_gamma) return;
#pragma unroll
  for (float& x : gamma) x += 1.f;
}

template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads) norm(const __grid_constant__ NormTask task) {
  constexpr int kSize = Vector<Value>::kSize;
  __shared__ typename Lanes<kBlockThreads>::Shared shared;
  Lanes<kBlockThreads> lanes(shared);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool exists = row < task.rows;
  const RowPart<Value> part(task.x, row, task, exists);
  const auto count = static_cast<float>(task.cols);
  float x[kVectors][kSize];
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      x[i][k] = part.value(i, k);
      sum += x[i][k];
    }
  }
  float mean = 0.f;
  if constexpr (!kRms) mean = lanes.sum(sum) / count;
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (column<Value>(i) >= task.cols) continue;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      if constexpr (!kRms) x[i][k] -= mean;
      squares += x[i][k] * x[i][k];
    }
  }
  const float rstd = rsqrtf(lanes.sum(squares) / count + task.eps);
  if (!exists) return;
  if (threadIdx.x == 0) {
    task.rstd[row] = rstd;
    if constexpr (!kRms) task.mean[row] = mean;
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = column<Value>(i);
    if (at >= task.cols) continue;
    float gamma[kSize];
    float beta[kSize] = {};
    load_gamma<Value>(task, at, gamma);
    if (task.beta != nullptr) load_parameters(task.beta, at, task.gamma_dtype, beta);
    float y[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) y[k] = x[i][k] * rstd * gamma[k] + beta[k];
    store_values<Value>(task.y, row * task.cols + at, y);
  }
}

template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(kBlockThreads, kBlockThreads == kThreads ? kBlocksAtOnce : 1)
    norm_backward(const __grid_constant__ NormTask task) {
  constexpr int kSize = Vector<Value>::kSize;
  __shared__ typename Lanes<kBlockThreads>::Shared shared;
  Lanes<kBlockThreads> lanes(shared);
  const auto count = static_cast<float>(task.cols);
  float grad_gamma[kVectors][kSize] = {};
  float grad_beta[kRms ? 1 : kVectors][kSize] = {};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  // As many turns for all threads of a block.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < task.rows;
       first += step) {
    const int64_t row = first + threadIdx.y;
    const bool exists = row < task.rows;
    const RowPart<Value> x(task.x, row, task, exists);
    const RowPart<Value> grad(task.grad, row, task, exists);
    const float rstd = exists ? task.rstd[row] : 0.f;
    const float mean = !kRms && exists ? task.mean[row] : 0.f;
    float normed[kVectors][kSize];  // (x - mean) * rstd
    float inner[kVectors][kSize];   // gamma * grad
    float sums[kRms ? 1 : 2] = {};  // of their products, and of inner
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column<Value>(i);
      float gamma[kSize] = {};
      if (at < task.cols) load_gamma<Value>(task, at, gamma);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const float g = grad.value(i, k);
        normed[i][k] = kRms ? x.value(i, k) * rstd : (x.value(i, k) - mean) * rstd;
        inner[i][k] = gamma[k] * g;
        grad_gamma[i][k] += g * normed[i][k];
        sums[0] += inner[i][k] * normed[i][k];
        if constexpr (!kRms) {
          grad_beta[i][k] += g;
          sums[1] += inner[i][k];
        }
      }
    }
    lanes.sum(sums);
    if (!exists) continue;
    const float along_x = sums[0] / count;
    const float along_one = kRms ? 0.f : sums[kRms ? 0 : 1] / count;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int at = column<Value>(i);
      if (at >= task.cols) continue;
      float grad_x[kSize];
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const float off = kRms ? inner[i][k] : inner[i][k] - along_one;
        grad_x[k] = rstd * (off - normed[i][k] * along_x);
      }
      store_values<Value>(task.grad_x, row * task.cols + at, grad_x);
    }
  }
  if (task.grad_gamma == nullptr) return;
  const int64_t partial = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int at = column<Value>(i);
    if (at >= task.cols) continue;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      task.grad_gamma[partial * task.cols + at + k] = grad_gamma[i][k];
      if constexpr (!kRms) task.grad_beta[partial * task.cols + at + k] = grad_beta[i][k];
    }
  }
}

dim3 block_of(const NormTask& task) {
  const int in_turn = kVectors * static_cast<int>(16 / value_size(task.dtype));
  const auto wanted = static_cast<unsigned>((task.cols + in_turn - 1) / in_turn);
  const unsigned lanes = wanted > 32 ? (wanted + 31) / 32 * 32 : std::bit_ceil(wanted);
  return dim3(lanes, std::max(1u, kThreads / lanes));
}

int backward_blocks(const NormTask& task) {
  const dim3 block = block_of(task);
  const int64_t wanted = (task.rows + block.y - 1) / block.y;
  const int at_once =
      std::clamp(kMaxThreads / static_cast<int>(block.x * block.y), 1, kBlocksAtOnce);
  return static_cast<int>(std::min<int64_t>(wanted, kMultiprocessors * at_once));
}

// run(Value{}, kRms, kBlockThreads)
template <typename Run>
cudaError_t with_types(const NormTask& task, const Run& run) {
  return with_value_type(task.dtype, [&](auto value) {
    const auto with_threads = [&](auto threads) {
      return task.mean == nullptr ? run(value, std::true_type{}, threads)
                                  : run(value, std::false_type{}, threads);
    };
    return block_of(task).x <= kThreads ? with_threads(std::integral_constant<int, kThreads>{})
                                        : with_threads(std::integral_constant<int, kMaxThreads>{});
  });
}

}  // namespace

int norm_partials(const NormTask& task) {
  return backward_blocks(task) * static_cast<int>(block_of(task).y);
}

cudaError_t launch_norm(const NormTask& task, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  const dim3 block = block_of(task);
  const auto blocks = static_cast<unsigned>((task.rows + block.y - 1) / block.y);
  return with_types(task, [&](auto value, auto rms, auto threads) {
    norm<decltype(value), rms(), threads()><<<blocks, block, 0, stream>>>(task);
    return cudaGetLastError();
  });
}

cudaError_t launch_norm_backward(const NormTask& task, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_types(task, [&](auto value, auto rms, auto threads) {
    norm_backward<decltype(value), rms(), threads()>
        <<<backward_blocks(task), block_of(task), 0, stream>>>(task);
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
