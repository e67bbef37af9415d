// What the tests of linears share: weights, and how far a product may be from the exact one.
#pragma once

#include "kernels/format/whole_layout.h"
#include "kernels/linear/linear.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {

inline LinearWeight linear_weight(const at::Tensor& values, const Layout& layout) {
  const Quantized q = quantized(values, layout);
  return {matrix_of({layout, q.image, q.grid}, layout.rows)};
}

inline Layout whole(const char* format, int64_t rows, int64_t cols) {
  return whole_layout(find_format(format), rows, cols);
}

inline at::Tensor dequantized(const LinearWeight& weight) {
  const RowImage& rows = weight.codes.row_image();
  const Quantized q{{}, rows.grid.operand(), rows.image.operand()};
  return dequantized(q, rows.layout, at::kFloat, rows.first_row, weight.codes.rows).cpu();
}

/// linear_forward and linear_backward of plain tensors. `sum` as in LinearBackwardTask.
inline at::Tensor forward_of(const at::Tensor& x, const LinearWeight& weight,
                             const std::optional<at::Tensor>& bias = std::nullopt) {
  return linear_forward(PlainOperand(x), weight, bias, /*save_quantized_input=*/false).output;
}

inline LinearBackward backward_of(const at::Tensor& grad, const LinearWeight& weight,
                                  const OperandProducer* input, at::ScalarType dtype,
                                  const at::Tensor& sum = {}) {
  const PlainOperand gradient(grad);
  return linear_backward({.grad = &gradient,
                          .needs_input = true,
                          .input = input,
                          .weight_grad_dtype = dtype,
                          .sum = sum},
                         weight);
}

inline LinearBackward backward_of(const at::Tensor& grad, const LinearWeight& weight,
                                  const at::Tensor& input, at::ScalarType dtype,
                                  const at::Tensor& sum = {}) {
  const PlainOperand operand(input);
  return backward_of(grad, weight, &operand, dtype, sum);
}

inline double epsilon_of(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 0x1p-22;
}

/// Error relative to what rounding the sum of |a||b| costs.
inline void expect_product(const at::Tensor& got, const at::Tensor& a, const at::Tensor& b,
                           const char* what) {
  const at::Tensor exact = a.to(at::kDouble).matmul(b.to(at::kDouble));
  const at::Tensor size = a.to(at::kDouble).abs().matmul(b.to(at::kDouble).abs());
  const double epsilon = epsilon_of(got.scalar_type());
  const at::Tensor allowed = exact.abs() * epsilon + size * 0x1p-11 + 1e-6;
  const at::Tensor error = (got.cpu().to(at::kDouble) - exact).abs();
  EXPECT_TRUE((error <= allowed).all().item<bool>())
      << what << ": worst " << (error / allowed).max().item<double>() << " of what is allowed";
}

}  // namespace qshard::testing
