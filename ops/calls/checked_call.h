// What every operator checks of its arguments before its kernel runs, and does after it.
//
// The dispatcher looks at the highest dispatch key among the arguments and at nothing else: beside
// one tensor on meta, tensors with values reach a Meta kernel, which returns memory that it never
// writes; fake tensors reach kernels that read pointers, where an operator has no Meta kernel. And
// ADInplaceOrView, which guards what aten's operators write, does not know ours. So kernels are
// registered by implement(), which puts these checks around each of them.
//
// They are made at compile time, around the unboxed kernel. A boxed wrapper, on a dispatch key of
// its own, would find the same in each schema; but boxing an operator's arguments costs about a
// microsecond, and FSDP2 calls some of these operators for every parameter. A look at a tensor
// where it lies takes a nanosecond or two.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <fmt/format.h>
#include <torch/library.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch/tensor/quantized_tensor_impl.h"

namespace qshard {

/// Which tensors an operator's kernel takes.
enum class Takes : int8_t {
  kValues,          // with values, all on one device: it reads their memory
  kValuesOrMeta,    // these, or all on meta
  kValuesAnywhere,  // with values, each on a device of its own: the kernel checks which fit
                    // together
  kEachDevice,      // these, or on meta
  kAnything,        // it is asked about tensors and reads no memory
  kMeta,            // on meta, or fake: a Meta kernel
  kAlias,           // what the operator takes that it is another name of, which checks them
};

/// One tensor of a call, perhaps in a list, and which argument of the schema it is.
struct TensorArgument {
  size_t position;
  const at::Tensor* tensor;
};
using TensorArguments = c10::SmallVector<TensorArgument, 8>;

/// An operator, or a method of a class, as its checks need it: what the schema says. Made once, at
/// the first call.
class CheckedOperator {
 public:
  /// `name`: an operator's without its namespace, or "Class.method" (checked_method.h).
  explicit CheckedOperator(std::string_view name);

  /// Whether any of them is written.
  bool writes(const TensorArguments& tensors) const {
    return std::ranges::any_of(
        tensors, [&](const TensorArgument& argument) { return is_written(argument.position); });
  }
  bool may_write() const { return written_ != 0; }
  /// @throws c10::Error for tensors of which a glance found that they are not what is taken.
  [[noreturn]] void refuse(Takes takes, const TensorArguments& tensors) const;
  /// @throws c10::Error unless what will be written may be written, by an operator that has no
  /// gradient for it, knows no quantized tensors there, and reads other arguments meanwhile.
  void check_written(Takes takes, const TensorArguments& tensors) const;
  /// Says that it was written: to autograd, which has saved it perhaps, and to the quantized tensor
  /// whose master it is.
  void bump_written(const TensorArguments& tensors) const;
  /// Whether an error, of this operator or one that it called, does not say which operator it was.
  bool is_unnamed(const c10::Error& error) const;
  /// Adds which call it was.
  void add_context(c10::Error& error, const std::vector<std::string>& shown) const;
  std::string what(size_t position) const;  // "qshard::linear: bias"
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::vector<std::string> arguments_;  // their names; of functions without a tensor torch has none
  uint64_t written_ = 0;                // a bit for each argument

  bool is_written(size_t position) const { return (written_ >> position & 1) != 0; }
};

namespace checked_call {

/// Whether a tensor has elements and no memory. A quantized one is judged by its master, where
/// kernels read values by address; operators that read codes ask the buffer.
inline bool is_freed(const at::Tensor& tensor, Takes takes) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if (has_key(tensor)) {
    return takes == Takes::kValues && is_quantized(tensor) &&
           buffer_of(tensor).planes().master().defined() && !impl.storage_initialized();
  }
  return impl.has_storage() && !impl.storage_initialized();
}

template <typename Visit>
void visit(const at::Tensor& tensor, const Visit& visit_tensor) {
  if (tensor.defined()) visit_tensor(tensor);
}
template <typename Visit>
void visit(const std::optional<at::Tensor>& tensor, const Visit& visit_tensor) {
  if (tensor) visit(*tensor, visit_tensor);
}
template <typename Visit>
void visit(at::TensorList tensors, const Visit& visit_tensor) {
  for (const at::Tensor& tensor : tensors) visit(tensor, visit_tensor);
}
template <typename Visit>
void visit(const std::vector<at::Tensor>& tensors, const Visit& visit_tensor) {
  visit(at::TensorList(tensors), visit_tensor);
}
template <typename Visit>
void visit(const std::optional<std::vector<at::Tensor>>& tensors, const Visit& visit_tensor) {
  if (tensors) visit(at::TensorList(*tensors), visit_tensor);
}
template <typename Other, typename Visit>
void visit(const Other&, const Visit&) {}

/// A look at each tensor, inline: whether something about one of them needs a closer one.
template <Takes kTakes>
struct Glance {
  std::optional<at::Device> device;
  bool is_odd = false;

