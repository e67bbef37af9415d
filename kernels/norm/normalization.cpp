#include "kernels/norm/normalization.h"

#include "kernels/format/value_dtype.h"

namespace qshard {

bool has_norm_kernel(const at::Tensor& x, const Normalization& norm) {
  const auto is_value = [&](const at::Tensor& t) {
    return is_value_dtype(t.scalar_type()) && t.device() == x.device();
  };
  const auto is_parameter = [&](const at::Tensor& t) {
    return is_value(t) && t.dim() == 1 && t.size(0) == x.size(-1);
  };
  const at::Tensor& bias = norm.bias;
  return x.is_cuda() && x.dim() >= 1 && is_value(x) && x.numel() > 0 && x.size(-1) % 8 == 0 &&
         x.size(-1) * x.element_size() <= kMaxNormBytes && is_parameter(norm.weight) &&
         (!bias.defined() ||
          (is_parameter(bias) && bias.scalar_type() == norm.weight.scalar_type()));
}

}  // namespace qshard
