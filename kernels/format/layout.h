// Where the bytes of a quantized shard lie: the row image and the scale grid.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/format/formats.h"

namespace qshard {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// Which row images a buffer holds of a format that has two (Format::columnwise).
enum class Images : int8_t { kAll, kRowwise, kColumnwise };

/// Placement and geometry of the rows one buffer holds.
///
/// The logical tensor is `logical_rows x cols`: `logical_rows / matrix_rows` matrices of
/// `matrix_rows` rows each (one for a 2-D weight, one per expert for N-D weights). Scale blocks are
/// anchored at each matrix's row 0, never at a shard's row 0, and never span matrices.
struct Layout {
  const Format* format = nullptr;
  int64_t rows = 0;          // rows held, padding included
  int64_t cols = 0;          // K, elements per row
  int64_t logical_rows = 0;  // R
  int64_t matrix_rows = 0;   // rows per matrix; logical_rows % matrix_rows == 0
  int64_t row_offset = 0;    // logical row of row 0
  Images images = Images::kAll;
  int64_t pitch = 0;  // of one image among others (rowwise(), columnwise()): bytes from row to row
  // A shard of a stack may hold some rows of each matrix, as Shard(1) cuts it: as many as this,
  // from the same row of each on. 0: the rows held follow one another.
  int64_t rows_of_each = 0;
  // Where the logical tensor lies in the full one, which tensor parallelism cuts: the element that
  // (0, 0) is, the elements from one row to the next (0 where they are `cols`), and the rows of a
  // full matrix (0 where they are `matrix_rows`).
  int64_t first_element = 0;
  int64_t full_cols = 0;
  int64_t full_matrix_rows = 0;

  // Layouts are made of one another by these, and by the functions below; only kernels and their
  // tests fill in fields.

  /// `held` rows of the same logical tensor, padding included, from the same row on.
  Layout holding(int64_t held) const { return with(&Layout::rows, held); }
  /// Row 0 is `row` of the logical tensor.
  Layout placed(int64_t row) const { return with(&Layout::row_offset, row); }
  /// Which row images are held.
  Layout with_images(Images held) const { return with(&Layout::images, held); }
  /// The logical tensor begins with element `first` of a full one of `width` columns, whose
  /// matrices have `height` rows.
  Layout within_full_tensor(int64_t first, int64_t width, int64_t height) const {
    return with(&Layout::first_element, first)
        .with(&Layout::full_cols, width)
        .with(&Layout::full_matrix_rows, height);
  }

  /// Row image: `[K codes | zeros to 16 B | row-local scales | pad to 16 B]` per row; of two images
  /// `[rowwise row | columnwise row]`.
  int64_t code_bytes() const { return ceil_div(cols * format->code_bits, 8); }
  int64_t row_scale_offset() const { return round_up(code_bytes(), 16); }
  int64_t row_scale_bytes() const {
    const ScaleLevel& scale = format->scale;
    if (scale.is_in_grid()) return 0;
    return scale.place == ScalePlace::kSlices ? ceil_div(block_cols(), scale.block_rows)
                                              : block_cols();
  }
  int64_t image_row_bytes() const { return round_up(row_scale_offset() + row_scale_bytes(), 16); }
  int64_t row_bytes() const {
    if (pitch) return pitch;
    return has_rowwise() && has_columnwise() ? 2 * image_row_bytes() : image_row_bytes();
  }
  int64_t image_bytes() const { return rows * row_bytes(); }

  bool has_rowwise() const { return images != Images::kColumnwise; }
  bool has_columnwise() const { return format->columnwise && images != Images::kRowwise; }
  /// Where the columnwise image begins in a row.
  int64_t columnwise_offset() const { return has_rowwise() ? image_row_bytes() : 0; }
  /// The layouts of single images; their rows keep their distance.
  Layout rowwise() const { return with_images(Images::kRowwise).with(&Layout::pitch, row_bytes()); }
  Layout columnwise() const {
    return with_images(Images::kAll)
        .with(&Layout::format, format->columnwise)
        .with(&Layout::pitch, row_bytes());
  }
  /// Whether its matrices can have this format: slices of scales need whole blocks.
  bool fits() const {
    return !format->columnwise || format->columnwise->scale.begins_at(matrix_rows);
  }
  /// The image whose blocks have the most rows: shard boundaries split the blocks of this one.
  Layout coarsest_image() const { return has_columnwise() ? columnwise() : *this; }

  /// Blocks of the logical tensor: block (i, j) holds rows `[i*B, (i+1)*B)` of its matrix.
  int64_t matrices() const { return matrix_rows ? logical_rows / matrix_rows : 0; }
  int64_t block_rows_per_matrix() const { return block_rows_per_matrix(format->scale); }
  int64_t block_cols() const { return block_cols(format->scale); }
  /// Block row of a logical row.
  int64_t block_row(int64_t logical_row) const { return block_row(format->scale, logical_row); }

