// Collectives on quantized tensors.
//
// To c10d a quantized tensor is `numel x itemsize` bytes of its nominal dtype, contiguous: its
// value, as a plain tensor would send it. No rank can know what its peers hold (plain tensors,
// other formats, other windows), so nothing else could be understood on the other side.
//
//   read arguments      the value, contiguous
//   received arguments  the window of the master (or `pending`) plane itself. A strided window,
//                       which c10d does not take, is received into a contiguous copy that is
//                       written back when the work is done.
//
// Received tensors count as written on every rank, the source and ranks without rows included:
// whether ranks meet in a flush may not depend on who sent. An asynchronous work says it a second
// time when it is waited for (received_work.h), unless a flush or a read has waited for it before.
//
// Schemas of _c10d_functional and _dtensor mark what they write. Those of c10d mark nothing, and
// there names tell (is_received). _c10d_functional_autograd calls _c10d_functional, but for
// all_to_all_single of later torch, which makes its result like its input.
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string_view>

#include "dispatch/aten/argument_tensors.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/aten/registration.h"
#include "dispatch/buffer/master_aliases.h"
#include "dispatch/collectives/received_work.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "dispatch/tensor/write_scope.h"

namespace qshard {
namespace {

bool is_c10d(const c10::OperatorHandle& op) {
  return op.operator_name().name.rfind("c10d::", 0) == 0;
}

/// send, recv_ and recv_any_source_: each pairs up with a call of one peer.
bool is_point_to_point(std::string_view name) {
  return name == "c10d::send" || name.rfind("c10d::recv", 0) == 0;
}

/// Whether c10d returns a work that the caller waits for: as its flag says, and receives, which
/// have none, always.
bool is_asynchronous(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> values) {
  if (!is_c10d(op)) return false;
  for (const char* name : {"async_op", "asyncOp"}) {
    const auto index = op.schema().argumentIndexWithName(name);
    if (index) return values[*index].toBool();
  }
  return is_point_to_point(op.operator_name().name);
}

/// Whether `op` writes this argument. c10d calls what it only reads `input*`, `sparse_indices`, and
/// the device's example of barriers `tensor`; `send` alone only reads its `tensors`. Everything
/// else counts as received (`output*`, and `tensors` of broadcast, reduce, all-reduce and receive,
/// in place): of an argument that no rule names a result must not be lost.
bool is_received(const c10::OperatorHandle& op, const c10::Argument& argument) {
  if (!is_c10d(op)) return argument.alias_info() && argument.alias_info()->isWrite();
  const std::string& name = argument.name();
  return op.operator_name().name != "c10d::send" && name.rfind("input", 0) != 0 &&
         name != "sparse_indices" && name != "tensor";
}

template <typename Convert>
c10::List<at::Tensor> converted_list(const c10::IValue& value, const Convert& convert) {
  c10::List<at::Tensor> list;
  for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
  return list;
}

/// Replaces every tensor of an argument or result by `convert(tensor)`.
template <typename Convert>
void convert_tensors(c10::IValue& value, const Convert& convert) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = convert(value.toTensor());
  } else if (value.isTensorList()) {
    value = converted_list(value, convert);
  } else if (value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList()) {
    c10::List<c10::List<at::Tensor>> lists;
    for (const c10::IValue& list : value.toListRef())
      lists.push_back(converted_list(list, convert));
    value = std::move(lists);
  }
}

/// Has the work that c10d returned call `arrived` when it is done.
void call_when_done(torch::jit::Stack& stack, std::function<void()> arrived,
                    std::function<void(const ReceivedWork::Ptr&)> by_future = {}) {
  auto work = stack.back().toCustomClass<c10d::Work>();
  if (!work) return;
  stack.back() = ReceivedWork::Ptr(
      c10::make_intrusive<ReceivedWork>(std::move(work), std::move(arrived), std::move(by_future)));
}

/// The plain contiguous tensors that stand for quantized arguments during one collective.
class PlainArguments {
 public:
  /// is_async: the caller waits for the work that c10d returns.
  PlainArguments(const c10::OperatorHandle& op, bool is_async) : op_(op), is_async_(is_async) {}

