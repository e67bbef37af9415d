// The values that a buffer's codes stand for.
#pragma once

#include <ATen/core/Tensor.h>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// Dequantized rows of the image in `out_dtype`, whether they show the value or not.
/// @throws c10::Error if only the columnwise image was gathered, or FSDP2 freed the bytes.
at::Tensor dequantized_rows(const Planes& planes, const Layout& layout, RowWindow rows,
                            at::ScalarType out_dtype);
inline at::Tensor dequantized_rows(const QuantizedBuffer& buffer, RowWindow rows,
                                   at::ScalarType out_dtype) {
  return dequantized_rows(buffer.planes(), buffer.layout(), rows, out_dtype);
}
/// The same of all rows.
inline at::Tensor dequantized_rows(const QuantizedBuffer& buffer, at::ScalarType out_dtype) {
  return dequantized_rows(buffer, {0, buffer.layout().rows}, out_dtype);
}

/// @throws c10::Error naming `what` is asked for if only the columnwise image was gathered.
void check_has_rowwise_image(const Layout& layout, const char* what);

/// @throws c10::Error if FSDP2 or untyped_storage().resize_() freed codes or scales.
void check_codes_are_allocated(const Planes& planes, const Layout& layout);

/// The same of a master, which only untyped_storage().resize_() frees.
void check_master_is_allocated(const Planes& planes, const Layout& layout, at::ScalarType dtype);

}  // namespace qshard
