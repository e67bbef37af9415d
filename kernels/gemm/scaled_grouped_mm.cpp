#include "kernels/gemm/scaled_grouped_mm.h"

#include <ATen/BlasBackend.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_grouped_mm_v2.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <exception>
#include <vector>

#include "kernels/format/layout.h"
#include "kernels/gemm/swizzle_scales.h"

namespace qshard {
namespace {

constexpr int64_t kTileRows = cuda::kScaleTileRows;
constexpr int64_t kTileCols = cuda::kScaleTileCols;

/// (batch, rows / 128, n / 4, 512): tiles, of scales (batch, rows, n).
at::Tensor tiles_of(const at::Tensor& scales) {
  const int64_t batch = scales.size(0), rows = scales.size(1), n = scales.size(2);
  const int64_t tile_rows = ceil_div(rows, kTileRows), tile_cols = ceil_div(n, kTileCols);
  return at::constant_pad_nd(scales,
                             {0, tile_cols * kTileCols - n, 0, tile_rows * kTileRows - rows})
      .reshape({batch, tile_rows, kTileRows / 32, 32, tile_cols, kTileCols})
      .permute({0, 1, 4, 3, 2, 5})
      .reshape({batch, tile_rows, tile_cols, cuda::kScaleTileBytes});
}

/// Tiles of one matrix as its scales have sizes.
at::Tensor as_matrix(const at::Tensor& tiles, int64_t tile_rows, int64_t tile_cols) {
  return tiles.view({tile_rows * kTileRows, tile_cols * kTileCols});
}

}  // namespace

at::Tensor swizzled(const at::Tensor& scales) {
  if (scales.dim() == 3) return tiles_of(scales).flatten(1);
  const at::Tensor tiles = tiles_of(scales.unsqueeze(0));
  return as_matrix(tiles, tiles.size(1), tiles.size(2));
}

at::Tensor swizzled_by_group(const at::Tensor& scales, const at::Tensor& ends) {
  const at::Tensor tiles = tiles_of(scales.unsqueeze(0)).squeeze(0);
  const int64_t rows = tiles.size(0), cols = tiles.size(1);
  const auto longs = ends.options().dtype(at::kLong);
  // Tiles behind the last group are one more.
  const at::Tensor stops =
      at::constant_pad_nd(ends.div(kTileCols, "floor").to(at::kLong), {0, 1}, cols);
  const at::Tensor col = at::arange(cols, longs);
  const at::Tensor group = at::searchsorted(stops, col, /*out_int32=*/false, /*right=*/true);
  const at::Tensor begin = at::constant_pad_nd(stops, {1, -1}).index_select(0, group);
  const at::Tensor count = stops.index_select(0, group) - begin;
  const at::Tensor place =
      at::arange(rows, longs).unsqueeze(1) * count + (col - begin) + begin * rows;
  at::Tensor sorted = at::empty_like(tiles);
  sorted.view({rows * cols, -1}).index_copy_(0, place.flatten(), tiles.view({rows * cols, -1}));
  return as_matrix(sorted, rows, cols);
}

bool has_scaled_grouped_mm(at::Device device) {
  static const c10::OperatorHandle op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::_scaled_grouped_mm_v2", "");
  const auto key = c10::computeDispatchKey(at::kByte, at::kStrided, device);
  return op.hasKernelForDispatchKey(key);
}

bool tries_scaled_grouped_mm(ScaleMode mode, at::Device device) {
  constexpr int64_t kRows = 128, kContracted = 128;
  const bool is_nvfp4 = mode == ScaleMode::kBlock1x16;
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(device);
  BlockScaledCodes a;
  a.codes = at::zeros({kRows, is_nvfp4 ? kContracted / 2 : kContracted}, bytes);
  a.scales = swizzled(at::zeros({kRows, kContracted / (is_nvfp4 ? 16 : 32)}, bytes));
  if (is_nvfp4) a.tensor_scales = at::zeros({1}, bytes.dtype(at::kFloat));
  BlockScaledCodes b = a;
  b.codes = a.codes.unsqueeze(0);
  b.scales = a.scales.view({1, -1});
  try {
    scaled_grouped_mm(mode, a, b, at::full({1}, kRows, bytes.dtype(at::kInt)));
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

at::Tensor scaled_grouped_mm(ScaleMode mode, const BlockScaledCodes& a, const BlockScaledCodes& b,
                             const at::Tensor& ends) {
  const bool is_nvfp4 = mode == ScaleMode::kBlock1x16;
  const auto code_type = is_nvfp4 ? at::kFloat4_e2m1fn_x2 : at::kFloat8_e4m3fn;
  const auto scale_type = is_nvfp4 ? at::kFloat8_e4m3fn : at::kFloat8_e8m0fnu;
  const auto scales_of = [&](const BlockScaledCodes& operand) {
    std::vector<at::Tensor> scales{operand.scales.view(scale_type)};
    if (is_nvfp4) scales.push_back(operand.tensor_scales);
    return scales;
  };
  using at::blas::ScalingType;
  using at::blas::SwizzleType;
  std::vector<int64_t> recipe{
      static_cast<int64_t>(is_nvfp4 ? ScalingType::BlockWise1x16 : ScalingType::BlockWise1x32)};
  std::vector<int64_t> swizzle{static_cast<int64_t>(SwizzleType::SWIZZLE_32_4_4)};
  if (is_nvfp4) {
    recipe.push_back(static_cast<int64_t>(ScalingType::TensorWise));
    swizzle.push_back(static_cast<int64_t>(SwizzleType::NO_SWIZZLE));
  }
  const std::vector<at::Tensor> scales_a = scales_of(a), scales_b = scales_of(b);
  try {
    return at::_scaled_grouped_mm_v2(
        a.codes.view(code_type), b.codes.view(code_type).transpose(-2, -1),
        at::TensorList(scales_a), recipe, swizzle, at::TensorList(scales_b), recipe, swizzle, ends,
        /*bias=*/std::nullopt, at::kBFloat16);
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {  // CUTLASS's
    TORCH_CHECK(false,
                fmt::format("qshard::grouped_linear: _scaled_grouped_mm_v2 of codes {} and {} "
                            "failed: {}. With weight_only=True experts multiply dequantized "
                            "values",
                            a.codes.sizes(), b.codes.sizes(), error.what()));
  }
}

}  // namespace qshard
