// From ATen's vocabulary to the kernels': value types, streams, and the guards kernels run under.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "dispatch/parts/streams.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/value_dtype.h"
#include "kernels/quantize/quantize.h"

namespace qshard {

/// Plain-tensor work inside a kernel of the quantized key: no autograd, no view tracking, and never
/// inference tensors, because what is allocated here outlives the caller's inference_mode.
struct PlainGuard {
  c10::InferenceMode no_inference{false};
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
};

/// ADInplaceOrView does this for the tensors it sees; inside TensorLists, and below it, no
/// kernel does, and autograd's saved-tensor check would miss the write.
inline void bump_version(const at::Tensor& written) {
  if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
}

}  // namespace qshard
