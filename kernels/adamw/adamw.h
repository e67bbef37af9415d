// Optimizer steps that quantize the new values while they are at hand; many tensors per call, on
// plain memory, CPU or CUDA.
#pragma once

#include <span>

#include "kernels/quantize/quantize.h"

namespace qshard {

/// What of quantizing its result a step can do in its own pass.
enum class StepQuantizes : uint8_t {
  kSkip,
  kAmax,         // what ranks agree on: codes wait for it
  kSpeculative,  // the same, and on CUDA devices codes by the scales that the grid has: a weight's
                 // amax seldom crosses a power of two, and then they are final
  kCodes,        // codes and their scales: no scale depends on rows of other ranks
};
StepQuantizes step_quantizes(const Layout& layout);

/// One shard of one parameter. `values` are its live rows' old values, and become the new ones;
/// gradient and moments are as many numbers of `value_dtype`, contiguous.
struct AdamWTask : QuantizeTask {
  StepQuantizes quantizes = StepQuantizes::kSkip;
  void* parameter = nullptr;    // `values`
  void* grad = nullptr;         // written if there is a grad_scale
  void* exp_avg = nullptr;      // read and written
  void* exp_avg_sq = nullptr;   // read and written
  const float* step = nullptr;  // number of this step, from 1
};

/// Those of torch._fused_adamw_. All pointers are memory of the call's stream.
struct AdamWOptions {
  double lr = 0;
  const float* device_lr = nullptr;  // not null: in place of lr
  double beta1 = 0;
  double beta2 = 0;
  double weight_decay = 0;
  double eps = 0;
  bool maximize = false;
  const float* grad_scale = nullptr;  // null: gradients are not scaled
  const float* found_inf = nullptr;   // null, or a float that is 1 if nothing is to change
};

/// Steps as torch.optim.AdamW(fused=True) does, bit for bit, then, of the new values and in the
/// same pass, what `quantizes` says: compute_amax() and the rows' part of quantize(), whose grid
/// entries of rows held elsewhere are left open. Every entry of `amax` and `speculative_scale_inv`
/// must be 0 before. No task quantizes nothing.
/// @throws c10::Error for device memory, as kernels/quantize/quantize.h says.
void fused_adamw(std::span<const AdamWTask> tasks, const AdamWOptions& options, Stream stream);

}  // namespace qshard
