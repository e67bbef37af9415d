#include "ops/tensor/tensor_state.h"

#include <fmt/format.h>

#include <utility>

#include "dispatch/buffer/adoption.h"
#include "dispatch/buffer/master_aliases.h"
#include "dispatch/flush/flush.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/device/capture.h"

namespace qshard {

using at::Tensor;

c10::Dict<std::string, int64_t> storage_bytes(const Tensor& self) {
  const QuantizedBuffer& buffer = buffer_of(self);
  c10::Dict<std::string, int64_t> bytes;
  const Planes& planes = buffer.planes();
  const auto add = [&](const char* name, const ReadOnlyTensor& plane) {
    bytes.insert(name, plane.defined() ? plane.nbytes() : 0);
  };
  add("image", planes.image());
  add("master", planes.master());
  add("grid", planes.grid().read());
  add("pending", planes.pending());
  add("grid_snapshot", planes.grid().given());
  const Layout& layout = buffer.layout();
  bytes.insert("sent", layout.rows * (layout.format->gathers_by_phase ? layout.image_row_bytes()
                                                                      : layout.row_bytes()));
  bytes.insert("state", buffer.scaling_state().nbytes());
  const auto codes = static_cast<int64_t>(planes.code_storage().nbytes());
  bytes.insert("storage", codes + (planes.master().defined() ? planes.master().nbytes() : 0));
  return bytes;
}

bool keeps_master(const Tensor& self) { return buffer_of(self).keeps_master(); }

void set_mesh_of_gathers(const Tensor& self, std::string_view mesh, bool is_replicated) {
  impl_of(self).buffer()->original()->remembered().mesh_of_gathers = {std::string(mesh),
                                                                      is_replicated};
}

int64_t number_of_groups(std::string_view shard, const std::vector<std::string>& tensor,
                         const std::vector<std::string>& replicas,
                         const std::vector<std::string>& columns) {
  return register_groups(shard, tensor, replicas, columns);
}

void keep_groups_of_spec(const Tensor& self, int64_t spec, int64_t groups) {
  buffer_of(self).remembered().groups_of_spec = {spec, groups};
}

void set_groups(const Tensor& self, int64_t groups) {
  adopt(buffer_of(self), registered_groups(groups));
}

void set_groups_of_moved(const Tensor& self, const Tensor& moved) {
  buffer_of(self).placement().adopt_groups_of(buffer_of(moved).placement());
  const Remembered& of_moved = buffer_of(moved).remembered();
  buffer_of(self).remembered().mesh_of_gathers = of_moved.mesh_of_gathers;
  buffer_of(self).remembered().watched = of_moved.watched;
}

void set_replicas(const Tensor& self, std::string_view group) {
  buffer_of(self).placement().set_replicas(group);
}

std::vector<std::string> tensor_groups(const Tensor& self) {
  std::vector<std::string> names;
  for (const RankGroupPtr& group : buffer_of(self).placement().groups().tensor) {
    names.push_back(group->name());
  }
  return names;
}

std::vector<int64_t> logical_tensor(const Tensor& self) {
  const Placement& placement = buffer_of(self).placement();
  const Layout& layout = placement.layout();
  // A file does not say where the logical tensor lies; a new shard's template did.
  const bool is_part =
      layout.full_cols > 0 || (placement.knows_groups() && !placement.share()->is_slice);
  return {layout.logical_rows, is_part, placement.is_share()};
}

void share_tensor_scale(const Tensor& self, int64_t id, int64_t members) {
  QuantizedBuffer& buffer = buffer_of(self);
  const Format& format = *buffer.layout().format;
  TORCH_CHECK_VALUE(
      id > 0 && members > 1 && format.has_tensor_scale() && format.amax_history.length == 0,
      fmt::format("qshard::TensorState.share_tensor_scale: {} as one of {}: needs weights whose "
                  "format has a scale per tensor, from their present amax",
                  describe(self), members));
  share_scale(buffer, {id, members});
}

void set_reduction_group(const Tensor& self, std::string_view group) {
  adopt(buffer_of(self), group);
}

c10::Dict<std::string, Tensor> scaling_state_tensors(const Tensor& self) {
  c10::Dict<std::string, Tensor> result;
  for (const auto& [name, tensor] : buffer_of(self).scaling_state().tensors())
    result.insert(name, tensor);
  return result;
}

std::vector<std::string> state_names_of_master(const Tensor& self) {
  std::vector<std::string> names;
  if (const BufferPtr owner = owner_of_master_alias(self)) {
    for (const auto& [name, tensor] : owner->scaling_state().tensors()) names.push_back(name);
  }
  return names;
}

void set_rounding_key_op(const Tensor& self, int64_t key) {
  QuantizedBuffer& buffer = buffer_of(self);
  TORCH_CHECK(
      buffer.scaling_state().rounding.defined() && key >= 0 && key < (int64_t{1} << 62),
      fmt::format(
          "qshard::TensorState.set_rounding_key: {} with key {}: needs a format that rounds "
          "stochastically and a key of 62 bits",
          describe(self), key));
  set_rounding_key(buffer, key);
}

Tensor written_by_rank_op(at::TensorList self, const c10::List<bool>& has_grad, int64_t rank,
                          int64_t world) {
  TORCH_CHECK_VALUE(
      has_grad.size() == self.size() && rank >= 0 && rank < world,
      fmt::format("qshard::TensorState.written_by_rank: {} tensors, has_grad of {}, rank {} of {}",
                  self.size(), has_grad.size(), rank, world));
  std::vector<BufferPtr> buffers;
  std::vector<bool> is_written;
  for (size_t i = 0; i < self.size(); ++i) {
    buffers.push_back(impl_of(self[i]).buffer()->original());
    is_written.push_back(has_grad[i] || buffers.back()->flush_state().is_written());
    if (is_capturing(buffers.back()->device())) return at::empty({0, world}, at::kInt);
  }
  return written_by_rank(buffers, is_written, rank, world);
}

}  // namespace qshard
