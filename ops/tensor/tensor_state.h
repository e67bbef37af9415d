// What Python reads and changes of a quantized tensor beside its value:
// torch.classes.qshard.TensorState (ops/classes.cpp). Each throws c10::Error for a tensor that is
// not quantized, before it changes anything.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <string>
#include <string_view>
#include <vector>

namespace qshard {

// ---- What a tensor is.

bool keeps_master(const at::Tensor& self);
/// Bytes by plane: image, master, grid, pending, grid_snapshot, state; "sent" by a gather of its
/// rows, and "storage", of its memory.
c10::Dict<std::string, int64_t> storage_bytes(const at::Tensor& self);
/// The plain tensors of its state (amax history, rounding), by name; writes to them act.
c10::Dict<std::string, at::Tensor> scaling_state_tensors(const at::Tensor& self);
/// The names of the state of the weight in whose master this plain tensor lies, if it does.
std::vector<std::string> state_names_of_master(const at::Tensor& self);
/// [rows of the logical tensor, whether that is part of a full one, whether `self` is some rank's
/// share of it].
std::vector<int64_t> logical_tensor(const at::Tensor& self);
/// Names of the groups that hold the other parts of the full tensor.
std::vector<std::string> tensor_groups(const at::Tensor& self);

// ---- Which ranks and weights it belongs with.

/// The number of these groups, by which set_groups() and others know them.
int64_t number_of_groups(std::string_view shard, const std::vector<std::string>& tensor,
                         const std::vector<std::string>& replicas,
                         const std::vector<std::string>& columns);
void set_groups(const at::Tensor& self, int64_t groups);
/// `self` is what Module.to() and its kin made of the parameter `moved`. Other copies are tensors
/// of their own.
void set_groups_of_moved(const at::Tensor& self, const at::Tensor& moved);
/// The groups that the DTensor spec with this number names. The last is kept: nearly every buffer
/// is the local tensor of one DTensor.
void keep_groups_of_spec(const at::Tensor& self, int64_t spec, int64_t groups);
/// The ranks of `group` hold the same rows and see other activations; "": no other rank does.
void set_replicas(const at::Tensor& self, std::string_view group);
/// The ranks of `group` hold the other rows.
void set_reduction_group(const at::Tensor& self, std::string_view group);
/// FSDP2 gathers over this mesh. `is_replicated`: the ranks of the mesh hold the same rows.
void set_mesh_of_gathers(const at::Tensor& self, std::string_view mesh, bool is_replicated);
/// From now on `self` is one of `members` weights with one tensor scale; `id` says which ones.
/// @throws c10::ValueError for a format without a scale per tensor from its present amax.
void share_tensor_scale(const at::Tensor& self, int64_t id, int64_t members);
/// @throws c10::Error unless the format rounds stochastically and the key has 62 bits.
void set_rounding_key_op(const at::Tensor& self, int64_t key);

/// int32 (tensors, world): which ranks wrote, written_by_rank() of shards and of the originals of
/// offloaded ones. Those with a gradient count as written, as in _flush_after_step. Empty where a
/// CUDA graph is captured, which cannot wait for an answer.
at::Tensor written_by_rank_op(at::TensorList self, const c10::List<bool>& has_grad, int64_t rank,
                              int64_t world);

}  // namespace qshard
