// Launchers of the kernels that prepare GEMM operands: activations, gradients, transposed weights.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/format/formats.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard::cuda {

/// Codes of x (M, K) in the orientations asked for, ready for a GEMM that contracts along rows of
/// codes. Whatever lies beyond M or K is written as code 0.
struct ActivationTask {
  const void* values = nullptr;  // (m, k) contiguous
  int64_t m = 0;
  int64_t k = 0;

  uint8_t* codes = nullptr;  // (m_padded, k_padded), or null
  float* scale_inv = nullptr;
  int64_t m_padded = 0;      // m <= m_padded <= round_up(m, 128)
  int64_t rows_written = 0;  // m_padded; of a group's tile less: the rows up to the group's end
  int64_t k_padded = 0;      // round_up(k, 16); more where these are columns of a wider matrix

  uint8_t* codes_t = nullptr;  // x^T (k_padded, m_padded_t), or null
  float* scale_inv_t = nullptr;
  int64_t m_padded_t = 0;       // round_up(m, 128)
  bool square_columns = false;  // codes_t has scales of 128x128 blocks

  bool power_of_two = true;
  bool has_own_amax = true;  // NaN where one of the values is; not so of an amax that callers give

  /// (k,), or null: `codes`, not codes_t, are of values times the factors of their columns. Codes
  /// with one scale per row alone take them.
  const float* column_factors = nullptr;
};

/// One scale per 1x128 block along each orientation's rows, outer dimension fastest, as cuBLASLt's
/// VEC128_32F takes them: scale_inv (ceil(k / 128), m_padded), scale_inv_t (ceil(m / 128),
/// k_padded). With square blocks scale_inv_t is as BLK128x128_32F takes it: (ceil(k / 128),
/// round_up(ceil(m / 128), 4)), the last ones zero. Codes are E4M3.
cudaError_t launch_quantize_activation_in_blocks(const ActivationTask& task, DType value_dtype,
                                                 cudaStream_t stream);

/// Which rows a tile of 128 rows covers where groups of rows are quantized apart from each other.
struct RowTile {
  int32_t row = 0;     // the first one; below 0: the tile covers none
  int32_t end = 0;     // where its group ends
  int32_t column = 0;  // where they begin in a row of codes_t: a multiple of 128
  int32_t group = 0;
};

/// How many tiles `groups` of together at most `total` rows have, at most.
constexpr int64_t most_row_tiles(int64_t total, int64_t groups) {
  return (total + 127) / 128 + groups;
}

/// Fills `count` tiles, most_row_tiles(total, groups), from where groups end: device memory
/// (groups,). Ends are clamped to `total` and to the one before. A group's first column follows the
/// last tile of the group before.
cudaError_t launch_row_tiles(const int32_t* offs, int64_t groups, int64_t total, RowTile* tiles,
                             int64_t count, cudaStream_t stream);

/// As launch_quantize_activation_in_blocks for each group of rows by itself, whose codes_t and
/// scale_inv_t begin at a multiple of 128 columns: m_padded_t is 128 * `count`. Rows that no group
/// owns are neither read nor written.
cudaError_t launch_quantize_groups_in_blocks(const ActivationTask& task, const RowTile* tiles,
                                             int64_t count, DType value_dtype, cudaStream_t stream);

/// Rows of E4M3 codes that hold their scales: E8M0 for 1x128, or one alone, from `scale_offset` on.
struct CodedRows {
  const uint8_t* image = nullptr;  // at a multiple of 16 bytes
  int64_t pitch = 0;               // bytes from row to row, a multiple of 16
  int64_t scale_offset = 0;
  bool has_row_scale = false;  // one alone
};

/// Does what launch_quantize_activation_in_blocks does, of rows that are codes already: these stay
/// as they are, and of the columns' each 128x128 have the largest scale of their rows (those of
/// zeros do not count), for 1x128, too. Without `codes`, their scale_inv may be asked for alone.
cudaError_t launch_repack(const CodedRows& rows, const ActivationTask& task, cudaStream_t stream);
/// So launch_quantize_groups_in_blocks.
cudaError_t launch_repack_groups(const CodedRows& rows, const ActivationTask& task,
                                 const RowTile* tiles, int64_t count, cudaStream_t stream);

