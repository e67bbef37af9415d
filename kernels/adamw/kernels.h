// Launchers of the kernels that step parameters and quantize them in one pass; many shards per
// launch.
#pragma once

#include "kernels/adamw/adamw.h"
#include "kernels/quantize/grid_scaled/kernels.h"
#include "kernels/quantize/row_scaled/kernels.h"

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
struct AdamWGridScaledTask : GridScaledTask {
  AdamWMemory memory;
};
struct AdamWRowScaledTask : RowScaledTask {
  AdamWMemory memory;
};

using AdamWGridScaledBatch = TaskBatch<AdamWGridScaledTask, 64>;
using AdamWRowScaledBatch = TaskBatch<AdamWRowScaledTask, 64>;
static_assert(sizeof(AdamWGridScaledBatch) + sizeof(AdamWParameters) <= kMaxParameterBytes &&
              sizeof(AdamWRowScaledBatch) + sizeof(AdamWParameters) <= kMaxParameterBytes);

// All tasks of a batch quantize as much, and have one format and one value type. Amaxes are raised;
// those of `kCodes` are set, of their blocks, and the rest of the blocks is written.

int adamw_blocks(const AdamWGridScaledTask& task, StepQuantizes quantizes);
/// `kCodes`: of one scale per tile.
cudaError_t launch_adamw(const AdamWGridScaledBatch& batch, StepQuantizes quantizes,
                         const AdamWParameters& parameters, DType value_dtype, cudaStream_t stream);

/// The same of tasks with one scale per row, but for `kCodes`.
cudaError_t launch_adamw_in_rows(const AdamWGridScaledBatch& batch, StepQuantizes quantizes,
                                 const AdamWParameters& parameters, DType value_dtype,
                                 cudaStream_t stream);

/// Tiles have kAmaxTileRows rows for the amax, else kCodeTileRows.
int adamw_blocks(const AdamWRowScaledTask& task, StepQuantizes quantizes);
/// `kAmax`: of formats with an fp32 scale per matrix; `kCodes`: of formats without one.
cudaError_t launch_adamw(const AdamWRowScaledBatch& batch, StepQuantizes quantizes,
                         const AdamWParameters& parameters, const Format& format, DType value_dtype,
                         cudaStream_t stream);

}  // namespace qshard::cuda
