#include "kernels/gemm/sm90/gemm.h"

#include <algorithm>
#include <limits>

#include "kernels/format/layout.h"

namespace qshard::cuda {
namespace {

constexpr int64_t kDepth = 128;
// An H100 or H200 has as many; fewer tiles than that would leave some of them idle.
constexpr int64_t kMultiprocessors = 132;

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

/// Where matrices lie, one after the other, and the box of one of them that a copy takes.
struct Boxes {
  int64_t rows;  // each matrix has as many
  int64_t columns;
  int64_t row_bytes;
  int64_t matrices;  // 0: the map has no such dimension
  int64_t box_rows;
  int64_t box_columns;
};

// What lies outside of a matrix reads as zero.
bool encode(CUtensorMap& map, CUtensorMapDataType type, const void* first, const Boxes& boxes,
            CUtensorMapSwizzle swizzle) {
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[] = {size(boxes.columns), size(boxes.rows), size(boxes.matrices)};
  const cuuint64_t strides[] = {size(boxes.row_bytes), size(boxes.rows * boxes.row_bytes)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(boxes.box_columns),
                            static_cast<cuuint32_t>(boxes.box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  const EncodeTiled encode = encode_tiled();
  return encode != nullptr &&
         encode(&map, type, boxes.matrices == 0 ? 2 : 3, const_cast<void*>(first), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

bool encode_codes(CUtensorMap& map, const GroupedCodes& operand, int64_t matrices,
                  int64_t box_rows) {
  const int64_t rows = matrices == 0 ? operand.rows : operand.rows / matrices;
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, operand.codes,
                {rows, operand.columns, operand.ld, matrices, box_rows, kDepth},
                CU_TENSOR_MAP_SWIZZLE_128B);
}

// `paired`: two of them as one element.
bool encode_scales(CUtensorMap& map, const GroupedCodes& operand, int64_t box, bool paired) {
  const int64_t blocks = ceil_div(operand.columns, kDepth);
  const int64_t each = paired ? 2 : 1;
  return encode(map, paired ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                operand.scales,
                {blocks, operand.scale_ld / each, operand.scale_ld * 4, 0, 1, box / each},
                CU_TENSOR_MAP_SWIZZLE_NONE);
}

bool fits_int(int64_t size) { return size <= std::numeric_limits<int>::max(); }

}  // namespace

int tile_rows_for(const GroupedGemm& gemm) {
  if (gemm.along == GroupsAlong::kContraction) {
    const int64_t rows = gemm.a.rows;
    if (rows <= 128) return rows <= 64 ? 64 : 128;
    const int64_t tiles = ceil_div(rows, 256) * ceil_div(gemm.n, columns_of_tile(256));
    return tiles * gemm.groups < kMultiprocessors ? 128 : 256;
  }
  // Measured with even loads and with those of 0.7 to 1.3 of the mean, of which tall tiles leave
  // more unused. Low tiles have B transposed more often; otherwise 128 rows were the best at no
  // mean.
  const int64_t rows = gemm.total / std::max<int64_t>(gemm.groups, 1);
  if (rows > 384) return 256;
  return gemm.transposes_b && rows > 96 ? 128 : 64;
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
  const bool by_group = gemm.a.has_constant_scales();
  GroupedGemmArguments arguments = {};
  arguments.offs = gemm.offs;
  arguments.groups = static_cast<int>(gemm.groups);
  arguments.total = static_cast<int>(gemm.total);
  arguments.m = static_cast<int>(m);
  arguments.n = static_cast<int>(gemm.n);
  arguments.d = gemm.d;
  arguments.d_type = gemm.d_type;
  arguments.adds = gemm.adds;
  // No codes: nothing is copied, and the copy engine has no map of them.
  if (gemm.groups != 0 && gemm.a.columns != 0) {
    const int columns = columns_of_tile(tile_rows);
    const int64_t matrices = cuts_rows ? gemm.groups : 1;
    if (!encode_codes(arguments.a, gemm.a, 0, tile_rows) ||
        (!by_group &&
         !encode_scales(arguments.a_scales, gemm.a, tile_rows + kScaleMargin, /*paired=*/true)) ||
        !encode_codes(arguments.b, gemm.b, matrices, gemm.transposes_b ? kDepth : columns) ||
        (has_row_scales && !encode_scales(arguments.b_scales, gemm.b, columns, /*paired=*/false))) {
      return cudaErrorInvalidValue;
    }
    arguments.k_blocks = static_cast<int>(ceil_div(gemm.a.columns, kDepth));
    arguments.scales_groups = by_group;
    arguments.a_group_scales = gemm.a.group_scales;
    arguments.b_group_scales = gemm.b.group_scales;
    arguments.a_row_vector = gemm.a.row_vector;
    arguments.b_row_vector = gemm.b.row_vector;
    arguments.square_scales = gemm.square_scales.scales;
    arguments.scale_group = static_cast<int>(gemm.square_scales.group);
    arguments.scale_rows = static_cast<int>(gemm.square_scales.rows);
    arguments.scale_block = static_cast<int>(gemm.square_scales.block);
  }
  if (gemm.transposes_b) {
    return launch_transposing_grouped_gemm(arguments, by_group, gemm.a.is_wide, tile_rows, stream);
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
