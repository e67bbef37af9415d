// Collectives on quantized tensors.
//
// c10d schemas carry no alias marks, so a fallback could not know which argument a collective
// writes, and the result would be lost without an error. Here the packed bytes themselves travel
// (image, master and grid), as uint8: nobody interprets them on the way.
#include <fmt/format.h>

#include "dispatch/fallback.h"
#include "dispatch/flush.h"
#include "dispatch/kernel_bridge.h"
#include "dispatch/native_kernels.h"
#include "dispatch/quantized_tensor_impl.h"
#include "dispatch/registration.h"

namespace qshard {
namespace {

/// The packed bytes of a tensor that shows its whole buffer; `received` collects those that the
/// collective may write.
at::Tensor wire_bytes(const at::Tensor& tensor, const std::string&,
                      std::vector<BufferPtr>& received) {
  if (!has_key(tensor)) return tensor;
  received.push_back(impl_of(tensor).buffer());
  return window(buffer_of(tensor).write_plane(), tensor);
}

void byte_collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  PlainGuard guard;
  const std::string name = op_name(op);
  const size_t count = op.schema().arguments().size();
  std::vector<BufferPtr> received;
  const auto convert_list = [&](const std::vector<at::Tensor>& tensors) {
    c10::List<at::Tensor> bytes;
    for (const auto& tensor : tensors) bytes.push_back(wire_bytes(tensor, name, received));
    return bytes;
  };
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = wire_bytes(value.toTensor(), name, received);
    } else if (value.isTensorList()) {
      value = convert_list(value.toTensorVector());
    } else if (value.isList() && !value.toListRef().empty() &&
               value.toListRef()[0].isTensorList()) {
      c10::List<c10::List<at::Tensor>> lists;
      for (const auto& list : value.toListRef())
        lists.push_back(convert_list(list.toTensorVector()));
      value = std::move(lists);
    }
  }
  op.callBoxed(stack);
  for (const auto& buffer : received) {
    buffer->written();
  }
}

}  // namespace

void register_collectives(torch::Library& c10d) {
  for (const char* name : {"broadcast_", "scatter_", "allgather_", "send", "recv_"}) {
    c10d.impl(name, torch::CppFunction::makeFromBoxedFunction<&byte_collective>());
  }
}

void register_functional_collectives(torch::Library& c10d_functional) {
  // Their results are new tensors, so values are right and plain: full_tensor() and redistribute()
  // of a sharded quantized parameter give the full-precision value. One by one, because composite
  // kernels win over the backend fallback.
  for (const char* name :
       {"all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce", "broadcast",
        "all_to_all_single", "reduce_scatter_tensor", "wait_tensor"}) {
    c10d_functional.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace qshard
