// RankGroups of c10d process groups, found by name.
#include "dispatch/rank_group.h"

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <map>
#include <mutex>

namespace qshard {
namespace {

using ProcessGroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Does not keep the process group: whoever destroys it means it. Names are given again in a
/// process that starts over, whose caches may hold DTensors with a mesh of before; so whoever finds
/// a group by its name finds this handle, and makes it one of the group that has the name now.
class ProcessGroupHandle final : public RankGroup {
 public:
  explicit ProcessGroupHandle(std::string name) : RankGroup(std::move(name)) { look_up(); }

  int64_t size() const override { return get()->getSize(); }

  void all_reduce_max(at::Tensor bits) const override {
    const ProcessGroupPtr group = get();
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

  void look_up() const {
    const auto group = c10d::resolve_process_group(name());
    const std::lock_guard lock(mutex_);
    group_ = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
  }

 private:
  ProcessGroupPtr get() const {
    {
      const std::lock_guard lock(mutex_);
      if (ProcessGroupPtr known = group_.lock()) return known;
    }
    return c10d::resolve_process_group(name());
  }

  mutable std::mutex mutex_;
  mutable c10::weak_intrusive_ptr<c10d::ProcessGroup> group_{ProcessGroupPtr()};
};

RankGroupPtr find(std::string_view name) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, std::shared_ptr<ProcessGroupHandle>>;
  std::string key(name);
  const std::lock_guard lock(mutex);
  std::shared_ptr<ProcessGroupHandle>& handle = (*known)[key];
  if (handle) {
    handle->look_up();
  } else {
    handle = std::make_shared<ProcessGroupHandle>(std::move(key));
  }
  return handle;
}

const bool kInstalled = [] {
  set_group_finder(&find);
  return true;
}();

}  // namespace
}  // namespace qshard
