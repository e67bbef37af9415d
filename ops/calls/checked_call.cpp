#include "ops/calls/checked_call.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/custom_class.h>

#include "dispatch/aten/registration.h"
#include "dispatch/parts/kernel_bridge.h"
#include "kernels/format/shown_name.h"

namespace qshard {
namespace {

/// Memory of a tensor whose elements lie side by side; others torch does not compare either.
struct Extent {
  const char* begin;
  const char* end;
  size_t position;
  bool is_written;
};

bool has_extent(const at::Tensor& tensor) {
  return !has_key(tensor) && !tensor.is_meta() && tensor.layout() == at::kStrided &&
         !tensor.key_set().has(c10::DispatchKey::Python) && tensor.numel() > 0 &&
         tensor.is_non_overlapping_and_dense();
}

std::string location(const at::Tensor& tensor) { return tensor.device().str(); }

const c10::FunctionSchema& schema_of(std::string_view name) {
  const size_t dot = name.find('.');
  if (dot == std::string_view::npos) {
    const std::string full_name = "qshard::" + std::string(name);
    return c10::Dispatcher::singleton().findSchemaOrThrow(full_name.c_str(), "").schema();
  }
  const std::string class_name(name.substr(0, dot));
  const auto type = torch::getCustomClass("__torch__.torch.classes.qshard." + class_name);
  const std::string method = checked_call::method_name(name);
  torch::jit::Function* found = type->findMethod(method);
  if (found == nullptr) found = type->findStaticMethod(method);
  TORCH_INTERNAL_ASSERT(found != nullptr);
  return found->getSchema();
}

}  // namespace

CheckedOperator::CheckedOperator(std::string_view name) : name_("qshard::" + std::string(name)) {
  const auto& arguments = schema_of(name).arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_self = arguments[i].type()->kind() == c10::TypeKind::ClassType;
    arguments_.push_back(is_self ? "self" : arguments[i].name());
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite()) written_ |= uint64_t{1} << i;
  }
}

std::string CheckedOperator::what(size_t position) const {
  return fmt::format("{}: {}", name_, arguments_[position]);
}

void CheckedOperator::refuse(Takes takes, const TensorArguments& tensors) const {
  const auto named = [&](const TensorArgument& argument) { return arguments_[argument.position]; };
  const TensorArgument& first = tensors.front();
  const bool takes_one_device = takes != Takes::kEachDevice && takes != Takes::kValuesAnywhere;
  for (const TensorArgument& other : tensors) {
    if (!takes_one_device || other.tensor->device() == first.tensor->device()) continue;
    const bool has_meta = other.tensor->is_meta() || first.tensor->is_meta();
    TORCH_CHECK(
        false,
        fmt::format("{}: {} is on {} and {} on {}; all tensors must be on one device{}", name_,
                    named(first), location(*first.tensor), named(other), location(*other.tensor),
                    has_meta ? ". What is on meta has no values: to_empty() and initialise "
                               "it, or load a checkpoint with assign=True"
                             : ""));
  }
  const bool takes_values = takes == Takes::kValues || takes == Takes::kValuesAnywhere;
  for (const TensorArgument& argument : tensors) {
    const at::Tensor& tensor = *argument.tensor;
    TORCH_CHECK_NOT_IMPLEMENTED(
        !takes_values || !tensor.is_meta(),
        fmt::format("{}: {} is on meta, or traced, and this operator has no kernel for tensors "
                    "without values; call it on real ones, outside traced code",
                    name_, named(argument)));
    TORCH_CHECK_VALUE(
        tensor.layout() == at::kStrided && !tensor.is_nested(),
        fmt::format("{}: {}: expected a strided tensor, got layout {}", name_, named(argument),
                    tensor.is_nested() ? "Nested" : c10::str(tensor.layout())));
    TORCH_CHECK(
        tensor.is_meta() || tensor.key_set().has(c10::DispatchKey::Python) ||
            !checked_call::is_freed(tensor, takes),
        fmt::format("{}: the memory of {}, of shape {}, was freed (its storage has 0 bytes)", name_,
                    named(argument), tensor.sizes()));
  }
  // A Meta kernel was reached by tensors that all lie elsewhere: a dispatch mode's doing.
  TORCH_CHECK(false, fmt::format("{}: expected tensors on meta, got {} on {}", name_, named(first),
                                 location(*first.tensor)));
}

