// What we keep with tensors that are not ours: activations, as a rule.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace qshard {

/// Each has a place of its own.
enum class Kept : uint8_t {
  kInputCodes,    // by linears that read the same activation
  kPythonObject,  // by the Python package
  kTally,         // what quantizing lost, with codes whose values are nowhere
};
using KeptThing = c10::intrusive_ptr<c10::intrusive_ptr_target>;

/// What is kept with a tensor lies in its TensorImpl and is released with it. So nothing has to
/// refer to the tensor: a weak reference would forbid torch.utils.swap_tensors, and its address
/// may be another tensor's later. Copies, `x.data` and `x.detach()` among them, have nothing.
///
/// Any thread may call these. Null: nothing is kept.
KeptThing kept_with(const c10::TensorImpl& tensor, Kept kind);

/// Keeps `thing` instead of what was there. False, and nothing is kept: the place is taken by
/// another backend, whose tensor it is.
bool keep_with(c10::TensorImpl& tensor, Kept kind, KeptThing thing);

}  // namespace qshard
