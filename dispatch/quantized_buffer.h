// QuantizedBuffer: one shard, shared by all views of it as a Storage is shared.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "dispatch/flush_state.h"
#include "dispatch/placement.h"
#include "dispatch/planes.h"
#include "dispatch/scaling_state.h"
#include "kernels/last_input_amax.h"

namespace qshard {

/// Rows [first, first + count) of a buffer.
struct RowWindow {
  int64_t first;
  int64_t count;
};

/// One shard: its planes, its placement, what its format remembers between flushes, and what the
/// next flush has to do. Nobody else changes any of them: a change is a call of a transition below.
///
/// The value is the master if kept, else the pending write, else the dequantized image.
///
///   state              what holds                             what may follow
///   clean              shown, agreed                          write, gather, copies of its bytes
///   written            the image is old; pending or master    flush; no gather and no codes
///                      has the value                          before it, but by a flush of this
///                                                             rank alone
///   shown, not agreed  codes are of the value, by scales      the same, and codes may be read;
///                      that other ranks may not know; a       the agreed flush quantizes again
///                      pending write is kept for the flush
///                      to come
///   gathered           no master; the image is FSDP's, the    a later gather; writes are local to
///                      grid a snapshot no flush changes       it and end with that
///   freed              gathered, and FSDP freed the bytes     a later gather; reads are an error
///   image-only copy    image and grid on another device; the  completion: of itself before the
///                      rest is the original's                 original changes or goes, or at use
///   grid a snapshot    other buffers read these scales, too   write_codes() gives it its own
class QuantizedBuffer final : public c10::intrusive_ptr_target {
 public:
  using Ptr = c10::intrusive_ptr<QuantizedBuffer>;

  QuantizedBuffer(Placement placement, at::ScalarType dtype, Planes planes);
  ~QuantizedBuffer() override;

  // ---------------------------------------------------------------------------------- made

  /// Zeros whose scales are 1. Meta devices have planes without data.
  static Ptr allocate(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                      at::Device device);
  /// The same for callers that write the grid next: it is not set to 1.
  static Ptr allocate_without_scales(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                                     at::Device device, Fill fill);
  /// (rows, cols) plain values, not flushed yet. Without a master `values` is the pending write
  /// itself.
  static Ptr of_values(const Placement& placement, const at::Tensor& values, bool keeps_master);
  /// Of codes: `image` (rows, row_bytes) uint8 and `grid` as Planes has them, which it takes over
  /// as the value, agreed on by all ranks. A master is what they stand for.
  static Ptr of_codes(const Placement& placement, at::ScalarType dtype, bool keeps_master,
                      const at::Tensor& image, const at::Tensor& grid);
  /// The rows of the logical tensor of `from` that `placement` says (Placement::cut), with a
  /// snapshot of the scales of `from`.
  static Ptr like_rows(QuantizedBuffer& from, const Placement& placement, at::ScalarType dtype,
                       at::Device device, Fill fill);
  /// The metadata of `from` and no bytes: what set_() builds on.
  static Ptr without_bytes(const QuantizedBuffer& from, at::ScalarType dtype, at::Device device);
  /// `from` over another storage: of its master, a value like any other, or without a master of
  /// its image and grid.
  static Ptr over_storage(const QuantizedBuffer& from, c10::Storage storage);
  /// The unsharded tensor over gathered bytes (rows * row_bytes, uint8); ends the gather of
  /// `shard`.
  static Ptr gathered(QuantizedBuffer& shard, const at::Tensor& bytes, at::ScalarType dtype);

  // ---------------------------------------------------------------------------------- read

