// A quantized matrix as GEMMs read it: weights, activations and gradients alike.
#pragma once

#include <ATen/core/Tensor.h>

#include <variant>

#include "kernels/format/layout.h"
#include "kernels/gemm/gemm.h"
#include "kernels/statistics/tally.h"
#include "kernels/tensors/read_only_tensor.h"

namespace qshard {

/// Which codes of a matrix (M, K) there are, or are asked for.
struct Orientations {
  bool rowwise = false;     // (M, K): GEMMs contract along K
  bool columnwise = false;  // of the transpose (K, M): along M
};

/// How codes and scales lie in memory.
enum class OperandLayout : uint8_t {
  kRowImage,  // RowImage: weights, and what block-scaled GEMMs read
  kPacked,    // PackedCodes: activations and gradients as FP8 GEMMs read them
};

/// Rows of codes with row-local scales, and the scales that span rows (kernels/format/layout.h).
/// The matrix's rows begin at `first_row`. Codes are zero up to a multiple of 16 bytes, which
/// cuBLASLt wants a row to have.
struct RowImage {
  Layout layout;
  ReadOnlyTensor
      image;  // uint8 (layout.rows, layout.row_bytes()); rows from logical_rows on are zero
  ReadOnlyTensor grid;  // float32 (layout.grid_numel(),), undefined or empty if the format has none
  int64_t first_row = 0;
};

/// Rows of one-byte codes without gaps, then their fp32 scales, then unwritten padding. Codes
/// beyond the matrix are zero.
struct PackedCodes {
  at::Tensor buffer;  // uint8, contiguous: packed_rowwise_bytes or packed_columnwise_bytes
  int64_t rows = 0;   // padding included
  int64_t ld = 0;     // codes, and bytes, from row to row; a multiple of 16
  ScaleMode scale_mode = ScaleMode::kTensor;  // or kRow, kBlock1x128, kBlock128x128
  at::Tensor other_scales = {};  // float32, in the place of those in the buffer, if defined

  int64_t code_bytes() const { return rows * ld; }
  /// float32 of one dimension: those that are used, in the order in which the buffer has them.
  at::Tensor scales() const;
  /// Where they lie, for GEMMs, which need no tensor of them.
  const float* scale_data() const;
  /// The same of codes that are being made.
  float* mutable_scale_data() const;
};

/// The codes of one orientation, if there are any.
using CodeImage = std::variant<std::monostate, RowImage, PackedCodes>;

/// Codes of a matrix (M, K) in the orientations that were asked for.
///
/// A weight's row image is its rowwise one and serves both orientations: where blocks are square by
/// its transpose, where the format has two images (Format::columnwise) by the second of them.
struct QuantizedMatrix {
  const Format* format = nullptr;  // a weight's own; else that of the weight it meets
  DType code_dtype = DType::kFloat8E4M3;
  int64_t rows = 0;  // M
  int64_t cols = 0;  // K
  CodeImage rowwise = {};
  CodeImage columnwise = {};

  /// Whether all orientations asked for are there.
  bool has(Orientations asked, OperandLayout operand_layout) const;
  /// A weight's.
  /// @throws std::bad_variant_access if the rowwise codes are no row image.
  const RowImage& row_image() const { return std::get<RowImage>(rowwise); }
};

/// The bytes of `codes`, to be read; undefined if they are none.
at::Tensor bytes_of(const CodeImage& codes);

/// Rows [image.first_row, image.first_row + rows) of a row image.
QuantizedMatrix matrix_of(RowImage image, int64_t rows);

/// What a packed matrix is to its linear.
enum class OperandRole : uint8_t { kInput, kGradient };

// How packed activations and gradients that meet a weight of `format` are quantized.

inline DType packed_code_dtype(const Format& format, OperandRole role) {
  const ActivationCodes& codes = format.activations;
  return role == OperandRole::kInput ? codes.packed_input_dtype : codes.packed_gradient_dtype;
}

/// By one scale, by one per row, or in blocks of 1x128.
inline ScaleMode packed_scale_mode(const Format& format) { return format.activations.packed_rows; }
/// Whether it is one per row: no kernel that computes values finds such scales in its pass.
inline bool has_scale_per_row(const Format& format) {
  return packed_scale_mode(format) == ScaleMode::kRow;
}

/// The same for columnwise codes, which wgrad reads: an input's may have blocks of 128x128.
inline ScaleMode packed_columns_scale_mode(const Format& format, OperandRole role) {
  const ActivationCodes& codes = format.activations;
  return role == OperandRole::kInput ? codes.packed_input_columns : codes.packed_gradient_columns;
}

/// Whether operands of linears with such a weight are packed, and scaled by their own amaxes.
inline bool scales_by_itself(const Format& format) {
  return format.gemm.kind == GemmKind::kPacked && format.amax_history.length == 0;
}
/// Whether gradients can be quantized where the weight that they meet is not at hand.
inline bool gives_gradients_in_codes(const Format& format) {
  return scales_by_itself(format) && !format.gemm.folds_row_scales;
}

/// Bytes of a packed matrix (m, k) in one orientation, for every format alike: enough for the
/// scales of blocks of 1x128.
int64_t packed_rowwise_bytes(int64_t m, int64_t k);
int64_t packed_columnwise_bytes(int64_t m, int64_t k);

/// A packed matrix (m, k) to meet a weight of `format`: its codes in buffers of those bytes. An
/// undefined one's orientation is not there.
QuantizedMatrix packed_matrix(const Format& format, OperandRole role, int64_t m, int64_t k,
                              const at::Tensor& rowwise, const at::Tensor& columnwise);

/// The matrix of these codes whose values are `factor` times as large: float32 (1,) beside it.
QuantizedMatrix multiplied(QuantizedMatrix packed, const at::Tensor& factor);

// Packed codes as torch's tensors: views.

/// The codes without their scales: float8 (rows, ld).
at::Tensor packed_codes(const PackedCodes& codes, DType code_dtype);
/// The scales of codes in blocks: float32 (rows, ceil(ld / 128)), that of each 128 codes of a row.
at::Tensor packed_block_scales(const PackedCodes& codes);

/// The rowwise codes beside the `values` that they were made of, (M, K), contiguous, which must
/// outlive the result. `column_factors`: as OperandRequest has them, or undefined.
/// @throws c10::Error for no rowwise codes.
CodedMatrix coded_matrix(const QuantizedMatrix& matrix, const ReadOnlyTensor& values,
                         const at::Tensor& column_factors = {});

/// The scales of a weight (N, K) whose format has one per row: float32 (N,), a view.
at::Tensor weight_row_scales(const QuantizedMatrix& weight);

/// Values (M, K) of a matrix in `dtype`: code * scale_inv, from the rowwise codes if there are any.
/// @throws c10::Error for no codes, and for columnwise ones after the random Hadamard transform.
at::Tensor dequantized(const QuantizedMatrix& matrix, at::ScalarType dtype);

/// The values of a weight by its second, columnwise image, if the format has one; else as
/// dequantized().
at::Tensor dequantized_columnwise(const QuantizedMatrix& weight, at::ScalarType dtype);

}  // namespace qshard
