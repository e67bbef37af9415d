#include "dispatch/placement.h"

#include <fmt/format.h>

#include <stdexcept>

namespace qshard {

void Placement::become_own_tensor() {
  Layout own = layout_;
  own.logical_rows = layout_.rows;
  if (layout_.matrix_rows == 0 || layout_.rows % layout_.matrix_rows != 0) {
    own.matrix_rows = layout_.rows;
  }
  own.row_offset = 0;
  if (!own.fits()) {
    throw std::invalid_argument(fmt::format(
        "qshard: {} rows of plain values cannot be written into a new {} tensor, which has blocks "
        "of {} rows; copy from a quantized tensor, or quantize the values in another format",
        own.matrix_rows, layout_.format->name, layout_.format->columnwise->block_rows));
  }
  layout_ = own;
}

void Placement::resize(int64_t bytes, int64_t row_bytes) {
  if (is_placed() || row_bytes == 0 || bytes % row_bytes != 0) return;
  if (const int64_t rows = bytes / row_bytes; rows <= layout_.logical_rows) layout_.rows = rows;
}

void Placement::adopt(std::string_view group) {
  if (group_ != group) group_ = group;
  is_adopted_ = true;
}

void Placement::set_replicas(std::string_view groups) {
  if (replica_groups_ != groups) replica_groups_ = groups;
}

void Placement::adopt_groups_of(const Placement& other) {
  group_ = other.group_;
  replica_groups_ = other.replica_groups_;
  is_adopted_ = other.is_adopted_;
  was_placed_ = other.was_placed_;
}

void Placement::disown() {
  group_.clear();
  replica_groups_.clear();
  is_adopted_ = false;
}

}  // namespace qshard
