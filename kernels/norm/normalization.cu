// Normalization of rows: some lanes of a CUDA block hold a row in registers, read once and written
// once. CUDA blocks take rows until none are left.
#include "kernels/norm/rows.cuh"

namespace qshard::cuda {
namespace {

template <typename Value, bool kRms, int kBlockThreads>
constexpr RowCosts kValueCosts = {
    .rows = kRowsAtOnce<kBlockThreads>,
    .parameters = Value::kPerWord == 1 || kBlockThreads == kNormThreads ? ParametersIn::kRegisters
                                                                        : ParametersIn::kMemory,
    .ahead_in_registers = true,
    .unpacked = false,
    .threads_at_once = kThreadsAtOnce<kBlockThreads>};

template <typename Value, bool kRms, int kBlockThreads>
__global__ void __launch_bounds__(
    kBlockThreads, norm_blocks_at_once<kBlockThreads>(kValueCosts<Value, kRms, kBlockThreads>))
    norm(const __grid_constant__ NormTask task) {
  constexpr RowCosts kCosts = kValueCosts<Value, kRms, kBlockThreads>;
  const auto store = [&](const auto& rows, const auto& parameters, const auto& columns) {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      const auto of_columns = parameters.of(i);
#pragma unroll
      for (int row = 0; row < kCosts.rows; ++row) {
        if (!columns.has(i, rows.index(row))) continue;
        const int64_t at = static_cast<int64_t>(rows.index(row)) * task.cols + columns.first(i);
        store_vector<Value>(task.y, at, rows.vector(row, i, of_columns));
      }
    }
  };
  for_rows<Value, kRms, kBlockThreads, kCosts>(task, task.rows, store);
}

}  // namespace

cudaError_t launch_norm(const NormTask& task, cudaStream_t stream) {
  if (task.rows == 0 || task.cols == 0) return cudaSuccess;
  return with_norm_types(task, [&](auto value, auto rms, auto threads) {
    using Value = decltype(value);
    constexpr RowCosts kCosts = kValueCosts<Value, rms(), threads()>;
    return launch_for_rows<Value, rms(), threads(), kCosts>(norm<Value, rms(), threads()>, task,
                                                            task.rows, stream);
  });
}

}  // namespace qshard::cuda
