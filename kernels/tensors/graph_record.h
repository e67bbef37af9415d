// A function of the autograd graph as the record of what it returned.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace qshard {

/// Counted by std::shared_ptr up to torch 2.14, intrusively after it.
using GraphRecord = std::decay_t<decltype(std::declval<const at::TensorBase&>().grad_fn())>;

template <typename T>
std::weak_ptr<T> weak_record(const std::shared_ptr<T>& record) {
  return record;
}
template <typename T>
c10::weak_intrusive_ptr<T> weak_record(const c10::intrusive_ptr<T>& record) {
  return c10::weak_intrusive_ptr<T>(record);
}
/// While one lives, no other record has the same address.
using WeakGraphRecord = decltype(weak_record(std::declval<const GraphRecord&>()));

}  // namespace qshard
