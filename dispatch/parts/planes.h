// Planes: the memory of one shard.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <utility>

#include "dispatch/parts/grid.h"
#include "dispatch/parts/storage.h"
#include "kernels/format/layout.h"
#include "kernels/tensors/read_only_tensor.h"

namespace qshard {

/// A tensor that Planes lets others read.
class Plane final : public ReadOnlyTensor {
 public:
  using ReadOnlyTensor::ReadOnlyTensor;
  at::Tensor write() const { return tensor_; }
  const c10::Storage& storage() const { return tensor_.storage(); }
  c10::TensorImpl* impl() const { return tensor_.unsafeGetTensorImpl(); }
};

/// The bytes of `[image | grid]`, and of a master.
int64_t bytes_of_codes(const Layout& layout);
int64_t bytes_of_master(const Layout& layout, at::ScalarType dtype);

/// What holds a shard's value, and what shows it in codes:
///
///   master   `dtype` (rows, cols)             the value at full precision, if kept
///   pending  `dtype` (rows, cols)             without a master: a write that no flush has reached
///   image    uint8   (rows, row_bytes)        codes and row-local scales, one row per row
///   grid     float32 (grid_rows, grid_cols)   scales that span rows, of the whole logical tensor,
///                                             replicated
///
/// A master is alone in its storage, which is the tensor's: `rows * cols * itemsize` bytes, as a
/// plain tensor has. Image and grid share another, `[image | grid]`, each 16-byte aligned; without
/// a master that one is the tensor's. A grid lies elsewhere that is a snapshot, and those of
/// gathered tensors and image-only copies, whose bytes have no room for one.
class Planes {
 public:
  /// No memory yet: what set_() gives a storage to.
  static Planes none(at::ScalarType dtype, bool keeps_master, at::Device device);
  static Planes allocate(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                         at::Device device, Fill fill, bool pinned = false);
  /// With the grid of another buffer's snapshot, until something is about to write it.
  static Planes allocate_with_snapshot(const ReadOnlyTensor& grid, const Layout& layout,
                                       at::ScalarType dtype, bool keeps_master, at::Device device,
                                       Fill fill);
  /// A master in `storage`, with room for image and grid beside it.
  /// @throws c10::Error, here and in over_codes, for a storage of another size than the layout's.
  static Planes around_master(c10::Storage storage, const Layout& layout, at::ScalarType dtype);
  /// Image and grid in `storage`, without a master.
  static Planes over_codes(c10::Storage storage, const Layout& layout);
  /// Over memory that others share: `[image | grid]` as bytes, and a master, which may be
  /// undefined.
  static Planes over(const at::Tensor& master, const at::Tensor& codes, const Layout& layout,
                     at::ScalarType dtype);
  /// An image over bytes that were gathered or sent (rows * row_bytes, uint8), and its grid.
  static Planes over_image(const at::Tensor& bytes, Grid grid, const Layout& layout);

  const ReadOnlyTensor& image() const { return image_; }
  const ReadOnlyTensor& master() const { return master_; }
  const ReadOnlyTensor& pending() const { return pending_; }
  const Grid& grid() const { return grid_; }
  /// The tensor's storage.
  const c10::Storage& storage() const { return storage_; }
  at::Device device() const { return image_.device(); }
  /// Whether `[image | grid]` is one storage that holds all of both.
  bool has_code_storage(const Layout& layout) const;
  /// The storage of image and grid.
  const c10::Storage& code_storage() const { return image_.storage(); }
  /// Watches the storages of value and codes, which must outlive the watch.
  MemoryWatch memory() const { return {storage_, code_storage()}; }
  /// The counter of what holds the value: the master, or the image.
  const c10::VariableVersion& version_counter() const;
  const c10::TensorImpl* master_impl() const { return master_.impl(); }

  // Other classes see the planes of a buffer as const. QuantizedBuffer and WriteScope write them.

  at::Tensor write_image() { return image_.write(); }
  at::Tensor write_master() { return master_.write(); }
  at::Tensor write_pending() { return pending_.write(); }
  void set_pending(at::Tensor pending) { pending_ = std::move(pending); }
  /// Returns the grid for writing. A snapshot is replaced by a copy that belongs to this shard.
  Grid& own_grid(const Layout& layout);
  void fill_unit_scales();
  /// Returns a copy of the grid that other buffers may hold, or an undefined tensor without a grid.
  /// `is_fresh`: makes a new copy even if an earlier one exists.
  const ReadOnlyTensor& give_grid(bool is_fresh);
  /// The same, made by the kernel that wrote the grid.
  void set_given_grid(ReadOnlyTensor copy) { grid_.set_given(std::move(copy)); }
  void set_master_counter(const c10::VariableVersion& counter);
  /// The image as flat bytes: made once, FSDP2 asks for it at every gather.
  at::Tensor flat_image();
  /// Bytes and grid of a later gather; what was pending ends with those before.
  void replace_image(const at::Tensor& bytes, Grid grid, const Layout& layout);
  void release();

 private:
  c10::Storage storage_;
  Plane image_, master_, pending_;
  Grid grid_;
  at::Tensor flat_image_;

  void bind_codes(const c10::Storage& codes, const Layout& layout, const ReadOnlyTensor& snapshot);
  void bind_value(c10::Storage codes, const Layout& layout, at::ScalarType dtype, bool keeps_master,
                  Fill fill, bool pinned);
};

}  // namespace qshard
