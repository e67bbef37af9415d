#include "kernels/gemm/scaled_mm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>

#include "kernels/format/value_dtype.h"

namespace qshard::cuda {
namespace {

bool has_row_scales(const ScaledOperand& operand) { return operand.scale_mode == ScaleMode::kRow; }

at::Tensor row_scales_of(const ScaledOperand& operand, const at::TensorOptions& options) {
  auto* scales = const_cast<void*>(operand.scale_inv);  // which is read alone
  return at::for_blob(scales, {operand.rows})
      .options(options.dtype(at::kFloat))
      .target_device(options.device())
      .make_tensor();
}

}  // namespace

at::Tensor scaled_mm(ScaledGemm gemm, int64_t rows, int64_t cols,
                     const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                     const at::Tensor& added) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto is_aligned = [](const at::Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
  };
  const bool is_whole = gemm.a.rows == rows && gemm.b.rows == cols;
  bool has_bias = bias && bias->scalar_type() == dtype && dtype != at::kFloat &&
                  bias->is_contiguous() && is_aligned(*bias);
  bool has_added =
      added.defined() && is_whole && !bias && gemm.alpha_zero == nullptr && is_aligned(added);
  const auto run = [&](at::ScalarType out_dtype) {
    at::Tensor out = at::empty({gemm.a.rows, gemm.b.rows}, options.dtype(out_dtype));
    gemm.out = out.mutable_data_ptr();
    gemm.out_dtype = value_dtype(out_dtype);
    gemm.bias = has_bias ? bias->const_data_ptr() : nullptr;
    gemm.added = has_added ? added.const_data_ptr() : nullptr;
    return scaled_gemm(gemm) ? out : at::Tensor();
  };
  at::Tensor out = has_bias || has_added ? run(dtype) : at::Tensor();
  if (!out.defined()) {
    has_bias = has_added = false;
    if (is_value_dtype(dtype)) out = run(dtype);
  }
  if (!out.defined() && dtype != at::kFloat) out = run(at::kFloat);
  if (!out.defined() && has_row_scales(gemm.a) && has_row_scales(gemm.b)) {
    const at::Tensor scales_a = row_scales_of(gemm.a, options).unsqueeze(1);
    const at::Tensor scales_b = row_scales_of(gemm.b, options);
    const at::Tensor one = at::ones({1}, options.dtype(at::kFloat));
    gemm.a.scale_mode = gemm.b.scale_mode = ScaleMode::kTensor;
    gemm.a.scale_inv = gemm.b.scale_inv = one.const_data_ptr();
    out = run(at::kFloat);
    if (out.defined()) out.mul_(scales_a).mul_(scales_b);
  }
  if (!out.defined()) return out;
  if (!is_whole) {
    out = out.narrow(0, 0, rows).narrow(1, 0, cols).clone(at::MemoryFormat::Contiguous);
  }
  if (bias && !has_bias) out.add_(*bias);
  out = out.to(dtype);
  if (added.defined() && !has_added) out.add_(added);
  return out;
}

bool scaled_addmm(ScaledGemm gemm, const at::Tensor& out) {
  if (gemm.a.rows != out.size(0) || gemm.b.rows != out.size(1)) return false;
  if (has_row_scales(gemm.a) || has_row_scales(gemm.b)) return false;
  gemm.out = out.mutable_data_ptr();
  gemm.out_dtype = value_dtype(out.scalar_type());
  gemm.added = gemm.out;
  return scaled_gemm(gemm);
}

}  // namespace qshard::cuda
