// Gradients of a normalization: x and the gradient of y are read once, the gradient of x is written
// once. CUDA blocks take rows until none are left, and add up the parameters' gradients on the way;
// another kernel adds up the blocks'.
#include <algorithm>

#include "kernels/norm/rows.cuh"

namespace qshard::cuda {
namespace {

constexpr int kMultiprocessors = 132;  // an H200's; elsewhere some wait, or a turn is shorter

/// Beside the sums of the parameters' gradients two rows want the registers of 512 threads.
template <int kBlockThreads>
constexpr int kBackwardRows = kThreadsAtOnce<kBlockThreads> == 512 ? 2 : 1;
template <int kBlockThreads>
constexpr int kBackwardBlocks = kThreadsAtOnce<kBlockThreads> / kBlockThreads;

/// What is read of the rows in shared memory, for the next turn, and `added` for this one.
template <typename Value, int kBlockThreads, bool kAdds>
using BackwardAhead = RowsAhead<Value, kBackwardRows<kBlockThreads>*(kAdds ? 3 : 2), kBlockThreads>;

/// A vector's contribution to a row's sums and to its columns', and the gradient made from them.
template <typename Value, bool kRms>
struct VectorGradient {
  static constexpr int kSize = Vector<Value>::kSize;

  float grad[kSize];    // of y
  float normed[kSize];  // (x - mean) * rstd
  float inner[kSize];   // gamma * grad

  __device__ VectorGradient(const Vector<Value>& x, const Vector<Value>& grads, float mean,
                            float rstd, const float (&gamma)[kSize]) {
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const float value = Value::load(x.word_of(k), k % Value::kPerWord);
      grad[k] = Value::load(grads.word_of(k), k % Value::kPerWord);
      normed[k] = __fmul_rn(kRms ? value : __fsub_rn(value, mean), rstd);
      inner[k] = __fmul_rn(gamma[k], grad[k]);
    }
  }

  /// `along_x` and `along_one`: means of inner * normed and of inner over the row.
  __device__ Vector<Value> of_x(float rstd, float along_x, float along_one) const {
    float grad_x[kSize];
#pragma unroll
    for (int k = 0; k < kSize; ++k) {
      const float off = kRms ? inner[k] : __fsub_rn(inner[k], along_one);
      grad_x[k] = __fmul_rn(rstd, __fmaf_rn(-normed[k], along_x, off));
    }
    return vector_of<Value>(grad_x);
  }
};

/// Sums of a CUDA block's rows of threads, at `to` (columns); `sums` are a thread's.
template <typename Value>
__device__ __forceinline__ void store_sums(const float (&sums)[kNormVectors][Vector<Value>::kSize],
                                           int cols, float* shared, float* to) {
  constexpr int kSize = Vector<Value>::kSize;
  const auto lanes_cols = static_cast<int>(blockDim.x) * kNormVectors * kSize;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = Columns<Value>::first(i);
    if (blockDim.y == 1) {
      if (at < cols) store_floats<kSize>(to + at, sums[i]);
    } else {
      store_floats<kSize>(shared + threadIdx.y * lanes_cols + at, sums[i]);
    }
  }
  if (blockDim.y == 1) return;
  __syncthreads();
  const auto thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const auto threads = static_cast<int>(blockDim.x * blockDim.y);
  for (int col = thread; col < cols; col += threads) {
    float sum = 0.f;
    for (unsigned y = 0; y < blockDim.y; ++y) sum += shared[y * lanes_cols + col];
    to[col] = sum;
  }
  __syncthreads();
}

