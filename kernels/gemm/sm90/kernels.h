// The launcher of Hopper's grouped GEMM (grouped_gemm_sm90.cu), for its host side.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/format/formats.h"

namespace qshard::cuda {

/// Which dimension groups cut: rows of A and D, or what both operands contract.
enum class GroupsAlong : uint8_t { kRows, kContraction };

/// How B is scaled: one scale for 128 of its rows and 128 contracted codes, or one for each row and
/// 128 codes, as A is. Or scales are constant along what is contracted: each group has one of A and
/// one of B, or in place of one of these, or of both, there is a vector with one for each row.
enum class ColumnScales : uint8_t { kSquare, kRow, kGroup, kVector };

/// A tile of D has 64, 128 or 256 rows and as many columns as these. Each computes the same bits.
constexpr int columns_of_tile(int rows) { return rows == 64 ? 256 : 128; }

/// A tile begins at any row, but copies of A's scales at a multiple of 16 bytes: anywhere else the
/// copy engine raises an illegal instruction.
constexpr int kScaleMargin = 4;

/// What the kernel reads. Tensor maps carry addresses and sizes of the operands.
struct GroupedGemmArguments {
  bool has_vectors() const { return a_row_vector != nullptr || b_row_vector != nullptr; }

  CUtensorMap a;  // boxes (tile rows, 128)
  // Boxes (1, tile rows + kScaleMargin), two floats to an element: a box has at most 256.
  CUtensorMap a_scales;
  CUtensorMap b;                  // matrices; boxes (1, tile columns, 128), or (1, 128, 128)
  CUtensorMap b_scales;           // kRow: boxes (1, tile columns)
  const int32_t* offs = nullptr;  // (groups,); null: one group of all
  int groups = 0;
  int total = 0;     // T: no group ends beyond it
  int m = 0;         // kContraction: rows of A, and of each D
  int n = 0;         // rows of B, of one group's where groups cut rows; columns of D
  int k_blocks = 0;  // of 128 contracted codes; kContraction: of all groups
  const float* square_scales = nullptr;   // kSquare: of B
  int scale_group = 0;                    // distances in it: from one group to the next,
  int scale_rows = 0;                     // from 128 rows of B,
  int scale_block = 0;                    // and from 128 codes
  bool scales_groups = false;             // kGroup, kVector
  const float* a_group_scales = nullptr;  // kGroup, kVector: (groups,) each
  const float* b_group_scales = nullptr;
  // kVector: (T,) or, with groups along the contraction, (groups, m); and (groups, n).
  const float* a_row_vector = nullptr;
  const float* b_row_vector = nullptr;
  void* d = nullptr;                // kRows: (T, n), kContraction: (groups, m, n)
  DType d_type = DType::kBFloat16;  // or kFloat32, kFloat16
  bool adds = false;                // kContraction: to what D holds
};

/// Multiplies scales in blocks; they are kSquare where groups cut rows. cudaErrorInvalidValue for a
/// tile that there is none of, here and below.
cudaError_t launch_grouped_gemm(const GroupedGemmArguments& arguments, GroupsAlong along,
                                ColumnScales scales, int tile_rows, cudaStream_t stream);
/// The same for kGroup, or kVector if there is a vector. `wide_a`: A is of E5M2, without vectors.
cudaError_t launch_grouped_gemm_scaled_by_group(const GroupedGemmArguments& arguments,
                                                GroupsAlong along, bool wide_a, int tile_rows,
                                                cudaStream_t stream);
/// The same with groups along rows and B (groups, K, N), which the kernel transposes tile by tile.
/// `by_group`: as above; else scales are kSquare.
cudaError_t launch_transposing_grouped_gemm(const GroupedGemmArguments& arguments, bool by_group,
                                            bool wide_a, int tile_rows, cudaStream_t stream);

}  // namespace qshard::cuda