void CheckedOperator::check_written(Takes takes, const TensorArguments& tensors) const {
  c10::SmallVector<Extent, 8> extents;
  for (const TensorArgument& argument : tensors) {
    const at::Tensor& tensor = *argument.tensor;
    const bool written = is_written(argument.position);
    if (written) {
      TORCH_CHECK(!has_key(tensor),
                  fmt::format("{} must be a plain tensor, and is quantized: this operator writes "
                              "plain memory; copy_() what it has written",
                              what(argument.position)));
      TORCH_CHECK(!(at::GradMode::is_enabled() && tensor.requires_grad()),
                  fmt::format("{} requires grad, and what is written into it has no gradient; call "
                              "the operator under torch.no_grad()",
                              what(argument.position)));
      TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes,
                  fmt::format("{} has elements that share memory: shape {}, strides {}; give it a "
                              "clone()",
                              what(argument.position), tensor.sizes(), tensor.strides()));
    }
    if (takes == Takes::kMeta || !has_extent(tensor)) continue;
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    extents.push_back({begin, begin + tensor.nbytes(), argument.position, written});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const Extent* last = nullptr;          // of those so far, the one that ends last
  const Extent* last_written = nullptr;  // of those that are written
  for (const Extent& extent : extents) {
    const Extent* before = extent.is_written ? last : last_written;
    TORCH_CHECK(before == nullptr || before->end <= extent.begin,
                fmt::format("{} shares memory with {}, and one of them is written; give it a "
                            "clone()",
                            what(before->position), arguments_[extent.position]));
    if (last == nullptr || extent.end > last->end) last = &extent;
    if (extent.is_written && (last_written == nullptr || extent.end > last_written->end)) {
      last_written = &extent;
    }
  }
}

void CheckedOperator::bump_written(const TensorArguments& tensors) const {
  for (const TensorArgument& argument : tensors) {
    if (is_written(argument.position)) bump_version(*argument.tensor);
  }
}

bool CheckedOperator::is_unnamed(const c10::Error& error) const {
  const auto says_it = [&](const std::string& text) {
    return text.find(name_) != std::string::npos;
  };
  return !says_it(error.msg()) && std::ranges::none_of(error.context(), says_it);
}

void CheckedOperator::add_context(c10::Error& error, const std::vector<std::string>& shown) const {
  std::vector<std::string> arguments;
  for (size_t i = 0; i < shown.size(); ++i) {
    const bool is_named = !arguments_[i].starts_with('_');
    arguments.push_back(is_named ? fmt::format("{}={}", arguments_[i], shown[i]) : shown[i]);
  }
  // An operator that calls others, as swiglu_mlp calls linears, is the one that the user knows: the
  // call within it gives way to it. Both would be several lines.
  auto& others = const_cast<std::vector<std::string>&>(error.context());
  std::erase_if(others, [](const std::string& text) { return text.starts_with("in qshard::"); });
  error.add_context(fmt::format("in {}({})", name_, fmt::join(arguments, ", ")));
}

namespace checked_call {

std::string shown(const at::Tensor& tensor) {
  if (!tensor.defined()) return "None";
  if (tensor.is_nested()) return "a nested tensor";
  return fmt::format("{}{}", c10::toString(tensor.scalar_type()), c10::str(tensor.sym_sizes()));
}

std::string shown(std::string_view text) { return fmt::format("'{}'", shown_name(text)); }

std::string shown(at::IntArrayRef numbers) {
  constexpr size_t kCodesCurrent = 12;
  if (numbers.size() <= kCodesCurrent) return c10::str(numbers);
  return fmt::format("[{}, ... {} of them]", fmt::join(numbers.slice(0, kCodesCurrent), ", "),
                     numbers.size());
}

}  // namespace checked_call

namespace {

bool is_lazy(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_neg() || tensor.is_conj());
}

at::Tensor resolved(const at::Tensor& tensor) {
  return is_lazy(tensor) ? tensor.resolve_neg().resolve_conj() : tensor;
}

/// torch's own fallback resolves such arguments, and copies a result back into those that are
/// written; it takes that from the stack, where operators that return nothing have left none.
void lazy_views_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    const auto* alias = arguments[i].alias_info();
    const bool is_written = alias != nullptr && alias->isWrite();
    const auto resolve = [&](const at::Tensor& tensor) {
      TORCH_CHECK(!(is_written && is_lazy(tensor)),
                  fmt::format("{}: {} is a lazily negated or conjugated view, whose memory has "
                              "other values; give it resolve_neg() or resolve_conj()",
                              op.schema().name(), arguments[i].name()));
      return resolved(tensor);
    };
    if (value.isTensor()) {
      value = resolve(value.toTensor());
    } else if (value.isTensorList()) {
      const auto list = value.toTensorList();
      for (size_t j = 0; j < list.size(); ++j) list.set(j, resolve(list.get(j)));
    }
  }
  // Conjugate is the lower of the two keys, and no argument has either now.
  op.redispatchBoxed(
      keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Conjugate),
      stack);
}

}  // namespace

void refuse_lazy_views(torch::Library& m) {
  for_each_tensor_op("qshard", [&](const c10::OperatorHandle& op, const std::string& name) {
    const auto& arguments = op.schema().arguments();
    const bool writes = std::ranges::any_of(arguments, [](const c10::Argument& argument) {
      return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    });
    if (writes) {
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&lazy_views_kernel>());
    }
  });
}

}  // namespace qshard
