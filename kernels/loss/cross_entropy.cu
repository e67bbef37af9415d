// Cross entropy in two reads of the logits: 2 bytes of bfloat16 read for a row's losses; then 2
// read, and 1 written for each orientation of the gradient's codes.
#include "kernels/activation/codes.cuh"
#include "kernels/loss/kernels.h"

namespace qshard::cuda {
namespace {

/// A chunk of logits: a vector of 16-bit values, or two of fp32.
template <typename Value, bool kVectorized>
__device__ __forceinline__ void load_chunk(const typename Value::Raw* row, int64_t begin, int64_t v,
                                           float (&x)[kSoftmaxChunk],
                                           float (&present)[kSoftmaxChunk]) {
  constexpr int kSize = Vector<Value>::kSize;
#pragma unroll
  for (int part = 0; part < kSoftmaxChunk / kSize; ++part) {
    const int64_t c = begin + part * kSize;
    const int count = static_cast<int>(max(min(v - c, int64_t{kSize}), int64_t{0}));
    Vector<Value> values = {};
    if constexpr (kVectorized) {
      if (count > 0) values = load_vector<Value>(row + c);
    } else {
      values = load_some<Value>(row + c, count);
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const float value = Value::load(values.word_of(i), i % Value::kPerWord);
      x[part * kSize + i] = i < count ? value : __uint_as_float(0xff800000u);
      present[part * kSize + i] = i < count ? value : 0.f;
    }
  }
}

template <typename Value, bool kVectorized>
__global__ void __launch_bounds__(kSoftmaxLanes)
    cross_entropy_losses(const __grid_constant__ CrossEntropyTask task) {
  __shared__ LogitSums lanes[kSoftmaxLanes];
  const int64_t r = blockIdx.x;
  const auto* row = static_cast<const typename Value::Raw*>(task.logits) + r * task.v;
  const bool sums_logits = task.smoothing.smoothing != 0.f;
  const int lane = static_cast<int>(threadIdx.x);
  LogitSums sums = kNoLogits;
  for (int64_t begin = int64_t{lane} * kSoftmaxChunk; begin < task.v;
       begin += kSoftmaxLanes * kSoftmaxChunk) {
    float x[kSoftmaxChunk], present[kSoftmaxChunk];
    load_chunk<Value, kVectorized>(row, begin, task.v, x, present);
    sums.add(x, present, sums_logits);
  }
  lanes[lane] = sums;
  __syncthreads();
  for (int apart = kSoftmaxLanes / 2; apart > 0; apart /= 2) {
    if (lane < apart) lanes[lane] = LogitSums::merged(lanes[lane], lanes[lane + apart]);
    __syncthreads();
  }
  if (lane != 0) return;
  float log_sum = lanes[0].log_sum();
  float loss = 0.f;
  const int64_t target = task.targets[r];
  if (target != task.ignored) {
    if (target < 0 || target >= task.v) {
      log_sum = loss = __uint_as_float(kNaNBits);
    } else {
      const uint32_t raw = row[target];
      loss = task.smoothing.loss(log_sum, Value::load(raw, 0), lanes[0].logits,
                                 static_cast<float>(task.v));
    }
  }
  task.log_sums[r] = log_sum;
  task.losses[r] = loss;
}

__global__ void __launch_bounds__(kSoftmaxLanes)
    cross_entropy_totals(const __grid_constant__ CrossEntropyTask task) {
  __shared__ float losses[kSoftmaxLanes];
  __shared__ unsigned long long counts[kSoftmaxLanes];
  const int lane = static_cast<int>(threadIdx.x);
  float loss = 0.f;
  unsigned long long count = 0;
  for (int64_t row = lane; row < task.m; row += kSoftmaxLanes) {
    loss += task.losses[row];
    count += task.targets[row] != task.ignored;
  }
  losses[lane] = loss;
  counts[lane] = count;
  __syncthreads();
  for (int apart = kSoftmaxLanes / 2; apart > 0; apart /= 2) {
    if (lane < apart) {
      losses[lane] += losses[lane + apart];
      counts[lane] += counts[lane + apart];
    }
    __syncthreads();
  }
  if (lane != 0) return;
  task.totals[0] = canonical_nan(losses[0]);
  task.totals[1] = static_cast<float>(counts[0]);
}

/// A tile of logits becomes one of gradients, rounded to the dtype of the logits.
template <typename Value>
__device__ __forceinline__ void to_gradient(ActivationTile<Value>& tile,
                                            const CrossEntropyTask& task, int64_t tile_row,
                                            int64_t tile_col) {
  using Tile = ActivationTile<Value>;
  const int64_t c = tile_col + tile.col;
  const int count = static_cast<int>(max(min(task.v - c, int64_t{Tile::kCols}), int64_t{0}));
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int64_t r = tile_row + tile.row + i;
    const int64_t target = r < task.m ? task.targets[r] : task.ignored;
    if (target == task.ignored) {
      tile.values[i] = {};
      continue;
    }
    const float log_sum = task.log_sums[r];
    const int64_t at = target - c;  // the target's place among the thread's columns
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      uint32_t word = 0;
#pragma unroll
      for (int k = 0; k < Value::kPerWord; ++k) {
        const int j = w * Value::kPerWord + k;
        const float x =
            task.smoothing.gradient(Value::load(tile.values[i].word[w], k), log_sum, at == j);
        const uint32_t raw = j < count ? Value::store(x) : 0;
        word |= raw << (16 * k);
      }
      tile.values[i].word[w] = word;
    }
  }
}

