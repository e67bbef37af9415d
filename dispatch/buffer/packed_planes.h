// A buffer's planes as the bytes of a file.
#pragma once

#include <ATen/core/Tensor.h>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// The planes as one new uint8 tensor: `[image | master | grid]`, each 16-byte aligned. Part of the
/// file format.
at::Tensor pack_planes(QuantizedBuffer& buffer);
int64_t packed_bytes(const Layout& layout, at::ScalarType dtype, bool keeps_master);
/// From such bytes, on their device; `pending` may be undefined.
BufferPtr unpack_planes(const at::Tensor& bytes, const at::Tensor& pending,
                        const Placement& placement, at::ScalarType dtype, bool keeps_master,
                        bool is_written);

}  // namespace qshard
