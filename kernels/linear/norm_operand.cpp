#include "kernels/linear/norm_operand.h"

#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>

#include "kernels/linear/linear_amax.h"
#include "kernels/linear/norm_quantize.h"

namespace qshard {
namespace {

// By torch's operators; in fp32, rounded once.
at::Tensor composed(const at::Tensor& x, const Normalization& norm) {
  const at::Tensor wide = x.to(at::kFloat);
  at::Tensor gamma = norm.weight.to(at::kFloat);
  if (norm.zero_centered_gamma) gamma = gamma + 1;
  const bool has_bias = norm.bias.defined();
  const at::Tensor bias = has_bias ? norm.bias.to(at::kFloat) : at::Tensor();
  const auto shape = gamma.sizes();
  if (!norm.rms) return at::layer_norm(wide, shape, gamma, bias, norm.eps).to(x.scalar_type());
  at::Tensor y = at::rms_norm(wide, shape, gamma, norm.eps);
  if (has_bias) y = y + bias;
  return y.to(x.scalar_type());
}

}  // namespace

QuantizedMatrix NormOperand::codes(const OperandRequest& request) const {
  const bool is_fused = request.operand_layout == OperandLayout::kPacked &&
                        request.role == OperandRole::kInput &&
                        !has_scale_per_row(*request.format) && has_norm_kernel(x_, norm_);
  if (is_fused) return cuda::quantize_norm(x_, norm_, request, statistics_, amax_);
  return PlainOperand(values(dtype())).codes(request);
}

at::Tensor NormOperand::values(at::ScalarType) const {
  if (!has_norm_kernel(x_, norm_)) return composed(x_, norm_);
  auto [y, statistics] = normalized(x_, norm_);
  if (!statistics_.defined()) statistics_ = std::move(statistics);
  return std::move(y);
}

void NormOperand::collect_amax(const DelayedAmax& delayed) const {
  if (delayed) qshard::collect_amax(values(dtype()), delayed);
}

}  // namespace qshard