template <typename Value, bool kRms, int kBlockThreads, bool kAdds>
__global__ void __launch_bounds__(kBlockThreads, kBackwardBlocks<kBlockThreads>)
    norm_backward(const __grid_constant__ NormTask task) {
  constexpr int kSize = Vector<Value>::kSize;
  constexpr int kRows = kBackwardRows<kBlockThreads>;
  constexpr int kSums = kRms ? 1 : 2;  // of a row
  using RowLanes = Lanes<kBlockThreads, kRows * kSums>;
  __shared__ typename RowLanes::Shared shared;
  RowLanes lanes(shared);
  using Ahead = BackwardAhead<Value, kBlockThreads, kAdds>;
  extern __shared__ uint4 dynamic[];
  Ahead ahead(*reinterpret_cast<typename Ahead::Shared*>(dynamic));
  const MeanOf mean_of(task.cols);
  float grad_gamma[kNormVectors][kSize] = {};
  float grad_beta[kRms ? 1 : kNormVectors][kSize] = {};
  const Columns<Value> columns(task);
  RowTurns<Value, kRows> turns(task, task.rows);
  const auto ask = [&](int part, const void* of) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const auto* from = static_cast<const typename Value::Raw*>(of) + turns.at(row);
      ahead.ask(part * kRows + row, from, turns.index(row), columns);
    }
  };
  ask(0, task.x);
  ask(1, task.grad);
  ahead.commit();
  for (; turns.left > 0; --turns.left) {
    float rstd[kRows];
    float mean[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const int index = turns.index(row);
      const bool exists = index < static_cast<int>(task.rows);
      rstd[row] = exists ? __ldg(task.rstd + index) : 0.f;
      mean[row] = !kRms && exists ? __ldg(task.mean + index) : 0.f;
    }
    ahead.template wait<0>();
    RowPart<Value> x[kRows];
    RowPart<Value> grad[kRows];
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      x[row] = ahead.get(row);
      grad[row] = ahead.get(kRows + row);
    }
    if constexpr (kAdds) {
      ask(2, task.added);
      ahead.commit();
    }
    const RowTurns<Value, kRows> turn = turns;
    turns.next();
    ask(0, task.x);
    ask(1, task.grad);
    ahead.commit();
    float gamma[kNormVectors][kSize] = {};
    float sums[kRows * kSums] = {};  // of inner * normed, and of inner
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      if (columns.has(i)) load_gamma<Value>(task, columns.first(i), gamma[i]);
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        const VectorGradient<Value, kRms> v(x[row].v[i], grad[row].v[i], mean[row], rstd[row],
                                            gamma[i]);
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          grad_gamma[i][k] = __fmaf_rn(v.grad[k], v.normed[k], grad_gamma[i][k]);
          sums[row * kSums] = __fmaf_rn(v.inner[k], v.normed[k], sums[row * kSums]);
          if constexpr (!kRms) {
            grad_beta[i][k] = __fadd_rn(grad_beta[i][k], v.grad[k]);
            sums[row * kSums + 1] = __fadd_rn(sums[row * kSums + 1], v.inner[k]);
          }
        }
      }
    }
    lanes.sum(sums, mean_of);
    if constexpr (kAdds) ahead.template wait<1>();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const RowPart<Value> added = kAdds ? ahead.get(2 * kRows + row) : RowPart<Value>();
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
        if (!columns.has(i, turn.index(row))) continue;
        const VectorGradient<Value, kRms> v(x[row].v[i], grad[row].v[i], mean[row], rstd[row],
                                            gamma[i]);
        Vector<Value> rounded =
            v.of_x(rstd[row], sums[row * kSums], kRms ? 0.f : sums[row * kSums + kSums - 1]);
        if constexpr (kAdds) rounded = sum_of(rounded, added.v[i]);
        store_vector<Value>(task.grad_x, turn.at(row) + columns.from_first(i), rounded);
      }
    }
  }
  if (task.grad_gamma == nullptr) return;
  ahead.template wait<0>();  // zeros, of rows that are not there
  __syncthreads();
  auto* sums = reinterpret_cast<float*>(dynamic);
  const int64_t partial = static_cast<int64_t>(blockIdx.x) * task.cols;
  store_sums<Value>(grad_gamma, task.cols, sums, task.grad_gamma + partial);
  if constexpr (!kRms) {
    store_sums<Value>(grad_beta, task.cols, sums, task.grad_beta + partial);
  }
}

constexpr int kSumWarps = 16;

/// Sums over the CUDA blocks of norm_backward(), of gamma's gradients or beta's, in an order that
/// is the same in every run.
template <typename Value>
__global__ void __launch_bounds__(32 * kSumWarps)
    norm_parameter_gradients(const float* partials, int count, int cols, void* grads) {
  __shared__ float of_warps[kSumWarps][32];
  const auto col = static_cast<int>(blockIdx.x * 32 + threadIdx.x);
  const float* from = partials + static_cast<int64_t>(blockIdx.y) * count * cols + col;
  float sum = 0.f;
  if (col < cols) {
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.y); i < count; i += kSumWarps) {
      sum += __ldg(from + static_cast<int64_t>(i) * cols);
    }
  }
  of_warps[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  for (int warp = 1; warp < kSumWarps; ++warp) sum += of_warps[warp][threadIdx.x];
  static_cast<typename Value::Raw*>(grads)[static_cast<int64_t>(blockIdx.y) * cols + col] =
      Value::store(sum);
}

template <int kBlockThreads>
int backward_blocks(const NormTask& task) {
  const int64_t in_turn = static_cast<int64_t>(norm_block(task).y) * kBackwardRows<kBlockThreads>;
  const int64_t wanted = (task.rows + in_turn - 1) / in_turn;
  return static_cast<int>(
      std::min<int64_t>(wanted, kMultiprocessors * kBackwardBlocks<kBlockThreads>));
}

}  // namespace

int norm_partials(const NormTask& task) {
  int partials = 0;
  with_norm_types(task, [&](auto, auto, auto threads) {
    partials = backward_blocks<threads()>(task);
    return cudaSuccess;
  });
  return partials;
}

cudaError_t launch_norm_backward(const NormTask& task, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    using Value = decltype(value);
    const auto launch = [&](auto adds) {
      return launch_rows(norm_backward<Value, rms(), threads(), adds()>, task,
                         backward_blocks<threads()>(task),
                         sizeof(typename BackwardAhead<Value, threads(), adds()>::Shared), stream);
    };
    return task.added != nullptr ? launch(std::true_type{}) : launch(std::false_type{});
  });
}

cudaError_t launch_norm_parameter_gradients(const NormTask& task, void* grads,
                                            cudaStream_t stream) {
  if (task.cols == 0) return cudaSuccess;
  return with_value_type(task.gamma_dtype, [&](auto value) {
    const dim3 grid((task.cols + 31) / 32, task.mean == nullptr ? 1 : 2);
    norm_parameter_gradients<decltype(value)><<<grid, dim3(32, kSumWarps), 0, stream>>>(
        task.grad_gamma, norm_partials(task), task.cols, grads);
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
