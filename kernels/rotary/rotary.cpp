#include "kernels/rotary/rotary.h"

#include <ATen/ops/mul.h>

#include <utility>

#include "kernels/rotary/rotary_cuda.h"

namespace qshard {
namespace {

/// The first and the second channels of all pairs.
std::pair<at::Tensor, at::Tensor> pairs_of(const at::Tensor& x, const Rotation& rotation) {
  const int64_t rotated = rotation.rotated();
  if (rotation.interleaved) return {x.slice(-1, 0, rotated, 2), x.slice(-1, 1, rotated, 2)};
  return {x.narrow(-1, 0, rotated / 2), x.narrow(-1, rotated / 2, rotated / 2)};
}

/// A table as it meets `values`: of the same dimensions, 1 of those that share angles.
at::Tensor beside(const at::Tensor& values, const at::Tensor& table, const Rotation& rotation) {
  at::Tensor result = table.narrow(-2, 0, values.size(rotation.dim));
  const bool has_sequences = rotation.has_tables_of_sequences();
  if (has_sequences && rotation.dim < rotation.sequence_dim()) result = result.transpose(0, 1);
  for (int64_t i = 0; i + 1 < values.dim(); ++i) {
    const bool is_own = i == rotation.dim || (has_sequences && i == rotation.sequence_dim());
    if (!is_own) result = result.unsqueeze(i);
  }
  return result;
}

}  // namespace

void rotate(const at::Tensor& values, const Rotation& rotation, const at::Tensor& out) {
  if (values.is_cuda()) return cuda::rotate(values, rotation, out);
  const int64_t rotated = rotation.rotated();
  const auto angles = [&](const at::Tensor& table) {
    return pairs_of(beside(values, table, rotation), rotation);
  };
  const auto [a, b] = pairs_of(values.to(at::kFloat), rotation);
  const auto [cos_a, cos_b] = angles(rotation.cos);
  auto [sin_a, sin_b] = angles(rotation.sin);
  if (rotation.inverse) std::tie(sin_a, sin_b) = std::pair(-sin_b, -sin_a);
  const auto [out_a, out_b] = pairs_of(out, rotation);
  out_a.copy_(at::mul(a, cos_a).sub_(at::mul(b, sin_a)));
  out_b.copy_(at::mul(b, cos_b).add_(at::mul(a, sin_b)));
  out.narrow(-1, rotated, out.size(-1) - rotated)
      .copy_(values.narrow(-1, rotated, out.size(-1) - rotated));
}

}  // namespace qshard
