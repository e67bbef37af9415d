#include "dispatch/placement.h"

#include <fmt/format.h>

#include <stdexcept>
#include <utility>

#include "kernels/scaling_state.h"

namespace qshard {

void Placement::become_own_tensor() {
  const bool is_whole = layout_.matrix_rows != 0 && layout_.rows % layout_.matrix_rows == 0;
  const Layout own = layout_.own_tensor(is_whole ? layout_.matrix_rows : layout_.rows);
  if (!own.fits()) {
    throw std::invalid_argument(fmt::format(
        "qshard: {} rows of plain values cannot be written into a new {} tensor, which has blocks "
        "of {} rows; copy from a quantized tensor, or quantize the values in another format",
        own.matrix_rows, layout_.format->name, layout_.format->columnwise->block_rows));
  }
  layout_ = own;
  groups_.tensor.clear();
  scale_group_ = {};
}

const std::vector<RankGroupPtr>& Placement::groups_of_full_tensor() const {
  static const std::vector<RankGroupPtr> none;
  const Format& format = *layout_.format;
  const bool has_any = format.has_tensor_scale() || state_words(format) > 0;
  return is_adopted_ && has_any ? groups_.tensor : none;
}

void Placement::resize(int64_t bytes, int64_t row_bytes) {
  if (is_placed() || row_bytes == 0 || bytes % row_bytes != 0) return;
  const int64_t rows = bytes / row_bytes;
  if (rows <= layout_.logical_rows) layout_ = layout_.holding(rows);
}

void Placement::adopt(std::string_view group) {
  const RankGroupPtr& known = groups_.shard;
  const bool is_known = known ? known->name() == group : group.empty();
  if (!is_known) groups_.shard = find_group(group);
  is_adopted_ = true;
}

void Placement::adopt(const Groups& groups) {
  groups_ = groups;
  is_adopted_ = true;
}

void Placement::set_replicas(std::string_view group) {
  groups_.replicas.clear();
  if (!group.empty()) groups_.replicas.push_back(find_group(group));
}

void Placement::adopt_groups_of(const Placement& other) {
  groups_ = other.groups_;
  scale_group_ = other.scale_group_;
  is_adopted_ = other.is_adopted_;
  was_placed_ = other.was_placed_;
}

void Placement::disown() {
  groups_ = {};
  is_adopted_ = false;
}

}  // namespace qshard
