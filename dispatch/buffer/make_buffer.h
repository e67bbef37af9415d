// How buffers with memory of their own are made.
#pragma once

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// Zeros whose scales are 1. Meta devices have planes without data.
BufferPtr make_buffer(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                      at::Device device);
/// (rows, cols) plain values, not flushed yet. Without a master `values` is the pending write
/// itself.
BufferPtr make_buffer_of_values(const Placement& placement, const at::Tensor& values,
                                bool keeps_master);
/// `image` (rows, row_bytes) uint8 and `grid`, as Planes has them, are the value, agreed on by all
/// ranks. A master is what they stand for.
BufferPtr make_buffer_of_codes(const Placement& placement, at::ScalarType dtype, bool keeps_master,
                               const at::Tensor& image, const at::Tensor& grid);
/// The rows of the logical tensor of `from` that `placement` says (Placement::slice), with a
/// snapshot of the scales of `from`.
BufferPtr make_buffer_of_rows(QuantizedBuffer& from, const Placement& placement,
                              at::ScalarType dtype, at::Device device, Fill fill);
/// The metadata of `from` and no bytes: what set_() builds on.
BufferPtr make_buffer_without_bytes(const QuantizedBuffer& from, at::ScalarType dtype,
                                    at::Device device);
/// `from` over another storage: of its master, a value like any other, or without a master of its
/// image and grid.
BufferPtr make_buffer_over_storage(const QuantizedBuffer& from, c10::Storage storage);
/// Over planes that another buffer shares; master and pending may be undefined.
BufferPtr make_buffer_over_planes(const Placement& placement, at::ScalarType dtype,
                                  const at::Tensor& master, const at::Tensor& codes,
                                  const at::Tensor& pending, ScalingState state, bool is_written);
/// The state of a buffer whose planes were loaded. Codes of a written buffer stand for its value if
/// there is neither master nor pending write: quantizing them again would give other bytes. A rank
/// without rows cannot tell whether the others have a pending write.
void restore_flush_state(QuantizedBuffer& loaded, bool is_written);

}  // namespace qshard
