// Small products by a GEMM of codes beside what emulates it: whether the GEMM is right.
#pragma once

#include <c10/core/Device.h>

#include <string>

#include "kernels/linear/gemm_backend.h"

namespace qshard {

/// The first product of a linear, in any direction, that is farther from the emulated one than the
/// arithmetic of a GEMM of codes allows; "" if there is none. Directions that `backend` does not
/// run are left out. Deterministic: draws nothing from torch's generators. Waits for the device.
std::string wrong_product(const QuantizedGemmBackend& backend, const Format& format,
                          at::Device device);
/// The same of the grouped GEMM of experts; "" where the format has none on the device.
std::string wrong_grouped_product(const Format& format, at::Device device);

}  // namespace qshard
