// The one description of each quantized format.
//
// A new format is one entry in formats.cpp plus its kernels; nothing in dispatch/ or fsdp/ knows a
// format by name. Formulas: test/reference/.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace qshard {

/// Element types as the kernels see them.
enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3,  // OCP OFP8 E4M3 ("fn": no infinity, largest finite 448)
  kFloat8E5M2,  // OCP OFP8 E5M2 (largest finite 57344)
  kFloat4E2M1,  // OCP FP4: 0, .5, 1, 1.5, 2, 3, 4, 6; two codes per byte, the first in the low
                // nibble
};

/// Bytes of one value: float32, bfloat16 or float16.
constexpr int64_t value_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// How the row image holds the scale of a block: one byte in each row that the block touches.
enum class RowScale : uint8_t {
  kNone,  // it does not: scales of blocks are entries of the grid
  kE8M0,  // 2^(byte - 127); 255 is NaN (OCP MX v1.0)
  kE4M3,  // times the matrix's own fp32 scale, which is in the grid (NVFP4)
};

struct Format {
  std::string_view name;
  DType code_dtype;
  int64_t code_bits;   // bits per code in a row image
  float code_max;      // largest finite code, e.g. 448
  int64_t block_rows;  // rows sharing one scale; 0: the whole matrix
  int64_t block_cols;  // columns sharing one scale; 0: the whole matrix
  RowScale row_scale;
  bool power_of_two_scales;  // every scale is a power of two
  DType grad_dtype;          // code dtype of gradients in this format's linear

  /// Whether the grid holds the scale of every block.
  constexpr bool scales_in_grid() const { return row_scale == RowScale::kNone; }
  /// Whether one fp32 scale spans a whole matrix, alone or above those of its blocks.
  constexpr bool has_tensor_scale() const {
    return row_scale == RowScale::kE4M3 || (scales_in_grid() && block_rows == 0);
  }
  /// Scales that span rows live in an fp32 grid beside the row image.
  constexpr bool has_grid() const { return scales_in_grid() || has_tensor_scale(); }
};

/// All formats, in a fixed order (their index is stable within a build, not across builds).
std::span<const Format> formats();

/// @throws std::invalid_argument naming the known formats.
const Format& find_format(std::string_view name);

}  // namespace qshard
