// Quantize and dequantize row images on plain memory, CPU or CUDA, many tensors per call. All throw
// c10::Error for device memory where the library has no code for the device (kernels/cuda/
// check_launch.h) or was built without CUDA; sizes are the callers' to check.
#pragma once

#include <span>

#include "kernels/device/stream.h"
#include "kernels/format/quantize_tasks.h"

namespace qshard {

/// Sets every entry of `amax`: the largest |x| of the task's live rows in each grid entry or cut
/// block (as float bits, so that NaN compares above infinity), 0 where this shard has no rows.
/// What is known of a task's amaxes is copied.
void compute_amax(std::span<const QuantizeTask> tasks, Stream stream);

/// Writes the whole `grid` from the agreed `amax`, and codes and row-local
/// scales of the live rows from `values`. Padding rows and padding bytes become zero.
void quantize(std::span<const QuantizeTask> tasks, Stream stream);

/// compute_amax(), then quantize(), for amaxes that no other rank has a part in: in one pass over
/// the values where that can be.
void quantize_at_once(std::span<const QuantizeTask> tasks, Stream stream);

/// values = code * scale_inv, rounded once to value_dtype, where a block's row-local scale times
/// the matrix's is rounded to fp32 first; NaN scales give NaN. Rows that are not live read as zero.
/// @throws c10::Error if the layout lacks the image asked for, or rows of its blocks.
void dequantize(std::span<const DequantizeTask> tasks, Stream stream);

}  // namespace qshard
