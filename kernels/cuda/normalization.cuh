// What the kernels of a normalization share: how a row's threads hold and sum it, its statistics,
// and how a value is normalized and rounded, which is the same wherever it happens.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cuda/normalization_kernels.h"
#include "kernels/cuda/vector_codes.cuh"

namespace qshard::cuda {

constexpr int kNormThreads = 256;  // of a CUDA block, unless a row takes more
constexpr int kLongNormThreads = 512;
constexpr int kMaxNormThreads = 1024;
constexpr int kNormVectors = 2;  // of a row, that a thread holds

/// Threads of a row: a power of two of a warp's, or whole warps, which share memory.
template <int kBlockThreads>
class Lanes {
  static constexpr int kWarps = kBlockThreads / 32;
  static constexpr int kRows = kBlockThreads == kNormThreads ? 4 : 1;  // of two warps, or one row
  static constexpr int kAll = kRows * kWarps;

 public:
  struct Shared {
    // Of warps that a row does not have, zeros, which change no sum that began at one.
    alignas(16) float sums[2][2][kRows][kWarps];
  };

  /// Synchronises the block.
  __device__ explicit Lanes(Shared& shared)
      : of_row_(&shared.sums[0][0][threadIdx.y][0]), of_warp_(of_row_ + threadIdx.x / 32) {
    const auto thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    const auto threads = static_cast<int>(blockDim.x * blockDim.y);
    float* all = &shared.sums[0][0][0][0];
    for (int i = thread; i < 4 * kRows * kWarps; i += threads) all[i] = 0.f;
    __syncthreads();
  }

  /// Sums over a row's lanes, for each of them. All threads of the block take part.
  template <int kCount>
  __device__ void sum(float (&x)[kCount]) {
    if (blockDim.x <= 32) {
      for (int lane = static_cast<int>(blockDim.x) / 2; lane > 0; lane /= 2) add_lane(x, lane);
      return;
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) add_lane(x, lane);
    // Two in turn: who writes to one has seen all threads leave it.
    turn_ ^= 2 * kAll;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (threadIdx.x % 32 == 0) of_warp_[turn_ + i * kAll] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = 0.f;
#pragma unroll
      for (int warp = 0; warp < kWarps; warp += 4) {
        const auto four = *reinterpret_cast<const float4*>(of_row_ + turn_ + i * kAll + warp);
        x[i] = x[i] + four.x + four.y + four.z + four.w;
      }
    }
  }
  __device__ float sum(float x) {
    float one[1] = {x};
    sum(one);
    return one[0];
  }

 private:
  template <int kCount>
  __device__ static void add_lane(float (&x)[kCount], int lane) {
#pragma unroll
    for (float& of_lane : x) of_lane += __shfl_xor_sync(kWholeWarp, of_lane, lane);
  }

  float* of_row_;
  float* of_warp_;
  int turn_ = 0;
};

/// The first column of a thread's vector i.
template <typename Value>
__device__ __forceinline__ int column_of(int i) {
  const auto vector = static_cast<int>(threadIdx.x + i * blockDim.x);
  return vector * Vector<Value>::kSize;
}

/// The first value of a row.
template <typename Value>
__device__ __forceinline__ const typename Value::Raw* row_of(const void* x, int64_t row,
                                                             const NormTask& task) {
  return static_cast<const typename Value::Raw*>(x) + row * task.cols;
}

/// A thread's vectors of a row; zeros where there are none.
template <typename Value>
struct RowPart {
  Vector<Value> v[kNormVectors];

  RowPart() = default;
  __device__ RowPart(const typename Value::Raw* row, int cols, bool exists) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      v[i] = {};
      const int c = column_of<Value>(i);
      if (exists && c < cols) v[i] = load_vector<Value>(row + c);
    }
  }
  __device__ float value(int i, int k) const {
    return Value::load(v[i].word_of(k), k % Value::kPerWord);
  }
};

/// Rows that are on their way into shared memory while others are worked on, which takes no
/// registers. A thread reads what it has asked for itself: nothing is to synchronise.
template <typename Value, int kRows, int kBlockThreads>
class RowsAhead {
 public:
  struct Shared {
    uint4 words[kRows][kNormVectors][kBlockThreads];
  };

