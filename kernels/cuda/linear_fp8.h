// FP8 linear on Hopper: quantized operands and their GEMMs. Runs on the current device and stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/gemm.h"
#include "kernels/linear.h"
#include "kernels/linear_amax.h"

namespace qshard::cuda {

/// Whether the device runs the FP8 GEMMs below for weights of `format`: with one scale per tensor
/// from compute capability 8.9 on, with 128x128 scales on 9.0 alone (cuBLASLt).
bool has_fp8_gemm(at::Device device, const Format& format);

/// Whether it does for every format with scales in the grid: compute capability 9.0.
bool has_every_fp8_gemm(at::Device device);

/// An activation or gradient (M, K) as GEMM operands that contract along K and, transposed, along
/// M.
struct Fp8Activation {
  at::Tensor buffer;      // owns rows' memory
  ScaledOperand rows;     // (M or M padded to 16, K padded to 16)
  at::Tensor saved;       // owns columns' memory: uint8 (saved_input_bytes(M, K),)
  ScaledOperand columns;  // (K padded to 16, M padded to 128)
};

/// Quantizes x (M, K) once, in the orientations asked for, as `format` scales activations; by the
/// amaxes of earlier steps where `delayed` is theirs.
Fp8Activation quantize_activation(const at::Tensor& x, const Format& format, DType code_dtype,
                                  bool rows, bool columns, const DelayedAmax& delayed);

/// The operands in the two buffers of quantize_activation.
ScaledOperand rows_operand(const at::Tensor& buffer, const Format& format, int64_t m, int64_t k);
ScaledOperand saved_operand(const at::Tensor& saved, const Format& format, int64_t m, int64_t k);

/// The values of a saved operand, (m, k) in `dtype`.
at::Tensor dequantize_saved(const at::Tensor& saved, const Format& format, int64_t m, int64_t k,
                            at::ScalarType dtype);

/// The GEMMs. Each returns an undefined tensor if cuBLASLt has no kernel.
/// (m, N) = x @ weight^T + bias.
at::Tensor fp8_forward(const ScaledOperand& x, int64_t m, const WeightOperand& weight,
                       const std::optional<at::Tensor>& bias, const at::TensorOptions& options);
/// (m, K) = grad @ weight.
at::Tensor fp8_grad_input(const ScaledOperand& grad, int64_t m, const WeightOperand& weight,
                          const at::TensorOptions& options);
/// (n, k) = grad^T @ x, both operands transposed.
at::Tensor fp8_grad_weight(const ScaledOperand& grad_t, const ScaledOperand& x_t, int64_t n,
                           int64_t k, const at::TensorOptions& options);
/// sum += grad^T @ x; false, having written nothing, if no GEMM can: scaled_addmm.
bool fp8_add_grad_weight(const ScaledOperand& grad_t, const ScaledOperand& x_t,
                         const at::Tensor& sum);

}  // namespace qshard::cuda