  const Layout& layout() const { return placement_.layout(); }
  const Placement& placement() const { return placement_; }
  at::ScalarType dtype() const { return dtype_; }  // nominal; of master and pending, too
  at::Device device() const { return planes_.device(); }
  bool is_meta() const { return planes_.image().is_meta(); }
  /// The storage of its tensors (dispatch/planes.h).
  const c10::Storage& storage() const { return planes_.storage(); }
  const at::Tensor& image() const { return planes_.image(); }
  const at::Tensor& master() const { return planes_.master(); }
  const Grid& grid() const { return planes_.grid(); }
  const at::Tensor& pending() const { return planes_.pending(); }
  const at::Tensor& snapshot() const { return grid_snapshot_; }
  /// Which grid the codes belong to (flush_state.h).
  int64_t generation();
  const FlushState& flush_state() const { return flush_state_; }
  const ScalingState& scaling_state() const { return scaling_state_; }
  /// No state: what the codes of a linear's input are guessed by, whose weight this is.
  LastInputAmax& last_input() { return last_input_; }
  bool keeps_master() const { return planes_.master().defined() || original_keeps_master_; }
  /// Whether its tensors have an address: the bytes there are values.
  bool has_address() const { return planes_.master().defined(); }
  bool is_written() const { return flush_state_.is_written(); }
  bool is_shown() const { return flush_state_.is_shown(); }
  /// Whether it is shown, for sure and on any thread.
  bool is_ready() const { return flush_state_.is_settled_and_shown(); }
  bool is_image_only() const { return is_image_only_; }
  /// Whether requantizing needs no other rank.
  bool can_flush_alone() const { return placement_.is_alone(); }

  /// Dequantized rows of the image in `out_dtype`, whether they show the value or not.
  at::Tensor dequantize_rows(RowWindow rows, at::ScalarType out_dtype) const;
  /// @throws c10::Error naming `what` is asked for if only the columnwise image was gathered.
  void check_has_rowwise_image(const char* what) const;
  /// @throws c10::Error if FSDP2 freed the gathered bytes (reshard).
  void check_is_allocated() const;
  /// The same of a master, which only untyped_storage().resize_() frees.
  void check_master_is_allocated() const;
  /// The same where the value is in those bytes, and
  /// @throws c10::Error if it is that of an original which is gone.
  void check_has_value();

  // --------------------------------------------------------------------- values and writes

  /// The current value, (rows, cols) in the nominal dtype. Aliases master or pending; a fresh
  /// tensor otherwise.
  at::Tensor value_plane();
  /// The plane that writes go to: the master, or the pending write, made from the image at first.
  /// The write itself is said afterwards.
  at::Tensor write_plane();
  /// Makes the grid the buffer's own. Image and grid may be written then.
  void write_codes();
  /// After a write to the value, before any early return on numel 0: whether ranks meet in a flush
  /// must not depend on how many rows each of them holds.
  void written();
  /// The same of a write of no elements. The image stands: without a master it may be the value,
  /// and made anew it would be rounded twice. Beside a master it waits for the flush, as on the
  /// ranks whose rows were written.
  void written_nothing();
  /// The same of a kernel that left the amaxes of the new values, and if `shown` their codes and
  /// scales in the image, or else perhaps codes by `provisional` (QuantizeTask::provisional).
  void written_with_amax(at::Tensor amax, at::Tensor provisional, bool shown);
  /// Some rank wrote this parameter, as its peers know.
  void written_elsewhere() { flush_state_.write_elsewhere(); }
  /// An in-place kernel said all that it did; the bump of the version that follows is part of it.
  void note_before_bump() { flush_state_.note_before_bump(); }
  /// The same of the bump of `written` alone.
  void note_before_bump(const c10::TensorImpl& written) { flush_state_.note_before_bump(written); }
  /// Operators on it that were called before have returned.
  void settle_bumps() { flush_state_.settle_bumps(); }
  /// Something is being received whose end no call tells of: a flush waits for it first, by
  /// `arrival`.
  void expect(std::function<void(QuantizedBuffer&)> arrival) {
    arrivals_.push_back(std::move(arrival));
  }
  void settle_arrivals() {
    for (const auto& arrive : std::exchange(arrivals_, {})) arrive(*this);
  }
  /// A write failed before it changed anything: what was pending just for it goes.
  void drop_pending();

  // --------------------------------------------------------------------------------- flush