  __device__ explicit RowsAhead(Shared& shared)
      : shared_(shared), thread_(threadIdx.y * blockDim.x + threadIdx.x) {}

  /// The thread's vectors of row i; no longer those before.
  __device__ void ask(int i, const typename Value::Raw* row, int cols, bool exists) {
#pragma unroll
    for (int k = 0; k < kNormVectors; ++k) {
      const int c = column_of<Value>(k);
      const bool is_there = exists && c < cols;
      const auto to =
          static_cast<uint32_t>(__cvta_generic_to_shared(&shared_.words[i][k][thread_]));
      const auto* from = is_there ? row + c : nullptr;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                   "r"(is_there ? 16 : 0));
    }
  }
  /// Once all that was asked for is there.
  __device__ void get(RowPart<Value> (&parts)[kRows]) {
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int k = 0; k < kNormVectors; ++k) {
        const uint4 words = shared_.words[i][k][thread_];
        parts[i].v[k] = {{words.x, words.y, words.z, words.w}};
      }
    }
  }

 private:
  Shared& shared_;
  uint32_t thread_;
};

/// A vector of values, rounded.
template <typename Value>
__device__ __forceinline__ Vector<Value> vector_of(const float (&x)[Vector<Value>::kSize]) {
  if constexpr (Value::kPerWord == 2) {
    return {{store2(Value{}, x[0], x[1]), store2(Value{}, x[2], x[3]), store2(Value{}, x[4], x[5]),
             store2(Value{}, x[6], x[7])}};
  } else {
    return {{Value::store(x[0]), Value::store(x[1]), Value::store(x[2]), Value::store(x[3])}};
  }
}

/// As torch adds two tensors.
template <typename Value>
__device__ __forceinline__ Vector<Value> sum_of(const Vector<Value>& a, const Vector<Value>& b) {
  float x[Vector<Value>::kSize];
#pragma unroll
  for (int k = 0; k < Vector<Value>::kSize; ++k) {
    x[k] = __fadd_rn(Value::load(a.word_of(k), k % Value::kPerWord),
                     Value::load(b.word_of(k), k % Value::kPerWord));
  }
  return vector_of<Value>(x);
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

/// What a vector of columns is multiplied by, and what is added to it: by RMSNorm nothing.
template <typename Value, bool kRms>
struct NormParameters {
  float gamma[Vector<Value>::kSize] = {};
  float beta[kRms ? 1 : Vector<Value>::kSize] = {};

  NormParameters() = default;
  __device__ NormParameters(const NormTask& task, int at) {
    load_gamma<Value>(task, at, gamma);
    if constexpr (!kRms) {
      if (task.beta != nullptr) load_parameters(task.beta, at, task.gamma_dtype, beta);
    }
  }
  __device__ float beta_of(int k) const { return kRms ? 0.f : beta[kRms ? 0 : k]; }
};

/// Where the parameters of a thread's columns are from row to row.
enum class ParametersIn {
  kMemory,  // as they came
  kRegisters,
  kShared,  // in fp32: dynamic shared memory of parameter_bytes()
};

/// What a kernel has its rows cost in registers, and with them in threads at once.
struct RowCosts {
  ParametersIn parameters;
  bool ahead_in_registers;  // the next row is; else in shared memory
  bool unpacked = false;    // NormRow
};

/// Where they are for kernels that make something of each value: both parameters of 16-bit values
/// take the registers of a quarter of the threads, which long rows cannot do without.
template <typename Value, bool kRms, int kBlockThreads>
constexpr ParametersIn kParametersIn =
    kRms || Value::kPerWord == 1 || kBlockThreads == kNormThreads ? ParametersIn::kRegisters
                                                                  : ParametersIn::kShared;

/// The parameters of a thread's columns.
template <typename Value, bool kRms, ParametersIn kWhere>
class RowParameters {
  using Parameters = NormParameters<Value, kRms>;
  static constexpr int kFours = Vector<Value>::kSize / 4;

 public:
  __device__ explicit RowParameters(const NormTask& task) : task_(task) {
#pragma unroll
    for (int i = 0; kWhere != ParametersIn::kMemory && i < kNormVectors; ++i) {
      const int at = column_of<Value>(i);
      if (at >= task.cols) continue;
      if constexpr (kWhere == ParametersIn::kRegisters) {
        stay_[i] = Parameters(task, at);
      } else {
        put(i, Parameters(task, at));
      }
    }
  }

  /// Of the thread's vector i, which is one of the row's.
  __device__ Parameters of(int i) const {
    if constexpr (kWhere == ParametersIn::kRegisters) return stay_[i];
    if constexpr (kWhere == ParametersIn::kMemory) return Parameters(task_, column_of<Value>(i));
    Parameters parameters;
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      take(*shared(i, four), parameters.gamma + 4 * four);
      if constexpr (!kRms) take(*shared(i, kFours + four), parameters.beta + 4 * four);
    }
    return parameters;
  }

 private:
  /// What a thread has put there itself: nothing is to synchronise. Neighbours' lie side by side.
  __device__ static float4* shared(int i, int four) {
    extern __shared__ float4 of_threads[];
    constexpr int kOfVector = kRms ? kFours : 2 * kFours;
    const auto threads = static_cast<int>(blockDim.x * blockDim.y);
    const auto thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    return of_threads + (i * kOfVector + four) * threads + thread;
  }
  __device__ static void put(int i, const Parameters& parameters) {
#pragma unroll
    for (int four = 0; four < kFours; ++four) {
      *shared(i, four) = of(parameters.gamma + 4 * four);
      if constexpr (!kRms) *shared(i, kFours + four) = of(parameters.beta + 4 * four);
    }
  }
  __device__ static float4 of(const float* x) { return {x[0], x[1], x[2], x[3]}; }
  __device__ static void take(const float4& four, float* x) {
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
  }

  const NormTask& task_;
  Parameters stay_[kWhere == ParametersIn::kRegisters ? kNormVectors : 1];
};

