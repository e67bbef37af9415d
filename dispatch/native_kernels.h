// The native kernels of the quantized key, one registration function per operator family. They are
// gathered in registration.cpp, because the fallback must be registered after all of them.
#pragma once

#include <torch/library.h>

namespace qshard {

void register_views(torch::Library& aten);
void register_factories(torch::Library& aten);
void register_copies(torch::Library& aten);
void register_matmul(torch::Library& aten);
void register_optimizers(torch::Library& aten);

/// Boxed kernel of view ops without a hand-written kernel: runs the op on a meta tensor with the
/// same virtual strides and wraps the result. In-place view ops (`t_`, `squeeze_`) likewise.
void view_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
void inplace_view_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                         torch::jit::Stack* stack);

/// Boxed kernels of c10d::* and _c10d_functional::*.
void register_collectives(torch::Library& c10d);
void register_functional_collectives(torch::Library& c10d_functional);

}  // namespace qshard
