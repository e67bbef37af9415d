// The linear layer's GEMMs with a quantized weight, on plain tensors.
//
// CUDA: GEMMs of codes through cuBLASLt, activations and gradients quantized on the way in; FP8 on
// Hopper, MXFP8 and NVFP4 on Blackwell. Elsewhere, or where a shape has no such GEMM: dequantized
// weight and a GEMM in the activation dtype; each such reason is warned about once and listed by
// backend_report().
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "kernels/graph_record.h"
#include "kernels/layout.h"

namespace qshard {

/// A weight (N, K) as plain tensors: N rows of a row image and its grid. Of two row images forward
/// reads the rowwise one, dgrad the columnwise one.
struct WeightOperand {
  Layout layout;          // of the whole buffer
  at::Tensor image;       // uint8 (layout.rows, layout.row_bytes())
  at::Tensor grid;        // float32 (grid_rows, grid_cols), undefined if the format has none
  int64_t first_row = 0;  // rows [first_row, first_row + rows) of the image are the weight
  int64_t rows = 0;       // N
  // Of delayed scaling (kernels/scaling_state.h), undefined without it.
  at::Tensor amax_history = {};
  at::Tensor scaling_amax = {};
};

/// Whether linear_forward can keep its input as FP8 for wgrad: decided from the device and sizes
/// only, so that tracing with fake tensors decides alike. M tokens, N out features, K in features.
bool can_save_quantized_input(at::Device device, int64_t m, int64_t n, int64_t k);

/// Bytes of the packed saved input: codes of x^T plus its scales, for every format alike.
int64_t saved_input_bytes(int64_t m, int64_t k);

/// Bytes of quantize_input's rows, for every format alike.
int64_t input_rows_bytes(int64_t m, int64_t k);

/// Whether linear_forward multiplies FP8 codes of an input (M, K) of `dtype` with a weight of
/// `format`, N out features, as long as the weight's memory allows it.
bool multiplies_input_codes(const Format& format, at::Device device, at::ScalarType dtype,
                            int64_t m, int64_t n, int64_t k);

struct QuantizedInput {
  at::Tensor rows;     // uint8 (input_rows_bytes,), for linear_forward; empty (0,) if not asked for
  at::Tensor columns;  // uint8 (saved_input_bytes,), for linear_backward; likewise
};

/// An input (M, K) as operands of linears whose weights have `format`, which must not scale by
/// earlier steps. For callers that know of several such linears: compiled code.
/// @throws c10::Error for a format of delayed scaling, an input that is no float32, bfloat16 or
/// float16 matrix, or one that no FP8 GEMM of its device takes.
QuantizedInput quantize_input(const at::Tensor& input, const Format& format, bool rows,
                              bool columns);

/// An input of several linears whose codes they may share (kernels/cuda/shared_activation.h).
struct SharedInput {
  at::Tensor tensor = {};   // of which the input is the matrix; undefined: nothing is shared
  GraphRecord record = {};  // what made its values: another one when they are made again
};

struct LinearForward {
  at::Tensor output;  // (M, N) in the input's dtype
  at::Tensor saved;   // uint8 (saved_input_bytes,) if asked for, else empty (0,)
};

/// output = input @ weight^T + bias; input (M, K) float32/bfloat16/float16, bias (N,). With
/// `weight_only` activations and gradients are not quantized: the weight is dequantized to their
/// dtype. Linears called with the same `shared` input share its codes. `input_rows`, if defined,
/// are those of quantize_input with the weight's format, and nothing is saved.
/// @throws c10::Error, before anything is computed, if shapes, dtypes or devices do not go
/// together, the image that forward reads was not gathered, or an input is to be saved that cannot
/// be.
LinearForward linear_forward(const at::Tensor& input, const WeightOperand& weight,
                             const std::optional<at::Tensor>& bias, bool save_quantized_input,
                             bool weight_only = false, const SharedInput& shared = {},
                             const at::Tensor& input_rows = {});

struct LinearBackward {
  at::Tensor grad_input;   // (M, K) in grad's dtype, undefined unless asked for
  at::Tensor grad_weight;  // (N, K) in weight_grad_dtype, undefined unless asked for
};

/// grad (M, N); `input` is (M, K) plain, or what linear_forward saved when `input_is_quantized`.
/// The gradient is quantized once, in the orientations that are needed. grad_weight is added to
/// `sum`, if defined, and is then it: (N, K) contiguous in weight_grad_dtype. Where one GEMM can,
/// it adds in place; elsewhere the product is made first. Either way to autograd's bits on CPU, and
/// in cuBLASLt's FP8 GEMMs.
/// @throws c10::Error as linear_forward does, for the image that dgrad reads too.
LinearBackward linear_backward(const at::Tensor& grad, const WeightOperand& weight,
                               const at::Tensor& input, bool input_is_quantized, bool needs_input,
                               bool needs_weight, at::ScalarType weight_grad_dtype,
                               bool weight_only = false, const at::Tensor& sum = {});

/// One line per GEMM path taken so far in this process: format, direction, backend, count, and for
/// a fallback its reason.
std::string backend_report();

/// Why linears with a weight of `format` multiply dequantized values on the device, whatever their
/// shape; "" if they multiply codes.
std::string why_dequantized(const Format& format, at::Device device);

}  // namespace qshard
