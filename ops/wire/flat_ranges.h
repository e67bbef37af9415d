// Ranges of weights that flat parameters cut anywhere: elements [start, start + numel) of a weight
// (rows, cols) whose scales are all in a grid, many at a time. A weight that stays plain and whole
// is such a range, too.
//
// What the operators over them have in common is here: agree_on_ranges.h has their amaxes and
// histories, range_messages.h their codes in FSDP1's all-gather.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "kernels/format/layout.h"

namespace qshard {

/// One range's weight, and where it begins.
struct FlatRange {
  Layout weight;
  int64_t start;
};

/// Ranges of weights of `formats[i]`, with rows, columns and start in geometry[3i, 3i + 3).
/// @throws c10::ValueError for lists of other lengths, formats whose scales lie in the rows, empty
/// weights and sizes that overflow. All name `op`, as those below do.
std::vector<FlatRange> ranges_of(const char* op, const std::vector<std::string>& formats,
                                 at::IntArrayRef geometry);
/// The scales of all weights together.
int64_t grid_numel(const char* op, const std::vector<FlatRange>& ranges);

/// The values that kernels read: fp64, which FSDP1's units with a lower param_dtype may keep, as
/// fp32.
at::Tensor quantizable(const at::Tensor& values);
at::ScalarType quantizable_dtype(const at::Tensor& values);
/// @throws c10::ValueError unless there are values for each range, which lie within its weight, and
/// c10::TypeError unless they are plain, contiguous float32, bfloat16, float16 or float64.
void check_values(const char* op, at::TensorList values, const std::vector<FlatRange>& ranges);
/// @throws c10::ValueError unless there are float32 (grid_rows * grid_cols,) for each range.
void check_amaxes(const char* op, at::TensorList amax, const std::vector<FlatRange>& ranges);

/// The largest |x| of each range by grid entry, by bits, so that NaN is the largest; 0 where the
/// range has no element. One tensor, range after range. The values are of one device.
at::Tensor amax_of_ranges(const char* op, at::TensorList values,
                          const std::vector<FlatRange>& ranges);
/// What codes of whole weights, scaled by `amax`, are multiplied by: a tensor each.
std::vector<at::Tensor> scale_inv_of_ranges(const char* op, at::TensorList amax,
                                            const std::vector<FlatRange>& ranges);
/// Writes the codes of ranges, scaled by `amax`, to `codes`, uint8 of as many bytes, contiguous.
void quantize_ranges(const char* op, at::TensorList values, const std::vector<FlatRange>& ranges,
                     at::TensorList amax, at::TensorList codes);
/// The reverse: writes `values`.
void dequantize_ranges(at::TensorList codes, const std::vector<FlatRange>& ranges,
                       at::TensorList scale_inv, at::TensorList values);

}  // namespace qshard
