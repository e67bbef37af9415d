// AdamW and, of the new values, amaxes or all of quantizing: formats with scales in the grid.
//
// A tile's new values stay in shared memory between the amax of its scale block and the codes, so
// nothing is read twice. The floor, in bytes per element with fp32 values, moments and gradient:
//   scale of the tile    reads 16, writes 12 + 1: 29
//   wider scale          reads 16, writes 12 + 1: 29, the codes by the scale before. Where that is
//                        no power of two, 28; the flush's quantize pass then reads 4, writes 1
// A bf16 gradient, where torch allows one beside fp32 values, is left to torch's own kernel.
#include "kernels/adamw/adamw.cuh"
#include "kernels/device/amax.cuh"
#include "kernels/device/vector_codes.cuh"
#include "kernels/quantize/grid_scaled/tile.cuh"

namespace qshard::cuda {
namespace {

/// Shared memory for a tile's values.
template <typename Value>
constexpr int tile_bytes() {
  return kThreads * ThreadRows<Value>::kRows * static_cast<int>(sizeof(uint4));
}

constexpr int kSharedBytes = 48 * 1024;  // what a kernel may have without asking

/// kInRows: each row has a scale of its own, which spans tiles.
template <typename Value, StepQuantizes kQuantizes, bool kInRows>
__global__ void __launch_bounds__(kThreads)
    fused_adamw(const __grid_constant__ AdamWGridScaledBatch batch,
                const __grid_constant__ AdamWParameters parameters) {
  using Rows = ThreadRows<Value>;
  extern __shared__ uint4 kept[];  // [row of the thread][thread]
  int block = static_cast<int>(blockIdx.x);
  const AdamWGridScaledTask& task = find_task(batch, block);
  const Tile tile = find_tile(task, block);
  if (tile.grid_index < 0) {
    if constexpr (kQuantizes == StepQuantizes::kCodes) write_zeros(task, tile);
    return;
  }
  const AdamW adamw(parameters, task.memory.step);
  const Rows rows(tile);
  const int thread = static_cast<int>(threadIdx.x);
  const auto store_codes = [&](int row, const Vector<Value>& x, float scale) {
    store_bytes(task.image + static_cast<int64_t>(row) * task.row_bytes + rows.col,
                encode_vector<E4M3>(x, scale));
  };
  float scale_before = 0.f;
  if constexpr (kQuantizes == StepQuantizes::kSpeculative && !kInRows) {
    const float scale_inv = task.grid[tile.grid_index];
    scale_before = inverse_scale(scale_inv);
    if (thread == 0)
      task.speculative_scale_inv[tile.grid_index] = scale_inv;  // the same of all tiles
  }

  uint32_t largest = 0;
#pragma unroll 1
  for (int begin = 0; begin < Rows::kRows; begin += kInFlight) {
    int64_t at[kInFlight];
    int count[kInFlight];
    Vector<Value> x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int row = rows.row(begin + i);
      at[i] = static_cast<int64_t>(row) * task.cols + rows.col;
      count[i] = row < tile.row_end ? min(Vector<Value>::kSize, task.cols - rows.col) : 0;
    }
    step_vectors(adamw, task, at, count, x);
    if constexpr (kInRows) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const uint32_t of_row = Rows::max_of_row(largest_of<Value, 1>(x + i));
        const int row = rows.row(begin + i);
        if (Rows::is_first() && row < tile.row_end) {
          raise(task.amax + entry_of_row(task, row), of_row);
        }
      }
    } else {
      largest = max(largest, largest_of<Value, kInFlight>(x));
    }
    if constexpr (kQuantizes == StepQuantizes::kSpeculative) {
      if (rows.col >= task.row_bytes) continue;
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int row = rows.row(begin + i);
        if (row >= tile.row_end) continue;
        if constexpr (kInRows) {
          const float scale_inv = task.grid[entry_of_row(task, row)];
          scale_before = inverse_scale(scale_inv);
          // The same of all tiles.
          if (Rows::is_first()) task.speculative_scale_inv[entry_of_row(task, row)] = scale_inv;
        }
        store_codes(row, x[i], scale_before);
      }
    }
    if constexpr (kQuantizes == StepQuantizes::kCodes) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        kept[(begin + i) * kThreads + thread] =
            make_uint4(x[i].word[0], x[i].word[1], x[i].word[2], x[i].word[3]);
      }
    }
  }
  if constexpr (kInRows) return;
  largest = max_of_block<kThreads>(largest);
  if constexpr (kQuantizes != StepQuantizes::kCodes) {
    if (thread == 0) raise(task.amax + tile.grid_index, largest);
    return;
  }
  const float amax = __uint_as_float(canonical_amax(largest));
  const float scale = scale_from_amax(amax, task.code_max, task.power_of_two);
  if (thread == 0) {
    task.amax[tile.grid_index] = amax;
    task.grid[tile.grid_index] = inverse_scale(scale);
  }
  if (rows.col >= task.row_bytes) return;
#pragma unroll 4
  for (int i = 0; i < Rows::kRows; ++i) {
    const int row = rows.row(i);
    if (row >= tile.row_end) return;
    const uint4 words = kept[i * kThreads + thread];
    store_codes(row, {{words.x, words.y, words.z, words.w}}, scale);
  }
}

template <StepQuantizes kQuantizes, bool kInRows = false>
cudaError_t launch(const AdamWGridScaledBatch& batch, const AdamWParameters& parameters,
                   DType value_dtype, cudaStream_t stream) {
  const int blocks = batch.first_block[batch.count];
  if (blocks == 0) return cudaSuccess;
  return with_value_type(value_dtype, [&](auto value) {
    const auto kernel = fused_adamw<decltype(value), kQuantizes, kInRows>;
    const int shared = kQuantizes == StepQuantizes::kCodes ? tile_bytes<decltype(value)>() : 0;
    if (shared > kSharedBytes) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      if (error != cudaSuccess) return error;
    }
    kernel<<<blocks, kThreads, shared, stream>>>(batch, parameters);
    return cudaGetLastError();
  });
}

}  // namespace

int adamw_blocks(const AdamWGridScaledTask& task, StepQuantizes quantizes) {
  return quantizes == StepQuantizes::kCodes ? tile_count(task) : amax_blocks(task);
}

cudaError_t launch_adamw(const AdamWGridScaledBatch& batch, StepQuantizes quantizes,
                         const AdamWParameters& parameters, DType value_dtype,
                         cudaStream_t stream) {
  switch (quantizes) {
    case StepQuantizes::kAmax:
      return launch<StepQuantizes::kAmax>(batch, parameters, value_dtype, stream);
    case StepQuantizes::kSpeculative:
      return launch<StepQuantizes::kSpeculative>(batch, parameters, value_dtype, stream);
    case StepQuantizes::kCodes:
      return launch<StepQuantizes::kCodes>(batch, parameters, value_dtype, stream);
    case StepQuantizes::kSkip:
      break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_adamw_in_rows(const AdamWGridScaledBatch& batch, StepQuantizes quantizes,
                                 const AdamWParameters& parameters, DType value_dtype,
                                 cudaStream_t stream) {
  switch (quantizes) {
    case StepQuantizes::kAmax:
      return launch<StepQuantizes::kAmax, true>(batch, parameters, value_dtype, stream);
    case StepQuantizes::kSpeculative:
      return launch<StepQuantizes::kSpeculative, true>(batch, parameters, value_dtype, stream);
    case StepQuantizes::kCodes:
    case StepQuantizes::kSkip:
      break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace qshard::cuda