template <typename Value>
__device__ __forceinline__ ActivationTile<Value> gradient_tile(const CrossEntropyTask& task,
                                                               int64_t tile_row, int64_t tile_col,
                                                               bool vectorized) {
  ActivationTile<Value> tile;
  tile.load(task.logits, task.m, task.v, task.v, tile_row, tile_col, vectorized);
  to_gradient(tile, task, tile_row, tile_col);
  return tile;
}

template <typename Value, typename Code, bool kBlocks>
__global__ void __launch_bounds__(kTileThreads)
    cross_entropy_codes(const __grid_constant__ CrossEntropyTask task,
                        const __grid_constant__ ActivationTask out, bool vectorized) {
  __shared__ typename ActivationTile<Value>::Shared shared;
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const auto tile = gradient_tile<Value>(task, tile_row, tile_col, vectorized);
  if constexpr (kBlocks) {
    store_in_blocks(tile, out, {tile_row, tile_row}, tile_col, shared);
  } else {
    const float scale = scale_from_amax(1.f, Code::kMax, out.power_of_two);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) store_tensor_scale(out, scale);
    // NaNs of a gradient have no sign that could be lost.
    tile.template store_both<Code>(out, tile_row, tile_col, shared, /*has_nan=*/false, scale);
  }
}

template <typename Value>
__global__ void __launch_bounds__(kTileThreads)
    cross_entropy_gradient(const __grid_constant__ CrossEntropyTask task, typename Value::Raw* out,
                           bool vectorized) {
  const int64_t tile_row = static_cast<int64_t>(blockIdx.y) * kTile;
  const int64_t tile_col = static_cast<int64_t>(blockIdx.x) * kTile;
  const auto tile = gradient_tile<Value>(task, tile_row, tile_col, vectorized);
  const int64_t c = tile_col + tile.col;
  const int count = static_cast<int>(max(min(task.v - c, int64_t{tile.kCols}), int64_t{0}));
#pragma unroll
  for (int i = 0; i < tile.kRows; ++i) {
    const int64_t r = tile_row + tile.row + i;
    if (r >= task.m) return;
    typename Value::Raw* to = out + r * task.v + c;
#pragma unroll
    for (int j = 0; j < tile.kCols; ++j) {
      const uint32_t word = tile.values[i].word_of(j);
      if (j < count) to[j] = static_cast<typename Value::Raw>(word >> (16 * (j % Value::kPerWord)));
    }
  }
}

bool is_vectorized(const CrossEntropyTask& task, DType dtype) {
  return reinterpret_cast<uintptr_t>(task.logits) % 16 == 0 && task.v * value_size(dtype) % 16 == 0;
}

dim3 tiles_of(const CrossEntropyTask& task) {
  return dim3(static_cast<unsigned>((task.v + kTile - 1) / kTile),
              static_cast<unsigned>((task.m + kTile - 1) / kTile));
}

}  // namespace

cudaError_t launch_cross_entropy_losses(const CrossEntropyTask& task, DType dtype,
                                        cudaStream_t stream) {
  if (task.m == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(task.m);
  return with_value_type(dtype, [&](auto value) {
    using Value = decltype(value);
    if (is_vectorized(task, dtype)) {
      cross_entropy_losses<Value, true><<<blocks, kSoftmaxLanes, 0, stream>>>(task);
    } else {
      cross_entropy_losses<Value, false><<<blocks, kSoftmaxLanes, 0, stream>>>(task);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_cross_entropy_totals(const CrossEntropyTask& task, cudaStream_t stream) {
  cross_entropy_totals<<<1, kSoftmaxLanes, 0, stream>>>(task);
  return cudaGetLastError();
}

cudaError_t launch_cross_entropy_gradient(const CrossEntropyTask& task, void* values, DType dtype,
                                          cudaStream_t stream) {
  if (task.m == 0 || task.v == 0) return cudaSuccess;
  return with_value_type(dtype, [&](auto value) {
    using Value = decltype(value);
    cross_entropy_gradient<Value><<<tiles_of(task), kTileThreads, 0, stream>>>(
        task, static_cast<typename Value::Raw*>(values), is_vectorized(task, dtype));
    return cudaGetLastError();
  });
}

cudaError_t launch_cross_entropy_codes(const CrossEntropyTask& task, const ActivationTask& out,
                                       bool in_blocks, DType dtype, DType code_dtype,
                                       cudaStream_t stream) {
  if (task.m == 0 || task.v == 0) return cudaSuccess;
  const bool vectorized = is_vectorized(task, dtype);
  return with_value_type(dtype, [&](auto value) {
    using Value = decltype(value);
    const dim3 grid = tiles_of(task);
    if (in_blocks) {
      cross_entropy_codes<Value, E4M3, true>
          <<<grid, kTileThreads, 0, stream>>>(task, out, vectorized);
    } else if (code_dtype == DType::kFloat8E5M2) {
      cross_entropy_codes<Value, E5M2, false>
          <<<grid, kTileThreads, 0, stream>>>(task, out, vectorized);
    } else {
      cross_entropy_codes<Value, E4M3, false>
          <<<grid, kTileThreads, 0, stream>>>(task, out, vectorized);
    }
    return cudaGetLastError();
  });
}

}  // namespace qshard::cuda
