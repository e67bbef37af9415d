// What FSDP2's all-gather hooks do: one uint8 input per parameter, the padded row image, zero copy
// on the way in and out. The hooks themselves are installed by qshard/_runtime/hooks.py.
//
// Beside bf16 parameters FSDP2 would handle bf16 words with less host time. But it copies them by
// torch's foreach kernels, which go through float and make all NaNs one: codes would change.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <typeinfo>
#include <utility>

#include "dispatch/buffer/adoption.h"
#include "dispatch/buffer/gathered_buffer.h"
#include "dispatch/buffer/image_copy.h"
#include "dispatch/buffer/master_aliases.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/device/capture.h"
#include "ops/calls/checked_call.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;

/// FSDP2 cuts columns as willingly as rows and fails much later, with an error about a view; and it
/// cuts the parts that tensor parallelism has left as willingly as whole tensors. From sizes that
/// are the same on all ranks: what each holds is its chunk of the logical tensor's rows, padding
/// included.
void check_is_sharded_by_rows(const Tensor& self, const QuantizedBuffer& buffer) {
  const Layout& layout = buffer.layout();
  const int64_t ranks = ranks_of(buffer.placement().group());
  const int64_t rows_per_slice =
      c10::multiply_integers(self.sizes().slice(1, std::max<int64_t>(self.dim() - 2, 0)));
  if (rows_per_slice == 0) return;
  const int64_t slices = layout.logical_rows / rows_per_slice;
  if (layout.rows == ceil_div(slices, ranks) * rows_per_slice) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.rows < layout.logical_rows,
      fmt::format("qshard: this quantized parameter is sharded by another dimension than its rows "
                  "(each rank holds a {}); rows are the unit of quantized shards. Return Shard(0) "
                  "from shard_placement_fn",
                  describe(self)));
  TORCH_CHECK_NOT_IMPLEMENTED(
      false,
      fmt::format(
          "qshard: FSDP2 gathers this quantized parameter over {} ranks of {} rows each, and "
          "it was quantized as rows of a tensor of {}; after parallelize_module say so: "
          "qshard.quantize_(model, recipe, tp_mesh=tp_mesh)",
          ranks, layout.rows, layout.logical_rows));
}

/// What this pass gathers: the same on all ranks, which are all in forward, or all in a backward.
/// FSDP2's unshard and prefetch of backward run inside the autograd engine, and so does what
/// activation checkpointing computes again.
Images images_to_gather(const Format& format) {
  if (!format.gathers_by_phase) return Images::kAll;
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  return in_backward ? Images::kColumnwise : Images::kRowwise;
}

/// The bytes to send of a shard, flushed over `group` if it was written since its last flush. Every
/// rank of the group gets here, with or without rows. What belongs to them waits in the shard:
/// handing it to Python and back took a microsecond per parameter and gather.
Tensor pre_all_gather(const Tensor& self, c10::string_view group) {
  const BufferPtr& buffer = impl_of(self).buffer();
  adopt(*buffer, {group.data(), group.size()});
  check_is_sharded_by_rows(self, *buffer);
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(buffer->device());
  // An offloaded shard arrives as a fresh device copy: flush the original, once, not every copy.
  const BufferPtr owner = buffer->original();
  owner->flush_state().watch().settle();
  if (owner->flush_state().is_written()) flush({owner});
  if (ImageCopy* copy = linked_copy(*buffer)) copy->refresh();
  return GatheredBuffer::begin(*buffer, images_to_gather(*buffer->layout().format));
}

/// The same for FSDP2, which gathers over the group of its mesh, '' for one rank. None if
/// _set_mesh_of_gathers has not told the shard what that mesh is to it.
OptionalTensor gather_over_mesh(const Tensor& self, c10::string_view mesh) {
  const BufferPtr owner = impl_of(self).buffer()->original();
  const MeshOfGathers& known = owner->remembered().mesh_of_gathers;
  if (!mesh.empty() && known.mesh != mesh) return std::nullopt;
  return pre_all_gather(self, known.is_replicated ? "" : mesh);
}