  enum class Pending { kDrop, kKeep };
  /// Kernels made the image anew. `snapshot`: a copy of the grid that they wrote, if they did.
  void requantized(at::Tensor snapshot, const FlushEvent& event, Pending pending);
  /// What the image shows was made by this rank alone; `amax` is that of the values, if known.
  void shown_alone(at::Tensor amax = {}) { flush_state_.show(std::move(amax)); }
  /// All ranks took part in a flush.
  void agreed() { flush_state_.agree(); }
  /// The grid as gathered tensors may hold it: no flush changes it.
  const at::Tensor& snapshot_grid();

  // ------------------------------------------------------------------------------ placement

  /// The ranks of `group` hold the other rows; an image-only copy tells its original.
  void adopt(std::string_view group);
  /// The same with all groups.
  void adopt(const Groups& groups);
  /// This is `other`, moved: the share that it was, agreed on with the same ranks.
  void adopt_groups_of(const QuantizedBuffer& other) {
    placement_.adopt_groups_of(other.placement_);
  }
  void set_replicas(std::string_view group) { placement_.set_replicas(group); }
  /// From the next flush of all of them on; what is shown until then stands.
  void share_scale(const ScaleGroup& group);
  void set_rounding_key(int64_t key) {
    scaling_state_.set_rounding_key(key);
    rounding_groups_.reset();
  }
  /// Whether all that hold its rows, or others of its tensor, round by the key that this has. What
  /// ranks quantize apart, with seeds of their own, does not until they meet.
  bool rounding_is_agreed() const {
    return !scaling_state_.rounding.defined() || rounding_groups_ == placement_.groups();
  }
  void agreed_on_rounding() { rounding_groups_ = placement_.groups(); }

  const MeshOfGathers& mesh_of_gathers() const { return mesh_of_gathers_; }
  void set_mesh_of_gathers(MeshOfGathers mesh) { mesh_of_gathers_ = std::move(mesh); }
  const GroupsOfSpec& groups_of_spec() const { return groups_of_spec_; }
  void keep_groups_of_spec(GroupsOfSpec groups) { groups_of_spec_ = groups; }

  // -------------------------------------------------------------------------------- gathers

  /// The bytes of one gather of a flushed shard, and what they are to be read with, until
  /// gathered() or regather() ends it.
  at::Tensor begin_gather(Images images);
  /// A later gather into this gathered buffer: new codes and scales, perhaps the other image.
  void regather(QuantizedBuffer& shard, const at::Tensor& bytes);

  // --------------------------------------------------------------------------------- copies

  struct CopyTo {
    at::ScalarType dtype;
    at::Device device;
    bool non_blocking = false;
    bool pinned = false;
    bool keeps_adoption =
        false;  // else a copy is a tensor of its own until a gather, say, adopts it
  };
  /// All of it: padding rows and placement included, because FSDP2 hands copies of padded shards to
  /// its hooks. A change of dtype rounds the master and keeps the codes, which were rounded from
  /// the wider value: autocast casts the weight of F.linear this way, and its GEMM should not see
  /// values rounded twice. Without a master, codes are the value in float32 alone: of another dtype
  /// the copy waits for a flush of its values.
  Ptr copy(const CopyTo& to);
  Ptr copy();
  /// Rows of `from`, values and codes, into rows of this one as bytes, if that shows exactly the
  /// source's value and leaves no block with two scales: within one generation, or all live rows
  /// together with their grid. False: nothing was done.
  bool copy_rows_from(QuantizedBuffer& from, RowWindow to_rows, RowWindow from_rows,
                      bool non_blocking);
  /// Consecutive rows of one logical tensor, of one generation, as one.
  static Ptr concatenate(const std::vector<std::pair<Ptr, RowWindow>>& pieces);

