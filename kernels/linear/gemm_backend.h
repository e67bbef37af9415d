// What runs the GEMMs of linears: backends that multiply codes, one that emulates them, and one
// that dequantizes the weight alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/gemm/gemm_report.h"
#include "kernels/linear/quantized_matrix.h"

namespace qshard {

/// What a backend says about a GEMM before its operands are made. M tokens, N out features, K in
/// features.
struct GemmProblem {
  GemmDirection direction = GemmDirection::kForward;
  const Format* format = nullptr;  // of the weight
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kBFloat16;  // of the input or gradient that is multiplied
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  const QuantizedMatrix* weight = nullptr;  // null: grad_weight, or any whose memory allows it
};

/// A matrix as values or as codes: backends read what they multiply.
struct GemmOperand {
  at::Tensor values = {};
  const QuantizedMatrix* codes = nullptr;
};

struct GemmTask {
  GemmDirection direction = GemmDirection::kForward;
  GemmOperand a = {};                   // the input of forward, else the gradient (M, N)
  GemmOperand b = {};                   // the weight (N, K), of grad_weight the input (M, K)
  at::TensorOptions out = {};           // dtype and device of the product
  std::optional<at::Tensor> bias = {};  // (N,), of forward
  at::Tensor added = {};  // of forward: (M, N), contiguous, of the product's dtype, or undefined
  at::Tensor sum = {};    // in the shape of a gradient's product: add to it, if one GEMM can
};

class GemmBackend {
 public:
  virtual ~GemmBackend() = default;

  /// kNone, or why it cannot run: from sizes, device and the weight's place in memory alone.
  virtual GemmFallback supports(const GemmProblem& problem) const = 0;
  /// forward (M, N) = a @ b^T + bias + added, grad_input (M, K) = a @ b, grad_weight (N, K) =
  /// a^T @ b: a new tensor, or `sum` if it was added to. Undefined if cuBLASLt has no kernel.
  virtual at::Tensor run(const GemmTask& task) const = 0;
};

class QuantizedGemmBackend : public GemmBackend {
 public:
  /// That of the activations and gradients it reads. Packed codes of both orientations are made in
  /// one pass.
  virtual OperandLayout operand_layout() const = 0;
};

/// Returns the backend that multiplies codes of a weight's format: FP8, block-scaled (MXFP8,
/// NVFP4), or the emulated one.
const QuantizedGemmBackend& quantized_backend(const Format& format);
/// GEMMs of dequantized weights in the activations' dtype. They run what no other backend can.
const GemmBackend& dequantized_gemms();

/// Whether the kernels of codes cannot count that far.
bool is_too_large(int64_t m, int64_t n, int64_t k);

}  // namespace qshard
