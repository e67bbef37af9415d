// Tasks of formats with scales in the grid.
#pragma once

#include "kernels/cuda/row_image_kernels.h"
#include "kernels/quantize_tasks.h"

namespace qshard::cuda {

/// A task as the kernels see it.
RowImageTask describe_row_image(const QuantizeTask& task);

}  // namespace qshard::cuda
