#include "dispatch/storage.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#ifdef QSHARD_WITH_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#endif

namespace qshard {
namespace {

constexpr int64_t kGrainBytes = 1 << 20;  // below, one thread

c10::Storage storage_from(c10::Allocator* allocator, int64_t bytes) {
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator,
                      /*resizable=*/true);
}

c10::Storage allocate_on_cpu(int64_t bytes, Fill fill) {
  auto storage = storage_from(c10::GetCPUAllocator(), bytes);
  auto* data = static_cast<uint8_t*>(storage.mutable_data());
  if (fill == Fill::kZeros) {
    at::parallel_for(0, bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
      std::memset(data + begin, 0, end - begin);
    });
  }
  return storage;
}

}  // namespace

c10::Storage allocate_storage(int64_t bytes, at::Device device, Fill fill, bool pinned) {
  if (pinned) {
    auto flat = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    if (fill == Fill::kZeros) flat.zero_();
    return flat.storage();
  }
  if (device.is_cpu()) return allocate_on_cpu(bytes, fill);
#ifdef QSHARD_WITH_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    auto storage = storage_from(c10::cuda::CUDACachingAllocator::get(), bytes);
    if (fill == Fill::kZeros && bytes > 0) {
      C10_CUDA_CHECK(cudaMemsetAsync(storage.mutable_data(), 0, bytes,
                                     c10::cuda::getCurrentCUDAStream(device.index())));
    }
    return storage;
  }
#endif
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device)).storage();
}

at::Tensor tensor_at(const c10::Storage& storage, at::ScalarType dtype, int64_t byte_offset,
                     at::IntArrayRef sizes) {
  const auto device = storage.device();
  const auto key = device.is_meta()   ? c10::DispatchKey::Meta
                   : device.is_cuda() ? c10::DispatchKey::CUDA
                                      : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_storage_offset(byte_offset /
                                                   static_cast<int64_t>(c10::elementSize(dtype)));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

void copy_on_device(void* to, const void* from, int64_t bytes, at::Device device) {
  if (bytes == 0) return;
#ifdef QSHARD_WITH_CUDA
  if (device.is_cuda()) {
    const c10::DeviceGuard guard(device);
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice,
                                   c10::cuda::getCurrentCUDAStream(device.index())));
    return;
  }
#endif
  TORCH_INTERNAL_ASSERT(device.is_cpu());
  at::parallel_for(0, bytes, kGrainBytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<uint8_t*>(to) + begin, static_cast<const uint8_t*>(from) + begin,
                end - begin);
  });
}

}  // namespace qshard
