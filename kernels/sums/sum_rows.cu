// Sums of rows in one pass: each row is read as often as it is named, and each sum written once.
#include <algorithm>

#include "kernels/device/vector_codes.cuh"
#include "kernels/sums/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // rows whose values are under way at once

/// One value in a word of its own, where rows are not aligned.
template <typename Value>
struct One {
  using Whole = typename Value::Raw;
  static constexpr int kSize = 1;
  __device__ static void add(Whole whole, float (&sum)[1]) {
    sum[0] = __fadd_rn(sum[0], Value::load(whole, 0));
  }
  __device__ static Whole rounded(const float (&sum)[1]) { return Value::store(sum[0]); }
};

template <typename Value>
struct Many {
  using Whole = uint4;
  static constexpr int kSize = Vector<Value>::kSize;
  __device__ static void add(const Whole& whole, float (&sum)[kSize]) {
    const Vector<Value> x = {{whole.x, whole.y, whole.z, whole.w}};
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      sum[i] = __fadd_rn(sum[i], Value::load(x.word_of(i), i % Value::kPerWord));
    }
  }
  __device__ static Whole rounded(const float (&sum)[kSize]) { return round_values<Value>(sum); }
};

/// A row of threads makes a sum, a thread kSize columns of it at once.
template <typename Part>
__global__ void __launch_bounds__(kThreads) sum_rows(const __grid_constant__ SumRowsTask task) {
  using Whole = typename Part::Whole;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (i >= task.sums) return;
  const auto* rows = static_cast<const Whole*>(task.rows);
  auto* out = static_cast<Whole*>(task.out);
  const int64_t parts = task.cols / Part::kSize;
  const int64_t begin = i == 0 ? 0 : max(int64_t{0}, __ldg(task.ends + i - 1));
  const int64_t end = min(__ldg(task.ends + i), task.place_count);
  for (int64_t at = threadIdx.x; at < parts; at += blockDim.x) {
    float sum[Part::kSize] = {};
    for (int64_t first = begin; first < end; first += kInFlight) {
      Whole x[kInFlight];
      bool is_row[kInFlight];
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const int64_t row = first + j < end ? __ldg(task.places + first + j) : -1;
        is_row[j] = row >= 0 && row < task.row_count;
        if (is_row[j]) x[j] = __ldg(rows + row * parts + at);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (is_row[j]) Part::add(x[j], sum);
      }
    }
    out[i * parts + at] = Part::rounded(sum);
  }
}

}  // namespace

cudaError_t launch_sum_rows(const SumRowsTask& task, DType dtype, cudaStream_t stream) {
  if (task.sums == 0 || task.cols == 0) return cudaSuccess;
  const auto launch = [&](auto kernel, int at_once) {
    const int64_t wanted = task.cols / at_once;
    const int lanes = static_cast<int>(std::min<int64_t>(wanted, kThreads));
    const dim3 block(lanes, kThreads / lanes);
    kernel<<<static_cast<unsigned>((task.sums + block.y - 1) / block.y), block, 0, stream>>>(task);
    return cudaGetLastError();
  };
  return with_value_type(dtype, [&](auto value) {
    using Value = decltype(value);
    return task.vectorized ? launch(sum_rows<Many<Value>>, Many<Value>::kSize)
                           : launch(sum_rows<One<Value>>, 1);
  });
}

}  // namespace qshard::cuda
