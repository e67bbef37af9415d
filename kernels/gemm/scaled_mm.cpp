#include "kernels/gemm/scaled_mm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>

#include <c10/cuda/CUDAStream.h>

#include "kernels/device/check_launch.h"
#include "kernels/device/compute_capability.h"
#include "kernels/format/layout.h"
#include "kernels/format/value_dtype.h"
#include "kernels/gemm/sm90/gemm.h"

namespace qshard::cuda {
namespace {

bool has_row_scales(const ScaledOperand& operand) { return operand.scale_mode == ScaleMode::kRow; }

/// In blocks, 1x128 codes of a and either of b, without what only cuBLASLt adds. Hopper's grouped
/// GEMM multiplies these as one group in 0.93 to 1.0 of cuBLASLt's time, to the same bits (one
/// H200, bench/results/2026-11-29-h200.md); where fewer codes are contracted, cuBLASLt is as fast.
bool is_for_grouped_gemm(const ScaledGemm& gemm) {
  constexpr int64_t kLeastContracted = 2048;
  const ScaleMode b = gemm.b.scale_mode;
  return gemm.a.scale_mode == ScaleMode::kBlock1x128 && gemm.k >= kLeastContracted &&
         (b == ScaleMode::kBlock128x128 || b == ScaleMode::kBlock1x128) && gemm.bias == nullptr &&
         gemm.alpha_zero == nullptr && (gemm.added == nullptr || gemm.added == gemm.out);
}

/// Returns false, having launched nothing, for sizes and alignments that it does not take.
bool multiplied_as_one_group(const ScaledGemm& gemm) {
  const auto codes_of = [&](const ScaledOperand& operand, bool in_squares) {
    GroupedCodes codes{static_cast<const uint8_t*>(operand.codes), operand.rows, gemm.k,
                       operand.ld};
    if (!in_squares) {
      codes.scales = static_cast<const float*>(operand.scale_inv);
      codes.scale_ld = operand.rows;
    }
    return codes;
  };
  const bool in_squares = gemm.b.scale_mode == ScaleMode::kBlock128x128;
  GroupedGemm one;
  one.a = codes_of(gemm.a, /*in_squares=*/false);
  one.b = codes_of(gemm.b, in_squares);
  if (in_squares) {
    one.square_scales = {static_cast<const float*>(gemm.b.scale_inv), 0,
                         round_up(ceil_div(gemm.k, 128), 4), 1};
  }
  one.along = GroupsAlong::kContraction;
  one.groups = 1;
  one.total = gemm.k;
  one.n = gemm.b.rows;
  one.d = gemm.out;
  one.d_type = gemm.out_dtype;
  one.adds = gemm.added != nullptr;
  if (reinterpret_cast<uintptr_t>(gemm.out) % 16 != 0) return false;
  const cudaError_t error =
      grouped_gemm_sm90(one, tile_rows_for(one), c10::cuda::getCurrentCUDAStream());
  if (error == cudaErrorInvalidValue) return false;
  check_launch(error);
  return true;
}

bool multiplied(const ScaledGemm& gemm, at::Device device) {
  return (is_for_grouped_gemm(gemm) && compute_capability(device) == 90 &&
          multiplied_as_one_group(gemm)) ||
         scaled_gemm(gemm);
}

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
    return multiplied(gemm, options.device()) ? out : at::Tensor();
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
  return multiplied(gemm, out.device());
}

}  // namespace qshard::cuda
