#include "kernels/device/current_stream.h"

#include <c10/cuda/CUDAStream.h>

namespace qshard {

Stream current_stream(at::Device device) {
  if (device.is_cuda()) return {true, c10::cuda::getCurrentCUDAStream(device.index()).stream()};
  return {device.is_cuda(), nullptr};
}

}  // namespace qshard
