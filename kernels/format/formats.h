// The one description of each quantized format.
//
// A new format is one entry in formats.cpp plus its kernels. All other code asks the fields for
// what it wants to know: it knows no format by name, and infers no field from another. Formulas:
// test/reference/.
#pragma once

#include <cstdint>
#include <optional>
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
  kFloat8E8M0,  // 2^(byte - 127); 255 is NaN (OCP MX v1.0); of scales alone
};

/// Bytes of one value: float32, bfloat16 or float16.
constexpr int64_t value_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// Where the scales of blocks lie (kernels/format/layout.h).
enum class ScalePlace : uint8_t {
  kGrid,    // in the fp32 grid beside the row image: scales that span rows
  kRows,    // in the row image: each row that a block touches holds the block's scale
  kSlices,  // in the row image: the rows that share blocks hold equal slices of the blocks' scales
};

/// One level of scales: a code stands for itself times the scale of each level.
struct ScaleLevel {
  DType dtype = DType::kFloat32;
  int64_t block_rows = 0;  // rows of a matrix that share a scale; 0: all of them
  int64_t block_cols = 0;  // columns that share it; 0: all of them
  ScalePlace place = ScalePlace::kGrid;
  bool power_of_two = false;  // every scale is a power of two
  /// E8M0 scales are what fp32 ones would be: 1 for a block of zeros, or with infinity or NaN.
  bool as_fp32 = false;

  constexpr bool spans_matrix() const { return block_rows == 0 && block_cols == 0; }
  /// Whether each row has one scale; in the grid, columns on other ranks share it.
  constexpr bool is_of_row() const { return block_rows == 1 && block_cols == 0; }
  constexpr bool is_in_grid() const { return place == ScalePlace::kGrid; }
  /// Whether a block begins at this row of a matrix.
  constexpr bool begins_at(int64_t row) const { return block_rows == 0 || row % block_rows == 0; }
  bool operator==(const ScaleLevel&) const = default;
};

/// How a GEMM reads the scale_inv of an operand, and of which type they are.
enum class ScaleMode : uint8_t {
  kTensor,        // one float
  kBlock1x128,    // float (ceil(k / 128), rows): one per row and 128 contracted elements
  kBlock128x128,  // float (ceil(rows / 128), round_up(ceil(k / 128), 4))
  // One per row and 32 or 16 contracted elements, in the order of kernels/gemm/swizzle_scales.h.
  // Both operands are so, on compute capability 10.0 and above.
  kBlock1x32,  // E8M0 (MXFP8)
  kBlock1x16,  // E4M3 (NVFP4)
  kRow,        // float (rows): one per row. Both operands are so
};

struct Format;

/// How the activations and gradients that meet a weight are quantized for the linear's GEMMs.
struct ActivationCodes {
  DType input_dtype;
  DType gradient_dtype;
  bool power_of_two_scales;  // every scale of a block is a power of two
  /// Codes that wgrad reads are of the random Hadamard transform along the tokens.
  bool hadamard_columns = false;
  bool stochastic_gradients = false;  // gradients are rounded stochastically
  /// What they are as row images, which GEMMs of row images read; others unpack those that arrive
  /// from another rank. Null: none.
  const Format* row_format = nullptr;
  // As PackedCodes (kernels/linear/quantized_matrix.h). Operators make these for any format, also
  // where no GEMM of it reads them.
  DType packed_input_dtype;
  DType packed_gradient_dtype;
  ScaleMode packed_rows;              // how forward and dgrad read the scales of both
  ScaleMode packed_input_columns;     // how wgrad reads those of the input
  ScaleMode packed_gradient_columns;  // how wgrad reads those of the gradient
};

/// Which GEMMs multiply the codes of a weight.
enum class GemmKind : uint8_t {
  kPacked,     // cuBLASLt's FP8: activations and gradients are PackedCodes
  kRowImages,  // cuBLASLt's block-scaled: both operands are row images
};

constexpr int kAnyLaterCapability = 1000;

