// Placement: which part of which tensor a shard holds, and who holds the others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "dispatch/parts/rank_group.h"
#include "kernels/format/layout.h"

namespace qshard {

/// Weights that are one matrix elsewhere, as an inference engine's q/k/v: flushed together, they
/// take the tensor scale of the largest amax among them. Flushed apart, each has a scale of its own
/// until they meet.
struct ScaleGroup {
  int64_t id = 0;       // 0: none
  int64_t members = 0;  // how many there are

  bool operator==(const ScaleGroup&) const = default;
};

/// Rows that are no rank's share, of whole weights and of copies: their scales wait for no other
/// rank.
struct Own {
  Groups groups;  // replicas alone, which hold the same rows
};

/// Some rank's rows of a tensor whose other rows lie on other ranks.
struct Share {
  Groups groups;
  /// Whether the groups are told: by quantize(logical_rows=), a gather, an optimizer step or a
  /// flush over them, or by the share that this one was made of. Until then a read is served by
  /// scales of these rows alone.
  bool knows_groups = false;
  /// Whether it is a slice of a tensor on this rank, which knew where its rows lie.
  bool is_slice = false;
};

/// All rows, which FSDP gathered: the scales are those of the shards, and a write ends with the
/// gather.
struct Gathered {};

/// Rows of a logical tensor, those from row_offset on or some of each matrix, where that lies in
/// the full one, and whose they are:
///
///   whose      what it knows of other ranks   what may follow
///   Own        replicas alone                 adopt(): a share
///   Share      the groups, once it is told    adopt(): other groups; detach_from_groups(), as of a
///                                             copy: Own, or a share that is not told
///   Gathered   nothing: the shards know       adopt(): a share
///
/// FSDP, HSDP, tensor parallelism and DDP differ in nothing else: FSDP's ranks hold rows of one
/// logical tensor, tensor-parallel ones a logical tensor each, replicas the same rows.
class Placement {
 public:
  Placement() = default;
  explicit Placement(const Layout& layout, std::variant<Own, Share, Gathered> whose = Own{})
      : layout_(layout), whose_(std::move(whose)) {}

  const Layout& layout() const { return layout_; }
  /// None of gathered rows.
  const Groups& groups() const;
  /// The group whose ranks hold the other rows; null where none is known.
  const RankGroupPtr& group() const { return groups().shard; }
  /// The groups whose ranks agree on the scale and the state of the full tensor. Formats that have
  /// neither have none, because blocks end with the logical tensor; but ranks that hold columns of
  /// rows with one scale each agree on those.
  const std::vector<RankGroupPtr>& groups_of_full_tensor() const;
  /// How many amaxes those groups agree on, all of the grid or none; the others are of blocks.
  int64_t amaxes_of_full_tensor() const;

  const ScaleGroup& scale_group() const { return scale_group_; }

  bool is_gathered() const { return std::holds_alternative<Gathered>(whose_); }
  bool is_share() const { return std::holds_alternative<Share>(whose_); }
  /// Null of what is no share.
  const Share* share() const { return std::get_if<Share>(&whose_); }
  bool knows_groups() const { return share() && share()->knows_groups; }
  /// Whether other ranks may hold rows of the same tensor. A weight that quantize_ made, and that
  /// nothing has cut, is whole on each of them.
  bool may_have_peers() const {
    return is_share() && (share()->is_slice || knows_groups() || !layout_.holds_all_rows());
  }
  /// Whether they do, and which they are is not known yet.
  bool awaits_groups() const { return is_share() && !knows_groups() && !layout_.holds_all_rows(); }
  /// Whether scales need no other rank: all rows are here, or no other rank is known to hold any.
  bool is_alone() const {
    return groups_of_full_tensor().empty() && !group() &&
           (layout_.holds_all_rows() || !knows_groups());
  }
  /// Whether every block has its scale from one rank's rows alone: on all ranks or on none, with or
  /// without rows.
  bool ranks_own_their_blocks() const;

  /// The placement of `rows` rows, from `row` of the logical tensor on, of the tensor that this is
  /// or is a part of. `is_whole`: they may be all rows of this one, whose ranks stay the same.
  Placement slice(int64_t row, int64_t rows, bool is_whole) const;
  /// The placement of the rows [row, row + rows) of each matrix, of the tensor that this is.
  Placement slice_of_each(int64_t row, int64_t rows) const;
  /// The images that are held from now on (a gather of one of two).
  void set_images(Images images) { layout_ = layout_.with_images(images); }
  /// The ranks of the group of this name hold the other rows.
  /// @throws c10::Error if there is no such group.
  void adopt(std::string_view group);
  void adopt(const Groups& groups);
  /// The ranks of the group of this name hold the same rows.
  /// @throws c10::Error if there is no such group.
  void set_replicas(std::string_view group);
  void share_scale(const ScaleGroup& group) { scale_group_ = group; }
  /// Whether all that hold its rows, or others of its tensor, round by one key of stochastic
  /// rounding. What ranks quantize apart, with seeds of their own, does not until they meet.
  bool agrees_on_rounding() const { return rounding_groups_ == groups(); }
  void agreed_on_rounding() { rounding_groups_ = groups(); }
  /// This rank was given another key.
  void forget_rounding() { rounding_groups_.reset(); }
  /// Belongs to whom `other` belongs, of whose parameter this is.
  void adopt_groups_of(const Placement& other);
  /// Forgets the groups, as a copy of a share does: it agrees with no other rank until it is
  /// adopted.
  void detach_from_groups();

 private:
  Layout layout_;
  std::variant<Own, Share, Gathered> whose_;
  ScaleGroup scale_group_;
  std::optional<Groups> rounding_groups_;  // that agreed on the key of stochastic rounding

  bool cuts_scaled_rows() const;
  Placement slice_with(const Layout& layout, bool is_whole) const;
  Share& as_share();
};

}  // namespace qshard
