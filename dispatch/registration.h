// Which kernel each operator gets on the quantized key. Runs once, when the library is loaded.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace qshard {

/// What a schema says about one operator, in the terms the registration and the fallback need.
struct OpTraits {
  bool returns_view = false;      // some return aliases an argument without being written
  bool changes_metadata = false;  // gives its argument another shape or other data
  bool takes_tensor = false;

  static OpTraits of(const c10::OperatorHandle& op);
};

/// "aten::add_.Tensor"
std::string op_name(const c10::OperatorHandle& op);

}  // namespace qshard
