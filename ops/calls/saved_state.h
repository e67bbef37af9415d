// What an autograd function keeps between forward and backward beside its saved tensors: a struct
// that names its fields, so that save_state() and load_state() write and read all of them in one
// order. A state is
//
//   struct State {
//     int64_t dim;
//     bool inverse;
//     auto fields() { return std::tie(dim, inverse); }
//   };
//
// whose fields are bool, int64_t, double, SymInt, string, ScalarType and Tensor, optionals and
// vectors of these, and other states. AutogradContext has one place for such data, a dictionary of
// IValues; a state is a single flat list there, as compiled autograd lifts or hashes an IValue and
// the elements of a list, and knows no other object:
// https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/dynamo/compiled_autograd.h
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace qshard {
namespace saved_state {

template <typename T>
concept State = requires(T& state) {
  state.fields();
};
template <typename T>
concept Optional = requires(T& field) {
  field.has_value();
};
template <typename T>
concept Sequence = requires(T& field) {
  field.push_back(field.front());
}
&&!std::is_same_v<T, std::string>;

/// Appends fields to a list of IValues.
class Writer {
 public:
  Writer() { values_.reserve(kUsual); }

  template <typename T>
  void write(T& field) {
    if constexpr (State<T>) {
      std::apply([&](auto&... each) { (write(each), ...); }, field.fields());
    } else if constexpr (Optional<T>) {
      values_.emplace_back(field.has_value());
      if (field) write(*field);
    } else if constexpr (Sequence<T>) {
      values_.emplace_back(static_cast<int64_t>(field.size()));
      for (auto& each : field) write(each);
    } else if constexpr (std::is_same_v<T, at::Tensor>) {
      values_.push_back(field.defined() ? c10::IValue(std::move(field)) : c10::IValue());
    } else if constexpr (std::is_same_v<T, at::ScalarType>) {
      values_.emplace_back(static_cast<int64_t>(field));
    } else {
      values_.emplace_back(std::move(field));
    }
  }
  c10::IValue take() && { return std::move(values_); }

 private:
  static constexpr size_t kUsual = 16;
  c10::impl::GenericList values_{c10::AnyType::get()};
};

/// Reads the fields that a Writer wrote, in the same order.
class Reader {
 public:
  explicit Reader(const c10::IValue& list) : values_(list.toListRef()) {}

  template <typename T>
  void read(T& field) {
    if constexpr (State<T>) {
      std::apply([&](auto&... each) { (read(each), ...); }, field.fields());
    } else if constexpr (Optional<T>) {
      if (next().toBool()) read(field.emplace());
    } else if constexpr (Sequence<T>) {
      field.resize(next().toInt());
      for (auto& each : field) read(each);
    } else if constexpr (std::is_same_v<T, at::Tensor>) {
      const c10::IValue& value = next();
      if (!value.isNone()) field = value.toTensor();
    } else if constexpr (std::is_same_v<T, at::ScalarType>) {
      field = static_cast<at::ScalarType>(next().toInt());
    } else {
      field = next().template to<T>();
    }
  }

 private:
  const c10::IValue& next() { return values_[position_++]; }

  c10::ArrayRef<c10::IValue> values_;  // the context's, which outlives a backward
  size_t position_ = 0;
};

}  // namespace saved_state

/// Keeps `state` until backward. Called once in a forward.
template <typename T>
void save_state(torch::autograd::AutogradContext* ctx, T state) {
  saved_state::Writer writer;
  writer.write(state);
  ctx->saved_data.emplace(std::string(), std::move(writer).take());
}

/// The state that forward kept.
template <typename T>
T load_state(torch::autograd::AutogradContext* ctx) {
  T state;
  saved_state::Reader(ctx->saved_data.at(std::string())).read(state);
  return state;
}

}  // namespace qshard
