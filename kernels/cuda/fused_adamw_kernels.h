// Launchers of the kernels that step parameters and quantize them in one pass; many shards per
// launch.
#pragma once

#include "kernels/cuda/row_image_kernels.h"
#include "kernels/cuda/row_scaled_kernels.h"

namespace qshard::cuda {

/// AdamWOptions, rounded to fp32 as torch's kernel rounds them.
struct AdamWParameters {
  float lr;
  float beta1;
  float beta2;
  float weight_decay;
  float eps;
  bool maximize;
  const float* device_lr;
  const float* grad_scale;
  const float* found_inf;
};

/// What a step reads and writes beside the values, element for element.
struct AdamWMemory {
  void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  const float* step;
};

// `vectorized` says of all four, values included, that their rows are 16-byte aligned.
struct AdamWRowImageTask : RowImageTask {
  AdamWMemory memory;
};
struct AdamWRowScaledTask : RowScaledTask {
  AdamWMemory memory;
};

using AdamWRowImageBatch = TaskBatch<AdamWRowImageTask, 64>;
using AdamWRowScaledBatch = TaskBatch<AdamWRowScaledTask, 64>;
static_assert(sizeof(AdamWRowImageBatch) + sizeof(AdamWParameters) <= kMaxParameterBytes &&
              sizeof(AdamWRowScaledBatch) + sizeof(AdamWParameters) <= kMaxParameterBytes);

// All tasks of a batch have one format and one value type. Those of a `kAmaxes` launch raise amax
// entries; those of a `kAll` launch set the entries of their blocks, and write the rest of them.

int adamw_amax_blocks(const AdamWRowImageTask& task);
int adamw_quantize_blocks(const AdamWRowImageTask& task);
cudaError_t launch_adamw_amax(const AdamWRowImageBatch& batch, const AdamWParameters& parameters,
                              DType value_dtype, cudaStream_t stream);
/// One scale per tile.
cudaError_t launch_adamw_quantize(const AdamWRowImageBatch& batch,
                                  const AdamWParameters& parameters, DType value_dtype,
                                  cudaStream_t stream);

// Tiles have kAmaxTileRows rows for the amax, else kCodeTileRows.
int adamw_amax_blocks(const AdamWRowScaledTask& task);
int adamw_quantize_blocks(const AdamWRowScaledTask& task);
/// Formats with an fp32 scale per matrix.
cudaError_t launch_adamw_amax(const AdamWRowScaledBatch& batch, const AdamWParameters& parameters,
                              const Format& format, DType value_dtype, cudaStream_t stream);
/// Formats without one.
cudaError_t launch_adamw_quantize(const AdamWRowScaledBatch& batch,
                                  const AdamWParameters& parameters, const Format& format,
                                  DType value_dtype, cudaStream_t stream);

}  // namespace qshard::cuda
