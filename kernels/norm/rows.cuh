// How CUDA blocks take the rows of a normalization in turn.
#pragma once

#include <algorithm>
#include <bit>
#include <type_traits>

#include "kernels/norm/lanes.cuh"
#include "kernels/norm/values.cuh"

namespace qshard::cuda {

/// Where the parameters of a thread's columns are from row to row.
enum class ParametersIn {
  kMemory,  // as they came
  kRegisters,
  kShared,  // in fp32: dynamic shared memory
};

/// The parameters of a thread's columns; zeros beyond the last.
template <typename Value, bool kRms, int kBlockThreads, ParametersIn kWhere>
class RowParameters {
  using Parameters = NormParameters<Value, kRms>;
  static constexpr int kFloats = (kRms ? 1 : 2) * Vector<Value>::kSize;  // of a vector
  static constexpr int kFours = kFloats / 4;

 public:
  /// Bytes of dynamic shared memory.
  static constexpr int kBytes =
      kWhere == ParametersIn::kShared ? kNormVectors * kFloats * kBlockThreads * 4 : 0;

  __device__ RowParameters(const NormTask& task, const Columns<Value>& columns)
      : task_(task), columns_(columns) {
    if constexpr (kWhere == ParametersIn::kShared) {
      extern __shared__ uint4 of_threads[];
      at_ = shared_address(of_threads + threadIdx.y * blockDim.x + threadIdx.x);
    }
#pragma unroll
    for (int i = 0; kWhere != ParametersIn::kMemory && i < kNormVectors; ++i) {
      if constexpr (kWhere == ParametersIn::kRegisters) {
        stay_[i] = from_memory(i);
      } else {
        put(i, from_memory(i));
      }
    }
  }

  /// The parameters of the thread's vector i.
  __device__ Parameters of(int i) const {
    if constexpr (kWhere == ParametersIn::kRegisters) return stay_[i];
    if constexpr (kWhere == ParametersIn::kMemory) return from_memory(i);
    Parameters parameters;
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      const uint4 words = load_shared(address(i, four));
      parameters.at(4 * four) = __uint_as_float(words.x);
      parameters.at(4 * four + 1) = __uint_as_float(words.y);
      parameters.at(4 * four + 2) = __uint_as_float(words.z);
      parameters.at(4 * four + 3) = __uint_as_float(words.w);
    }
    return parameters;
  }

 private:
  __device__ Parameters from_memory(int i) const {
    return columns_.has(i) ? Parameters(task_, Columns<Value>::first(i)) : Parameters();
  }
  /// The address of parameters that the thread has put there itself, so it need not synchronise.
  /// Those of neighbouring threads lie side by side.
  __device__ uint32_t address(int i, int four) const {
    return at_ + (i * kFours + four) * kBlockThreads * sizeof(uint4);
  }
  __device__ void put(int i, Parameters parameters) const {
#pragma unroll
    for (int k = 0; k < kFloats; ++k) {
      store_shared(address(i, k / 4) + k % 4 * sizeof(float), parameters.at(k));
    }
  }

  const NormTask& task_;
  const Columns<Value>& columns_;
  Parameters stay_[kWhere == ParametersIn::kRegisters ? kNormVectors : 1];
  uint32_t at_ = 0;  // shared address of the thread's first four
};

/// What a kernel has its rows cost.
struct RowCosts {
  int rows;  // at once: their threads meet once for all
  ParametersIn parameters;
  bool ahead_in_registers;  // the next rows are; else in shared memory
  bool unpacked;            // NormRows
  int threads_at_once;      // on a multiprocessor, or a CUDA block's: registers for as many
};

/// What most kernels take: of the longest rows no thread could hold two.
template <int kBlockThreads>
constexpr int kRowsAtOnce = kBlockThreads == kMaxNormThreads ? 1 : 2;
template <int kBlockThreads>
constexpr int kThreadsAtOnce = kBlockThreads == kMaxNormThreads      ? 1024
                               : kBlockThreads == kMiddleNormThreads ? 640
                                                                     : 512;

/// A thread's parts of some rows of x, less the mean, and the rows' statistics. Unpacked, x stays
/// in fp32 while the rows are summed; else it is made of its words again after each sum, which
/// takes fewer registers.
template <typename Value, bool kRms, RowCosts kCosts>
struct NormRows {
  static constexpr int kRows = kCosts.rows;
  static constexpr int kSize = Vector<Value>::kSize;

