#include "dispatch/parts/streams.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

namespace qshard {

namespace {

using c10::cuda::CUDAStream;

/// The CUDA graph that `stream` is captured into, 0 for none.
unsigned long long capture_of(const CUDAStream& stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream.stream(), &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

void wait_for(const CUDAStream& other, const CUDAStream& current) {
  // CUDA refuses to order what a graph captures after anything outside of it. torch synchronizes
  // the device before a capture.
  if (other == current || capture_of(other) != capture_of(current)) return;
  c10::Event reached(c10::DeviceType::CUDA);
  reached.record(other.unwrap());
  reached.block(current.unwrap());
}

}  // namespace

std::optional<c10::Stream> current_device_stream(at::Device device) {
  if (!device.is_cuda()) return std::nullopt;
  return c10::cuda::getCurrentCUDAStream(device.index()).unwrap();
}

void wait_for_stream(std::optional<c10::Stream> stream, at::Device device) {
  if (!device.is_cuda()) return;
  wait_for(stream ? CUDAStream(*stream) : c10::cuda::getDefaultCUDAStream(device.index()),
           c10::cuda::getCurrentCUDAStream(device.index()));
}

void record_on_current_stream(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_cuda()) {
    tensor.record_stream(c10::cuda::getCurrentCUDAStream(tensor.device().index()).unwrap());
  }
}

void record_on_default_stream(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.is_cuda()) {
    tensor.record_stream(c10::cuda::getDefaultCUDAStream(tensor.device().index()).unwrap());
  }
}

struct FlushEvent::Point {
  explicit Point(const CUDAStream& current) : stream(current), capture(capture_of(current)) {
    event.record(stream.unwrap());
  }

  c10::Event event{c10::DeviceType::CUDA};
  CUDAStream stream;
  unsigned long long capture;
};

FlushEvent FlushEvent::record(at::Device device) {
  FlushEvent recorded;
  if (!device.is_cuda()) return recorded;
  const c10::DeviceGuard guard(device);
  recorded.point_ = std::make_shared<const Point>(c10::cuda::getCurrentCUDAStream(device.index()));
  return recorded;
}

void FlushEvent::wait() const {
  if (!point_) return;
  const auto current = c10::cuda::getCurrentCUDAStream(point_->stream.device_index());
  if (current == point_->stream) return;
  // One flush serves many parameters, whose gathers follow each other: the first wait is enough.
  thread_local std::pair<std::weak_ptr<const Point>, c10::StreamId> last;
  if (last.second == current.id() && last.first.lock() == point_) return;
  const auto capture = capture_of(current);
  if (capture != point_->capture) return;
  point_->event.block(current.unwrap());
  if (capture == 0) last = {point_, current.id()};
}

bool FlushEvent::is_captured() const { return point_ && point_->capture != 0; }

}  // namespace qshard
