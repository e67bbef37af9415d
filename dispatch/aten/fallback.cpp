#include "dispatch/aten/fallback.h"

#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "dispatch/aten/argument_tensors.h"
#include "dispatch/aten/matmul.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/aten/registration.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "dispatch/tensor/write_scope.h"

namespace qshard {
namespace {

std::atomic<bool> g_tracing{false};
std::mutex g_trace_mutex;
std::map<std::string, int64_t> g_trace, g_traced_reads;

void trace(const c10::OperatorHandle& op, std::map<std::string, int64_t>& counts) {
  if (!g_tracing.load(std::memory_order_relaxed)) return;
  std::lock_guard lock(g_trace_mutex);
  ++counts[op_name(op)];
}

/// The plain tensors that stand for quantized arguments during one call.
class PlainArguments {
 public:
  PlainArguments(std::string name, const c10::FunctionSchema& schema)
      : name_(std::move(name)),
        counts_storage_(schema.argumentIndexWithName("storage_offset").has_value()) {}

  at::Tensor read(const at::Tensor& tensor) {
    if (!is_quantized_argument(tensor)) return tensor;
    reads_ = true;
    // as_strided_copy and its like count elements of the storage. A master lies somewhere within
    // the packed storage; a copy of the plane starts at its own.
    return counts_storage_ ? window(buffer_of(tensor).value().operand().clone(), tensor)
                           : value_of(tensor);
  }

  at::Tensor read_codes(const at::Tensor& tensor) {
    reads_ = reads_ || has_key(tensor);
    return dequantized_codes(tensor, name_.c_str());
  }

  /// Whether the operator runs on values of quantized tensors, made for it.
  bool reads() const { return reads_; }

  at::Tensor write(const at::Tensor& tensor) {
    if (!is_quantized_argument(tensor)) return tensor;
    const WriteScope scope(tensor);
    writes_.push_back({scope, scope.plane(), Kind::kInPlace});
    return writes_.back().plain;
  }

  at::Tensor out(const at::Tensor& tensor) {
    if (!is_quantized_argument(tensor)) return tensor;
    reads_ = true;
    writes_.push_back({WriteScope(tensor), value_copy(tensor), Kind::kOut});
    return writes_.back().plain;
  }

  void commit() {
    for (const Write& write : writes_) {
      if (write.kind != Kind::kOut) continue;
      check_shape(write);
      at::assert_no_internal_overlap(write.scope.tensor());
    }
    for (const Write& write : writes_) {
      if (write.kind == Kind::kOut) write.scope.plane().copy_(write.plain);
      write.scope.commit();
    }
  }

  /// After an error. What is written to out= comes after the last one.
  void roll_back(bool may_have_written) {
    for (const Write& write : writes_) {
      write.scope.roll_back(may_have_written && write.kind == Kind::kInPlace);
    }
  }

  /// The caller's tensor for a result that is one of the plain stand-ins.
  at::Tensor restore(const at::Tensor& result) const {
    for (const Write& write : writes_) {
      if (result.is_same(write.plain)) return write.scope.tensor();
    }
    return result;
  }

 private:
  enum class Kind { kInPlace, kOut };
  struct Write {
    WriteScope scope;
    at::Tensor plain;
    Kind kind;
  };

  std::string name_;
  bool counts_storage_;
  bool reads_ = false;
  std::vector<Write> writes_;

  static bool is_quantized_argument(const at::Tensor& tensor) {
    if (!has_key(tensor)) return false;
    impl_of(tensor);  // refuses impostors by name
    return true;
  }

  void check_shape(const Write& write) const {
    TORCH_CHECK(write.plain.sizes() == write.scope.tensor().sizes(),
                fmt::format("{}: out= is a {} and cannot be resized; pass a tensor of the result's "
                            "shape",
                            name_, describe(write.scope.tensor())));
  }
};

/// Whether an op that fails has written nothing: element by element on single tensors, all
/// arguments are looked at first. Lists are written one tensor after the other, and a bad index,
/// say, may be found on the way. A shard may fail where its peers do not (without rows it has
/// another shape), so what was not written must not count as written.
bool checks_before_it_writes(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  const bool takes_list = std::any_of(arguments.begin(), arguments.end(), [](const auto& argument) {
    return argument.type()->kind() == c10::TypeKind::ListType;
  });
  if (takes_list) return false;
  if (op.hasTag(at::Tag::pointwise)) return true;
  auto name = op.operator_name();  // some in-place variants lack the tag
  if (name.name.back() != '_') return false;
  name.name.pop_back();
  const auto functional = c10::Dispatcher::singleton().findOp(name);
  return functional && functional->hasTag(at::Tag::pointwise);
}

template <typename Convert>
void convert_value(c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) {
    const at::Tensor tensor = value.toTensor();
    if (tensor.defined()) value = convert(tensor);
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> converted;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      converted.push_back(tensor.defined() ? convert(tensor) : tensor);
    }
    value = std::move(converted);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> converted;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec()) {
      converted.push_back(tensor && tensor->defined() ? std::optional(convert(*tensor)) : tensor);
    }
    value = std::move(converted);
  }
}