  float x[kRows][kNormVectors][kSize];
  float mean[kRows] = {};
  float rstd[kRows];
  int first;  // row; a block's others follow
  int count;  // of the matrix

  /// The statistics are yet to come.
  __device__ NormRows(const NormTask& task, int first, const RowPart<Value> (&parts)[kRows])
      : first(first), count(static_cast<int>(task.rows)) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          x[row][i][k] = parts[row].value(i, k);
          if constexpr (kCosts.unpacked) asm volatile("" : "+f"(x[row][i][k]));
        }
      }
    }
  }

  __device__ int index(int row) const { return first + row * static_cast<int>(blockDim.y); }
  __device__ bool exists(int row) const { return index(row) < count; }

  /// All threads of the block take part.
  template <typename RowLanes>
  __device__ void reduce(const NormTask& task, const Columns<Value>& columns, const MeanOf& mean_of,
                         RowLanes& lanes) {
    if constexpr (!kRms) {
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
          for (int k = 0; k < kSize; ++k) mean[row] += x[row][i][k];
        }
      }
      lanes.sum(mean, mean_of);
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      rstd[row] = 0.f;
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
        const float less = columns.has(i) ? mean[row] : 0.f;  // zeros stay beyond the last column
#pragma unroll
        for (int k = 0; k < kSize; ++k) {
          if constexpr (!kRms) x[row][i][k] = __fsub_rn(x[row][i][k], less);
          rstd[row] = __fmaf_rn(x[row][i][k], x[row][i][k], rstd[row]);
        }
      }
    }
    lanes.sum(rstd, [&](float squares) { return rsqrtf(mean_of(squares) + task.eps); });
  }

  __device__ void store_statistics(const NormTask& task) const {
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      if (!exists(row)) continue;
      task.rstd[index(row)] = rstd[row];
      if constexpr (!kRms) task.mean[index(row)] = mean[row];
    }
  }

  /// The thread's vector i of a row.
  __device__ Vector<Value> vector(int row, int i,
                                  const NormParameters<Value, kRms>& parameters) const {
    return normed<Value>(x[row][i], rstd[row], parameters);
  }
};

/// The rows that a CUDA block takes in turn: kRows of each of its rows of threads at once, in as
/// many turns for all of its threads.
template <typename Value, int kRows>
class RowTurns {
 public:
  __device__ RowTurns(const NormTask& task, int64_t rows) {
    const auto block_rows = static_cast<int>(blockDim.y);
    const int first = static_cast<int>(blockIdx.x) * block_rows * kRows;
    index_ = first + static_cast<int>(threadIdx.y);
    at_ = static_cast<int64_t>(index_) * task.cols + Columns<Value>::first(0);
    step_ = static_cast<int>(gridDim.x) * block_rows * kRows;
    step_values_ = step_ * task.cols;
    row_values_ = block_rows * task.cols;
    left = (static_cast<int>(rows) - first + step_ - 1) / step_;
  }

  /// The thread's row `row` of this turn, and the place of its vector 0 among all values.
  __device__ int index(int row) const { return index_ + row * static_cast<int>(blockDim.y); }
  __device__ int64_t at(int row) const { return at_ + row * row_values_; }

  __device__ void next() {
    index_ += step_;
    at_ += step_values_;
  }

  int left;

 private:
  int index_, step_;
  int64_t at_;
  int step_values_, row_values_;  // at most what all CUDA blocks hold at once
};

