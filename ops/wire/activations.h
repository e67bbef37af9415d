// Tokens on the wire of tensor parallelism, for qshard/tensor_parallel: of FP8 as messages
// (kernels/messages/activation_message.h), of MXFP8 as rows that hold their scales
// (kernels/format/layout.h).
#pragma once

#include "ops/calls/ops.h"

namespace qshard {

/// The amax that ranks have to agree upon before they send tokens to meet a weight of `format`:
/// float32 (1,), or (0,) where scales are of blocks.
Tensor message_amax(const Tensor& self, c10::string_view format);

/// The message of tokens (..., K), float32, bfloat16 or float16: uint8.
Tensor encode_activation_op(const Tensor& self, c10::string_view format, bool is_gradient,
                            const Tensor& amax);

/// (ranks, size...), with sizes that view to these, as one tensor `whole`, along `dim` of `size`.
Tensor put_together(const Tensor& parts, at::IntArrayRef size, int64_t dim, at::IntArrayRef whole);

/// Values of the messages of all ranks, each of tokens of shape `size`, put together along `dim`.
/// @throws c10::Error for bytes that are no such messages.
Tensor decode_activations_op(const Tensor& messages, c10::string_view format, bool is_gradient,
                             at::IntArrayRef size, int64_t dim, at::ScalarType dtype);

}  // namespace qshard
