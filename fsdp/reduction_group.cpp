// The one collective of a flush, over a c10d process group found by name, and the group's size.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>

#include "dispatch/requantize.h"

namespace qshard {
namespace {

void all_reduce_max(at::Tensor& bits, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  const auto devices = group->getDeviceTypes();
  const bool is_served = std::any_of(devices.begin(), devices.end(), [&](const at::Device& device) {
    return device.type() == bits.device().type();
  });
  // Amaxes of CPU-offloaded parameters under NCCL go through the GPU.
  std::vector<at::Tensor> tensors{is_served || devices.empty() ? bits
                                                               : bits.to(devices.front().type())};
  group->allreduce(tensors, options)->wait();
  if (!tensors.front().is_same(bits)) bits.copy_(tensors.front());
}

int64_t group_size(const std::string& group_name) {
  return c10d::resolve_process_group(group_name)->getSize();
}

const bool kInstalled = [] {
  set_group_operations({&all_reduce_max, &group_size});
  return true;
}();

}  // namespace
}  // namespace qshard
