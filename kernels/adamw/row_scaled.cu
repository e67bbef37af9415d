// AdamW and, of the new values, amaxes or all of quantizing: formats with row-local scales.
//
// As in fused_adamw.cu nothing is read twice; the floor, in bytes per element with fp32 values,
// moments and gradient:
//   MXFP8, no boundary     reads 16, writes 12 + 1.03: 29.03
//   NVFP4                  reads 16, writes 12: 28; the flush's quantize pass then reads 4, writes
//                          0.56
#include "kernels/adamw/adamw.cuh"
#include "kernels/quantize/row_scaled/quantize.cuh"

namespace qshard::cuda {
namespace {

/// Steps this lane's vectors of the rows first_row + [0, kInFlight).
template <typename Value>
__device__ __forceinline__ void step_rows(const AdamW& adamw, const AdamWRowScaledTask& task,
                                          const RowScaledTile& tile, int first_row, int col,
                                          Vector<Value>* x) {
  int64_t at[kInFlight];
  int count[kInFlight];
#pragma unroll
  for (int i = 0; i < kInFlight; ++i) {
    const int row = first_row + i;
    at[i] = static_cast<int64_t>(row) * task.cols + col;
    const bool is_here = row >= tile.row_begin && row < tile.row_end;
    count[i] = is_here ? min(Vector<Value>::kSize, task.cols - col) : 0;
  }
  step_vectors(adamw, task, at, count, x);
}

template <int kBlockCols, typename Value>
__global__ void __launch_bounds__(kRowScaledThreads)
    adamw_amax(const __grid_constant__ AdamWRowScaledBatch batch,
               const __grid_constant__ AdamWParameters parameters) {
  using Row = TileRow<Value, kBlockCols>;
  int block = static_cast<int>(blockIdx.x);
  const AdamWRowScaledTask& task = find_task(batch, block);
  const RowScaledTile tile = find_tile<kAmaxTileRows>(task, block);
  const AdamW adamw(parameters, task.memory.step);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int col = tile.tile_col * Row::kCols + lane * Row::kSize;

  uint32_t largest = 0;
#pragma unroll 1
  for (int first = tile.origin + warp * kRowsPerWarp; first < tile.row_end;
       first += kCodeTileRows) {
    uint32_t of_rows = 0;
#pragma unroll 1
    for (int row = first; row < first + kRowsPerWarp; row += kInFlight) {
      Vector<Value> x[kInFlight];
      step_rows(adamw, task, tile, row, col, x);
      of_rows = max(of_rows, largest_of<Value, kInFlight>(x));
    }
    largest = max(largest, of_rows);
    raise_boundary_amax<kBlockCols, Value>(task, first, col, of_rows);
  }
  raise_matrix_amax(task, tile, largest);
}

template <typename Kind, typename Value>
__global__ void __launch_bounds__(kRowScaledThreads)
    adamw_quantize(const __grid_constant__ AdamWRowScaledBatch batch,
                   const __grid_constant__ AdamWParameters parameters) {
  using Row = TileRow<Value, Kind::kBlockCols>;
  // A thread's own vectors, out of registers while it steps.
  __shared__ uint4 kept[kRowsPerWarp][kRowScaledThreads];
  int block = static_cast<int>(blockIdx.x);
  const AdamWRowScaledTask& task = find_task(batch, block);
  const int tiles = tile_count(task);
  if (block >= tiles) {
    write_rest(task, block - tiles, nvfp4_range(Kind::kFourOverSix));
    return;
  }
  const RowScaledTile tile = find_tile<kCodeTileRows>(task, block);
  const AdamW adamw(parameters, task.memory.step);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int col = tile.tile_col * Row::kCols + lane * Row::kSize;
  const int first_row = tile.origin + warp * kRowsPerWarp;

#pragma unroll 1
  for (int i = 0; i < kRowsPerWarp; i += kInFlight) {
    Vector<Value> x[kInFlight];
    step_rows(adamw, task, tile, first_row + i, col, x);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      kept[i + k][threadIdx.x] = make_uint4(x[k].word[0], x[k].word[1], x[k].word[2], x[k].word[3]);
    }
  }
  Vector<Value> x[kRowsPerWarp];
#pragma unroll
  for (int i = 0; i < kRowsPerWarp; ++i) {
    const uint4 words = kept[i][threadIdx.x];
    x[i] = Vector<Value>{{words.x, words.y, words.z, words.w}};
  }
  quantize_tile<Kind>(task, tile, col, x);
}

template <typename Kernel>
cudaError_t launch(Kernel kernel, const AdamWRowScaledBatch& batch,
                   const AdamWParameters& parameters, cudaStream_t stream) {
  const int blocks = batch.first_block[batch.count];
  if (blocks == 0) return cudaSuccess;
  kernel<<<blocks, kRowScaledThreads, 0, stream>>>(batch, parameters);
  return cudaGetLastError();
}

}  // namespace

int adamw_blocks(const AdamWRowScaledTask& task, StepQuantizes quantizes) {
  return quantizes == StepQuantizes::kCodes ? quantize_blocks(task) : tile_count(task);
}

cudaError_t launch_adamw(const AdamWRowScaledBatch& batch, StepQuantizes quantizes,
                         const AdamWParameters& parameters, const Format& format, DType value_dtype,
                         cudaStream_t stream) {
  const bool to_codes = quantizes == StepQuantizes::kCodes;
  return with_row_scaled_types(format, value_dtype, [&](auto kind, auto value) {
    using Kind = decltype(kind);
    if constexpr (Kind::kRowScale == RowScale::kE4M3) {
      const auto kernel = adamw_amax<Kind::kBlockCols, decltype(value)>;
      return to_codes ? cudaErrorInvalidValue : launch(kernel, batch, parameters, stream);
    } else if constexpr (Kind::kBlockRows > 1) {
      const auto kernel = adamw_quantize<Kind, decltype(value)>;
      return to_codes ? launch(kernel, batch, parameters, stream) : cudaErrorInvalidValue;
    } else {
      return cudaErrorInvalidValue;  // step_quantizes() says kSkip of them
    }
  });
}

}  // namespace qshard::cuda
