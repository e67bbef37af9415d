// FP8 linear on Hopper: quantized operands and their GEMMs. Runs on the current device and stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/gemm/gemm.h"
#include "kernels/linear/operand_producer.h"

namespace qshard::cuda {

/// Whether the device runs the FP8 GEMMs below on packed codes that are scaled so, along their
/// rows: by one scale from compute capability 8.9 on, in blocks on 9.0 alone (cuBLASLt).
bool has_fp8_gemm(at::Device device, ScaleMode packed_rows);

/// Whether it does for every scale mode of packed codes: compute capability 9.0.
bool has_every_fp8_gemm(at::Device device);

/// Quantizes x (M, K) once, in the orientations asked for, as the format scales activations; by the
/// amaxes of earlier steps where `delayed` is theirs, else by `amax`, with one scale: it becomes
/// that of x if it is undefined, which takes one pass where `last_input` guesses the scale.
QuantizedMatrix quantize_activation(const at::Tensor& x, const OperandRequest& request,
                                    at::Tensor& amax);
inline QuantizedMatrix quantize_activation(const at::Tensor& x, const OperandRequest& request) {
  at::Tensor amax;
  return quantize_activation(x, request, amax);
}

/// The packed codes asked for of rows that arrived: row images of the request's row format.
QuantizedMatrix repack_activation(const QuantizedMatrix& rows, const OperandRequest& request);

/// Packed codes as cuBLASLt takes them.
ScaledOperand scaled_operand(const PackedCodes& codes, DType code_dtype);

/// The GEMMs, of packed codes with a weight's row image. Each returns an undefined tensor if
/// cuBLASLt has no kernel.
/// (M, N) = x @ weight^T + bias + added, if that is defined; reads x rowwise.
at::Tensor fp8_forward(const QuantizedMatrix& x, const QuantizedMatrix& weight,
                       const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                       const at::Tensor& added = {});
/// (M, K) = grad @ weight; reads grad rowwise. `sum`, if it is defined and was added to within the
/// GEMM: scaled_addmm.
at::Tensor fp8_grad_input(const QuantizedMatrix& grad, const QuantizedMatrix& weight,
                          const at::TensorOptions& options, const at::Tensor& sum = {});
/// (N, K) = grad^T @ x; reads both columnwise.
at::Tensor fp8_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                           const at::TensorOptions& options);
/// sum += grad^T @ x; false, having written nothing, if no GEMM can: scaled_addmm.
bool fp8_add_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                         const at::Tensor& sum);

}  // namespace qshard::cuda
