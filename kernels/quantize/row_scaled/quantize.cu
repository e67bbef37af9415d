// Row images with row-local scales from values.
//
// The first CUDA blocks of a task each quantize one tile, keeping its values in registers between
// finding the blocks' amaxes and encoding; the next zero the rows outside the logical tensor, the
// last write the grid.
#include "kernels/quantize/row_scaled/quantize.cuh"

namespace qshard::cuda {
namespace {

template <typename Kind, typename Value, typename Batch>
__global__ void __launch_bounds__(kRowScaledThreads) quantize(const __grid_constant__ Batch batch) {
  using Row = TileRow<Value, Kind::kBlockCols>;
  int block = static_cast<int>(blockIdx.x);
  const auto& task = find_task(batch, block);
  const int tiles = tile_count(task);
  if (block >= tiles) {
    write_rest(task, block - tiles, nvfp4_range(Kind::kFourOverSix));
    return;
  }
  const RowScaledTile tile = find_tile<kCodeTileRows>(task, block);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int col = tile.tile_col * Row::kCols + lane * Row::kSize;
  Vector<Value> x[kRowsPerWarp];
  load_rows(task, tile, tile.origin + warp * kRowsPerWarp, col, x);
  quantize_tile<Kind>(task, tile, col, x);
}

/// This thread's vectors of a row: those at `thread`, and every kRowScaledThreads-th after it.
template <typename Value>
struct VectorsOfRow {
  using Raw = typename Value::Raw;
  static constexpr int kSize = Vector<Value>::kSize;
  static constexpr int kStep = kRowScaledThreads * kSize;

  const Raw* values;
  int cols;
  bool vectorized;
  int first = static_cast<int>(threadIdx.x) * kSize;

  __device__ Vector<Value> load(int col) const {
    if (col >= cols) return {};
    return vectorized ? load_vector<Value>(values + col)
                      : load_some<Value>(values + col, cols - col);
  }
};

/// Blocks that are whole rows. A CUDA block takes as many rows of its tile row as there are tiles
/// beside each other, one after the other, and reads 16-bit values of up to 8,192 columns once.
template <typename Kind, typename Value, typename Batch>
__global__ void __launch_bounds__(kRowScaledThreads)
    quantize_in_rows(const __grid_constant__ Batch batch) {
  using Code = typename Kind::Code;
  using Vectors = VectorsOfRow<Value>;
  constexpr int kHeld = 8;  // in registers; the rest is read from the cache again
  int block = static_cast<int>(blockIdx.x);
  const auto& task = find_task(batch, block);
  const int tiles = tile_count(task);
  if (block >= tiles) {
    write_rest(task, block - tiles);
    return;
  }
  const RowScaledTile tile = find_tile<kCodeTileRows>(task, block);
  for (int row = tile.origin + tile.tile_col; row < tile.row_end; row += task.tile_cols) {
    if (row < tile.row_begin) continue;
    const auto* values = static_cast<const typename Value::Raw*>(task.values);
    const Vectors vectors{values + static_cast<int64_t>(row) * task.cols, task.cols,
                          task.vectorized};
    Vector<Value> x[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) x[i] = vectors.load(vectors.first + i * Vectors::kStep);
    uint32_t largest = largest_of<Value, kHeld>(x);
    for (int col = vectors.first + kHeld * Vectors::kStep; col < task.cols; col += Vectors::kStep) {
      const Vector<Value> more = vectors.load(col);
      largest = max(largest, largest_of<Value, 1>(&more));
    }
    __syncthreads();  // the row before has been reduced
    largest = max_of_block<kRowScaledThreads>(largest);
    const BlockScale scale = block_scale(Kind::kRowScale, __uint_as_float(largest), 1.f);
    uint8_t* image = task.image + static_cast<int64_t>(row) * task.row_bytes;
    const auto write = [&](int col, const Vector<Value>& v) {
      if (col >= task.row_scale_offset) return;
      if constexpr (std::is_same_v<Batch, StochasticRowScaledBatch>) {
        const RandomWords random(task.rounding);
        uint32_t words[Vectors::kSize];
        random.get(task.element + row * task.element_pitch + col, words);
        store_bytes(image + col, encode_vector_stochastic<Code>(v, scale.encode, words));
      } else {
        store_bytes(image + col, encode_vector<Code>(v, scale.encode));
      }
    };
#pragma unroll
    for (int i = 0; i < kHeld; ++i) write(vectors.first + i * Vectors::kStep, x[i]);
    for (int col = vectors.first + kHeld * Vectors::kStep; col < task.row_scale_offset;
         col += Vectors::kStep) {
      write(col, vectors.load(col));
    }
    const int byte = static_cast<int>(threadIdx.x);
    if (byte < task.image_row_bytes - task.row_scale_offset) {
      image[task.row_scale_offset + byte] = byte == 0 ? scale.byte : 0;
    }
  }
}

template <typename Batch>
cudaError_t launch(const Batch& batch, const Format& format, DType value_dtype,
                   cudaStream_t stream) {
  return with_row_scaled_types(format, value_dtype, [&](auto kind, auto value) {
    using Kind = decltype(kind);
    if constexpr (Kind::kBlockCols == 0) {
      const auto kernel = quantize_in_rows<Kind, decltype(value), Batch>;
      return launch_batch<kRowScaledThreads>(kernel, batch, stream);
    } else {
      const auto kernel = quantize<Kind, decltype(value), Batch>;
      return launch_batch<kRowScaledThreads>(kernel, batch, stream);
    }
  });
}

}  // namespace

bool has_row_scaled_kernels(const Format& format) {
  return with_row_scaled_types(format, DType::kFloat32, [](auto, auto) { return cudaSuccess; }) ==
         cudaSuccess;
}

int quantize_blocks(const RowScaledTask& task) {
  return tile_count(task) + zero_blocks(task) +
         (task.grid_numel + kRowScaledThreads - 1) / kRowScaledThreads;
}

cudaError_t launch_quantize(const RowScaledFlushBatch& batch, const Format& format,
                            DType value_dtype, cudaStream_t stream) {
  return launch(batch, format, value_dtype, stream);
}

cudaError_t launch_quantize(const StochasticRowScaledBatch& batch, const Format& format,
                            DType value_dtype, cudaStream_t stream) {
  return launch(batch, format, value_dtype, stream);
}

}  // namespace qshard::cuda