/// `is_replicated`: the ranks of the mesh hold the same rows.
void set_mesh_of_gathers(const Tensor& self, c10::string_view mesh, bool is_replicated) {
  impl_of(self).buffer()->original()->remembered().mesh_of_gathers = {{mesh.data(), mesh.size()},
                                                                      is_replicated};
}

/// The unsharded tensor over the gathered bytes of shard `self`.
Tensor post_all_gather(const Tensor& self, const Tensor& image, at::ScalarType dtype) {
  PlainGuard guard;
  auto buffer = GatheredBuffer::of(*impl_of(self).buffer()->original(), image, dtype);
  auto sizes = self.sizes().vec();
  const int64_t rows_per_slice =
      c10::multiply_integers(self.sizes().slice(1, std::max<int64_t>(self.dim() - 2, 0)));
  sizes[0] = rows_per_slice == 0 ? 0 : buffer->layout().rows / rows_per_slice;
  return make_tensor(std::move(buffer), sizes);
}

/// A later gather into the same storage.
void refresh_gathered(const Tensor& self, const Tensor& image, const Tensor& unsharded) {
  PlainGuard guard;
  QuantizedBuffer& buffer = buffer_of(unsharded);
  TORCH_CHECK(typeid(buffer) == typeid(GatheredBuffer),
              "qshard::_refresh_gathered: bytes were gathered for ", describe(unsharded),
              ", which is not a gathered tensor");
  static_cast<GatheredBuffer&>(buffer).regather(buffer_of(self), image);
}

/// The number of these groups, by which _set_groups and others know them.
int64_t groups(c10::string_view shard, const std::vector<std::string>& tensor,
               const std::vector<std::string>& replicas, const std::vector<std::string>& columns) {
  return register_groups({shard.data(), shard.size()}, tensor, replicas, columns);
}

/// What _keep_groups_of_spec said of these tensors for these DTensor specs, -1 where it did not.
std::vector<int64_t> groups_of_specs(at::TensorList self, at::IntArrayRef specs) {
  TORCH_CHECK(specs.size() == self.size(), "qshard::_groups_of_specs: one spec per tensor");
  std::vector<int64_t> groups;
  groups.reserve(self.size());
  for (size_t i = 0; i < self.size(); ++i) {
    const GroupsOfSpec& known = buffer_of(self[i]).remembered().groups_of_spec;
    groups.push_back(known.spec == specs[i] ? known.groups : -1);
  }
  return groups;
}

/// The last is kept: nearly every buffer is the local tensor of one DTensor.
void keep_groups_of_spec(const Tensor& self, int64_t spec, int64_t groups) {
  buffer_of(self).remembered().groups_of_spec = {spec, groups};
}

void set_groups(const Tensor& self, int64_t groups) {
  adopt(buffer_of(self), registered_groups(groups));
}

/// `self` is what Module.to() and its kin made of the parameter `moved`. Other copies are tensors
/// of their own.
void set_groups_of_moved(const Tensor& self, const Tensor& moved) {
  buffer_of(self).placement().adopt_groups_of(buffer_of(moved).placement());
  buffer_of(self).remembered().mesh_of_gathers = buffer_of(moved).remembered().mesh_of_gathers;
}

/// The ranks of `group` hold the same rows and see other activations; "": no other rank does.
void set_replicas(const Tensor& self, c10::string_view group) {
  buffer_of(self).placement().set_replicas({group.data(), group.size()});
}

/// Names of the groups that hold the other parts of the full tensor.
std::vector<std::string> tensor_groups(const Tensor& self) {
  std::vector<std::string> names;
  for (const RankGroupPtr& group : buffer_of(self).placement().groups().tensor) {
    names.push_back(group->name());
  }
  return names;
}

