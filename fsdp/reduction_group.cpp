// RankGroups of c10d process groups, found by name.
#include "dispatch/parts/rank_group.h"

#include <c10/util/intrusive_ptr.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <map>
#include <mutex>

#include "kernels/format/shown_name.h"

namespace qshard {
namespace {

using Tensors = std::vector<at::Tensor>;

/// NCCL returns no work where a call is not asynchronous: it is on the current stream.
void wait_for(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();
}

// torch 2.15 has other names for these. In 2.11 a process group that is written in Python, which
// has no backends, is asked for lists of tensors by C++, as functional collectives ask it.

template <typename Group>
auto gather(Group& group, Tensors& whole, Tensors& part) {
  c10d::AllgatherOptions options;
  options.asyncOp = false;
  if constexpr (requires { group.all_gather_single(whole[0], part[0], options); }) {
    return group.all_gather_single(whole[0], part[0], options);
  } else {
    return group.hasBackends() ? group._allgather_base(whole[0], part[0], options)
                               : group.allgather_into_tensor_coalesced(whole, part, options);
  }
}

template <typename Group>
auto scatter(Group& group, Tensors& whole, Tensors& part) {
  c10d::ReduceScatterOptions options;
  options.asyncOp = false;
  if constexpr (requires { group.reduce_scatter_single(part[0], whole[0], options); }) {
    return whole.size() == 1 ? group.reduce_scatter_single(part[0], whole[0], options)
                             : group.reduce_scatter_single_coalesced(part, whole, options);
  } else {
    return whole.size() == 1 && group.hasBackends()
               ? group._reduce_scatter_base(part[0], whole[0], options)
               : group.reduce_scatter_tensor_coalesced(part, whole, options);
  }
}

/// Asks for the process group at each use (a look into a hash map beside a collective). A
/// caller that destroys a group ends it, but others may keep it alive, and its name is given again
/// in a process that starts over, whose caches may hold DTensors with a mesh of before.
class ProcessGroupHandle final : public RankGroup {
 public:
  using RankGroup::RankGroup;

  int64_t size() const override { return get()->getSize(); }
  int64_t rank() const override { return get()->getRank(); }

  void all_reduce_max(at::Tensor bits) const override {
    const auto group = get();
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::MAX;
    const auto devices = group->getDeviceTypes();
    const bool is_served = std::any_of(
        devices.begin(), devices.end(),
        [&](const at::Device& device) { return device.type() == bits.device().type(); });
    // Amaxes of CPU-offloaded parameters under NCCL go through the GPU.
    std::vector<at::Tensor> tensors{is_served || devices.empty() ? bits
                                                                 : bits.to(devices.front().type())};
    wait_for(group->allreduce(tensors, options));
    if (!tensors.front().is_same(bits)) bits.copy_(tensors.front());
  }

  at::Tensor all_gather(const at::Tensor& part) const override {
    const auto group = get();
    auto sizes = part.sizes().vec();
    sizes.front() *= group->getSize();
    std::vector<at::Tensor> whole{at::empty(sizes, part.options())}, own{part};
    wait_for(gather(*group, whole, own));
    return whole.front();
  }

  void sum_and_scatter(std::vector<at::Tensor> whole, std::vector<at::Tensor> part) const override {
    const auto group = get();
    wait_for(scatter(*group, whole, part));
  }

  c10::intrusive_ptr<c10d::ProcessGroup> get() const { return c10d::resolve_process_group(name()); }
};

RankGroupPtr find(std::string_view name) {
  // torch's error, which Python would read up to here, does not say which operator was called.
  TORCH_CHECK_VALUE(name.find('\0') == std::string_view::npos,
                    fmt::format("qshard: no process group is called {}", shown_name(name)));
  static std::mutex mutex;
  static auto* const known = new std::map<std::string, std::shared_ptr<ProcessGroupHandle>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<ProcessGroupHandle>& handle = (*known)[std::string(name)];
  if (!handle) handle = std::make_shared<ProcessGroupHandle>(std::string(name));
  handle->get();  // an unknown name is an error here
  return handle;
}

const bool kInstalled = [] {
  set_group_finder(&find);
  return true;
}();

}  // namespace
}  // namespace qshard
