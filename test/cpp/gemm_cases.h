// What the tests of linears share: weights, and how far a product may be from the exact one.
#pragma once

#include "kernel_cases.h"
#include "kernels/linear.h"

namespace qshard::testing {

inline WeightOperand weight_operand(const at::Tensor& values, const Layout& layout) {
  const Quantized q = quantized(values, layout);
  return {layout, q.image, q.grid, 0, layout.rows};
}

inline Layout whole(const char* format, int64_t rows, int64_t cols) {
  return {&find_format(format), rows, cols, rows, rows, 0};
}

inline at::Tensor dequantized(const WeightOperand& weight) {
  const Quantized q{{}, weight.grid, weight.image};
  return dequantized(q, weight.layout, at::kFloat, weight.first_row, weight.rows).cpu();
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
