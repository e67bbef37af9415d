// Methods of the classes in torch.classes.qshard (ops/classes.cpp), with the checks of operators.
#pragma once

#include <torch/custom_class.h>

#include <initializer_list>
#include <utility>

#include "ops/calls/checked_call.h"

namespace qshard {

/// A tensor whose state Python reads or changes: torch.classes.qshard.TensorState(tensor).
class TensorState : public torch::CustomClassHolder {
 public:
  explicit TensorState(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor tensor_;
};

namespace checked_call {

template <Name kName, Takes kTakes, auto kFunction>
struct Method;

template <Name kName, Takes kTakes, typename Result, typename... Arguments,
          Result (*kFunction)(const at::Tensor&, Arguments...)>
struct Method<kName, kTakes, kFunction> {
  using Self = TensorState;
  static Result run(const c10::intrusive_ptr<TensorState>& self, Arguments... arguments) {
    return Call<kName, kTakes, kFunction>::run(self->tensor(), arguments...);
  }
};

template <Name kName, Takes kTakes, typename Object, typename Result, typename... Arguments,
          Result (*kFunction)(const c10::intrusive_ptr<Object>&, Arguments...)>
struct Method<kName, kTakes, kFunction> : Call<kName, kTakes, kFunction> {
  using Self = Object;
};

}  // namespace checked_call

/// Adds `kFunction`, whose first argument is the object, or a TensorState's tensor. `kName`:
/// "Class.name".
template <checked_call::Name kName, auto kFunction, Takes kTakes = Takes::kAnything>
void method(torch::class_<typename checked_call::Method<kName, kTakes, kFunction>::Self>& type,
            std::initializer_list<torch::arg> arguments = {}) {
  type.def(checked_call::method_name(kName.text),
           &checked_call::Method<kName, kTakes, kFunction>::run, "", arguments);
}

/// Adds a function without a tensor of its own to a class. `kName`: "Class.name".
template <checked_call::Name kName, auto kFunction, Takes kTakes = Takes::kAnything, typename Type>
void static_method(torch::class_<Type>& type) {
  type.def_static(checked_call::method_name(kName.text),
                  &checked_call::Call<kName, kTakes, kFunction>::run);
}

}  // namespace qshard