struct GemmPairing {
  GemmKind kind;
  ScaleMode scale_mode;  // how a GEMM reads the scales of a weight
  /// Whether dgrad reads the weight's codes transposed: their scales are those of the transpose.
  bool transposes_weight;
  /// Whether a weight has one scale per row and its transpose none: dgrad multiplies the gradient's
  /// columns by them before it quantizes its rows.
  bool folds_row_scales = false;
  // The compute capabilities that have these GEMMs, 90 for 9.0.
  int first_capability;
  int last_capability;       // or kAnyLaterCapability
  std::string_view devices;  // the same for users: why a device has none

  constexpr bool runs_on(int capability) const {
    return first_capability <= capability && capability <= last_capability;
  }
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
  int64_t code_bits;                      // bits per code in a row image
  float code_max;                         // largest finite code, e.g. 448
  ScaleLevel scale;                       // the scales next to the codes
  std::optional<ScaleLevel> outer_scale;  // above `scale`, of fewer and larger blocks, in the grid
  ActivationCodes activations;
  GemmPairing gemm;
  AmaxHistory amax_history = {};
  bool stochastic_rounding = false;  // of codes, by flushes after an optimizer step
  int index = 0;                     // base_format() that this one is a variant of
  /// Format of a second row image of the same values, which dgrad reads; null: there is one image,
  /// for both. All rows of a matrix are in whole blocks of it, and an image's rows have as many
  /// bytes in both.
  const Format* columnwise = nullptr;
  /// Whether a block's largest value becomes code 6 or 4, whichever leaves the block the smaller
  /// squared error (arXiv:2512.02010); the scale of the matrix then leaves room for both.
  bool four_over_six = false;
  bool gathers_by_phase = false;  // forward gathers the rowwise image only, backward the columnwise
  /// Whether linears multiply dequantized codes in place of the GEMM that multiplies codes
  /// (kernels/linear/emulated_gemms.h). What is stored and sent is the same.
  bool emulated = false;

  /// The scales in the grid; null: the format has no grid.
  constexpr const ScaleLevel* grid_scale() const {
    if (scale.is_in_grid()) return &scale;
    return outer_scale && outer_scale->is_in_grid() ? &*outer_scale : nullptr;
  }
  constexpr bool has_grid() const { return grid_scale() != nullptr; }
  /// Whether a row image holds all that its rows stand for, whichever other rows there are.
  constexpr bool has_rows_of_their_own() const {
    return scale.place == ScalePlace::kRows && scale.block_rows == 1 && !has_grid() && !columnwise;
  }
  /// Whether a scale spans a whole matrix, alone or above those of its blocks.
  constexpr bool has_tensor_scale() const {
    return scale.spans_matrix() || (outer_scale && outer_scale->spans_matrix());
  }
};

/// All formats of weights without their variants, in a fixed order.
std::span<const Format> formats();
/// The formats that others are variants of: formats(), then float8_1x128 and float8_1xK, which
/// activations alone have.
constexpr int kBaseFormats = 13;
const Format& base_format(int index);

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
///   rowwise        there is no second row image    (mxfp8_1x32)
///   x_block_scaling_dim=1  inputs of wgrad in blocks of 128 tokens (float8_blockwise)
///   no_hadamard    operands of wgrad as they are   (nvfp4, nvfp4_1x16)
///   nearest_gradients  gradients rounded to nearest (nvfp4, nvfp4_1x16)
///   4over6         blocks of one row end in code 6 or 4 (nvfp4, nvfp4_1x16)
///
/// @throws std::invalid_argument naming the known formats, or the option that is wrong; or if there
/// are thousands of variants by now, which no program has but one that reads made-up files.
const Format& find_format(std::string_view name);
/// The same by value, under its base's name: nothing is remembered of it.
Format parse_format(std::string_view name);

/// The format of activations and gradients as row images, to meet a weight of `format`. Need not be
/// one of formats().
/// @throws std::invalid_argument if no GEMM of `format` reads row images.
const Format& activation_format(const Format& format);

}  // namespace qshard
