#include "dispatch/parts/placement.h"

#include <algorithm>

#include "kernels/scaling/scaling_state.h"

namespace qshard {

const Groups& Placement::groups() const {
  static const Groups none;
  if (const Own* own = std::get_if<Own>(&whose_)) return own->groups;
  return share() ? share()->groups : none;
}

const std::vector<RankGroupPtr>& Placement::groups_of_full_tensor() const {
  static const std::vector<RankGroupPtr> none;
  if (!knows_groups()) return none;
  if (cuts_scaled_rows()) return groups().columns;
  const Format& format = *layout_.format;
  const bool has_any = format.has_tensor_scale() || state_words(format) > 0;
  return has_any ? groups().tensor : none;
}

int64_t Placement::amaxes_of_full_tensor() const {
  return layout_.format->has_tensor_scale() || cuts_scaled_rows() ? layout_.grid_numel() : 0;
}

/// Whether other ranks hold columns of rows that have one scale.
bool Placement::cuts_scaled_rows() const {
  const ScaleLevel& scale = layout_.format->scale;
  return scale.is_in_grid() && scale.is_of_row() && knows_groups() && !groups().columns.empty();
}

bool Placement::ranks_own_their_blocks() const {
  if (!groups_of_full_tensor().empty()) return false;
  const int64_t ranks = ranks_of(group());
  if (ranks <= 1) return layout_.owns_its_blocks();
  if (layout_.logical_rows <= 1 || layout_.cols == 0) return true;
  if (layout_.format->has_tensor_scale()) return false;
  // As many rows of each matrix are on each rank.
  if (!is_one_range(layout_)) {
    return layout_.coarsest_image().format->scale.begins_at(layout_.rows_of_each);
  }
  // Rows that torch.chunk does not cut, as someone may have them who sharded by hand.
  if (layout_.live_rows() > 0 && !layout_.owns_its_blocks()) return false;
  // It cuts stacks into whole matrices. A single matrix of one is taken for a tensor of two
  // dimensions: a rank without rows knows no more.
  const int64_t chunk = ceil_div(layout_.logical_rows, ranks);
  return layout_.matrices() > 1 || layout_.coarsest_image().format->scale.begins_at(chunk);
}

Placement Placement::slice(int64_t row, int64_t rows, bool is_whole) const {
  return slice_with(layout_.holding(rows).placed(std::min(row, layout_.logical_rows)), is_whole);
}

Placement Placement::slice_of_each(int64_t row, int64_t rows) const {
  return slice_with(holding_of_each(layout_, row, rows), /*is_whole=*/false);
}

Placement Placement::slice_with(const Layout& layout, bool is_whole) const {
  Placement part(layout.with_images(Images::kAll), Share{});
  Share& share = part.as_share();
  if (is_whole && this->share()) share = *this->share();
  share.is_slice = true;
  share.groups.tensor = groups().tensor;  // the parts of the full tensor lie where they did
  share.groups.columns = groups().columns;
  part.scale_group_ = scale_group_;
  return part;
}

Share& Placement::as_share() {
  if (!is_share()) whose_ = Share{.groups = groups()};
  return std::get<Share>(whose_);
}

void Placement::adopt(std::string_view group) {
  Share& share = as_share();
  const RankGroupPtr& known = share.groups.shard;
  const bool is_known = known ? known->name() == group : group.empty();
  if (!is_known) share.groups.shard = find_group(group);
  share.knows_groups = true;
}

void Placement::adopt(const Groups& groups) {
  Share& share = as_share();
  share.groups = groups;
  share.knows_groups = true;
}

void Placement::set_replicas(std::string_view group) {
  std::vector<RankGroupPtr> replicas;
  if (!group.empty()) replicas.push_back(find_group(group));
  if (Own* own = std::get_if<Own>(&whose_)) own->groups.replicas = std::move(replicas);
  if (Share* share = std::get_if<Share>(&whose_)) share->groups.replicas = std::move(replicas);
}

void Placement::adopt_groups_of(const Placement& other) {
  whose_ = other.is_gathered() ? std::variant<Own, Share, Gathered>() : other.whose_;
  scale_group_ = other.scale_group_;
}

void Placement::detach_from_groups() {
  forget_rounding();
  if (share() && share()->is_slice) {
    Share copy;
    copy.is_slice = true;
    whose_ = std::move(copy);
  } else if (!is_gathered()) {
    whose_ = Own{};
  }
}

}  // namespace qshard
