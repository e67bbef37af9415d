// What a build without CUDA has in the place of streams.cpp: no device has a stream.
#include "dispatch/parts/streams.h"

namespace qshard {

std::optional<c10::Stream> current_device_stream(at::Device) { return std::nullopt; }
void wait_for_stream(std::optional<c10::Stream>, at::Device) {}
void record_on_current_stream(const at::Tensor&) {}
void record_on_default_stream(const at::Tensor&) {}

struct FlushEvent::Point {};
FlushEvent FlushEvent::record(at::Device) { return {}; }
void FlushEvent::wait() const {}
bool FlushEvent::is_captured() const { return false; }

}  // namespace qshard