  void operator()(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    const bool is_python = impl.key_set().has(c10::DispatchKey::Python);
    if constexpr (kTakes == Takes::kMeta) {  // FakeTensorMode has looked at the devices of its own
      is_odd |= !is_python && !impl.is_meta();
      return;
    }
    const at::Device own = impl.device();
    if constexpr (kTakes == Takes::kValues || kTakes == Takes::kValuesAnywhere) {
      is_odd |= own.is_meta();
    }
    if constexpr (kTakes == Takes::kValues || kTakes == Takes::kValuesOrMeta) {
      if (!device) device = own;
      is_odd |= *device != own;
    }
    is_odd |= impl.layout() != at::kStrided || impl.is_nested();
    if (!is_python && !own.is_meta()) is_odd |= is_freed(tensor, kTakes);
  }
};

std::string shown(const at::Tensor& tensor);
std::string shown(std::string_view text);
std::string shown(at::IntArrayRef numbers);
template <typename Argument>
std::string show(const Argument& argument) {
  using Bare = std::remove_cvref_t<Argument>;
  if constexpr (std::is_same_v<Bare, bool>) {
    return argument ? "True" : "False";
  } else if constexpr (std::is_arithmetic_v<Bare>) {
    return fmt::to_string(argument);
  } else if constexpr (std::is_same_v<Bare, c10::SymIntArrayRef>) {
    return c10::str(argument);
  } else if constexpr (std::is_same_v<Bare, at::Tensor> || std::is_same_v<Bare, at::IntArrayRef>) {
    return shown(argument);
  } else if constexpr (std::is_same_v<Bare, c10::string_view> ||
                       std::is_same_v<Bare, std::string>) {
    return shown(std::string_view(argument.data(), argument.size()));
  } else if constexpr (requires { argument.weak_use_count(); }) {
    return "this";  // an object whose method is called
  } else if constexpr (requires { argument.has_value(); }) {
    return argument.has_value() ? show(*argument) : "None";
  } else if constexpr (requires { argument.size(); }) {
    return fmt::format("[{} of them]", argument.size());
  } else {
    return c10::str(argument);
  }
}

/// "method" of "Class.method".
inline std::string method_name(std::string_view name) {
  return std::string(name.substr(name.find('.') + 1));
}

/// An operator's name as a template argument.
template <size_t kSize>
struct Name {
  char text[kSize];
  constexpr Name(const char (&name)[kSize]) { std::copy_n(name, kSize, text); }
};

template <Name kName, Takes kTakes, auto kKernel>
struct Call;

template <Name kName, Takes kTakes, typename Result, typename... Arguments,
          Result (*kKernel)(Arguments...)>
struct Call<kName, kTakes, kKernel> {
  static TensorArguments tensors_of(const std::remove_cvref_t<Arguments>&... arguments) {
    TensorArguments tensors;
    [[maybe_unused]] size_t position = 0;
    [[maybe_unused]] const auto add = [&](const auto& argument) {
      visit(argument, [&](const at::Tensor& tensor) { tensors.push_back({position, &tensor}); });
      ++position;
    };
    (add(arguments), ...);
    return tensors;
  }

  static Result run(Arguments... arguments) {
    static const CheckedOperator op(kName.text);
    try {
      if constexpr (kTakes == Takes::kAlias) return kKernel(arguments...);
      if constexpr (kTakes != Takes::kAnything) {
        Glance<kTakes> glance;
        const auto look = [&](const at::Tensor& tensor) { glance(tensor); };
        (visit(arguments, look), ...);
        if (glance.is_odd) op.refuse(kTakes, tensors_of(arguments...));
      }
      if (!op.may_write()) return kKernel(arguments...);
      const TensorArguments tensors = tensors_of(arguments...);
      if (!op.writes(tensors)) return kKernel(arguments...);
      op.check_written(kTakes, tensors);
      if constexpr (std::is_void_v<Result>) {
        kKernel(arguments...);
        op.bump_written(tensors);
      } else {
        Result result = kKernel(arguments...);
        op.bump_written(tensors);
        return result;
      }
    } catch (c10::Error& error) {
      if (op.is_unnamed(error)) op.add_context(error, {show(arguments)...});
      throw;
    } catch (const std::invalid_argument& error) {  // of kernels, which know no operator
      TORCH_CHECK_VALUE(false, op.name(), ": ", error.what());
    }
  }
};

}  // namespace checked_call

/// Registers `kKernel` as the implementation of qshard::`kName` on the key of `m`.
template <checked_call::Name kName, auto kKernel, Takes kTakes = Takes::kValues>
void implement(torch::Library& m) {
  m.impl(kName.text, &checked_call::Call<kName, kTakes, kKernel>::run);
}

/// Registers, on the key of `m`, what refuses lazily negated or conjugated views that an operator
/// writes, for each operator of ours that writes anything.
void refuse_lazy_views(torch::Library& m);

}  // namespace qshard
