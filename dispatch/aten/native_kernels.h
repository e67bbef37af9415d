// The native kernels of the quantized key, one registration function per operator family. They are
// gathered in registration.cpp, because the fallback must be registered after all of them.
#pragma once

#include <torch/library.h>

namespace qshard {

void register_views(torch::Library& aten);
void register_factories(torch::Library& aten);
void register_copies(torch::Library& aten);
void register_indexing(torch::Library& aten);
void register_matmul(torch::Library& aten);
void register_optimizers(torch::Library& aten);

/// From now on, on this thread, new_zeros and new_empty of a quantized tensor make rank `rank`'s
/// shard of it, and empty_like its own rows anew: FSDP2's constructor is at work. kSameRows:
/// empty_like alone, for nn.Module._apply. Nothing: factories make plain tensors again.
void make_shards(std::optional<int64_t> rank);
/// Whether they are being made: rows are copied into them on the ranks that have some.
bool makes_shards();
constexpr int64_t kSameRows = -1;

/// Boxed kernel of view ops without a hand-written kernel: runs the op on a meta tensor with the
/// same virtual strides and wraps the result. In-place view ops (`t_`, `squeeze_`) likewise.
/// @throws c10::Error for what plain tensors refuse, in the same words, and for views that sizes
/// and strides cannot express.
void view_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
void inplace_view_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack);

/// Boxed kernel of c10d::*, _c10d_functional::* and _dtensor::*: quantized tensors send and receive
/// their values.
/// @throws c10::Error, before anything is sent, for what no rank could receive: overlapping
/// elements, point-to-point receives into strided windows.
void collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
bool is_collective(const c10::OperatorHandle& op);
void register_collectives(torch::Library& library, const char* name_space);
/// On BackendSelect, which sees every call: ops whose Tensor[][] arguments dispatch overlooks, and
/// what plain tensors receive that are aliases of masters.
void register_collectives_of_any(torch::Library& c10d);

}  // namespace qshard