  /// Grid: the scales of all blocks of the level that lies there.
  int64_t grid_rows() const {
    const ScaleLevel* scale = format->grid_scale();
    return scale == nullptr ? 0 : matrices() * block_rows_per_matrix(*scale);
  }
  int64_t grid_cols() const {
    const ScaleLevel* scale = format->grid_scale();
    return scale == nullptr ? 0 : block_cols(*scale);
  }
  int64_t grid_numel() const { return grid_rows() * grid_cols(); }
  /// Grid row of a logical row; 0 of a format without a grid.
  int64_t grid_row(int64_t logical_row) const {
    const ScaleLevel* scale = format->grid_scale();
    return scale == nullptr ? 0 : block_row(*scale, logical_row);
  }

  /// Elements of the full tensor from one row to the next.
  int64_t element_pitch() const { return full_cols ? full_cols : cols; }
  /// The element of the full tensor that begins a logical row.
  int64_t element(int64_t logical_row) const {
    const int64_t row = full_matrix_rows == 0 ? logical_row
                                              : logical_row / matrix_rows * full_matrix_rows +
                                                    logical_row % matrix_rows;
    return first_element + row * element_pitch();
  }

  /// Rows held that are rows of the logical tensor: padding is none.
  int64_t live_rows() const {
    if (rows_of_each) return rows;
    const int64_t left = logical_rows - row_offset;
    return left < 0 ? 0 : left < rows ? left : rows;
  }

  /// Whether all rows of the logical tensor are held, or all that are worth anything: of one
  /// without elements, on any rank, nothing is ever copied or agreed on.
  bool holds_all_rows() const {
    return logical_rows == 0 || cols == 0 ||
           (rows_of_each == 0 && row_offset == 0 && rows >= logical_rows);
  }
  /// Whether every block that the live rows touch lies within them.
  bool owns_its_blocks() const {
    if (holds_all_rows()) return true;
    const int64_t live = live_rows();
    if (format->has_tensor_scale() || live == 0) return false;
    const ScaleLevel& scale = coarsest_image().format->scale;
    const auto is_cut = [&](int64_t row) { return !scale.begins_at(row % matrix_rows); };
    return !is_cut(row_offset) && !is_cut(row_offset + (rows_of_each ? rows_of_each : live));
  }

 private:
  int64_t block_rows_per_matrix(const ScaleLevel& scale) const {
    return scale.block_rows ? ceil_div(matrix_rows, scale.block_rows) : 1;
  }
  int64_t block_cols(const ScaleLevel& scale) const {
    return cols == 0 ? 0 : scale.block_cols ? ceil_div(cols, scale.block_cols) : 1;
  }
  int64_t block_row(const ScaleLevel& scale, int64_t logical_row) const {
    return logical_row / matrix_rows * block_rows_per_matrix(scale) +
           (scale.block_rows ? logical_row % matrix_rows / scale.block_rows : 0);
  }

  template <typename Field>
  Layout with(Field Layout::*field, std::type_identity_t<Field> value) const {
    Layout layout = *this;
    layout.*field = value;
    return layout;
  }
};

/// The shard that holds `rows` rows of each matrix of a whole tensor, from `row` of each on.
inline Layout holding_of_each(const Layout& whole, int64_t row, int64_t rows) {
  Layout layout = whole.holding(whole.matrices() * rows).placed(row);
  layout.rows_of_each = rows == whole.matrix_rows ? 0 : rows;
  return layout;
}

/// Whether the rows held follow one another in the logical tensor.
inline bool is_one_range(const Layout& layout) { return layout.rows_of_each == 0; }

/// The row of the logical tensor that a row held is.
inline int64_t logical_row(const Layout& layout, int64_t held) {
  if (is_one_range(layout)) return layout.row_offset + held;
  return layout.row_offset + held / layout.rows_of_each * layout.matrix_rows +
         held % layout.rows_of_each;
}

/// How many of `count` rows, from `held` on, follow one another in the logical tensor.
inline int64_t run_from(const Layout& layout, int64_t held, int64_t count) {
  if (is_one_range(layout)) return count;
  return std::min(count, layout.rows_of_each - held % layout.rows_of_each);
}

/// The same rows for a reader of one such run, that of row `held`: as if all followed one another.
inline Layout with_run(const Layout& layout, int64_t held) {
  Layout run = layout.placed(logical_row(layout, held) - held);
  run.rows_of_each = 0;
  return run;
}

/// A shard of `count` rows of one run alone, from row `held` on.
inline Layout run_alone(const Layout& layout, int64_t held, int64_t count) {
  return with_run(layout, held).placed(logical_row(layout, held)).holding(count);
}

/// The rows held are all of a logical tensor of its own, in matrices of `rows_of_one`.
inline Layout own_tensor(const Layout& layout, int64_t rows_of_one) {
  Layout own = layout.placed(0).within_full_tensor(0, 0, 0);
  own.rows_of_each = 0;
  own.logical_rows = layout.rows;
  own.matrix_rows = rows_of_one;
  return own;
}

/// Rows of `width` elements.
inline Layout with_cols(Layout layout, int64_t width) {
  layout.cols = width;
  return layout;
}

/// The same format by the address of one that stays.
inline Layout with_format(Layout layout, const Format& same) {
  layout.format = &same;
  return layout;
}

}  // namespace qshard
