// Streams and events of the devices that have them; nothing elsewhere.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>
#include <optional>

namespace qshard {

/// The device's current stream, none on cpu and meta.
std::optional<c10::Stream> current_device_stream(at::Device device);

/// Makes the current stream wait for work queued on `stream`, or on the device's default stream.
void wait_for_stream(std::optional<c10::Stream> stream, at::Device device);

/// Tells the caching allocator that `tensor` is in use on the current stream. No-op off CUDA.
void record_on_current_stream(const at::Tensor& tensor);
/// The same of the default stream.
void record_on_default_stream(const at::Tensor& tensor);

/// A point in a stream that other streams can wait for. Copies are the same point; an empty one has
/// nothing to wait for, and so has one within a graph, whose replays leave no event.
class FlushEvent {
 public:
  /// Now, on the device's current stream.
  static FlushEvent record(at::Device device);
  /// Makes the device's current stream wait for it.
  void wait() const;
  bool is_captured() const;

 private:
  struct Point;
  std::shared_ptr<const Point> point_;
};

}  // namespace qshard
