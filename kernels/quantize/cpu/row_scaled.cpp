// Formats whose block scales are bytes in the row image (MXFP8, NVFP4, rows that are sent).
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/values.h"
#include "kernels/numerics/row_scales.h"
#include "kernels/quantize/cpu/quantize_cpu.h"
#include "kernels/quantize/cpu/row_ranges.h"
#include "kernels/quantize/cpu/with_encoder.h"

namespace qshard::cpu {
namespace {

// Columns of a block.
int64_t block_width(const Layout& layout) {
  const int64_t width = layout.format->scale.block_cols;
  return width == 0 ? layout.cols : width;
}

// Rows [begin, end) of one block row of `range`, the block row that holds row `begin`.
int64_t end_of_block_row(const Layout& layout, const RowRange& range, int64_t begin) {
  const int64_t in_matrix = (range.logical_row + begin - range.begin) % layout.matrix_rows;
  const int64_t block = layout.format->scale.block_rows;
  return std::min(range.end, begin + block - in_matrix % block);
}

// The amaxes that ranks agreed on for the block row of local row `row`; null if this rank holds all
// of it.
float* boundary_amax(const QuantizeTask& task, int64_t row) {
  const Layout& layout = task.layout;
  const int64_t block_row = layout.block_row(layout.row_offset + row);
  const int64_t last = layout.row_offset + layout.live_rows() - 1;
  int64_t index = -1;
  if (block_row == layout.block_row(layout.row_offset)) {
    index = task.boundary.first;
  } else if (block_row == layout.block_row(last)) {
    index = task.boundary.last;
  }
  return index < 0 ? nullptr : task.amax + layout.grid_numel() + index * layout.block_cols();
}

// Amaxes of the blocks of one block row from rows [begin, end).
void block_amax(const QuantizeTask& task, int64_t begin, int64_t end,
                std::vector<uint32_t>& columns, std::vector<uint32_t>& blocks) {
  const Layout& layout = task.layout;
  const auto fold = row_kernels().fold_amax[static_cast<int>(task.value_dtype)];
  std::fill(columns.begin(), columns.end(), 0);
  for (int64_t row = begin; row < end; ++row) {
    fold(value_row(task, row), layout.cols, columns.data());
  }
  const int64_t width = block_width(layout);
  for (size_t j = 0; j < blocks.size(); ++j) {
    const auto first = columns.begin() + static_cast<int64_t>(j) * width;
    const int64_t count = std::min(width, layout.cols - static_cast<int64_t>(j) * width);
    blocks[j] = canonical_amax(*std::max_element(first, first + count));
  }
}

// The scale bytes of a block row that one of its rows holds: all, or its slice of them.
struct ScaleSlice {
  int64_t begin;
  int64_t count;
};

ScaleSlice scale_slice(const Layout& layout, int64_t logical_row) {
  if (layout.format->scale.place != ScalePlace::kSlices) return {0, layout.block_cols()};
  const int64_t in_block = logical_row % layout.matrix_rows % layout.format->scale.block_rows;
  const int64_t begin = std::min(in_block * layout.row_scale_bytes(), layout.block_cols());
  return {begin, std::min(layout.row_scale_bytes(), layout.block_cols() - begin)};
}

// scaled[i] = values[i] * scales[i] in fp32.
void multiply_columns(const void* values, DType dtype, const std::vector<float>& scales,
                      std::vector<float>& scaled) {
  for (size_t i = 0; i < scales.size(); ++i) {
    scaled[i] = load_value(values, dtype, static_cast<int64_t>(i)) * scales[i];
  }
}

// The scale of block j of a row, by the errors of both that it may have.
BlockScale four_over_six_scale(const void* row, const QuantizeTask& task, int64_t j, float amax,
                               float tensor_scale) {
  constexpr int kWidth = 16;
  const int64_t count = std::min<int64_t>(kWidth, task.layout.cols - j * kWidth);
  const FourOverSix scales(amax, tensor_scale);
  float six[kWidth] = {}, four[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) {
    const float x = load_value(row, task.value_dtype, j * kWidth + i);
    six[i] = nvfp4_squared_error(x, scales.six, tensor_scale);
    four[i] = nvfp4_squared_error(x, scales.four, tensor_scale);
  }
  return scales.better(sum_in_pairs(six), sum_in_pairs(four));
}

// Writes the live rows of a range; `encode` is with_encoder's, of float32 for blocks of one column.
template <bool kByColumn, typename Encode>
void quantize_rows(const QuantizeTask& task, const RowRange& range, const Encode& encode) {
  const Layout& layout = task.layout;
  const Format& format = *layout.format;
  const int64_t width = block_width(layout);
  const int64_t block_value_bytes = width * value_size(task.value_dtype);
  const int64_t block_code_bytes = width * format.code_bits / 8;
  const RowScale kind = row_scale_of(format.scale);
  const float tensor_scale =
      format.outer_scale
          ? nvfp4_tensor_scale(nvfp4_tensor_scale_inv(task.amax[layout.grid_row(range.logical_row)],
                                                      nvfp4_range(format.four_over_six)))
          : 1.f;

  std::vector<uint32_t> columns(layout.cols), blocks(layout.block_cols());
  std::vector<float> scales(blocks.size());
  std::vector<uint8_t> scale_bytes(blocks.size());
  std::vector<float> scaled(kByColumn ? layout.cols : 0);
  for (int64_t row = range.begin; row < range.end;) {
    const int64_t next = end_of_block_row(layout, range, row);
    if (const float* agreed = boundary_amax(task, row)) {
      std::memcpy(blocks.data(), agreed, blocks.size() * sizeof(float));
    } else {
      block_amax(task, row, next, columns, blocks);
    }
    for (size_t j = 0; j < blocks.size(); ++j) {
      const float amax = bits_float(blocks[j]);
      const BlockScale scale =
          format.four_over_six ? four_over_six_scale(value_row(task, row), task,
                                                     static_cast<int64_t>(j), amax, tensor_scale)
                               : block_scale(kind, amax, tensor_scale);
      scales[j] = scale.encode;
      scale_bytes[j] = scale.byte;
    }
    for (; row < next; ++row) {
      const uint8_t* x = value_row(task, row);
      uint8_t* image = task.image + row * layout.row_bytes();
      if constexpr (kByColumn) {
        multiply_columns(x, task.value_dtype, scales, scaled);
        encode(scaled.data(), layout.cols, 1.f, image);
      } else {
        for (size_t j = 0; j < blocks.size(); ++j) {
          const auto block = static_cast<int64_t>(j);
          encode(x + block * block_value_bytes, std::min(width, layout.cols - block * width),
                 scales[j], image + block * block_code_bytes);
        }
      }
      std::memset(image + layout.code_bytes(), 0, layout.row_scale_offset() - layout.code_bytes());
      const ScaleSlice slice = scale_slice(layout, range.logical_row + row - range.begin);
      uint8_t* end = std::copy_n(scale_bytes.begin() + slice.begin, slice.count,
                                 image + layout.row_scale_offset());
      std::memset(end, 0, image + layout.image_row_bytes() - end);
    }
  }
}

void store_values(const std::vector<float>& values, DType dtype, void* out) {
  if (dtype == DType::kFloat32) {
    std::copy(values.begin(), values.end(), static_cast<float*>(out));
    return;
  }
  const auto round = dtype == DType::kBFloat16 ? float_to_bfloat16 : float_to_half;
  std::transform(values.begin(), values.end(), static_cast<uint16_t*>(out), round);
}

// Writes the values of a range of rows whose blocks have one column, from all of their scales.
void dequantize_columns(const DequantizeTask& task, const RowRange& range) {
  const Layout& layout = task.layout;
  const int64_t block = layout.format->scale.block_rows;
  const auto* scale_rows = task.image + layout.row_scale_offset();
  const auto decode = row_kernels().decode[static_cast<int>(DType::kFloat32)];
  std::vector<float> scale_inv(layout.cols), values(layout.cols);
  for (int64_t row = range.begin; row < range.end; ++row) {
    const int64_t in_block = (range.logical_row + row - range.begin) % layout.matrix_rows % block;
    if (row == range.begin || in_block == 0) {
      for (int64_t j = 0; j < layout.cols; ++j) {
        const int64_t holder = row - in_block + j / layout.row_scale_bytes();
        scale_inv[j] =
            e8m0_to_float(scale_rows[holder * layout.row_bytes() + j % layout.row_scale_bytes()]);
      }
    }
    decode(task.image + row * layout.row_bytes(), layout.cols, 1.f, values.data());
    for (int64_t j = 0; j < layout.cols; ++j) {
      // Zero times NaN: a NaN scale makes every value the same NaN, whatever its code.
      values[j] = scale_inv[j] == scale_inv[j] ? values[j] * scale_inv[j] : scale_inv[j];
    }
    store_values(values, task.value_dtype,
                 static_cast<uint8_t*>(task.values) +
                     (row - task.first_row) * layout.cols * value_size(task.value_dtype));
  }
}

}  // namespace

void compute_amax_row_scaled(std::span<const QuantizeTask> tasks) {
  parallel_over(reset_amax(tasks), [&](const RowRange& range) {
    const QuantizeTask& task = tasks[range.task];
    const Layout& layout = task.layout;
    if (layout.format->outer_scale) {
      const auto amax = row_kernels().amax[static_cast<int>(task.value_dtype)];
      const uint32_t largest =
          amax(value_row(task, range.begin), (range.end - range.begin) * layout.cols);
      atomic_max(task.amax + layout.grid_row(range.logical_row), largest);
    }
    std::vector<uint32_t> columns(layout.cols), blocks(layout.block_cols());
    for (int64_t row = range.begin; row < range.end;) {
      const int64_t next = end_of_block_row(layout, range, row);
      if (float* out = boundary_amax(task, row)) {
        block_amax(task, row, next, columns, blocks);
        for (size_t j = 0; j < blocks.size(); ++j) atomic_max(out + j, blocks[j]);
      }
      row = next;
    }
  });
}

void quantize_row_scaled(std::span<const QuantizeTask> tasks) {
  for (const QuantizeTask& task : tasks) {
    const float range = nvfp4_range(task.layout.format->four_over_six);
    for (int64_t i = 0; i < task.layout.grid_numel(); ++i) {
      task.grid[i] = nvfp4_tensor_scale_inv(task.amax[i], range);
    }
  }
  parallel_over(rows_to_quantize(tasks), [&](const RowRange& range) {
    const QuantizeTask& task = tasks[range.task];
    if (!range.is_live()) return write_zeros(task, range);
    if (task.layout.format->scale.block_cols != 1) {
      with_encoder(task, range, task.value_dtype,
                   [&](const auto& encode) { quantize_rows<false>(task, range, encode); });
    } else {
      with_encoder(task, range, DType::kFloat32,
                   [&](const auto& encode) { quantize_rows<true>(task, range, encode); });
    }
  });
}

void dequantize_row_scaled(std::span<const DequantizeTask> tasks) {
  const RowKernels& kernels = row_kernels();
  parallel_over(rows_to_dequantize(tasks), [&](const RowRange& range) {
    const DequantizeTask& task = tasks[range.task];
    if (!range.is_live()) return write_zeros(task, range);
    if (task.layout.format->scale.block_cols == 1) return dequantize_columns(task, range);
    const Layout& layout = task.layout;
    const Format& format = *layout.format;
    const int64_t size = value_size(task.value_dtype);
    auto* values = static_cast<uint8_t*>(task.values);
    const int64_t row_size = layout.cols * size;
    const auto type = static_cast<int>(task.value_dtype);
    const auto decode =
        format.code_dtype == DType::kFloat4E2M1 ? kernels.decode_fp4[type] : kernels.decode[type];
    const int64_t width = block_width(layout);
    const RowScale kind = row_scale_of(format.scale);
    const float tensor_scale_inv =
        format.outer_scale ? task.grid[layout.grid_row(range.logical_row)] : 1.f;
    const std::vector<uint8_t> zeros(width);
    for (int64_t row = range.begin; row < range.end; ++row) {
      const uint8_t* codes = task.image + row * layout.row_bytes();
      const uint8_t* scale_bytes = codes + layout.row_scale_offset();
      uint8_t* x = values + (row - task.first_row) * row_size;
      for (int64_t j = 0; j < layout.block_cols(); ++j) {
        const float scale_inv = block_scale_inv(kind, scale_bytes[j], tensor_scale_inv);
        // Zero times NaN: a NaN scale makes every value the same NaN, whatever its code.
        const bool is_nan = scale_inv != scale_inv;
        decode(is_nan ? zeros.data() : codes + j * width * format.code_bits / 8,
               std::min(width, layout.cols - j * width), scale_inv, x + j * width * size);
      }
    }
  });
}

}  // namespace qshard::cpu
