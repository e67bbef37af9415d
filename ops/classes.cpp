// The classes: every method, then which function it is. What operators of schemas.cpp compute, a
// compiler may trace, reorder and leave out. These read or change state that no schema can declare,
// so they are methods of objects, which torch.compile runs outside of graphs. Python alone uses
// them, and they may change.
#include <torch/custom_class.h>
#include <torch/library.h>

#include "ops/calls/checked_method.h"
#include "ops/calls/ops.h"
#include "ops/tensor/saved_tensor.h"
#include "ops/tensor/tensor_state.h"
#include "ops/tensor/watch.h"

namespace qshard {
namespace {

/// Functions about this process, not about a tensor.
struct Process : torch::CustomClassHolder {};

void define_tensor_state(torch::Library& m) {
  using torch::arg;
  auto type = m.class_<TensorState>("TensorState");
  type.def(torch::init<at::Tensor>(), "", {arg("tensor")});

  // What a tensor is (tensor_state.h).
  method<"TensorState.keeps_master", &keeps_master>(type);
  method<"TensorState.storage_bytes", &storage_bytes>(type);
  method<"TensorState.scaling_state", &scaling_state_tensors>(type);
  method<"TensorState.state_names_of_master", &state_names_of_master>(type);
  method<"TensorState.logical_tensor", &logical_tensor>(type);
  method<"TensorState.groups", &tensor_groups>(type);
  method<"TensorState.is_export", &is_export>(type);
  method<"TensorState.has_pending_update", &has_pending_update>(type);
  static_method<"TensorState.written_by_rank", &written_by_rank_op>(type);

  // Which ranks and weights it belongs with (tensor_state.h).
  method<"TensorState.set_groups", &set_groups>(type, {arg("groups")});
  method<"TensorState.set_groups_of_moved", &set_groups_of_moved>(type, {arg("moved")});
  method<"TensorState.keep_groups_of_spec", &keep_groups_of_spec>(type,
                                                                  {arg("spec"), arg("groups")});
  method<"TensorState.set_replicas", &set_replicas>(type, {arg("group")});
  method<"TensorState.set_reduction_group", &set_reduction_group>(type, {arg("group")});
  method<"TensorState.set_mesh_of_gathers", &set_mesh_of_gathers>(
      type, {arg("mesh"), arg("is_replicated")});
  method<"TensorState.share_tensor_scale", &share_tensor_scale>(type, {arg("id"), arg("members")});
  method<"TensorState.set_rounding_key", &set_rounding_key_op>(type, {arg("key")});

  // Copies of it (saved_tensor.h, ops.h).
  method<"TensorState.export_view", &export_view>(type);
  method<"TensorState.copy_buffer", &copy_buffer_op, Takes::kValuesOrMeta>(type);
  method<"TensorState.copy_to", &copy_to, Takes::kValuesOrMeta>(type,
                                                                {arg("dtype"), arg("device")});
  method<"TensorState.meta_replica", &meta_replica, Takes::kValuesOrMeta>(type);
  method<"TensorState.pack", &pack, Takes::kValuesOrMeta>(type);
  method<"TensorState.shared_planes", &shared_planes, Takes::kValuesOrMeta>(type);
}

void define_saved_tensor(torch::Library& m) {
  using torch::arg;
  auto type = m.class_<SavedTensor>("SavedTensor");
  type.def(torch::init<at::Tensor, std::optional<at::Tensor>, std::vector<int64_t>, std::string,
                       std::vector<int64_t>, std::vector<int64_t>, int64_t, at::ScalarType,
                       std::vector<at::Tensor>>(),
           "",
           {arg("bytes"), arg("pending"), arg("layout"), arg("format"), arg("size"), arg("stride"),
            arg("storage_offset"), arg("dtype"), arg("state")});
  method<"SavedTensor.read", &read_saved>(type);
  method<"SavedTensor.read_later", &read_saved_later>(type);
  method<"SavedTensor.read_into", &read_saved_into>(type, {arg("tensor")});
  method<"SavedTensor.over_shared_planes", &over_shared_planes>(type, {arg("master")});
}

void define_watch(torch::Library& m) {
  using torch::arg;
  auto type = m.class_<StatisticsWatch>("Watch");
  type.def(torch::init<int64_t>(), "", {arg("every")});
  method<"Watch.add", &add_watched>(type, {arg("weight"), arg("number"), arg("step")});
  method<"Watch.take", &take_samples>(type);
  method<"Watch.end", &end_watch>(type);
}

void define_process(torch::Library& m) {
  auto type = m.class_<Process>("Process");
  static_method<"Process.number_of_groups", &number_of_groups>(type);
  static_method<"Process.set_in_step", &set_in_step_op>(type);
  static_method<"Process.make_shards", &make_shards_op>(type);
  static_method<"Process.set_fallback_tracing", &set_fallback_tracing_op>(type);
  static_method<"Process.traced_fallbacks", &traced_fallbacks_op>(type);
  static_method<"Process.why_dequantized", &why_dequantized_op>(type);
  static_method<"Process.gemm_verdicts", &gemm_verdicts_op>(type);
  static_method<"Process.shares_input_codes", &shares_input_codes, Takes::kAnything>(type);
  static_method<"Process.check_codes_can_be_read", &check_codes_can_be_read, Takes::kEachDevice>(
      type);
  static_method<"Process.foreign_owner_of_key", &foreign_owner_of_key_op>(type);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(qshard, m) {
  define_tensor_state(m);
  define_saved_tensor(m);
  define_watch(m);
  define_process(m);
}

}  // namespace qshard
