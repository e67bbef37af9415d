// ImageCopy: the image of a buffer on another device.
#pragma once

#include <optional>
#include <typeinfo>
#include <vector>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// Image and grid of another buffer, its original, one byte per element: how FSDP2 moves an
/// offloaded shard for every gather. Its axis is how much of it is its own:
///
///   state     what holds                             what may follow
///   linked    the value stays with the original;     refresh(), before a gather; materialize(),
///             image and state are what it had at     at any use as a tensor, and before the
///             original the last refresh()                     is written or goes; an error where
///             that was
///                                                    written behind qshard's back, or is gone
///   own       it has a value of its own, and knows   what may follow of any buffer
///             no other ranks, as any copy
///
/// Its FlushState says of a linked one what that of the original said at the last refresh().
class ImageCopy final : public QuantizedBuffer {
 public:
  using CopyPtr = c10::intrusive_ptr<ImageCopy>;

  static CopyPtr of(QuantizedBuffer& original, at::Device device);
  /// Made by of().
  ImageCopy(QuantizedBuffer& original, Planes planes);

  bool is_linked() const { return link_.has_value(); }
  bool keeps_master() const override;
  Ptr original() override;
  void materialize() override;
  /// Does so before `original` is written or goes.
  void materialize_from(QuantizedBuffer& original);
  /// Brings a linked one up to date with its flushed original.
  void refresh();

  void release_resources() override;

 private:
  /// Weak: a copy does not keep the master of its original alive.
  struct Link {
    c10::weak_intrusive_ptr<QuantizedBuffer> original;
    uint32_t writes;  // of the original, at the last refresh()
    bool keeps_master;
  };
  std::optional<Link> link_;
};

/// The buffer as an image copy that is linked; null otherwise. Each gather asks.
inline ImageCopy* linked_copy(QuantizedBuffer& buffer) {
  if (typeid(buffer) != typeid(ImageCopy)) return nullptr;
  auto& copy = static_cast<ImageCopy&>(buffer);
  return copy.is_linked() ? &copy : nullptr;
}

/// What an original knows of its copies. Weak, too.
struct QuantizedBuffer::ImageCopies {
  std::vector<c10::weak_intrusive_ptr<ImageCopy>> copies;

  void add(const ImageCopy::CopyPtr& copy);
  /// Makes all linked copies buffers of their own.
  void materialize(QuantizedBuffer& original);
};

}  // namespace qshard
