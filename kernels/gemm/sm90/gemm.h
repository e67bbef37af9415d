// Hopper's GEMM of FP8 codes, for many groups or one: one launch for all, whose ends stay on the
// device. Plain memory: no torch.
#pragma once

#include "kernels/gemm/sm90/kernels.h"

namespace qshard::cuda {

/// FP8 codes, `rows` rows of `columns` that are contracted, `ld` bytes apart: E4M3, or A's E5M2.
struct GroupedCodes {
  const uint8_t* codes = nullptr;  // 16-byte aligned
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t ld = 0;  // a multiple of 16
  // One for each row and 128 codes: (ceil(columns / 128), scale_ld), 16-byte aligned. Null: B's are
  // GroupedGemm::square_scales, or both have group_scales.
  const float* scales = nullptr;
  int64_t scale_ld = 0;  // a multiple of 4, at least `rows`
  // One for each group, (groups,), or one for each row: of A (T,), or (groups, m) where groups are
  // along the contraction, of B (groups, n). Both operands have one of these, or none has.
  const float* group_scales = nullptr;
  const float* row_vector = nullptr;
  bool is_wide = false;  // E5M2

  bool has_constant_scales() const { return group_scales != nullptr || row_vector != nullptr; }
};

/// Scales of 128x128 blocks of B wherever they lie: distances from one group to the next, from 128
/// rows of B to the next, from 128 contracted codes to the next.
struct SquareScales {
  const float* scales = nullptr;
  int64_t group = 0;
  int64_t rows = 0;
  int64_t block = 0;
};

/// Groups along rows: D (T, n) with rows [offs[e - 1], offs[e]) = those of A (T, k) @ B[e]^T, where
/// the first n of B's rows for each group are multiplied; rows from offs[-1] on are zero. With
/// `transposes_b`, they are those of A @ B[e], whose first n columns are multiplied.
/// Groups along the contraction: D (groups, m, n), D[e] = A[:, e] @ B[:, e]^T of A (m, T') and
/// B (n, T'), where a group's columns begin at a multiple of 128 and are zero up to the next one's.
/// Ends are clamped: to T, and to the one before.
struct GroupedGemm {
  GroupedCodes a;
  GroupedCodes b;
  SquareScales square_scales;
  GroupsAlong along = GroupsAlong::kRows;
  const int32_t* offs = nullptr;  // (groups,), on the device; null: one group of all
  int64_t groups = 0;
  int64_t total = 0;  // T
  int64_t n = 0;
  bool transposes_b = false;        // groups along rows: B is (groups, k, at least n)
  void* d = nullptr;                // 16-byte aligned
  DType d_type = DType::kBFloat16;  // or kFloat32, kFloat16
  bool adds = false;  // groups along the contraction: D += the product, which is rounded before. A
                      // group without columns leaves its part of D as it is.
};

/// The height of its tiles, by rows per group, which the host knows.
int tile_rows_for(const GroupedGemm& gemm);

/// Runs on the current device, which is one of compute capability 9.0.
/// @return cudaErrorInvalidValue for alignments that the copy engine does not take.
cudaError_t grouped_gemm_sm90(const GroupedGemm& gemm, int tile_rows, cudaStream_t stream);

}  // namespace qshard::cuda
