#include "kernels/device/current_stream.h"

#ifdef QSHARD_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace qshard {

Stream current_stream([[maybe_unused]] at::Device device) {
#ifdef QSHARD_WITH_CUDA
  if (device.is_cuda()) return {true, c10::cuda::getCurrentCUDAStream(device.index()).stream()};
#endif
  return {device.is_cuda(), nullptr};
}

}  // namespace qshard
