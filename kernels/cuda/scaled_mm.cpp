#include "kernels/cuda/scaled_mm.h"

#include <ATen/ops/empty.h>

#include "kernels/value_dtype.h"

namespace qshard::cuda {

at::Tensor scaled_mm(ScaledGemm gemm, int64_t rows, int64_t cols,
                     const std::optional<at::Tensor>& bias, const at::TensorOptions& options) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const bool fuse_bias = bias && bias->scalar_type() == dtype && dtype != at::kFloat &&
                         bias->is_contiguous() &&
                         reinterpret_cast<uintptr_t>(bias->const_data_ptr()) % 16 == 0;
  const auto run = [&](at::ScalarType out_dtype, bool with_bias) {
    at::Tensor out = at::empty({gemm.a.rows, gemm.b.rows}, options.dtype(out_dtype));
    gemm.out = out.mutable_data_ptr();
    gemm.out_dtype = value_dtype(out_dtype);
    gemm.bias = with_bias ? bias->const_data_ptr() : nullptr;
    return scaled_gemm(gemm) ? out : at::Tensor();
  };
  bool has_bias = fuse_bias;
  at::Tensor out = fuse_bias ? run(dtype, true) : at::Tensor();
  if (!out.defined()) {
    has_bias = false;
    if (is_value_dtype(dtype)) out = run(dtype, false);
  }
  if (!out.defined() && dtype != at::kFloat) out = run(at::kFloat, false);
  if (!out.defined()) return out;
  if (gemm.a.rows != rows || gemm.b.rows != cols) {
    out = out.narrow(0, 0, rows).narrow(1, 0, cols).clone(at::MemoryFormat::Contiguous);
  }
  if (bias && !has_bias) out.add_(*bias);
  return out.to(dtype);
}

bool scaled_addmm(ScaledGemm gemm, const at::Tensor& out) {
  if (gemm.a.rows != out.size(0) || gemm.b.rows != out.size(1)) return false;
  gemm.out = out.mutable_data_ptr();
  gemm.out_dtype = value_dtype(out.scalar_type());
  gemm.accumulate = true;
  return scaled_gemm(gemm);
}

}  // namespace qshard::cuda