/// Calls run(NormRows, RowParameters, Columns) for the rows that a CUDA block takes in turn, of
/// `rows`, as often for each of its threads, and stores their statistics. The next rows' values are
/// on their way meanwhile.
template <typename Value, bool kRms, int kBlockThreads, RowCosts kCosts, typename Run>
__device__ __forceinline__ void for_rows(const NormTask& task, int64_t rows, const Run& run) {
  constexpr int kRows = kCosts.rows;
  using RowLanes = Lanes<kBlockThreads, kRows>;
  __shared__ typename RowLanes::Shared shared;
  RowLanes lanes(shared);
  const MeanOf mean_of(task.cols);
  const Columns<Value> columns(task);
  const RowParameters<Value, kRms, kBlockThreads, kCosts.parameters> parameters(task, columns);
  constexpr bool kInShared = !kCosts.ahead_in_registers;
  using Ahead = RowsAhead<Value, kRows, kInShared ? kBlockThreads : 1>;
  __shared__ typename Ahead::Shared on_their_way;
  Ahead ahead(on_their_way);
  RowPart<Value> parts[kRows];
  RowTurns<Value, kRows> turns(task, rows);
  const auto ask = [&] {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const auto* from = static_cast<const typename Value::Raw*>(task.x) + turns.at(row);
      if constexpr (kInShared) {
        ahead.ask(row, from, turns.index(row), columns);
      } else {
        parts[row] = RowPart<Value>(from, turns.index(row), columns);
      }
    }
    if constexpr (kInShared) ahead.commit();
  };
  ask();
  for (; turns.left > 0; --turns.left) {
    if constexpr (kInShared) {
      ahead.template wait<0>();
#pragma unroll
      for (int row = 0; row < kRows; ++row) parts[row] = ahead.get(row);
    }
    NormRows<Value, kRms, kCosts> turn(task, turns.index(0), parts);
    turns.next();
    ask();
    turn.reduce(task, columns, mean_of, lanes);
    turn.store_statistics(task);
    run(turn, parameters, columns);
  }
}

/// Lanes of a row, and rows of a CUDA block.
inline dim3 norm_block(const NormTask& task) {
  const int in_turn = kNormVectors * static_cast<int>(16 / value_size(task.dtype));
  const auto wanted = static_cast<unsigned>((task.cols + in_turn - 1) / in_turn);
  const unsigned lanes = wanted > 32 ? (wanted + 31) / 32 * 32 : std::bit_ceil(wanted);
  return dim3(lanes, std::max(1u, kNormThreads / lanes));
}

/// CUDA blocks for for_rows(): as many as there is room for at once.
inline unsigned norm_blocks(const NormTask& task, int64_t rows, RowCosts costs) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const dim3 block = norm_block(task);
  const int threads = static_cast<int>(block.x * block.y);
  const int64_t in_turn = static_cast<int64_t>(block.y) * costs.rows;
  const int at_once = std::max(1, costs.threads_at_once / threads);
  return static_cast<unsigned>(
      std::min<int64_t>((rows + in_turn - 1) / in_turn, at_once * multiprocessors));
}

template <int kBlockThreads>
constexpr int norm_blocks_at_once(RowCosts costs) {
  return std::max(1, costs.threads_at_once / kBlockThreads);
}

/// Launches a kernel that takes rows in turn, with dynamic shared memory.
template <typename Kernel, typename... Arguments>
cudaError_t launch_rows(Kernel kernel, const NormTask& task, unsigned blocks, int bytes,
                        cudaStream_t stream, Arguments... arguments) {
  if (bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
  }
  kernel<<<blocks, norm_block(task), bytes, stream>>>(task, arguments...);
  return cudaGetLastError();
}

/// A kernel of for_rows() over `rows`.
template <typename Value, bool kRms, int kBlockThreads, RowCosts kCosts, typename Kernel,
          typename... Arguments>
cudaError_t launch_for_rows(Kernel kernel, const NormTask& task, int64_t rows, cudaStream_t stream,
                            Arguments... arguments) {
  return launch_rows(kernel, task, norm_blocks(task, rows, kCosts),
                     RowParameters<Value, kRms, kBlockThreads, kCosts.parameters>::kBytes, stream,
                     arguments...);
}

/// Calls run(Value{}, kRms, kBlockThreads), the latter two as std::integral_constant.
template <typename Run>
cudaError_t with_norm_types(const NormTask& task, const Run& run) {
  return with_value_type(task.dtype, [&](auto value) {
    const auto with_threads = [&](auto threads) {
      return task.mean == nullptr ? run(value, std::true_type{}, threads)
                                  : run(value, std::false_type{}, threads);
    };
    const unsigned lanes = norm_block(task).x;
    if (lanes <= kNormThreads) return with_threads(std::integral_constant<int, kNormThreads>{});
    if (lanes <= kMiddleNormThreads) {
      return with_threads(std::integral_constant<int, kMiddleNormThreads>{});
    }
    if (lanes <= kLongNormThreads) {
      return with_threads(std::integral_constant<int, kLongNormThreads>{});
    }
    return with_threads(std::integral_constant<int, kMaxNormThreads>{});
  });
}

}  // namespace qshard::cuda