/// [rows of the logical tensor, whether that is part of a full one, whether `self` is some rank's
/// share of it].
std::vector<int64_t> logical_tensor(const Tensor& self) {
  const Placement& placement = buffer_of(self).placement();
  const Layout& layout = placement.layout();
  // A file does not say where the logical tensor lies; a new shard's template did.
  const bool is_part =
      layout.full_cols > 0 || (placement.knows_groups() && !placement.share()->is_slice);
  return {layout.logical_rows, is_part, placement.is_share()};
}

/// From now on `self` is one of `members` weights with one tensor scale; `id` says which ones.
void share_tensor_scale(const Tensor& self, int64_t id, int64_t members) {
  QuantizedBuffer& buffer = buffer_of(self);
  const Format& format = *buffer.layout().format;
  TORCH_CHECK_VALUE(
      id > 0 && members > 1 && format.has_tensor_scale() && format.amax_history.length == 0,
      fmt::format("qshard::_share_tensor_scale: {} as one of {}: needs weights whose "
                  "format has a scale per tensor, from their present amax",
                  describe(self), members));
  share_scale(buffer, {id, members});
}

/// [id, members]; zeros if `self` shares with none.
std::vector<int64_t> scale_group(const Tensor& self) {
  const ScaleGroup& group = buffer_of(self).placement().scale_group();
  return {group.id, group.members};
}

/// `self` as a share: rows [row_offset, ...) of logical_rows, whose element (0, 0) is
/// `first_element` of a full tensor with `full_cols` columns. It waits for its flush.
Tensor quantize_share(const Tensor& self, c10::string_view format, bool keep_master,
                      int64_t logical_rows, int64_t row_offset, int64_t first_element,
                      int64_t full_cols, int64_t groups) {
  return quantize_placed(self, format, keep_master,
                         {logical_rows, row_offset, first_element, full_cols},
                         registered_groups(groups));
}

void set_reduction_group(const Tensor& self, c10::string_view group) {
  adopt(buffer_of(self), {group.data(), group.size()});
}

/// After an optimizer step: what was written, in the order of the list. `groups[i]` is the number
/// of those that tensor i's DTensor names, 0 of a tensor that is none: it keeps what it knows. A
/// tensor that has a gradient was written, also where no kernel said so. `kernels_tell`: kernels of
/// torch's operators are all that wrote, so that codes which one of them left are those of the
/// values. Else memory may have been written after it, by an address.
void flush_after_step(at::TensorList self, at::IntArrayRef groups, const c10::List<bool>& has_grad,
                      const OptionalTensor& found_inf, bool is_step, bool kernels_tell) {
  TORCH_CHECK(groups.size() == self.size() && has_grad.size() == self.size(),
              "qshard::_flush_after_step: one number of groups per tensor");
  TORCH_CHECK_VALUE(!found_inf || found_inf->numel() == 1,
                    "qshard::_flush_after_step: found_inf must be one number, got shape ",
                    found_inf ? found_inf->sizes() : at::IntArrayRef());
  std::vector<BufferPtr> buffers;
  buffers.reserve(self.size());
  for (size_t i = 0; i < self.size(); ++i) {
    buffers.push_back(impl_of(self[i]).buffer());
    QuantizedBuffer& buffer = *buffers.back();
    if (groups[i] != 0) adopt(buffer, registered_groups(groups[i]));
    if (has_grad[i] && !(kernels_tell && buffer.flush_state().is_written_here())) buffer.written();
  }
  flush(buffers, is_step ? FlushKind::kStep : FlushKind::kOutsideStep,
        found_inf.value_or(Tensor()));
}

/// The plain tensors of a quantized tensor's state, by name; writes to them act.
c10::Dict<std::string, Tensor> state(const Tensor& self) {
  c10::Dict<std::string, Tensor> result;
  for (const auto& [name, tensor] : buffer_of(self).scaling_state().tensors())
    result.insert(name, tensor);
  return result;
}

