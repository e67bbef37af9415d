#include "kernels/device/check_launch.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

namespace qshard::cuda {
namespace {

bool means_no_code(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction ||
         error == cudaErrorUnsupportedPtxVersion;
}

}  // namespace

void check_launch(cudaError_t error) {
  if (!means_no_code(error)) {
    C10_CUDA_CHECK(error);
    return;
  }
  cudaGetLastError();  // not for the next caller to find
  const auto index = c10::cuda::current_device();
  const cudaDeviceProp* device = at::cuda::getDeviceProperties(index);
  const auto architecture = fmt::format("{}{}", device->major, device->minor);
  TORCH_CHECK(
      false,
      fmt::format("qshard: the library has no code for cuda:{}, {} of compute capability {}.{}: it "
                  "was built for {}. Build it for this GPU, in a qshard checkout: `pip install "
                  "--no-build-isolation -C cmake.define.CMAKE_CUDA_ARCHITECTURES={}-real .`",
                  index, device->name, device->major, device->minor, QSHARD_CUDA_ARCHITECTURES,
                  architecture == "90" ? "90a" : architecture));
}

}  // namespace qshard::cuda