/// A vector of x - mean, normalized and rounded. No NaN of these has a sign.
template <typename Value, bool kRms>
__device__ __forceinline__ Vector<Value> normed(const float (&x)[Vector<Value>::kSize], float rstd,
                                                const NormParameters<Value, kRms>& parameters) {
  float y[Vector<Value>::kSize];
#pragma unroll
  for (int k = 0; k < Vector<Value>::kSize; ++k) {
    y[k] = __fmaf_rn(__fmul_rn(x[k], rstd), parameters.gamma[k], parameters.beta_of(k));
  }
  return vector_of<Value>(y);
}

/// A thread's part of a row of x, less the mean, and the row's statistics. Unpacked, x stays in
/// fp32 while the row is summed; else it is made of its words again after each sum, which takes
/// fewer registers.
template <typename Value, bool kRms, int kBlockThreads, RowCosts kCosts>
struct NormRow {
  static constexpr int kSize = Vector<Value>::kSize;

  float x[kNormVectors][kSize];
  float mean = 0.f;
  float rstd;
  int index;  // of the row
  bool exists;

  /// The statistics are yet to come.
  __device__ NormRow(const NormTask& task, int row, const RowPart<Value>& part)
      : index(row), exists(row < static_cast<int>(task.rows)) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        x[i][k] = part.value(i, k);
        if constexpr (kCosts.unpacked) asm volatile("" : "+f"(x[i][k]));
      }
    }
  }

  /// All threads of the block take part.
  __device__ void reduce(const NormTask& task, Lanes<kBlockThreads>& lanes) {
    const auto count = static_cast<float>(task.cols);
    if constexpr (!kRms) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
#pragma unroll
        for (int k = 0; k < kSize; ++k) sum += x[i][k];
      }
      mean = lanes.sum(sum) / count;
    }
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      // Zeros stay beyond the last column.
      const float less = column_of<Value>(i) < task.cols ? mean : 0.f;
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        if constexpr (!kRms) x[i][k] = __fsub_rn(x[i][k], less);
        squares = __fmaf_rn(x[i][k], x[i][k], squares);
      }
    }
    rstd = rsqrtf(lanes.sum(squares) / count + task.eps);
  }

  __device__ void store_statistics(const NormTask& task) const {
    if (!exists || threadIdx.x != 0) return;
    task.rstd[index] = rstd;
    if constexpr (!kRms) task.mean[index] = mean;
  }

  /// The thread's vector i.
  template <typename Parameters>
  __device__ Vector<Value> vector(int i, const Parameters& parameters) const {
    return normed<Value>(x[i], rstd, parameters.of(i));
  }
};

