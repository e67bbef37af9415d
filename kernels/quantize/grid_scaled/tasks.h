// Tasks of formats with scales in the grid.
#pragma once

#include "kernels/format/quantize_tasks.h"
#include "kernels/quantize/grid_scaled/kernels.h"

namespace qshard::cuda {

/// A task as the kernels see it.
GridScaledTask describe_grid_scaled(const QuantizeTask& task);

}  // namespace qshard::cuda