/// The names of the state of the weight in whose master this plain tensor lies, if it does.
std::vector<std::string> state_names_of_master(const Tensor& self) {
  std::vector<std::string> names;
  if (const BufferPtr owner = owner_of_master_alias(self)) {
    for (const auto& [name, tensor] : owner->scaling_state().tensors()) names.push_back(name);
  }
  return names;
}

void set_rounding_key_op(const Tensor& self, int64_t key) {
  QuantizedBuffer& buffer = buffer_of(self);
  TORCH_CHECK(buffer.scaling_state().rounding.defined() && key >= 0 && key < (int64_t{1} << 62),
              fmt::format("qshard::_set_rounding_key: {} with key {}: needs a format that rounds "
                          "stochastically and a key of 62 bits",
                          describe(self), key));
  set_rounding_key(buffer, key);
}

void mark_written(const Tensor& self) { buffer_of(self).written(); }

/// What a linear of these weights is about to ask, before it sends anything: an error where codes
/// wait for a flush that other ranks take part in.
void check_codes_can_be_read(at::TensorList self) {
  for (const Tensor& weight : self)
    ensure_codes_current(impl_of(weight).buffer(), "qshard::linear");
}

/// written_by_rank() of shards, and of the originals of offloaded ones. Those with a gradient count
/// as written, as in flush_after_step(). Empty where a CUDA graph is captured, which cannot wait
/// for an answer.
Tensor written_by_rank_op(at::TensorList self, const c10::List<bool>& has_grad, int64_t rank,
                          int64_t world) {
  TORCH_CHECK_VALUE(
      has_grad.size() == self.size() && rank >= 0 && rank < world,
      fmt::format("qshard::_written_by_rank: {} tensors, has_grad of {}, rank {} of {}",
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

}  // namespace

TORCH_LIBRARY_IMPL(qshard, CompositeExplicitAutograd, m) {
  implement<"_pre_all_gather", &pre_all_gather, Takes::kEachDevice>(m);
  implement<"_gather_over_mesh", &gather_over_mesh, Takes::kEachDevice>(m);
  implement<"_set_mesh_of_gathers", &set_mesh_of_gathers, Takes::kAnything>(m);
  implement<"_post_all_gather", &post_all_gather, Takes::kEachDevice>(m);
  implement<"_refresh_gathered", &refresh_gathered, Takes::kEachDevice>(m);
  implement<"_groups", &groups, Takes::kAnything>(m);
  implement<"_groups_of_specs", &groups_of_specs, Takes::kAnything>(m);
  implement<"_keep_groups_of_spec", &keep_groups_of_spec, Takes::kAnything>(m);
  implement<"_set_groups", &set_groups, Takes::kAnything>(m);
  implement<"_set_groups_of_moved", &set_groups_of_moved, Takes::kAnything>(m);
  implement<"_set_replicas", &set_replicas, Takes::kAnything>(m);
  implement<"_tensor_groups", &tensor_groups, Takes::kAnything>(m);
  implement<"_logical_tensor", &logical_tensor, Takes::kAnything>(m);
  implement<"_share_tensor_scale", &share_tensor_scale, Takes::kAnything>(m);
  implement<"_scale_group", &scale_group, Takes::kAnything>(m);
  implement<"_quantize_share", &quantize_share, Takes::kValuesOrMeta>(m);
  implement<"_set_reduction_group", &set_reduction_group, Takes::kAnything>(m);
  implement<"_flush_after_step", &flush_after_step, Takes::kEachDevice>(m);
  implement<"_state", &state, Takes::kAnything>(m);
  implement<"_state_names_of_master", &state_names_of_master, Takes::kAnything>(m);
  implement<"_set_rounding_key", &set_rounding_key_op, Takes::kAnything>(m);
  implement<"_mark_written", &mark_written, Takes::kAnything>(m);
  implement<"_check_codes_can_be_read", &check_codes_can_be_read, Takes::kEachDevice>(m);
  implement<"_written_by_rank", &written_by_rank_op, Takes::kAnything>(m);
}

}  // namespace qshard
