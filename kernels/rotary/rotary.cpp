#include "kernels/rotary/rotary.h"

#include <ATen/ops/mul.h>

#include <utility>
#include <vector>
#include "kernels/rotary/rotary_cuda.h"

namespace qshard {
namespace {

/// The first and the second channels of all pairs.
std::pair<at::Tensor, at::Tensor> pairs_of(const at::Tensor& x, const Rotation& rotation) {
  const int64_t rotated = rotation.cos.size(1);
  if (rotation.interleaved) return {x.slice(-1, 0, rotated, 2), x.slice(-1, 1, rotated, 2)};
  return {x.narrow(-1, 0, rotated / 2), x.narrow(-1, rotated / 2, rotated / 2)};
}

}  // namespace

void rotate(const at::Tensor& values, const Rotation& rotation, const at::Tensor& out) {
  if (values.is_cuda()) return cuda::rotate(values, rotation, out);
  const int64_t rotated = rotation.cos.size(1);
  std::vector<int64_t> shape(values.dim(), 1);
  shape.back() = rotated;
  shape[rotation.dim] = values.size(rotation.dim);
  const auto angles = [&](const at::Tensor& table) {
    return pairs_of(table.narrow(0, 0, shape[rotation.dim]).view(shape), rotation);
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
