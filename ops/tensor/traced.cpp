// What qshard/_runtime/fakes.py answers traced calls with.
#include <fmt/format.h>

#include <array>

#include "dispatch/buffer/make_buffer.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/shown_name.h"
#include "ops/calls/ops.h"
#include "ops/calls/overlap.h"

namespace qshard {

Tensor meta_replica(const Tensor& self) {
  PlainGuard guard;
  const QuantizedBuffer& buffer = buffer_of(self);
  const Layout& layout = buffer.layout();
  return make_tensor(make_buffer(layout, buffer.dtype(), buffer.keeps_master(), at::kMeta),
                     {layout.rows, layout.cols});
}

OptionalTensor plane_copy(const Tensor& self, c10::string_view plane) {
  using Accessor = OptionalTensor (*)(const Tensor&);
  constexpr std::array<std::pair<c10::string_view, Accessor>, 6> kAccessors{{
      {"codes", [](const Tensor& t) { return OptionalTensor(codes(t)); }},
      {"scale_inv", [](const Tensor& t) { return OptionalTensor(scale_inv(t)); }},
      {"tensor_scale_inv", [](const Tensor& t) { return OptionalTensor(tensor_scale_inv(t)); }},
      {"columnwise_codes", [](const Tensor& t) { return OptionalTensor(columnwise_codes(t)); }},
      {"row_image", [](const Tensor& t) { return OptionalTensor(row_image(t)); }},
      {"master", &master},
  }};
  for (const auto& [name, accessor] : kAccessors) {
    if (name != plane) continue;
    const OptionalTensor alias = accessor(self);
    if (!alias) return std::nullopt;
    PlainGuard guard;
    if (may_overlap(alias->sym_sizes(), alias->sym_strides())) return alias->clone();
    return at::empty_strided(alias->sizes(), alias->strides(), alias->options()).copy_(*alias);
  }
  TORCH_CHECK_VALUE(false, fmt::format("qshard::_plane_copy: no plane is called {}",
                                       shown_name({plane.data(), plane.size()})));
}

}  // namespace qshard
