// Messages of activations: codes by the kernels that quantize a GEMM's operands, and values of what
// arrives, each byte read once and each value written once, where it belongs in the whole.
#include "kernels/activation/kernels.h"
#include "kernels/device/unaligned_vectors.cuh"
#include "kernels/messages/activation_message_kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 4;  // of a thread: as many loads are under way at once

/// What the kernel knows of a task.
struct Messages {
  const uint8_t* bytes;
  int64_t message_bytes;
  int64_t code_bytes;
  int64_t pitch;
  int64_t cols;
  uint32_t rows;  // of a message
  uint32_t ranks;
  uint32_t inner;
  bool has_one_scale;
  uint32_t block_cols;
};

/// Value of a code times scale_inv; NaN keeps its sign.
template <typename Code>
__device__ __forceinline__ float decode_scaled(uint32_t code, float scale_inv) {
  if constexpr (std::is_same_v<Code, E4M3>) {
    return decode_e4m3_scaled(code, scale_inv);
  } else {
    const float x = decode_e5m2(static_cast<uint8_t>(code));
    return x != x ? x : __fmul_rn(x, scale_inv);
  }
}

/// Values of a vector's codes.
template <typename Code, typename Value>
__device__ __forceinline__ uint4 values_of(VectorBytes<Code, Value> codes, float scale_inv) {
  if (!has_nan<Code, Value>(codes)) return decode_vector<Code, Value>(codes, scale_inv);
  return assemble<Value>([&](int i) {
    const uint32_t code = (word_at(codes, i) >> (8 * (i % 4))) & 0xffu;
    return Value::store(decode_scaled<Code>(code, scale_inv));
  });
}

template <typename Value, typename Code, bool kVectorized>
__global__ void __launch_bounds__(kThreads)
    dequantize_activations(const __grid_constant__ Messages task, typename Value::Raw* values) {
  constexpr int kSize = Vector<Value>::kSize;
  using Codes = Bytes<kSize>;
  const uint32_t first = (blockIdx.x * blockDim.y + threadIdx.y) * kRows;
  const uint8_t* message[kRows];
  uint32_t row[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t whole_row = first + i;
    const uint32_t part = whole_row / task.inner;
    row[i] = part / task.ranks * task.inner + whole_row % task.inner;
    message[i] = whole_row < task.ranks * task.rows
                     ? task.bytes + part % task.ranks * task.message_bytes
                     : nullptr;
  }
  // All lanes of a warp take part in the last stores of a row.
  for (int64_t begin = 0; begin < task.cols; begin += blockDim.x * kSize) {
    const int64_t c = begin + threadIdx.x * kSize;
    Codes codes[kRows] = {};
    float scale_inv[kRows] = {};
    const int64_t block = static_cast<uint32_t>(c) / task.block_cols;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (message[i] == nullptr || c >= task.cols) continue;
      codes[i] = __ldg(reinterpret_cast<const Codes*>(message[i] + row[i] * task.pitch + c));
      const auto* scales = reinterpret_cast<const float*>(message[i] + task.code_bytes);
      scale_inv[i] = __ldg(scales + (task.has_one_scale ? 0 : block * task.rows + row[i]));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const uint4 x = values_of<Code, Value>(codes[i], scale_inv[i]);
      auto* to = values + (first + i) * task.cols + c;
      if constexpr (kVectorized) {
        if (message[i] != nullptr && c < task.cols) store_bytes(to, x);
      } else {
        const int64_t count = message[i] != nullptr ? task.cols - c : 0;
        store_unaligned<Value, 32>(
            to, static_cast<int>(max(min(count, int64_t{kSize}), int64_t{0})), x);
      }
    }
  }
}

}  // namespace

cudaError_t launch_encode_activation(const EncodeActivationTask& task, cudaStream_t stream) {
  const ActivationMessage& message = task.message;
  // What is sent has no bytes of earlier owners of the memory: at most 12 here.
  if (const int64_t padding = message.bytes() - message.used_bytes(); padding > 0) {
    const cudaError_t error =
        cudaMemsetAsync(task.bytes + message.used_bytes(), 0, padding, stream);
    if (error != cudaSuccess) return error;
  }
  ActivationTask rows;
  rows.values = task.values;
  rows.m = rows.m_padded = rows.rows_written = message.rows;
  rows.k = message.cols;
  rows.k_padded = message.pitch();
  rows.codes = task.bytes;
  rows.scale_inv = reinterpret_cast<float*>(task.bytes + message.code_bytes());
  rows.power_of_two = message.power_of_two_scales;
  rows.has_own_amax = false;  // the ranks' own in tensor-parallel layers, anything from others
  if (message.has_one_scale) {
    return launch_quantize_activation_tensorwise(rows, task.amax, task.value_dtype,
                                                 message.code_dtype, stream);
  }
  if (message.block_cols != kTokenBlock) {
    return launch_quantize_activation_in_rows(rows, task.value_dtype, stream);
  }
  return launch_quantize_activation_in_blocks(rows, task.value_dtype, stream);
}

cudaError_t launch_decode_activations(const DecodeActivationsTask& task, cudaStream_t stream) {
  const ActivationMessage& message = task.message;
  const int64_t rows = task.ranks * message.rows;
  if (rows == 0 || message.cols == 0) return cudaSuccess;
  const Messages messages{task.messages,
                          message.bytes(),
                          message.code_bytes(),
                          message.pitch(),
                          message.cols,
                          static_cast<uint32_t>(message.rows),
                          static_cast<uint32_t>(task.ranks),
                          static_cast<uint32_t>(task.inner),
                          message.has_one_scale,
                          static_cast<uint32_t>(message.block_cols)};
  return with_value_type(task.value_dtype, [&](auto value) {
    using Value = decltype(value);
    constexpr int kSize = Vector<Value>::kSize;
    dim3 block(32, kThreads / 32);  // whole warps in a row
    while (static_cast<int64_t>(block.x) * kSize < message.cols && block.y > 1) {
      block.x *= 2;
      block.y /= 2;
    }
    const auto blocks = static_cast<unsigned>(ceil_div(rows, int64_t{block.y} * kRows));
    const auto launch = [&](auto kernel) {
      kernel<<<blocks, block, 0, stream>>>(messages,
                                           static_cast<typename Value::Raw*>(task.values));
      return cudaGetLastError();
    };
    const bool vectorized = message.cols % kSize == 0;
    if (message.code_dtype == DType::kFloat8E5M2) {
      return vectorized ? launch(dequantize_activations<Value, E5M2, true>)
                        : launch(dequantize_activations<Value, E5M2, false>);
    }
    return vectorized ? launch(dequantize_activations<Value, E4M3, true>)
                      : launch(dequantize_activations<Value, E4M3, false>);
  });
}

}  // namespace qshard::cuda
