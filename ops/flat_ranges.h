// Ranges of weights that flat parameters cut anywhere: elements [start, start + numel) of a weight
// (rows, cols) whose scales are all in a grid. Many ranges a call, of any formats and dtypes, on
// one device: FSDP1 asks for all of a gather or a step at once.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace qshard {

// Range i is of a weight of `formats[i]`, with rows, cols and start in geometry[3i, 3i + 3). Its
// values are plain and contiguous, float32, bfloat16 or float16; its amaxes and scales float32,
// those of the whole weight, (grid_rows * grid_cols,).
//
// All throw c10::ValueError for lists of other lengths, formats whose scales lie in the rows, empty
// weights, ranges outside of them and tensors of another size or device, and c10::TypeError for
// other dtypes and strides, before anything is written.

/// The largest |x| of each range by grid entry, by bits, so that NaN is the largest; 0 where the
/// range has no element. One tensor, range after range.
at::Tensor amax_of_ranges(at::TensorList values, const std::vector<std::string>& formats,
                          at::IntArrayRef geometry);
/// What codes are multiplied by, if whole weights are scaled by `amax`, flat as of amax_of_ranges.
/// It reads rows and cols of `geometry`.
at::Tensor scale_inv_of_ranges(const at::Tensor& amax, const std::vector<std::string>& formats,
                               at::IntArrayRef geometry);
/// Writes the codes of ranges, scaled by `amax`, to `codes`, uint8 of as many bytes, contiguous.
void quantize_ranges(at::TensorList values, const std::vector<std::string>& formats,
                     at::IntArrayRef geometry, at::TensorList amax, at::TensorList codes);
/// The reverse: writes `values`.
void dequantize_ranges(at::TensorList codes, const std::vector<std::string>& formats,
                       at::IntArrayRef geometry, at::TensorList scale_inv, at::TensorList values);

}  // namespace qshard