/// The groups of rows of which each has one scale for all of its columns' codes.
struct LargestScales {
  int32_t* largest = nullptr;  // (groups,), device memory
  int64_t groups = 1;
  const RowTile* tiles = nullptr;  // the groups' tiles of rows; null: all rows form one group
  int64_t tile_count = 0;
  int64_t scales = 1;  // how many scale_inv_t has: `groups`, or all alike
};
/// Writes scale_inv (m,) of rows with one scale each, whose codes stay where they are, unless it is
/// null. Columns in codes_t, if they are asked for, all have the largest scale of their group's
/// rows (those of zeros do not count), which is 1 without rows.
cudaError_t launch_repack_in_rows(const CodedRows& rows, const ActivationTask& task,
                                  const LargestScales& scales, cudaStream_t stream);

/// What one scale for each group is made of; device memory (groups,) each.
struct GroupScales {
  int64_t groups = 0;
  float* amax = nullptr;   // left with that of each group's values
  float* scale = nullptr;  // left with what they were multiplied by
  // Delayed scaling of all groups by earlier steps; own amaxes scale the codes of a first step.
  DelayedAmax delayed = {};
};

/// The same by one scale for each group: scale_inv and, with codes_t, scale_inv_t (groups,).
cudaError_t launch_quantize_groups_tensorwise(const ActivationTask& task, const RowTile* tiles,
                                              int64_t count, const GroupScales& scales,
                                              DType value_dtype, DType code_dtype,
                                              cudaStream_t stream);

/// One scale per row of each orientation: scale_inv (m_padded), scale_inv_t (k_padded). Codes are
/// E4M3.
cudaError_t launch_quantize_activation_in_rows(const ActivationTask& task, DType value_dtype,
                                               cudaStream_t stream);

/// One scale, from the device's `amax` (1): scale_inv (1), scale_inv_t (1). Codes are E4M3 or E5M2.
cudaError_t launch_quantize_activation_tensorwise(const ActivationTask& task, const float* amax,
                                                  DType value_dtype, DType code_dtype,
                                                  cudaStream_t stream);

/// Beyond so many bytes of values a CUDA block for each multiprocessor has more than two tiles, and
/// two launches that read the values twice are faster (bench/results/2026-11-29-h200.md).
constexpr int64_t kMostBytesAtOnce = int64_t{8} << 20;
/// Whether launch_quantize_activation_at_once() is for these values: there are some, and few.
bool is_quantized_at_once(const ActivationTask& task, DType value_dtype);
/// The same by the values' own amax, which is left in `amax` (1): one launch of at most `blocks`
/// CUDA blocks, which wait for each other. With one for each multiprocessor they run beside kernels
/// that leave half of it free. `maxima` (blocks): device memory. Cooperative launch: see CUDA C++
/// Programming Guide, "Grid Synchronization".
cudaError_t launch_quantize_activation_at_once(const ActivationTask& task, float* amax,
                                               uint32_t* maxima, int blocks, DType value_dtype,
                                               DType code_dtype, cudaStream_t stream);

/// An amax from before: by it codes are made in the pass that finds the values' own.
struct PreviousAmax {
  const float* amax = nullptr;  // on the device; 0: there is none
  DelayedAmax delayed = {};     // whose it is: codes by it are final, and the own is collected
  float* next = nullptr;        // without `delayed` it is a guess; the next one's is left here
};

/// The same by `earlier`, in one pass; in two where there is none, or where the own amax gives
/// another scale than the guess. `amax` (1): device memory, left with the values' own.
cudaError_t launch_quantize_activation_by_previous(const ActivationTask& task,
                                                   const PreviousAmax& previous, float* amax,
                                                   DType value_dtype, DType code_dtype,
                                                   cudaStream_t stream);

/// out (cols, ld_out)[c][r] = in (rows, ld_in)[r][c]. rows, cols, ld_in, ld_out are multiples of 16
/// and both pointers 16-byte aligned.
cudaError_t launch_transpose_codes(const uint8_t* in, int64_t rows, int64_t cols, int64_t ld_in,
                                   uint8_t* out, int64_t ld_out, cudaStream_t stream);

/// Copies scales of 128x128 blocks into the layout of cuBLASLt's BLK128x128_32F: the blocks along
/// the contraction run fastest, padded to a multiple of 4 with zeros. `grid` is (row_blocks,
/// col_blocks). Contracting columns: out (row_blocks, round_up(col_blocks, 4)); contracting rows:
/// out (col_blocks, round_up(row_blocks, 4)).
cudaError_t launch_gemm_block_scales(const float* grid, int64_t row_blocks, int64_t col_blocks,
                                     bool contract_rows, float* out, cudaStream_t stream);

}  // namespace qshard::cuda
