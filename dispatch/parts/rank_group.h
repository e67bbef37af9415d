// RankGroup: a handle of a c10d process group. dispatch/ knows no c10d; fsdp/ makes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace qshard {

/// Ranks that agree on something. One object per name, so handles compare as pointers.
class RankGroup {
 public:
  explicit RankGroup(std::string name) : name_(std::move(name)) {}
  virtual ~RankGroup() = default;

  const std::string& name() const { return name_; }
  virtual int64_t size() const = 0;
  virtual int64_t rank() const = 0;
  /// MAX over all ranks, in place, on int32 (the bits of non-negative floats order as the floats
  /// do, with NaN on top, on every backend).
  /// @throws c10::Error if there is no such process group any more.
  virtual void all_reduce_max(at::Tensor bits) const = 0;

  // The current stream of the tensors' device waits for each of these, which are given contiguous
  // tensors of the same sizes on all ranks.

  /// part (n, ...) of every rank, one after the other: (ranks * n, ...).
  virtual at::Tensor all_gather(const at::Tensor& part) const = 0;
  /// `part` is this rank's of the sum of `whole` (ranks * n, ...) over the ranks; the same of each
  /// further pair of tensors.
  virtual void sum_and_scatter(std::vector<at::Tensor> whole,
                               std::vector<at::Tensor> part) const = 0;

 private:
  std::string name_;
};
using RankGroupPtr = std::shared_ptr<const RankGroup>;

/// The group of a c10d name; null for "".
/// @throws c10::Error if there is none.
RankGroupPtr find_group(std::string_view name);
/// What find_group() asks.
using GroupFinder = RankGroupPtr (*)(std::string_view name);
void set_group_finder(GroupFinder finder);

inline int64_t ranks_of(const RankGroupPtr& group) { return group ? group->size() : 1; }

/// Whom a parameter's ranks agree with.
struct Groups {
  RankGroupPtr shard;                  // hold the other rows; null: none
  std::vector<RankGroupPtr> tensor;    // hold the other parts of the full tensor (tensor parallel)
  std::vector<RankGroupPtr> replicas;  // hold the same rows, and see other activations
  std::vector<RankGroupPtr> columns = {};  // of `tensor`: hold other columns of the same rows

  bool operator==(const Groups&) const = default;

  /// MAX over the ranks of all, in place, on int32. One group after the other, so that all ranks of
  /// a mesh see the same and fail together.
  void all_reduce_max(const at::Tensor& bits) const {
    if (shard) shard->all_reduce_max(bits);
    for (const RankGroupPtr& group : tensor) group->all_reduce_max(bits);
    for (const RankGroupPtr& group : replicas) group->all_reduce_max(bits);
  }
};

/// A number for these groups, by c10d names, to be handed to operators; 0 for none at all. An empty
/// name is that of a group of one rank, which has nothing to agree on. Asked
/// again for the same groups it gives the same.
int64_t register_groups(std::string_view shard, const std::vector<std::string>& tensor,
                        const std::vector<std::string>& replicas,
                        const std::vector<std::string>& columns);
/// The groups of such a number.
const Groups& registered_groups(int64_t number);

}  // namespace qshard
