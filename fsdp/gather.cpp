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
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/calls/checked_call.h"
#include "ops/calls/found_inf.h"
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
  if (!is_one_range(layout) && layout.rows * ranks == layout.logical_rows) return;
  const int64_t rows_per_slice =
      c10::multiply_integers(self.sizes().slice(1, std::max<int64_t>(self.dim() - 2, 0)));
  if (rows_per_slice == 0) return;
  const int64_t slices = layout.logical_rows / rows_per_slice;
  if (is_one_range(layout) && layout.rows == ceil_div(slices, ranks) * rows_per_slice) return;
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.rows < layout.logical_rows && is_one_range(layout),
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
/// TensorState.set_mesh_of_gathers has not told the shard what that mesh is to it.
OptionalTensor gather_over_mesh(const Tensor& self, c10::string_view mesh) {
  const BufferPtr owner = impl_of(self).buffer()->original();
  const MeshOfGathers& known = owner->remembered().mesh_of_gathers;
  if (!mesh.empty() && known.mesh != mesh) return std::nullopt;
  return pre_all_gather(self, known.is_replicated ? "" : mesh);
}

/// The unsharded tensor over the gathered bytes of shard `self`.
Tensor post_all_gather(const Tensor& self, const Tensor& image, at::ScalarType dtype) {
  TORCH_CHECK(image.is_meta() == self.is_meta(), "qshard::_post_all_gather: bytes on ",
              image.device(), " were gathered for ", describe(self), " on ", self.device());
  PlainGuard guard;
  auto buffer = GatheredBuffer::of(*impl_of(self).buffer()->original(), image, dtype);
  auto sizes = self.sizes().vec();
  if (is_one_range(buffer_of(self).layout())) {
    const int64_t rows_per_slice =
        c10::multiply_integers(self.sizes().slice(1, std::max<int64_t>(self.dim() - 2, 0)));
    sizes[0] = rows_per_slice == 0 ? 0 : buffer->layout().rows / rows_per_slice;
  } else {
    sizes[1] = buffer->layout().matrix_rows;
  }
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

/// What TensorState.keep_groups_of_spec said of these tensors for these DTensor specs, -1 where it
/// did not.
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

/// `self` as a share: rows [row_offset, ...) of logical_rows, or `rows_of_each` of each matrix from
/// row_offset on, whose element (0, 0) is `first_element` of a full tensor with `full_cols` columns
/// and `full_matrix_rows` rows of a matrix (0: as many as here). It waits for its flush.
Tensor quantize_share(const Tensor& self, c10::string_view format, bool keep_master,
                      int64_t logical_rows, int64_t row_offset, int64_t rows_of_each,
                      int64_t first_element, int64_t full_cols, int64_t full_matrix_rows,
                      int64_t groups) {
  return quantize_placed(
      self, format, keep_master,
      {logical_rows, row_offset, rows_of_each, first_element, full_cols, full_matrix_rows},
      registered_groups(groups));
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
  check_found_inf("qshard::_flush_after_step", found_inf, self);
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

void mark_written(const Tensor& self) { buffer_of(self).written(); }

}  // namespace

TORCH_LIBRARY_IMPL(qshard, CompositeExplicitAutograd, m) {
  implement<"_pre_all_gather", &pre_all_gather, Takes::kEachDevice>(m);
  implement<"_gather_over_mesh", &gather_over_mesh, Takes::kEachDevice>(m);
  implement<"_post_all_gather", &post_all_gather, Takes::kEachDevice>(m);
  implement<"_refresh_gathered", &refresh_gathered, Takes::kEachDevice>(m);
  implement<"_groups_of_specs", &groups_of_specs, Takes::kAnything>(m);
  implement<"_quantize_share", &quantize_share, Takes::kValuesOrMeta>(m);
  implement<"_flush_after_step", &flush_after_step, Takes::kEachDevice>(m);
  implement<"_mark_written", &mark_written, Takes::kAnything>(m);
}

}  // namespace qshard
