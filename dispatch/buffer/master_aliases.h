// Aliases of masters that callers hold as plain tensors, as the values of state_dicts are.
#pragma once

#include <ATen/core/Tensor.h>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// Remembers that a caller gets an alias of this buffer's master as a plain tensor. In-place
/// operators on the alias move the counter that it shares with the buffer (write_watch.h), but
/// collectives move none and have to look here.
void note_master_alias(const BufferPtr& buffer);

/// The buffer whose master a plain tensor is an alias of; null if it is no such alias.
BufferPtr owner_of_master_alias(const at::Tensor& plain);

}  // namespace qshard
