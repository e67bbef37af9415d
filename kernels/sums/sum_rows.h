// Sums of rows that are named by their places.
#pragma once

#include <ATen/core/Tensor.h>

namespace qshard {

/// out[i] = the sum of rows[places[j]] over j in [ends[i - 1], ends[i]), in float32 in the order of
/// j, rounded once. The first sum begins at 0. A place outside of the rows, and an end outside of
/// the places, adds nothing. The same bits on every device, but those of NaN.
/// rows: (R, N) float32, bfloat16 or float16; places: (P,) int64; ends: (T,) int64; out: (T, N) of
/// the dtype of rows. All are contiguous and on one device.
void sum_rows(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& ends,
              const at::Tensor& out);

}  // namespace qshard
