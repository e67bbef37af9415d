// Which kernel each operator gets on the quantized key. Runs once, when the library is loaded.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <string>

namespace qshard {

/// What a schema says about one operator, in the terms the registration and the fallback need.
struct OpTraits {
  bool returns_view = false;      // some return aliases an argument without being written
  bool changes_metadata = false;  // gives its argument another shape or other data
  bool takes_tensor = false;

  static OpTraits of(const c10::OperatorHandle& op);
};

/// The other library that has kernels on the quantized keys in this process, as messages name it;
/// "" if there is none. Looked up once, before the first kernel of ours is registered; whatever
/// registers or relies on one asks here first, since initialisers run in link order and a taken key
/// makes torch abort.
const std::string& foreign_owner_of_key();
inline bool key_is_ours() { return foreign_owner_of_key().empty(); }
/// @throws c10::Error naming `op` and the owner if the key is not ours.
void check_key_is_ours(const char* op);

/// "aten::add_.Tensor"
std::string op_name(const c10::OperatorHandle& op);

/// Calls visit(op, "add_.Tensor") for every operator of "aten" or another namespace that takes a
/// tensor. The lists differ between torch versions, so they are read from the dispatcher.
void for_each_tensor_op(
    const std::string& name_space,
    const std::function<void(const c10::OperatorHandle& op, const std::string& name)>& visit);

}  // namespace qshard
