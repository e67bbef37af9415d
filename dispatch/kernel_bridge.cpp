#include "dispatch/kernel_bridge.h"

#ifdef QSHARD_WITH_CUDA
#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace qshard {

void wait_for_default_stream([[maybe_unused]] at::Device device) {
#ifdef QSHARD_WITH_CUDA
  if (!device.is_cuda()) return;
  const auto current = c10::cuda::getCurrentCUDAStream(device.index());
  const auto default_stream = c10::cuda::getDefaultCUDAStream(device.index());
  if (current == default_stream) return;
  c10::Event written(c10::DeviceType::CUDA);
  written.record(default_stream.unwrap());
  written.block(current.unwrap());
#endif
}

void record_on_current_stream([[maybe_unused]] const at::Tensor& tensor) {
#ifdef QSHARD_WITH_CUDA
  if (tensor.defined() && tensor.is_cuda()) {
    tensor.record_stream(c10::cuda::getCurrentCUDAStream(tensor.device().index()).unwrap());
  }
#endif
}

void record_on_default_stream([[maybe_unused]] const at::Tensor& tensor) {
#ifdef QSHARD_WITH_CUDA
  if (tensor.defined() && tensor.is_cuda()) {
    tensor.record_stream(c10::cuda::getDefaultCUDAStream(tensor.device().index()).unwrap());
  }
#endif
}

}  // namespace qshard
