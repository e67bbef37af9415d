// Launchers of the kernels that make codes of silu(gate) * up, and of its gradients, while the
// values are in registers. They round and divide where torch's operators do, so codes are those of
// the values that silu, mul and silu_backward leave in memory, as long as both have the same expf.
// So for other activations in the place of silu, with up or without: theirs are computed by
// kernels/numerics/activations.h, and rounded where torch's are.
#pragma once

#include <cuda_runtime_api.h>

#include "kernels/activation/kernels.h"
#include "kernels/numerics/activations.h"

namespace qshard::cuda {

/// gate and up (m, k), rows `ld` values apart, as the halves of one matrix are.
struct SwigluTask {
  const void* gate = nullptr;
  const void* up = nullptr;    // null: the activation of gate alone
  const void* grad = nullptr;  // (m, k) contiguous, of silu(gate) * up; backward's
  int64_t m = 0;
  int64_t k = 0;
  int64_t ld_gate = 0;
  int64_t ld_up = 0;
  Activation activation = Activation::kSilu;
  bool vectorized = false;  // launchers set it
};

/// Codes of one matrix of the backward. Its values, m and k are the task's.
struct SwigluImage {
  ActivationTask task = {};
  const float* amax = nullptr;  // one scale, from it; null: in blocks
  /// (ceil(m / 128), k), of a gradient, or null: left with the sums of the columns of each 128
  /// rows, which launch_swiglu_column_sums adds up.
  float* column_sums = nullptr;
};

/// All scaled in one way: in blocks in E4M3, or by one scale, gradients in E5M2.
struct SwigluGradients {
  SwigluImage gate;   // of the gradients: in the same orientations,
  SwigluImage up;     // perhaps columns of one matrix, k_padded apart; none without up
  SwigluImage input;  // columns of silu(gate) * up, in E4M3; or none
};

/// Sets `maxima` (swiglu_maxima_numel(m, k)).
cudaError_t launch_swiglu_maxima(const SwigluTask& task, float* maxima, DType value_dtype,
                                 cudaStream_t stream);

/// Sets `maxima`, and makes the codes as launch_quantize_activation_by_previous does.
cudaError_t launch_swiglu_quantize_by_previous(const SwigluTask& task, const ActivationTask& out,
                                               const PreviousAmax& previous, float* maxima,
                                               DType value_dtype, cudaStream_t stream);

/// E4M3 codes of silu(gate) * up.
cudaError_t launch_swiglu_quantize(const SwigluTask& task, const SwigluImage& out,
                                   DType value_dtype, cudaStream_t stream);

/// Raises the amaxes (1) of both gradients; they may be one. With `power_of_two` they may be less
/// than the largest gradient, if its scale of E5M2 is theirs. `maxima`: of launch_swiglu_maxima, or
/// null. With them most of gate and up need not be read.
cudaError_t launch_swiglu_backward_amax(const SwigluTask& task, const float* maxima,
                                        float* gate_amax, float* up_amax, bool power_of_two,
                                        DType value_dtype, cudaStream_t stream);

/// As launch_swiglu_quantize of silu(gate) * up in blocks, for each group of rows by itself:
/// launch_row_tiles made `tiles`, and codes lie as launch_quantize_groups_in_blocks leaves them.
cudaError_t launch_swiglu_quantize_groups(const SwigluTask& task, const ActivationTask& out,
                                          const RowTile* tiles, int64_t count, DType value_dtype,
                                          cudaStream_t stream);
/// The same of launch_swiglu_backward_quantize in blocks.
cudaError_t launch_swiglu_backward_quantize_groups(const SwigluTask& task,
                                                   const SwigluGradients& out, const RowTile* tiles,
                                                   int64_t count, DType value_dtype,
                                                   cudaStream_t stream);

/// A gradient's column_sums are of its values, in fp32: of each 8 rows the values of bfloat16 and
/// float16 are added up four by four, those of float32 one after the other; then the sums of the 16
/// times 8 rows of 128, one after the other.
cudaError_t launch_swiglu_backward_quantize(const SwigluTask& task, const SwigluGradients& out,
                                            DType value_dtype, cudaStream_t stream);

/// sums (k): of the column_sums (count, k) of 128 rows each. Eight sums, of every eighth of them
/// from the first to the last, and then the eight in turn: the same in every run.
cudaError_t launch_swiglu_column_sums(const float* column_sums, int64_t count, int64_t k,
                                      float* sums, cudaStream_t stream);

}  // namespace qshard::cuda