  /// @throws c10::Error for what could not be received, before anything is changed.
  void check(const at::Tensor& tensor, bool received) const {
    if (!has_key(tensor)) return;
    impl_of(tensor);  // refuses impostors by name
    if (!received) return;
    at::assert_no_internal_overlap(tensor);
    // Waiting for its own work would deadlock a pair of ranks that receive before they send.
    TORCH_CHECK(tensor.is_contiguous() || !is_point_to_point(op_.operator_name().name),
                fmt::format("{}: Tensors must be contiguous, and this {} has strides {}; receive "
                            "into torch.empty(...) and copy_() from it",
                            op_name(op_), describe(tensor), tensor.strides()));
  }

  at::Tensor read(const at::Tensor& tensor) {
    if (!has_key(tensor)) return tensor;
    read_.push_back({tensor, value_of(tensor).contiguous()});
    return read_.back().plain;
  }

  at::Tensor receive(const at::Tensor& tensor) {
    if (!has_key(tensor)) return tensor;
    const WriteScope scope(tensor);
    received_.push_back({scope, {}, {}});
    Received& entry = received_.back();
    entry.target = scope.plane();
    entry.plain = entry.target.contiguous();
    return entry.plain;
  }

  /// Waits for what was received beside its place, and puts it there.
  void write_back(const torch::jit::Stack& stack) {
    for (const Received& entry : received_) {
      if (entry.plain.is_same(entry.target)) continue;
      wait(stack, entry.plain);
      entry.target.copy_(entry.plain);
    }
  }

  /// And, of c10d's asynchronous work, says it again when that is done.
  void mark_written(torch::jit::Stack& stack) {
    for (const Received& entry : received_) entry.scope.commit();
    if (!is_async_ || received_.empty()) return;
    const auto arrive = [received = received_] {
      for (const Received& entry : received) {
        if (entry.arrives_now()) {
          entry.put_where_values_are();
          entry.scope.commit();
        }
      }
    };
    if (!is_point_to_point(op_.operator_name().name)) {
      // All ranks are in this collective: a flush on the way waits for it, and sees what arrives.
      const auto work = stack.back().toCustomClass<c10d::Work>();
      for (const Received& entry : received_) {
        if (work) buffer_of(entry.scope.tensor()).arrivals().expect(entry.arrival(work));
      }
    }
    call_when_done(stack, arrive, [received = received_](const ReceivedWork::Ptr& work) {
      for (const Received& entry : received) {
        if (entry.has_arrived->load()) continue;
        buffer_of(entry.scope.tensor()).arrivals().expect(entry.arrival(work));
        entry.scope.commit();  // again: what was flushed before was not what arrives
      }
    });
  }

  /// After an error. A master may hold part of what was sent, and the peers count theirs as
  /// written.
  void roll_back() {
    for (const Received& entry : received_) entry.scope.roll_back(/*may_have_written=*/true);
  }

  /// The caller's tensor for a result that is one of the stand-ins.
  at::Tensor restore(const at::Tensor& result) const {
    for (const Received& entry : received_) {
      if (result.is_same(entry.plain)) return entry.scope.tensor();
    }
    for (const Read& entry : read_) {
      if (result.is_same(entry.plain)) return entry.quantized;
    }
    return result;
  }

 private:
  struct Read {
    at::Tensor quantized;
    at::Tensor plain;
  };
  struct Received {
    WriteScope scope;
    at::Tensor plain;   // what the collective writes
    at::Tensor target;  // the same elements of the plane
    /// Arrival happens once: a wait after a flush that has waited finds the value of that flush.
    std::shared_ptr<std::atomic<bool>> has_arrived = std::make_shared<std::atomic<bool>>(false);

    bool arrives_now() const { return !has_arrived->exchange(true); }
    /// The same for a flush, which the buffer keeps: it must not keep the buffer.
    std::function<void(QuantizedBuffer&)> arrival(const ReceivedWork::Ptr& work) const {
      const at::Tensor& quantized = scope.tensor();
      return [work, target = target, has_arrived = has_arrived, sizes = quantized.sizes().vec(),
              strides = quantized.strides().vec(),
              offset = quantized.storage_offset()](QuantizedBuffer& buffer) {
        if (has_arrived->load()) return;
        work->wait();
        if (has_arrived->exchange(true)) return;
        PlainGuard guard;
        const WriteScope scope(
            make_tensor(BufferPtr::reclaim_copy(&buffer), sizes, strides, offset));
        const at::Tensor now = scope.plane();
        if (now.const_data_ptr() != target.const_data_ptr()) now.copy_(target);
        scope.commit_before_bump();
      };
    }

