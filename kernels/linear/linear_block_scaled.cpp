#include "kernels/linear/linear_block_scaled.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/device/check_launch.h"
#include "kernels/gemm/scaled_mm.h"
#include "kernels/gemm/swizzle_scales_kernel.h"
#include "kernels/linear/block_scaled_operand.h"

namespace qshard::cuda {
namespace {

// The codes stay where they are, the scales are laid out for the GEMM.
struct SwizzledOperand {
  ScaledOperand operand;
  at::Tensor scales;  // owns scale_inv's memory
};

SwizzledOperand swizzled(const RowImage& rows) {
  const Layout& layout = rows.layout;
  const Format& format = *layout.format;
  SwizzledOperand out;
  out.scales =
      at::empty({swizzled_scale_bytes(layout.rows, layout.block_cols())}, rows.image.options());
  const auto* image = static_cast<const uint8_t*>(rows.image.const_data_ptr());
  const ScaleRows scales{image + layout.row_scale_offset(), layout.rows, layout.row_bytes(),
                         layout.block_cols()};
  check_launch(launch_swizzle_scales(scales, static_cast<uint8_t*>(out.scales.mutable_data_ptr()),
                                     c10::cuda::getCurrentCUDAStream()));
  out.operand.codes = image;
  out.operand.rows = layout.rows;
  out.operand.ld = layout.row_bytes();
  out.operand.dtype = format.code_dtype;
  out.operand.scale_mode = format.gemm.scale_mode;
  out.operand.scale_inv = out.scales.const_data_ptr();
  return out;
}

// NVFP4's blocks have scales under those of their tensors; the product of the two is alpha.
at::Tensor alpha_zero(const RowImage& a, const RowImage& b) {
  at::Tensor factors = at::zeros({2}, a.grid.options());
  at::Tensor alpha = factors.narrow(0, 0, 1);
  at::mul_out(alpha, a.grid.operand(), b.grid.operand());
  return factors;
}

// (rows, cols) = a @ b^T + bias + added, of the first rows of each.
at::Tensor gemm(const RowImage& a, const RowImage& b, int64_t rows, int64_t cols,
                const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                const at::Tensor& added = {}) {
  const SwizzledOperand swizzled_a = swizzled(a);
  const SwizzledOperand swizzled_b = swizzled(b);
  ScaledGemm gemm;
  gemm.a = swizzled_a.operand;
  gemm.b = swizzled_b.operand;
  // All that lies before the scales: 16 bytes of codes or a multiple, zeros at the end.
  gemm.k = a.layout.row_scale_offset() * 8 / a.layout.format->code_bits;
  at::Tensor factors;
  if (a.layout.format->outer_scale) {
    factors = alpha_zero(a, b);
    gemm.alpha_zero = factors.const_data_ptr<float>();
  }
  return scaled_mm(gemm, rows, cols, bias, options, added);
}

}  // namespace

at::Tensor block_scaled_forward(const QuantizedMatrix& x, const QuantizedMatrix& weight,
                                const std::optional<at::Tensor>& bias,
                                const at::TensorOptions& options, const at::Tensor& added) {
  return gemm(x.row_image(), weight_rows(weight), x.rows, weight.rows, bias, options, added);
}

at::Tensor block_scaled_grad_input(const QuantizedMatrix& grad, const QuantizedMatrix& weight,
                                   const at::TensorOptions& options) {
  return gemm(grad.row_image(), weight_columns(weight), grad.rows, weight.cols, std::nullopt,
              options);
}

at::Tensor block_scaled_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                                    const at::TensorOptions& options) {
  return gemm(std::get<RowImage>(grad.columnwise), std::get<RowImage>(x.columnwise), grad.cols,
              x.cols, std::nullopt, options);
}

}  // namespace qshard::cuda
