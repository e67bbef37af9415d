// Storages, plain tensors in them and byte copies, without the dispatcher: FSDP2 makes and moves
// buffers per parameter, and an aten call costs more host time than its memset or memcpy.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>

namespace qshard {

enum class Fill { kNothing, kZeros };

/// A resizable storage of `bytes` on cpu, cuda or meta, in pinned memory of the host if `pinned`;
/// zeros are written on the device's current stream.
c10::Storage allocate_storage(int64_t bytes, at::Device device, Fill fill, bool pinned = false);

/// A contiguous plain tensor in a storage.
at::Tensor tensor_at(const c10::Storage& storage, at::ScalarType dtype, int64_t byte_offset,
                     at::IntArrayRef sizes);

/// Copies bytes within `device`, on its current stream.
void copy_on_device(void* to, const void* from, int64_t bytes, at::Device device);

}  // namespace qshard
