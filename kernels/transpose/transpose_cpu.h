// CPU kernels behind kernels/transpose/transpose.h; threaded over rows of what they write. Sizes
// are checked and not zero.
#pragma once

#include "kernels/transpose/transpose.h"

namespace qshard::cpu {

void transpose_values(const TransposeTask& task);
void transpose_image(const TransposeImageTask& task);

}  // namespace qshard::cpu