/// Calls run(NormRow, RowParameters) for the rows that a CUDA block takes in turn, of `rows`, as
/// often for each of its threads, and stores their statistics. The next row's values are on their
/// way meanwhile.
template <typename Value, bool kRms, int kBlockThreads, RowCosts kCosts, typename Run>
__device__ __forceinline__ void for_rows(const NormTask& task, int64_t rows, const Run& run) {
  __shared__ typename Lanes<kBlockThreads>::Shared shared;
  Lanes<kBlockThreads> lanes(shared);
  const RowParameters<Value, kRms, kCosts.parameters> parameters(task);
  const auto step = static_cast<int>(gridDim.x * blockDim.y);
  const auto first = static_cast<int>(blockIdx.x * blockDim.y);
  int index = first + static_cast<int>(threadIdx.y);
  const int64_t step_values = static_cast<int64_t>(step) * task.cols;
  const auto* at = row_of<Value>(task.x, index, task);
  constexpr bool kInShared = !kCosts.ahead_in_registers;
  using Ahead = RowsAhead<Value, 1, kInShared ? kBlockThreads : 1>;
  __shared__ typename Ahead::Shared on_their_way;
  Ahead ahead(on_their_way);
  RowPart<Value> part[1];
  const auto ask = [&] {
    if constexpr (kInShared) {
      ahead.ask(0, at, task.cols, index < static_cast<int>(task.rows));
    } else {
      part[0] = RowPart<Value>(at, task.cols, index < static_cast<int>(task.rows));
    }
  };
  ask();
  int turns = (static_cast<int>(rows) - first + step - 1) / step;
  for (; turns > 0; --turns) {
    if constexpr (kInShared) ahead.get(part);
    NormRow<Value, kRms, kBlockThreads, kCosts> row(task, index, part[0]);
    index += step;
    at += step_values;
    ask();
    row.reduce(task, lanes);
    row.store_statistics(task);
    run(row, parameters);
  }
}

/// Lanes of a row, and rows of a CUDA block.
inline dim3 norm_block(const NormTask& task) {
  const int in_turn = kNormVectors * static_cast<int>(16 / value_size(task.dtype));
  const auto wanted = static_cast<unsigned>((task.cols + in_turn - 1) / in_turn);
  const unsigned lanes = wanted > 32 ? (wanted + 31) / 32 * 32 : std::bit_ceil(wanted);
  return dim3(lanes, std::max(1u, kNormThreads / lanes));
}

/// Threads that for_rows() has on a multiprocessor at once, or a CUDA block's: registers for as
/// many.
template <typename Value, bool kRms, RowCosts kCosts>
constexpr int kNormThreadsAtOnce =
    Value::kPerWord == 2 && kCosts.parameters == ParametersIn::kRegisters && !kRms ? 768 : 1024;

template <typename Value, bool kRms, int kBlockThreads, RowCosts kCosts>
constexpr int kNormBlocksAtOnce = std::max(1,
                                           kNormThreadsAtOnce<Value, kRms, kCosts> / kBlockThreads);

/// Dynamic shared memory of a kernel whose parameters lie there.
inline int parameter_bytes(const NormTask& task) {
  const dim3 block = norm_block(task);
  const int of_thread = kNormVectors * 16 / static_cast<int>(value_size(task.dtype));
  const int parameters = task.mean == nullptr ? 1 : 2;
  return static_cast<int>(block.x * block.y) * of_thread * parameters *
         static_cast<int>(sizeof(float));
}

/// CUDA blocks for for_rows(): as many as there is room for at once.
inline unsigned norm_blocks(const NormTask& task, int64_t rows, int threads_at_once) {
  int device = 0, multiprocessors = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const dim3 block = norm_block(task);
  const int threads = static_cast<int>(block.x * block.y);
  const int at_once = std::max(1, threads_at_once / threads);
  return static_cast<unsigned>(
      std::min<int64_t>((rows + block.y - 1) / block.y, at_once * multiprocessors));
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
    if (lanes <= kLongNormThreads) {
      return with_threads(std::integral_constant<int, kLongNormThreads>{});
    }
    return with_threads(std::integral_constant<int, kMaxNormThreads>{});
  });
}

}  // namespace qshard::cuda