  /// Image and grid of `from` on `device`, one byte per element: how FSDP2 moves an offloaded shard
  /// for every gather. The value stays with `from`, until the copy is used as a tensor or `from` is
  /// about to be written or goes; state is shared, and moves to `device`.
  static Ptr image_copy(const Ptr& from, at::Device device);
  /// The original of an image-only copy, itself otherwise.
  /// @throws c10::Error if it is gone.
  Ptr original();
  /// Brings an image-only copy up to date with its flushed original.
  void refresh_from_original();
  /// Makes an image-only copy a tensor of its own.
  /// @throws c10::Error if the original was written behind qshard's back since.
  void complete();

  // ---------------------------------------------------------------------------- saved files

  /// The planes as one new uint8 tensor: `[image | master | grid]`, each 16-byte aligned. Part of
  /// the file format.
  at::Tensor pack();
  static int64_t packed_bytes(const Layout& layout, at::ScalarType dtype, bool keeps_master);
  /// From such bytes, on their device; `pending` may be undefined.
  static Ptr unpack(const at::Tensor& bytes, const at::Tensor& pending, const Placement& placement,
                    at::ScalarType dtype, bool keeps_master, bool is_written);

  /// Copies everything of `from` into this buffer's own memory. Both were made of one description
  /// in a file: this buffer before the file's bytes were read, `from` after.
  /// @throws c10::Error if their layouts, dtypes or devices differ.
  void fill_from(QuantizedBuffer& from);

  /// `[image | grid]` as flat bytes that alias them, the grid the buffer's own.
  at::Tensor code_bytes();
  /// Over planes that somebody else shares; master and pending may be undefined.
  static Ptr over_planes(const Placement& placement, at::ScalarType dtype, const at::Tensor& master,
                         const at::Tensor& codes, const at::Tensor& pending, ScalingState state,
                         bool is_written);

  // ------------------------------------------------------------------------ version counter

  /// Lets a new tensor, its alias of the master and other tensors of the buffer share one counter,
  /// which is watched for writes through the address.
  void share_version(c10::TensorImpl& tensor);
  /// Before a view or an alias shares the counter of a tensor of the buffer.
  void share_counter();
  /// Watches the counter of a tensor that took this buffer over and kept its own (x.data = q).
  void watch(const c10::TensorImpl& tensor);
  /// The tensor goes or takes another buffer over.
  void let_go(const c10::TensorImpl& tensor) { flush_state_.let_go(tensor); }
  /// The counter of tensors that show codes or scales. An in-place operator on them writes, beside
  /// a master, the tensor, whose codes are then made anew; else codes or scales, which are the
  /// value.
  const c10::VariableVersion& code_counter();

  void release_resources() override;

 private:
  Placement placement_;
  at::ScalarType dtype_;
  Planes planes_;
  FlushState flush_state_;
  ScalingState scaling_state_;
  LastInputAmax last_input_;
  std::optional<Groups> rounding_groups_;  // that agreed on the key of stochastic rounding
  MeshOfGathers mesh_of_gathers_;
  GroupsOfSpec groups_of_spec_;
  std::vector<std::function<void(QuantizedBuffer&)>> arrivals_;
  /// What gathered tensors are given; replaced, never written.
  at::Tensor grid_snapshot_;
  uint32_t codes_version_ = 0;  // of code_counter(), when last looked at

  /// Of the gather that has begun and not ended.
  struct Gather {
    at::Tensor grid;
    int64_t generation;
    Images images;
  };
  std::optional<Gather> gather_;

  /// Between an original and its image-only copies; none of most buffers.
  struct ImageLinks;
  std::unique_ptr<ImageLinks> links_;
  bool is_image_only_ = false;
  bool original_keeps_master_ = false;

  void adopt_parameter(const QuantizedBuffer& other);
  void copy_flush_state(const QuantizedBuffer& other);
  void fill_unit_scales();
  void notice_written_codes();
  void note_codes();
  void bind_master_counter();
  void take_planes_of(QuantizedBuffer& original);
  void complete_image_copies();
  ImageLinks& links();
  Gather end_gather();
};

using BufferPtr = QuantizedBuffer::Ptr;

}  // namespace qshard
