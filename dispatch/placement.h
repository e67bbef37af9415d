// Placement: which part of which tensor a shard holds, and who holds the others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "dispatch/rank_group.h"
#include "kernels/layout.h"

namespace qshard {

/// Weights that are one matrix elsewhere, as an inference engine's q/k/v: flushed together, they
/// take the tensor scale of the largest amax among them. Flushed apart, each has a scale of its own
/// until they meet.
struct ScaleGroup {
  int64_t id = 0;       // 0: none
  int64_t members = 0;  // how many there are

  bool operator==(const ScaleGroup&) const = default;
};

/// What the mesh over which FSDP2 gathers a shard is to it. FSDP2 says it in an attribute of its
/// own, which takes too long to read at each gather.
struct MeshOfGathers {
  std::string mesh;            // c10d name of its group
  bool is_replicated = false;  // its ranks hold the same rows
};

/// The number of the groups that were found for a DTensor, `spec` the number of its spec.
struct GroupsOfSpec {
  int64_t spec = 0;  // 0: none
  int64_t groups = 0;
};

/// The rows [row_offset, row_offset + rows) of a logical tensor, where that lies in the full one,
/// and whom its ranks agree with. FSDP, HSDP, tensor parallelism and DDP differ in nothing else:
/// FSDP's ranks hold rows of one logical tensor, tensor-parallel ones a logical tensor each,
/// replicas the same rows.
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
  /// The group whose ranks hold the other rows; null where none is known.
  const RankGroupPtr& group() const { return groups_.shard; }
  const Groups& groups() const { return groups_; }
  /// The groups over which what belongs to the full tensor is agreed on: its scale, and its state.
  /// None of formats that have neither: blocks end with the logical tensor.
  const std::vector<RankGroupPtr>& groups_of_full_tensor() const;

  const ScaleGroup& scale_group() const { return scale_group_; }

  bool is_placed() const { return layout_.row_offset != Layout::kUnplaced; }
  bool is_adopted() const { return is_adopted_; }
  /// Whether this is what FSDP2 makes its shards of: rows copied into an unplaced tensor.
  bool was_placed() const { return was_placed_; }
  /// Whether the rows may be some rank's share of the logical tensor.
  bool may_be_share() const { return is_adopted_ || was_placed_ || !is_placed(); }
  /// Whether scales need no other rank: all rows are here, or the others are nobody's.
  bool is_alone() const {
    return groups_of_full_tensor().empty() && !group() &&
           (layout_.holds_all_rows() || !is_adopted_);
  }
  /// Whether every block that the rows touch has its scale from these rows alone.
  bool owns_its_blocks() const {
    return groups_of_full_tensor().empty() && layout_.owns_its_blocks();
  }

  /// Row 0 is `row` of the logical tensor.
  void place(int64_t row) {
    was_placed_ |= !is_placed();
    layout_ = layout_.placed(row);
  }
  /// The rows held become a logical tensor of their own, with blocks from its row 0.
  /// @throws std::invalid_argument if the format has no tensor of so many rows.
  void become_own_tensor();
  /// Unplaced, there are as many rows as `bytes` hold at `row_bytes` each, if the logical tensor
  /// has so many: the storage of an empty window may be that of a padded shard.
  void resize(int64_t bytes, int64_t row_bytes);
  /// The images that are held from now on (a gather of one of two).
  void hold(Images images) { layout_ = layout_.with_images(images); }
  /// The ranks of the group of this name hold the other rows.
  /// @throws c10::Error if there is no such group.
  void adopt(std::string_view group);
  void adopt(const Groups& groups);
  /// The ranks of the group of this name hold the same rows.
  /// @throws c10::Error if there is no such group.
  void set_replicas(std::string_view group);
  void share_scale(const ScaleGroup& group) { scale_group_ = group; }
  /// Takes the groups of `other`, of whose parameter this is.
  void adopt_groups_of(const Placement& other);
  /// Rows of the logical tensor that `other` has rows of lie in the full one as those do.
  void share_full_tensor_of(const Placement& other) { groups_.tensor = other.groups_.tensor; }
  /// Nobody's share any more, until it is adopted again.
  void disown();

 private:
  Layout layout_;
  Groups groups_;
  ScaleGroup scale_group_;
  bool is_adopted_ = false;
  bool was_placed_ = false;
};

}  // namespace qshard
