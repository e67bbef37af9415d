// CPU kernels behind kernels/quantize.h; threaded over ranges of rows.
#pragma once

#include <span>

#include "kernels/quantize.h"

namespace qshard::cpu {

void compute_amax(std::span<const QuantizeTask> tasks);
void quantize(std::span<const QuantizeTask> tasks);
void dequantize(std::span<const DequantizeTask> tasks);

}  // namespace qshard::cpu
