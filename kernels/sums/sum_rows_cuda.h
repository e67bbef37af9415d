// Sums of rows on a GPU, in one pass. Runs on the current device and stream.
#pragma once

#include "kernels/sums/sum_rows.h"

namespace qshard::cuda {

/// As qshard::sum_rows.
void sum_rows(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& ends,
              const at::Tensor& out);

}  // namespace qshard::cuda
