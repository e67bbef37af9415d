#include "kernels/device/memory.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

namespace qshard::cuda {

c10::Allocator* allocator() { return c10::cuda::CUDACachingAllocator::get(); }

void zero(void* memory, int64_t bytes, c10::Device device) {
  C10_CUDA_CHECK(
      cudaMemsetAsync(memory, 0, bytes, c10::cuda::getCurrentCUDAStream(device.index())));
}

void copy(void* to, const void* from, int64_t bytes, c10::Device device) {
  C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice,
                                 c10::cuda::getCurrentCUDAStream(device.index())));
}

}  // namespace qshard::cuda
