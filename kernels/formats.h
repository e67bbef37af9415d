// The one description of each quantized format.
//
// A new format is one entry in formats.cpp plus its kernels; nothing in dispatch/ or fsdp/ knows a
// format by name. Formulas: test/reference/.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace qshard {

/// Element types as the kernels see them. Codes of a packed format are `kUInt8`.
enum class DType : uint8_t {
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat8E4M3,  // OCP OFP8 E4M3 ("fn": no infinity, largest finite 448)
  kFloat8E5M2,  // OCP OFP8 E5M2 (largest finite 57344)
  kUInt8,
};

struct Format {
  std::string_view name;
  DType code_dtype;
  int64_t code_bits;         // bits per code in a row image
  float code_max;            // largest finite code, e.g. 448
  int64_t block_rows;        // rows sharing one scale; 0: the whole matrix
  int64_t block_cols;        // columns sharing one scale; 0: the whole matrix
  int64_t row_scale_cols;    // columns per row-local scale byte; 0: no scales inside the row image
  bool power_of_two_scales;  // scale rounded down to a power of two (mantissa cleared)
  DType grad_dtype;          // code dtype of gradients in this format's linear

  /// Scales that span rows live in an fp32 grid beside the row image.
  constexpr bool has_grid() const { return row_scale_cols == 0; }
};

/// All formats, in a fixed order (their index is stable within a build, not across builds).
std::span<const Format> formats();

/// @throws std::invalid_argument naming the known formats.
const Format& find_format(std::string_view name);

}  // namespace qshard
