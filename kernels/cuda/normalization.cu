// Normalization of rows: some lanes of a CUDA block hold a row in registers, read once and written
// once. CUDA blocks take rows until none are left; backward's add up gamma's gradient on the way.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/normalization.cuh"

namespace qshard::cuda {
namespace {

constexpr int kMultiprocessors = 132;  // an H200's; elsewhere some wait, or a turn is shorter
constexpr int kBlocksAtOnce = 3;       // of kNormThreads

template <typename Value>
__device__ __forceinline__ void store_vector(void* to, int64_t at, const Vector<Value>& v) {
  store_bytes(static_cast<typename Value::Raw*>(to) + at,
              make_uint4(v.word[0], v.word[1], v.word[2], v.word[3]));
}

template <typename Value, int kBlockThreads>
constexpr RowCosts kValueCosts = {
    .parameters = Value::kPerWord == 1 || kBlockThreads == kNormThreads ? ParametersIn::kRegisters
                                                                        : ParametersIn::kMemory,
    .ahead_in_registers = true};

template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(
    kBlockThreads, kNormBlocksAtOnce<Value, kRms, kBlockThreads, kValueCosts<Value, kBlockThreads>>)
    norm(const __grid_constant__ NormTask task) {
  const auto store = [&](const auto& row, const auto& parameters) {
    if (!row.exists) return;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const int at = column_of<Value>(i);
      if (at >= task.cols) continue;
      store_vector(task.y, static_cast<int64_t>(row.index) * task.cols + at,
                   row.vector(i, parameters));
    }
  };
  for_rows<Value, kRms, kBlockThreads, kValueCosts<Value, kBlockThreads>>(task, task.rows, store);
}

// As many as backward_blocks() starts, but of long rows of LayerNorm, which would spill.
template <bool kRms, int kBlockThreads>
constexpr int kBackwardBlocks = kBlockThreads == kNormThreads              ? kBlocksAtOnce
                                : kBlockThreads == kLongNormThreads&& kRms ? 2
                                                                           : 1;

template <typename Value, bool kRms, int kBlockThreads, bool kAdds>
__global__ void __launch_bounds__(kBlockThreads, kBackwardBlocks<kRms, kBlockThreads>)
    norm_backward(const __grid_constant__ NormTask task) {
  constexpr int kSize = Vector<Value>::kSize;
  __shared__ typename Lanes<kBlockThreads>::Shared shared;
  Lanes<kBlockThreads> lanes(shared);
  const auto count = static_cast<float>(task.cols);
  float grad_gamma[kNormVectors][kSize] = {};
  float grad_beta[kRms ? 1 : kNormVectors][kSize] = {};
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  // Where one block is on a multiprocessor at once, which waits for its rows alone.
  constexpr bool kAhead =
      kBackwardBlocks<kRms, kBlockThreads> == 1 && kBlockThreads < kMaxNormThreads;
  using Ahead = RowsAhead<Value, 2, kAhead ? kBlockThreads : 1>;
  __shared__ typename Ahead::Shared on_their_way;
  Ahead ahead(on_their_way);
  const auto ask = [&](int64_t row) {
    ahead.ask(0, row_of<Value>(task.x, row, task), task.cols, row < task.rows);
    ahead.ask(1, row_of<Value>(task.grad, row, task), task.cols, row < task.rows);
  };
  if constexpr (kAhead) ask(static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y);
  // As many turns for all threads of a block.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.y; first < task.rows;
       first += step) {
    const int64_t row = first + threadIdx.y;
    const bool exists = row < task.rows;
    RowPart<Value> parts[2];
    if constexpr (kAhead) {
      ahead.get(parts);
      ask(row + step);
    } else {
      parts[0] = RowPart<Value>(row_of<Value>(task.x, row, task), task.cols, exists);
      parts[1] = RowPart<Value>(row_of<Value>(task.grad, row, task), task.cols, exists);
    }
    const auto& [x, grad] = parts;
    const float rstd = exists ? task.rstd[row] : 0.f;
    const float mean = !kRms && exists ? task.mean[row] : 0.f;
    float normed[kNormVectors][kSize];  // (x - mean) * rstd
    float inner[kNormVectors][kSize];   // gamma * grad
    float sums[kRms ? 1 : 2] = {};      // of their products, and of inner
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const int at = column_of<Value>(i);
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
    // On its way while the sums are.
    const RowPart<Value> added(row_of<Value>(task.added, row, task), task.cols, kAdds && exists);
    lanes.sum(sums);
    if (!exists) continue;
    const float along_x = sums[0] / count;
    const float along_one = kRms ? 0.f : sums[kRms ? 0 : 1] / count;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const int at = column_of<Value>(i);
      if (at >= task.cols) continue;
      float grad_x[kSize];
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const float off = kRms ? inner[i][k] : inner[i][k] - along_one;
        grad_x[k] = rstd * (off - normed[i][k] * along_x);
      }
      Vector<Value> rounded = vector_of<Value>(grad_x);
      if constexpr (kAdds) rounded = sum_of(rounded, added.v[i]);
      store_vector(task.grad_x, row * task.cols + at, rounded);
    }
  }
  if (task.grad_gamma == nullptr) return;
  const int64_t partial = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = column_of<Value>(i);
    if (at >= task.cols) continue;
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      task.grad_gamma[partial * task.cols + at + k] = grad_gamma[i][k];
      if constexpr (!kRms) task.grad_beta[partial * task.cols + at + k] = grad_beta[i][k];
    }
  }
}

int backward_blocks(const NormTask& task) {
  const dim3 block = norm_block(task);
  const int64_t wanted = (task.rows + block.y - 1) / block.y;
  const int at_once =
      std::clamp(kMaxNormThreads / static_cast<int>(block.x * block.y), 1, kBlocksAtOnce);
  return static_cast<int>(std::min<int64_t>(wanted, kMultiprocessors * at_once));
}

}  // namespace

int norm_partials(const NormTask& task) {
  return backward_blocks(task) * static_cast<int>(norm_block(task).y);
}

cudaError_t launch_norm(const NormTask& task, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    using Value = decltype(value);
    constexpr int kAtOnce = kNormThreadsAtOnce<Value, rms(), kValueCosts<Value, threads()>>;
    norm<Value, rms(), threads()>
        <<<norm_blocks(task, task.rows, kAtOnce), norm_block(task), 0, stream>>>(task);
    return cudaGetLastError();
  });
}

cudaError_t launch_norm_backward(const NormTask& task, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    const auto launch = [&](auto adds) {
      norm_backward<decltype(value), rms(), threads(), adds()>
          <<<backward_blocks(task), norm_block(task), 0, stream>>>(task);
      return cudaGetLastError();
    };
    return task.added != nullptr ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

}  // namespace qshard::cuda
