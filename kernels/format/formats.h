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

/// How the row image holds the scale of a block: one byte in each row that the block touches, or in
/// one of them (Format::scales_in_slices).
enum class RowScale : uint8_t {
  kNone,  // it does not: scales of blocks are entries of the grid
  kE8M0,  // 2^(byte - 127); 255 is NaN (OCP MX v1.0)
  kE4M3,  // times the matrix's own fp32 scale, which is in the grid (NVFP4)
};

/// Delayed scaling: scales from the amaxes of earlier optimizer steps
/// (kernels/scaling/scaling_state.h).
struct AmaxHistory {
  int64_t length = 0;        // steps remembered; 0: scales follow the current amax
  int margin = 0;            // scales are 2^-margin of what the amax allows
  bool most_recent = false;  // use the latest amax, not the largest remembered
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
  AmaxHistory amax_history = {};
  bool stochastic_rounding = false;  // of codes, by flushes after an optimizer step
  int index = 0;                     // of the entry in formats() that this one is a variant of
  /// Format of a second row image of the same values, which dgrad reads; null: there is one image,
  /// for both. All rows of a matrix are in whole blocks of it, and an image's rows have as many
  /// bytes in both.
  const Format* columnwise = nullptr;
  bool gathers_by_phase = false;  // forward gathers the rowwise image only, backward the columnwise
  /// Block shape of the scales of inputs that wgrad reads: 1 = 1x128 along the tokens, 2 = 128x128.
  /// Inputs that forward reads have blocks of 1x128.
  int x_block_scaling_dim = 1;  // 2 of float8_blockwise
  /// Rows that share blocks hold the blocks' scales in equal slices, one slice a row; otherwise
  /// each of them holds them all.
  bool scales_in_slices = false;
  /// Whether linears multiply dequantized codes in place of the GEMM that multiplies codes
  /// (kernels/linear/emulated_gemms.h). What is stored and sent is the same.
  bool emulated = false;

  /// Whether the grid holds the scale of every block.
  constexpr bool scales_in_grid() const { return row_scale == RowScale::kNone; }
  /// Whether one fp32 scale spans a whole matrix, alone or above those of its blocks.
  constexpr bool has_tensor_scale() const {
    return row_scale == RowScale::kE4M3 || (scales_in_grid() && block_rows == 0);
  }
  /// Scales that span rows live in an fp32 grid beside the row image.
  constexpr bool has_grid() const { return scales_in_grid() || has_tensor_scale(); }
};

/// All formats without their variants, in a fixed order.
std::span<const Format> formats();

/// The format of a name and of options in brackets, such as `nvfp4[stochastic]` or
/// `float8_delayed[margin=1,history=16,most_recent,e4m3]`. Equal formats are one object; its `name`
/// leaves out what is the default. Never freed; safe to call from any thread.
///
///   stochastic     round codes stochastically after optimizer steps (any format)
///   emulate        linears compute what GEMMs of codes compute, on any device (any format)
///   margin=N       N >= 0, default 0          (float8_delayed)
///   history=N      N >= 1, default 1024       (float8_delayed)
///   most_recent    of the history, not the largest (float8_delayed)
///   e4m3           gradients in E4M3, not E5M2     (float8_delayed)
///   phase          gather one row image per pass   (mxfp8_1x32)
///   x_block_scaling_dim=1  inputs of wgrad in blocks of 128 tokens (float8_blockwise)
///
/// @throws std::invalid_argument naming the known formats, or the option that is wrong; or if there
/// are thousands of variants by now, which no program has but one that reads made-up files.
const Format& find_format(std::string_view name);
/// The same by value, under its base's name: nothing is remembered of it.
Format parse_format(std::string_view name);

/// How activations and gradients are quantized to meet a weight of `format`, one with row-local
/// scales: as it is, in blocks of one row. Need not be one of formats().
const Format& activation_format(const Format& format);

}  // namespace qshard
