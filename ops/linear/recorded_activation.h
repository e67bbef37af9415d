// Inputs of linears that nothing can write without autograd's knowledge.
#pragma once

#include <ATen/core/Tensor.h>

#include "kernels/tensors/graph_record.h"

namespace qshard {

/// What recorded `x`, if x is an activation that nothing wrote and whose memory belongs to the
/// graph; else null.
///
/// A version counter shows writes by torch's own operators. It does not show c10d receives, kernels
/// of other libraries, CUDA-graph replays and writes through a pointer, so code that remembers
/// something about the values of x must know that none of them has its memory. That holds for
/// - what one of autograd's operators returned, and views of it: the operator allocated it. A leaf,
///   or a view of one, is anybody's: pipeline stages receive into leaves that require grad, and
///   wrappers of modules pass views of them.
/// - what another autograd function returned, if no tensor but x and its base has that memory: else
///   it may be a buffer that is filled again, as are the outputs of a captured graph.
/// - of these, what was recorded on the current stream: replays write what was recorded while
///   theirs was captured.
///
/// A function may return one buffer again and again: each time there is another record.
GraphRecord record_of_activation(const at::Tensor& x);

}  // namespace qshard
