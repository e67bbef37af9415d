// RankGroups of c10d process groups, found by name.
#include "dispatch/rank_group.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <mutex>

namespace qshard {
namespace {

/// Does not keep the process group: whoever destroys it means it.
class ProcessGroupHandle final : public RankGroup {
 public:
  ProcessGroupHandle(std::string name, const c10::intrusive_ptr<c10d::ProcessGroup>& group)
      : RankGroup(std::move(name), group->getSize()), group_(group) {}

  bool is_alive() const override { return !group_.expired(); }
  bool is_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group) const {
    return group_.lock() == group;
  }

  void all_reduce_max(at::Tensor bits) const override {
    const auto group = group_.lock();
    TORCH_CHECK(group,
                fmt::format("qshard::flush: the process group {} that this parameter is sharded "
                            "over was destroyed; shard it over a mesh of living groups",
                            name()));
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    const auto devices = group->getDeviceTypes();
    const bool is_served = std::any_of(
        devices.begin(), devices.end(),
        [&](const at::Device& device) { return device.type() == bits.device().type(); });
    // Amaxes of CPU-offloaded parameters under NCCL go through the GPU.
    std::vector<at::Tensor> tensors{is_served || devices.empty() ? bits
                                                                 : bits.to(devices.front().type())};
    group->allreduce(tensors, options)->wait();
    if (!tensors.front().is_same(bits)) bits.copy_(tensors.front());
  }

 private:
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
};

RankGroupPtr find(std::string_view name) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, std::shared_ptr<ProcessGroupHandle>>;
  std::string key(name);
  const auto group = c10d::resolve_process_group(key);
  const std::lock_guard lock(mutex);
  std::shared_ptr<ProcessGroupHandle>& handle = (*known)[key];
  // Names are given again once their groups are gone.
  if (!handle || !handle->is_of(group)) {
    handle = std::make_shared<ProcessGroupHandle>(std::move(key), group);
  }
  return handle;
}

const bool kInstalled = [] {
  set_group_finder(&find);
  return true;
}();

}  // namespace
}  // namespace qshard
