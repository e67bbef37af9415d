// The linear layer's GEMMs with a quantized weight, on plain memory.
//
// CUDA: GEMMs of codes through cuBLASLt, activations and gradients quantized on the way in; FP8 on
// Hopper, MXFP8 and NVFP4 on Blackwell. Any device: what emulates them, for formats that say so.
// Elsewhere, or where a shape has no such GEMM: dequantized weight and a GEMM in the activation
// dtype; each such reason is warned about once and listed by backend_report().
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "kernels/linear/linear_weight.h"
#include "kernels/linear/operand_producer.h"

namespace qshard {

/// Whether linear_forward can keep its input as FP8 for wgrad: decided from the device and sizes
/// only, so that tracing with fake tensors decides alike. M tokens, N out features, K in features.
bool can_save_quantized_input(at::Device device, int64_t m, int64_t n, int64_t k);
/// The same where the format is known: an emulated one reads packed codes on every device.
bool can_save_quantized_input(const Format& format, at::Device device, int64_t m, int64_t n,
                              int64_t k);

/// Whether linear_forward multiplies FP8 codes of an input (M, K) of `dtype` with a weight of
/// `format`, N out features, as long as the weight's memory allows it.
bool multiplies_input_codes(const Format& format, at::Device device, at::ScalarType dtype,
                            int64_t m, int64_t n, int64_t k);
/// Whether the gradient of an (n, k) weight makes codes of an (m, k) input itself, the same as
/// linear_forward would save. Elsewhere a saved input is all that it ever sees of codes.
bool gradient_quantizes_input(const Format& format, at::Device device, at::ScalarType dtype,
                              int64_t m, int64_t n, int64_t k);
/// Whether it makes codes that cannot be made of packed ones: a saved input must be plain.
bool gradient_reads_plain_input(const Format& format, at::Device device, at::ScalarType dtype,
                                int64_t m, int64_t n, int64_t k);

/// An input (M, K) as operand of linears whose weights have `format`, which must not scale by
/// earlier steps: packed E4M3 codes, rowwise for linear_forward, columnwise for linear_backward.
/// For callers that know of several such linears: compiled code.
/// `amax`, `last_input`: as of quantize_activation (kernels/linear/linear_fp8.h).
/// @throws c10::Error for a format of delayed scaling, an input that is no float32, bfloat16 or
/// float16 matrix, or one that no FP8 GEMM of its device takes.
QuantizedMatrix quantize_input(const at::Tensor& input, const Format& format,
                               Orientations orientations, at::Tensor* amax = nullptr,
                               LastInputAmax* last_input = nullptr);

struct LinearForward {
  at::Tensor output;      // (M, N) in the input's dtype
  QuantizedMatrix saved;  // columnwise packed codes of the input, if asked for
};

/// output = input @ weight^T + bias + added; input (M, K) float32/bfloat16/float16, bias (N,),
/// added (M, N), contiguous and of the input's dtype: a GEMM of codes without a bias adds it and
/// rounds once, elsewhere the product has that dtype before. With
/// `weight_only` activations and gradients are not quantized: the weight is dequantized to their
/// dtype.
/// @throws c10::Error, before anything is computed, if shapes, dtypes or devices do not go
/// together, the image that forward reads was not gathered, or an input is to be saved that cannot
/// be.
LinearForward linear_forward(const OperandProducer& input, const LinearWeight& weight,
                             const std::optional<at::Tensor>& bias, bool save_quantized_input,
                             bool weight_only = false, const at::Tensor& added = {});

/// The random words by which gradients are rounded where the format rounds them stochastically, of
/// one backward for several weights. Each linear draws words of its own without.
struct GradientRounding {
  at::Tensor rows = {};     // int32 (kRoundingWords,), drawn when the first linear asks for it
  at::Tensor columns = {};  // of the gradient's columns, which wgrad reads
};

/// The words of QuantizeTask::rounding for one gradient operand of a block-scaled GEMM; undefined
/// rounds to nearest. Stochastic rounding goes by torch's own generator. `shared`, or null: words
/// that were drawn for several linears, or are to be: each counts from its `group` on, so that its
/// elements round in a way that no other group's rows change.
at::Tensor gradient_rounding(const Format& format, at::Device device, at::Tensor* shared,
                             int64_t group);

/// What linear_backward is to make, and of what.
struct LinearBackwardTask {
  const OperandProducer* grad = nullptr;   // (M, N)
  bool needs_input = false;                // grad_input is asked for
  at::Tensor input_sum = {};               // (M, K), contiguous, of its dtype: as `sum`
  const OperandProducer* input = nullptr;  // (M, K); null: grad_weight is not asked for
  at::ScalarType weight_grad_dtype = at::kFloat;
  at::Tensor sum = {};  // (N, K), contiguous, of that dtype: grad_weight is added to it and is it
  bool weight_only = false;
  GradientRounding* rounding = nullptr;  // null: none is shared
  int64_t group = 0;  // which of the weights this is: equal ones round in the same way
};

struct LinearBackward {
  at::Tensor grad_input;   // (M, K) in the gradient's dtype, undefined unless asked for
  at::Tensor grad_weight;  // (N, K) in weight_grad_dtype, undefined unless asked for
};

/// grad_input = grad @ weight (+ input_sum), grad_weight = grad^T @ input (+ sum). The gradient is
/// quantized once, in the orientations that are needed, and multiplied as it is where it arrives
/// quantized. Where one GEMM can, it adds to a sum in place; elsewhere the product is made first.
/// Either way to autograd's bits on CPU, and in cuBLASLt's FP8 GEMMs. grad_weight alone reads no
/// codes of the weight, whose image may then have no bytes.
/// @throws c10::Error as linear_forward does, for the image that dgrad reads too.
LinearBackward linear_backward(const LinearBackwardTask& task, const LinearWeight& weight);

/// One line per GEMM path taken so far in this process: format, direction, backend, count, and for
/// a fallback its reason.
std::string backend_report();

/// Why linears with a weight of `format` multiply dequantized values on the device, whatever their
/// shape; "" if they multiply codes.
std::string why_dequantized(const Format& format, at::Device device);

}  // namespace qshard
