// The check of GEMMs of codes on GPUs where no run of `python -m qshard verify` has seen them
// right: when the first weight of a format arrives.
#pragma once

#include <c10/core/Device.h>

#include "kernels/format/formats.h"

namespace qshard {

/// A weight of `format` is on `device`, or a linear is about to read one there. Multiplies small
/// products by the GEMMs of its codes, once in a process, unless they are known to be right there,
/// and switches off what is wrong: GemmVerdicts (kernels/gemm/gemm_verdicts.h). Does nothing while
/// a CUDA graph is captured or where memory is short: the next call does then.
/// @throws c10::Error for wrong GEMMs, if the environment says QSHARD_GEMM_CHECK=error.
void check_gemms_at_first_use(const Format& format, at::Device device);

}  // namespace qshard
