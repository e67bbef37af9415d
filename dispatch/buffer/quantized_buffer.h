// QuantizedBuffer: one shard, shared by all views of it as a Storage is shared.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <optional>
#include <span>

#include "dispatch/parts/arrivals.h"
#include "dispatch/parts/flush_state.h"
#include "dispatch/parts/placement.h"
#include "dispatch/parts/planes.h"
#include "dispatch/parts/remembered.h"
#include "dispatch/parts/scaling_state.h"
#include "dispatch/parts/version_counters.h"

namespace qshard {

/// Rows [first, first + count) of a buffer.
struct RowWindow {
  int64_t first;
  int64_t count;
};

/// Equal windows of rows of one logical tensor.
struct RowCopy {
  RowWindow to, from;
};

/// Where kernels write codes and scales.
struct WritableCodes {
  uint8_t* image;
  float* grid;  // null where a format has none
};

/// The parts of one shard: its memory (Planes), which rows it holds (Placement), what the next
/// flush has to do (FlushState, which has the table of its states) and what its format remembers
/// between flushes (ScalingState). Each part changes by transitions of its own; those that change
/// several parts together are members here.
///
/// The value is the master if kept, else the pending write, else the dequantized image.
///
/// This is a buffer with memory of its own. Two kinds add a state of theirs: GatheredBuffer, over
/// bytes that FSDP gathered, and ImageCopy, whose value is still another buffer's. Buffers are made
/// by the functions of dispatch/buffer/make_buffer.h.
class QuantizedBuffer : public c10::intrusive_ptr_target {
 public:
  using Ptr = c10::intrusive_ptr<QuantizedBuffer>;

  QuantizedBuffer(Placement placement, at::ScalarType dtype, Planes planes,
                  ScalingState state = {});
  ~QuantizedBuffer() override;

  // --------------------------------------------------------------------------------- parts

  const Layout& layout() const { return placement_.layout(); }
  const Placement& placement() const { return placement_; }
  Placement& placement() { return placement_; }
  at::ScalarType dtype() const { return dtype_; }  // nominal; of master and pending, too
  at::Device device() const { return planes_.device(); }
  /// To be read; writes of the value go through a WriteScope.
  const Planes& planes() const { return planes_; }
  virtual bool keeps_master() const { return planes_.master().defined(); }
  const FlushState& flush_state() const { return flush_state_; }
  FlushState& flush_state() { return flush_state_; }
  const ScalingState& scaling_state() const { return scaling_state_; }
  ScalingState& scaling_state() { return scaling_state_; }
  Arrivals& arrivals() { return arrivals_; }
  const Remembered& remembered() const { return remembered_; }
  Remembered& remembered() { return remembered_; }
  VersionCounters counters() { return {planes_, flush_state_.watch(), keeps_master()}; }

  // ---------------------------------------------------------------------------------- read

  /// Which grid the codes belong to (flush_state.h).
  int64_t generation();
  /// The current value, (rows, cols) in the nominal dtype, as far as it has arrived.
  ReadOnlyTensor value();
  /// The grid as gathered tensors may hold it: no flush changes it.
  const ReadOnlyTensor& snapshot_grid();
  /// @throws c10::Error if FSDP2 freed the gathered bytes (reshard).
  void check_is_allocated() const;

  // --------------------------------------------------------------------------------- write

  /// After a write to the value, before any early return on numel 0: whether ranks meet in a flush
  /// must not depend on how many rows each of them holds.
  void written() { flush_state_.write(device()); }
  /// Records a write of no elements. The codes are kept: without a master they may be the value,
  /// and requantizing would round twice. Beside a master they wait for the flush, as they do on the
  /// ranks whose rows were written. The counter of `tensor`, through which the write came, moves
  /// next; if another counter moves, as that of x beside x.data, that is another write.
  void mark_empty_write(const c10::TensorImpl& tensor);
  /// Image and grid, to be written; the grid is the buffer's own from then on.
  WritableCodes write_codes();
  enum class Pending { kDrop, kKeep };
  /// Kernels made the image anew. `given`: a copy of the grid that they wrote, if they did.
  void requantized(ReadOnlyTensor given, const FlushEvent& event, Pending pending);
  /// Copies rows of `from`, values and codes, into rows of this one as bytes, if the codes then
  /// have exactly the source's value and no block has two scales: within one generation, or all
  /// live rows together with their grid. `copies`: in the order of this one's rows. Returns false
  /// if nothing was done.
  bool copy_rows_from(QuantizedBuffer& from, std::span<const RowCopy> copies, bool non_blocking);
  /// Copies everything of `from` into this buffer's own memory. Both were made of one description
  /// in a file: this buffer before the file's bytes were read, `from` after.
  /// @throws c10::Error if their layouts, dtypes or devices differ.
  void fill_from(QuantizedBuffer& from);

  // --------------------------------------------------------------------------------- kinds

  /// The buffer that has the value: itself, but of an image copy.
  /// @throws c10::Error if that is gone.
  virtual Ptr original() { return Ptr::reclaim_copy(this); }
  /// Makes an image copy a buffer with a value of its own.
  /// @throws c10::Error if the original was written behind qshard's back since.
  virtual void materialize() {}

  void release_resources() override;

 private:
  Placement placement_;
  at::ScalarType dtype_;
  Planes planes_;
  FlushState flush_state_;
  ScalingState scaling_state_;
  Remembered remembered_;
  Arrivals arrivals_;
  uint32_t codes_version_ = 0;  // of counters().of_codes(), when last looked at

  /// What a gather that has begun and not ended is to be read with.
  struct Gather {
    ReadOnlyTensor grid;
    int64_t generation;
    Images images;
  };
  std::optional<Gather> gather_;

  /// The image copies that were made of it; null of most buffers.
  struct ImageCopies;
  std::unique_ptr<ImageCopies> image_copies_;

  /// The plane that writes go to: the master, or the pending write, made from the image at first.
  at::Tensor write_plane();
  /// A write failed before it changed anything: what was pending just for it goes.
  void drop_pending() { planes_.set_pending({}); }
  void note_codes();
  void notice_written_codes();
  void materialize_image_copies();
  Gather end_gather();

  friend class GatheredBuffer;
  friend class ImageCopy;
  friend class PlaneAccess;
  friend class WriteScope;
};

/// Whether each row of codes holds all that its values need: there is no master, no scale beside
/// the rows, and no other rank that has a part.
inline bool has_rows_of_their_own(const QuantizedBuffer& buffer) {
  return buffer.layout().format->has_rows_of_their_own() && !buffer.keeps_master() &&
         buffer.placement().is_alone();
}

using BufferPtr = QuantizedBuffer::Ptr;

}  // namespace qshard