    /// A flush in between dropped the pending write that was received into.
    void put_where_values_are() const {
      if (target.numel() == 0) return;
      PlainGuard guard;
      const at::Tensor now = scope.plane();
      if (now.const_data_ptr() != target.const_data_ptr()) now.copy_(target);
    }
  };

  const c10::OperatorHandle& op_;
  bool is_async_;
  std::vector<Read> read_;
  std::vector<Received> received_;

  /// c10d returns its work last; a functional collective registers it for the tensor it writes.
  void wait(const torch::jit::Stack& stack, const at::Tensor& written) const {
    if (!is_c10d(op_)) {
      torch::jit::Stack arguments{written};
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
          .callBoxed(arguments);
      return;
    }
    const auto work = stack.back().toCustomClass<c10d::Work>();
    if (!work && !is_async_) return;  // NCCL's ran on this stream
    TORCH_CHECK(work, fmt::format("{}: Tensors must be contiguous within a coalesced group of "
                                  "collectives; clone() the window first",
                                  op_name(op_)));
    work->wait();
  }
};

/// Before a backend is chosen, for what its key does not tell. Tensor[][] arguments do not take
/// part in dispatch: with plain tensors beside them, quantized ones in such lists would reach the
/// backend. And a plain tensor that is received into may be the alias of a master, a state_dict's
/// value.
void collective_of_any(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                       torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  bool any_quantized = false;
  std::vector<BufferPtr> masters;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(values[i], [&](const at::Tensor& tensor) {
      if (is_quantized(tensor)) {
        any_quantized = true;
      } else if (is_received(op, arguments[i])) {
        if (auto owner = owner_of_master_alias(tensor)) masters.push_back(std::move(owner));
      }
    });
  }
  const bool is_async = is_asynchronous(op, values);
  for (const BufferPtr& buffer : masters) WriteScope::written_by_alias(*buffer);
  if (any_quantized) {
    collective(op, keys, stack);
  } else {
    constexpr auto kBelow =
        c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    op.redispatchBoxed(keys & kBelow, stack);
  }
  if (masters.empty() || !is_async) return;
  call_when_done(*stack, [masters = std::move(masters)] {
    for (const BufferPtr& buffer : masters) WriteScope::written_by_alias(*buffer);
  });
}

}  // namespace

bool is_collective(const c10::OperatorHandle& op) {
  const std::string& name = op.operator_name().name;
  for (const char* prefix :
       {"c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::"}) {
    if (name.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

void collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  PlainGuard guard;
  const auto& schema = op.schema();
  const size_t first_argument = stack->size() - schema.arguments().size();
  PlainArguments plain_arguments(
      op, is_asynchronous(op, torch::jit::last(*stack, schema.arguments().size())));
  const auto for_each_argument = [&](const auto& visit) {
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      visit((*stack)[first_argument + i], is_received(op, schema.arguments()[i]));
    }
  };
  for_each_argument([&](const c10::IValue& value, bool received) {
    for_each_tensor(value,
                    [&](const at::Tensor& tensor) { plain_arguments.check(tensor, received); });
  });
  try {
    for_each_argument([&](c10::IValue& value, bool received) {
      convert_tensors(value, [&](const at::Tensor& tensor) {
        return received ? plain_arguments.receive(tensor) : plain_arguments.read(tensor);
      });
    });
    op.callBoxed(stack);
    plain_arguments.write_back(*stack);
  } catch (...) {
    plain_arguments.roll_back();
    throw;
  }
  plain_arguments.mark_written(*stack);
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    convert_tensors((*stack)[i],
                    [&](const at::Tensor& result) { return plain_arguments.restore(result); });
  }
}

void register_collectives(torch::Library& library, const char* name_space) {
  for_each_tensor_op(name_space, [&](const c10::OperatorHandle&, const std::string& name) {
    library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&collective>());
  });
}

void register_collectives_of_any(torch::Library& c10d) {
  for_each_tensor_op("c10d", [&](const c10::OperatorHandle& op, const std::string& name) {
    const auto& arguments = op.schema().arguments();
    if (std::none_of(arguments.begin(), arguments.end(),
                     [&](const c10::Argument& argument) { return is_received(op, argument); })) {
      return;
    }
    c10d.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&collective_of_any>());
  });
}

}  // namespace qshard
