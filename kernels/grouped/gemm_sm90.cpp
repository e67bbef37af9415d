#include "kernels/grouped/gemm_sm90.h"

#include <algorithm>
#include <limits>

#include "kernels/format/layout.h"

namespace qshard::cuda {
namespace {

constexpr int64_t kDepth = 128;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver is loaded by then, and linking with it would keep the library from loading elsewhere.
EncodeTiled encode_tiled() {
  static const EncodeTiled found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
    const bool is_there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
  }();
  return found;
}

// Boxes of (box_rows, box_columns) of a matrix. What lies outside of it reads as zero.
bool encode(CUtensorMap& map, CUtensorMapDataType type, const void* matrix, int64_t rows,
            int64_t columns, int64_t row_bytes, int64_t box_rows, int64_t box_columns,
            CUtensorMapSwizzle swizzle) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns),
                            static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const EncodeTiled encode = encode_tiled();
  return encode != nullptr &&
         encode(&map, type, 2, const_cast<void*>(matrix), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_codes(CUtensorMap& map, const GroupedCodes& operand, int64_t box_rows) {
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, operand.codes, operand.rows, operand.columns,
                operand.ld, box_rows, kDepth, CU_TENSOR_MAP_SWIZZLE_128B);
}

// `paired`: two of them as one element.
bool encode_scales(CUtensorMap& map, const GroupedCodes& operand, int64_t box, bool paired) {
  const int64_t blocks = ceil_div(operand.columns, kDepth);
  const int64_t each = paired ? 2 : 1;
  return encode(map, paired ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                operand.scales, blocks, operand.scale_ld / each, operand.scale_ld * 4, 1,
                box / each, CU_TENSOR_MAP_SWIZZLE_NONE);
}

bool fits_int(int64_t size) { return size <= std::numeric_limits<int>::max(); }

}  // namespace

int tile_rows_for(const GroupedGemm& gemm) {
  if (gemm.along == GroupsAlong::kContraction) {
    const int64_t rows = gemm.a.rows;
    return rows <= 64 ? 64 : rows <= 128 ? 128 : 256;
  }
  // Measured with even loads and with those of 0.7 to 1.3 of the mean, of which tall tiles leave
  // more unused. 128 rows were the best height at no mean.
  return gemm.total / std::max<int64_t>(gemm.groups, 1) <= 384 ? 64 : 256;
}

cudaError_t grouped_gemm_sm90(const GroupedGemm& gemm, int tile_rows, cudaStream_t stream) {
  const bool cuts_rows = gemm.along == GroupsAlong::kRows;
  const int64_t m = cuts_rows ? gemm.total : gemm.a.rows;
  if (m == 0 || gemm.n == 0 || (!cuts_rows && gemm.groups == 0)) return cudaSuccess;
  const int64_t out_rows = cuts_rows ? gemm.total : gemm.groups * m;
  if (!fits_int(out_rows) || !fits_int(gemm.a.columns) || !fits_int(gemm.b.rows) ||
      !fits_int(gemm.groups * gemm.square_scales.group)) {
    return cudaErrorInvalidValue;
  }
  const bool has_row_scales = gemm.b.scales != nullptr;
  const bool by_group = gemm.a.group_scales != nullptr;
  GroupedGemmArguments arguments = {};
  arguments.offs = gemm.offs;
  arguments.groups = static_cast<int>(gemm.groups);
  arguments.total = static_cast<int>(gemm.total);
  arguments.m = static_cast<int>(m);
  arguments.n = static_cast<int>(gemm.n);
  arguments.b_rows = static_cast<int>(gemm.b_rows);
  arguments.d = gemm.d;
  arguments.d_type = gemm.d_type;
  arguments.adds = gemm.adds;
  // No codes: nothing is copied, and the copy engine has no map of them.
  if (gemm.groups != 0 && gemm.a.columns != 0) {
    const int columns = columns_of_tile(tile_rows);
    if (!encode_codes(arguments.a, gemm.a, tile_rows) ||
        (!by_group &&
         !encode_scales(arguments.a_scales, gemm.a, tile_rows + kScaleMargin, /*paired=*/true)) ||
        !encode_codes(arguments.b, gemm.b, columns) ||
        (has_row_scales && !encode_scales(arguments.b_scales, gemm.b, columns, /*paired=*/false))) {
      return cudaErrorInvalidValue;
    }
    arguments.k_blocks = static_cast<int>(ceil_div(gemm.a.columns, kDepth));
    arguments.a_group_scales = gemm.a.group_scales;
    arguments.b_group_scales = gemm.b.group_scales;
    arguments.square_scales = gemm.square_scales.scales;
    arguments.scale_group = static_cast<int>(gemm.square_scales.group);
    arguments.scale_rows = static_cast<int>(gemm.square_scales.rows);
    arguments.scale_block = static_cast<int>(gemm.square_scales.block);
  }
  if (by_group) {
    return launch_grouped_gemm_scaled_by_group(arguments, gemm.along, gemm.a.is_wide, tile_rows,
                                               stream);
  }
  return launch_grouped_gemm(arguments, gemm.along,
                             has_row_scales ? ColumnScales::kRow : ColumnScales::kSquare, tile_rows,
                             stream);
}

}  // namespace qshard::cuda
