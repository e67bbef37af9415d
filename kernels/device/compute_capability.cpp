#include "kernels/device/compute_capability.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>

namespace qshard::cuda {

int compute_capability(at::Device device) {
  if (!device.is_cuda() || c10::cuda::device_count() == 0) return 0;
  const auto index = device.has_index() ? device.index() : c10::cuda::current_device();
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(index);
  return 10 * properties->major + properties->minor;
}

}  // namespace qshard::cuda
