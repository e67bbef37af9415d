// Transposed values, through the random Hadamard transform or as they are: a thread holds 16 rows
// of one column, a CUDA block 64 rows of 32 columns. Reads are coalesced along columns; the four
// warps write whole cache lines of each transposed row (of 16-bit values, one line).
#include "kernels/device/value_types.cuh"
#include "kernels/numerics/hadamard.h"
#include "kernels/transpose/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = kHadamardSize;  // of a thread

template <typename Value, bool kHadamard>
__global__ void __launch_bounds__(kThreads)
    transpose(const __grid_constant__ TransposeTask task, unsigned col_blocks) {
  using Raw = typename Value::Raw;
  constexpr int kWords = kRows / Value::kPerWord;
  const int64_t first_row =
      (static_cast<int64_t>(blockIdx.x / col_blocks) * kWarps + threadIdx.x / 32) * kRows;
  const int64_t col = static_cast<int64_t>(blockIdx.x % col_blocks) * 32 + threadIdx.x % 32;
  if (first_row >= task.padded_rows || col >= task.cols) return;
  const Raw* values = static_cast<const Raw*>(task.values) + first_row * task.cols + col;
  Raw raw[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    raw[i] = first_row + i < task.rows ? __ldg(values + i * task.cols) : Raw{0};
  }
  if constexpr (kHadamard) {
    float x[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = Value::load(raw[i], 0);
    random_hadamard(x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) raw[i] = Value::store(x[i]);
  }
  uint32_t words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    words[w] = raw[w * Value::kPerWord];
    if constexpr (Value::kPerWord == 2) words[w] |= static_cast<uint32_t>(raw[2 * w + 1]) << 16;
  }
  auto* out =
      reinterpret_cast<uint4*>(static_cast<Raw*>(task.out) + col * task.padded_rows + first_row);
#pragma unroll
  for (int w = 0; w < kWords; w += 4) {
    out[w / 4] = make_uint4(words[w], words[w + 1], words[w + 2], words[w + 3]);
  }
}

}  // namespace

cudaError_t launch_transpose_values(const TransposeTask& task, cudaStream_t stream) {
  const auto col_blocks = static_cast<unsigned>(ceil_div(task.cols, 32));
  const int64_t row_blocks = ceil_div(task.padded_rows, kRows * kWarps);
  const auto blocks = static_cast<unsigned>(row_blocks * col_blocks);
  return with_value_type(task.value_dtype, [&](auto value) {
    using Value = decltype(value);
    if (task.hadamard) {
      transpose<Value, true><<<blocks, kThreads, 0, stream>>>(task, col_blocks);
    } else {
      transpose<Value, false><<<blocks, kThreads, 0, stream>>>(task, col_blocks);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
