// Placement: which rows of which logical tensor a shard holds, and who holds the others.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "kernels/layout.h"

namespace qshard {

/// The rows [row_offset, row_offset + rows) of a logical tensor, and the groups of its ranks.
///
/// Unplaced: new_zeros, new_empty and empty_like of a template know the logical tensor and not yet
/// their rows; the first quantized copy_ tells them.
///
/// Adopted: somebody said that other ranks hold the other rows: quantize(logical_rows=), a gather,
/// an optimizer step or a flush over its group, or the template that a new shard was made of.
/// Copies and likes of windows are not, and until they are, are tensors of their own: their scales
/// wait for nobody.
class Placement {
 public:
  Placement() = default;
  explicit Placement(const Layout& layout, bool is_adopted = false)
      : layout_(layout), is_adopted_(is_adopted) {}

  const Layout& layout() const { return layout_; }
  /// c10d name of the group whose ranks share scales; empty where none is known.
  const std::string& group() const { return group_; }
  /// Names of the groups whose ranks hold the same rows (HSDP's replicas), with spaces between
  /// them.
  const std::string& replica_groups() const { return replica_groups_; }

  bool is_placed() const { return layout_.row_offset != Layout::kUnplaced; }
  bool is_adopted() const { return is_adopted_; }
  /// Whether this is what FSDP2 makes its shards of: rows copied into an unplaced tensor.
  bool was_placed() const { return was_placed_; }
  /// Whether scales need no other rank: all rows are here, or the others are nobody's.
  bool is_alone() const { return group_.empty() && (layout_.holds_all_rows() || !is_adopted_); }

  /// Row 0 is `row` of the logical tensor.
  void place(int64_t row) {
    was_placed_ |= !is_placed();
    layout_.row_offset = row;
  }
  /// The rows held become a logical tensor of their own, with blocks from its row 0.
  /// @throws std::invalid_argument if the format has no tensor of so many rows.
  void become_own_tensor();
  /// Unplaced, there are as many rows as `bytes` hold at `row_bytes` each, if the logical tensor
  /// has so many: the storage of an empty window may be that of a padded shard.
  void resize(int64_t bytes, int64_t row_bytes);
  /// The images that are held from now on (a gather of one of two).
  void hold(Images images) { layout_.images = images; }
  void adopt(std::string_view group);
  void set_replicas(std::string_view groups);
  /// Takes the groups of `other`, of whose parameter this is.
  void adopt_groups_of(const Placement& other);
  /// Nobody's share any more, until it is adopted again.
  void disown();

 private:
  Layout layout_;
  std::string group_;
  std::string replica_groups_;
  bool is_adopted_ = false;
  bool was_placed_ = false;
};

}  // namespace qshard
