// Masters that callers hold as plain tensors, as the values of state_dicts are.
#pragma once

#include <ATen/core/Tensor.h>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// An alias of this buffer's master goes out, a plain tensor from now on. In-place operators on it
/// move the counter that it shares with the buffer (write_watch.h); collectives move none.
void hand_out_master(const BufferPtr& buffer);

/// The buffer in whose master's memory a plain tensor lies, of those handed out; null otherwise.
BufferPtr owner_of_master(const at::Tensor& plain);

}  // namespace qshard
