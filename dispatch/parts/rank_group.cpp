#include "dispatch/parts/rank_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <deque>
#include <mutex>

namespace qshard {
namespace {

GroupFinder g_finder = nullptr;

/// Whom parameters agree with, each once. They are as many as there are kinds of meshes.
struct Registry {
  std::mutex mutex;
  std::deque<Groups> groups{Groups{}};  // references stay
};

Registry& registry() {
  static auto* const instance = new Registry;  // used by tensors that outlive main
  return *instance;
}

std::vector<RankGroupPtr> find_groups(const std::vector<std::string>& names) {
  std::vector<RankGroupPtr> groups;
  groups.reserve(names.size());
  for (const std::string& name : names) {
    if (RankGroupPtr group = find_group(name)) groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace

void set_group_finder(GroupFinder finder) { g_finder = finder; }

RankGroupPtr find_group(std::string_view name) {
  if (name.empty()) return nullptr;
  TORCH_INTERNAL_ASSERT(g_finder != nullptr);
  constexpr size_t kLongest = 1024;
  TORCH_CHECK_VALUE(name.size() <= kLongest, "qshard: no process group has a name of ", name.size(),
                    " characters");
  return g_finder(name);
}

int64_t register_groups(std::string_view shard, const std::vector<std::string>& tensor,
                        const std::vector<std::string>& replicas,
                        const std::vector<std::string>& columns) {
  Groups groups{find_group(shard), find_groups(tensor), find_groups(replicas),
                find_groups(columns)};
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  auto known = std::find(all.groups.begin(), all.groups.end(), groups);
  if (known == all.groups.end()) known = all.groups.insert(known, std::move(groups));
  return known - all.groups.begin();
}

const Groups& registered_groups(int64_t number) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(all.groups.size()),
              "qshard: there are no groups of number ", number);
  return all.groups[static_cast<size_t>(number)];
}

}  // namespace qshard
