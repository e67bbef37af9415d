// CPU kernels behind kernels/quantize/quantize.h; threaded over ranges of rows. Each takes tasks of
// formats with scales in the grid, or of formats with row-local scales.
#pragma once

#include <span>

#include "kernels/format/quantize_tasks.h"

namespace qshard::cpu {

void compute_amax_of_grid(std::span<const QuantizeTask> tasks);
void quantize_by_grid(std::span<const QuantizeTask> tasks);
void dequantize_by_grid(std::span<const DequantizeTask> tasks);

void compute_amax_row_scaled(std::span<const QuantizeTask> tasks);
void quantize_row_scaled(std::span<const QuantizeTask> tasks);
void dequantize_row_scaled(std::span<const DequantizeTask> tasks);

}  // namespace qshard::cpu
