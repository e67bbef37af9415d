// QuantizedBuffer: the bytes of one shard, shared by all views of it as a Storage is shared.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>

#include "dispatch/scaling_state.h"
#include "dispatch/storage.h"
#include "kernels/layout.h"

namespace qshard {

/// Planes of one shard in one packed storage, each plane 16-byte aligned:
///
///   image   uint8   (rows, row_bytes)          codes and row-local scales, one row per row
///   master  `dtype` (rows, cols)               the full-precision value, if kept
///   grid    float32 (grid_rows, grid_cols)     scales that span rows, of the whole logical tensor,
///                                              replicated
///
/// The packing is a pure function of (layout, dtype, keeps_master), so that `set_` on a copy of the
/// storage rebuilds the buffer exactly.
///
/// The tensor's value is the master if kept, else `pending` (a write not yet quantized), else the
/// dequantized image.
struct QuantizedBuffer final : c10::intrusive_ptr_target {
  using Ptr = c10::intrusive_ptr<QuantizedBuffer>;

  Layout layout;
  at::ScalarType dtype;  // nominal; also the dtype of master and pending
  c10::Storage storage;
  at::Tensor image;
  at::Tensor master;
  at::Tensor grid;
  at::Tensor pending;
  ScalingState state;

  /// Written since the last flush that all ranks took part in. Equal on all ranks.
  bool dirty = false;
  /// The image does not show the current value. A local matter: implies `dirty`, not the reverse.
  bool stale = false;
  /// Names the reduction group once known (c10d group name); empty before.
  std::string group;
  /// Names of the groups whose ranks hold the same rows (HSDP's replicas), with spaces between
  /// them.
  std::string replica_groups;
  /// Which grid the codes belong to. Codes move as bytes only within one generation.
  int64_t generation = 0;
  /// The image as flat bytes, as FSDP2 takes it; made at the first gather.
  at::Tensor flat_image;
  /// Grid handed to gathered tensors; replaced, never written, by a flush.
  at::Tensor grid_snapshot;
  /// `grid` is another buffer's snapshot: own_grid() comes before a write and before the packed
  /// storage is read as a whole.
  bool borrows_grid = false;
  /// Of the gather that has begun and not ended: what the bytes under way are to be read with.
  struct Gather {
    at::Tensor grid;
    int64_t generation;
    Images images;
  };
  std::optional<Gather> gather;
  /// The amaxes that compute_amax would find of the present values (kernels/quantize.h), or as many
  /// of them, from the first, as can be above 0; undefined where nobody has looked yet. An
  /// optimizer step leaves them for the flush that all ranks take part in, and so does a local
  /// flush without a master: the values are rounded by then, and have other amaxes. Never written:
  /// copies share it. To be read only if knows_amax().
  at::Tensor known_amax;
  /// Set on a `.to(device, non_blocking=True)` copy until it is written or its value is read: such
  /// a copy holds image and grid only. FSDP2 moves an offloaded shard this way for every gather,
  /// and the master (4 B per element) has no business on that wire.
  Ptr source;
  uint32_t source_writes = 0;  // source->writes when this copy was made
  uint32_t writes = 0;

  static int64_t next_generation();

  /// Total bytes of the packed storage.
  static int64_t packed_bytes(const Layout& layout, at::ScalarType dtype, bool keeps_master);

  /// A new buffer of zeros whose scales are 1. Meta devices have planes without data.
  static Ptr allocate(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                      at::Device device);
  /// The same for callers that write the grid next: it is not set to 1.
  static Ptr allocate_without_scales(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                                     at::Device device, Fill fill);
  /// The same with the scales of `snapshot`, another buffer's on that device, copied when needed.
  static Ptr allocate_borrowing_grid(const at::Tensor& snapshot, const Layout& layout,
                                     at::ScalarType dtype, bool keeps_master, Fill fill);

  /// Planes over a packed storage of exactly packed_bytes(...). The caller gives it its state.
  static Ptr from_storage(c10::Storage storage, const Layout& layout, at::ScalarType dtype,
                          bool keeps_master);

  /// A buffer without a master over gathered bytes (rows * row_bytes, uint8), no copy.
  static Ptr from_image(const at::Tensor& bytes, const at::Tensor& grid, const Layout& layout,
                        at::ScalarType dtype, int64_t generation);

  bool keeps_master() const { return master.defined() || (source && source->keeps_master()); }
  at::Device device() const { return image.device(); }
  bool is_meta() const { return image.is_meta(); }
  int64_t packed_bytes() const { return packed_bytes(layout, dtype, master.defined()); }
  /// All planes as one flat uint8 tensor that aliases the storage.
  at::Tensor packed() const;
  /// Gathered tensors and image-only copies keep their grid elsewhere: they are not packed.
  bool is_packed() const;
  /// Copies a borrowed grid into its plane.
  void own_grid();

  bool is_dirty() const { return dirty || master_was_written(); }
  bool is_stale() const { return stale || master_was_written(); }
  bool knows_amax() const { return known_amax.defined() && !master_was_written(); }

  /// Marks a write to the value plane, before any early return on numel 0: whether ranks meet in a
  /// flush must not depend on how many rows each of them holds.
  void mark_written();
  /// The same of a write whose kernel left the amaxes of the new values in entries [first, first +
  /// count) of the flat `amax`, and if `image_shows_it` their codes and scales in the image.
  void mark_written(const at::Tensor& amax, int64_t first, int64_t count, bool image_shows_it);
  /// Adopts the groups of `other`, of whose parameter this buffer is, and a copy of its state.
  void inherit_parameter(const QuantizedBuffer& other);
  /// Adopts the dirtiness of `other`, whose value this buffer took.
  void inherit_flags(const QuantizedBuffer& other);
  /// The image shows the value. `agreed`: all ranks know.
  void mark_flushed(bool agreed);

  /// The current value, (rows, cols) in `dtype`. Aliases master or pending; a fresh tensor
  /// otherwise.
  at::Tensor value_plane();
  /// The plane writes go to: the master, or `pending`, made from the image at the first write.
  at::Tensor write_plane();
  /// Dequantized rows [first, first + count) of the image in `out_dtype`, stale or not.
  at::Tensor dequantize_rows(int64_t first, int64_t count, at::ScalarType out_dtype) const;

  /// @throws c10::Error naming `what` is asked for if only the columnwise image was gathered.
  void check_has_rowwise_image(const char* what) const;
  /// @throws c10::Error if FSDP2 freed the gathered bytes (reshard).
  void check_is_allocated() const;

  /// An image-only copy of this buffer on `device` that remembers its source, and shares its state,
  /// which moves there.
  static Ptr image_copy(const Ptr& from, at::Device device);
  /// Brings an image-only copy up to date with its flushed source: one byte per element.
  void refresh_from_source();
  /// Gives an image-only copy all planes of its source.
  /// @throws c10::Error if the source was written since the copy was made.
  void detach_from_source();
  /// Turns an open buffer into a logical tensor of its own rows, so that plain values can be
  /// stored.
  void anchor();

  void release_resources() override;

 private:
  uint32_t seen_master_version_ = 0;

  bool master_was_written() const;
  void bind_planes(c10::Storage packed, bool keeps_master, const at::Tensor& borrowed_grid = {});
  at::Tensor grid_plane(bool keeps_master) const;
  static Ptr allocate_planes(const at::Tensor& borrowed_grid, const Layout& layout,
                             at::ScalarType dtype, bool keeps_master, at::Device device, Fill fill);
  void fill_unit_scales();
};

using BufferPtr = QuantizedBuffer::Ptr;

}  // namespace qshard