void check_has_value(const at::Tensor& tensor) {
  if (!has_key(tensor)) return;
  QuantizedBuffer& buffer = buffer_of(tensor);
  buffer.original();  // an error if it is gone
  const Planes& planes = buffer.planes();
  if (!planes.master().defined() && !planes.pending().defined()) buffer.check_is_allocated();
}

void refuse_what_cannot_fall_back(const c10::OperatorHandle& op, const std::string& name) {
  const auto traits = OpTraits::of(op);
  TORCH_CHECK(
      !traits.changes_metadata,
      fmt::format("{} would change the shape or storage of a quantized tensor in place, which "
                  "is not supported; make a new tensor from qshard::dequantize(tensor)",
                  name));
  TORCH_CHECK(!traits.returns_view,
              fmt::format("{} returns a view, and this view of a quantized tensor cannot be "
                          "expressed; use qshard::dequantize(tensor) first",
                          name));
}

thread_local bool t_in_step = false;

/// Merging an adapter into a frozen weight, say, which is then taken out again. `.data` of a weight
/// that is trained and the local tensor of a DTensor look frozen, too: within an optimizer's step
/// they are not.
void warn_of_rounded_sum(const std::string& op, const at::Tensor& tensor) {
  if ((op != "aten::add_" && op != "aten::sub_") || !has_key(tensor)) return;
  const QuantizedBuffer& buffer = buffer_of(tensor);
  if (t_in_step || buffer.keeps_master() || tensor.requires_grad()) return;
  if (buffer.layout().format->stochastic_rounding) return;
  TORCH_WARN_ONCE(fmt::format(
      "{}: the sum is rounded to {} codes, and taking the summand away again does not bring the "
      "weight back. Where that matters, as in merging and unmerging adapters, use "
      "quantize_(keep_master=True), or qshard.dequantize_(model) before",
      op, buffer.layout().format->name));
}

}  // namespace

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (is_collective(op)) return collective(op, keys, stack);  // one defined after loading
  trace(op, g_trace);
  const auto& schema = op.schema();
  const size_t first_argument = stack->size() - schema.arguments().size();
  const std::string name = op_name(op);
  PlainArguments plain_arguments(name, schema);
  PlainGuard guard;
  refuse_what_cannot_fall_back(op, name);
  // Before any argument is prepared for a write: a list of which one tensor was freed leaves the
  // others as they were.
  for (const c10::IValue& argument : torch::jit::last(*stack, schema.arguments().size())) {
    for_each_tensor(argument, check_has_value);
  }
  const auto as_codes = arguments_read_as_codes(schema.name());

  c10::OptionalDeviceGuard device_guard;
  bool runs = false;
  try {
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      const bool written = argument.alias_info() && argument.alias_info()->isWrite();
      const bool is_code_read = !written && std::find(as_codes.begin(), as_codes.end(),
                                                      argument.name()) != as_codes.end();
      convert_value((*stack)[first_argument + i], [&](const at::Tensor& tensor) {
        if (!device_guard.current_device() && has_key(tensor)) {
          device_guard.reset_device(tensor.device());
        }
        if (is_code_read) return plain_arguments.read_codes(tensor);
        if (!written) return plain_arguments.read(tensor);
        if (argument.is_out()) return plain_arguments.out(tensor);
        warn_of_rounded_sum(schema.name(), tensor);
        return plain_arguments.write(tensor);
      });
    }
    if (plain_arguments.reads()) trace(op, g_traced_reads);
    runs = true;
    op.callBoxed(stack);
    plain_arguments.commit();
  } catch (...) {
    plain_arguments.roll_back(runs && !checks_before_it_writes(op));
    throw;
  }
  const size_t first_return = stack->size() - schema.returns().size();
  for (size_t i = first_return; i < stack->size(); ++i) {
    convert_value((*stack)[i],
                  [&](const at::Tensor& result) { return plain_arguments.restore(result); });
  }
}

void set_in_step(bool in_step) { t_in_step = in_step; }

bool is_in_step() { return t_in_step; }

void set_fallback_tracing(bool enabled) {
  std::lock_guard lock(g_trace_mutex);
  if (enabled) {
    g_trace.clear();
    g_traced_reads.clear();
  }
  g_tracing = enabled;
}

std::map<std::string, int64_t> traced_fallbacks(bool reads_only) {
  std::lock_guard lock(g_trace_mutex);
  return reads_only ? g_traced_reads : g_trace;
}

}  // namespace qshard
