// What the kernel tests share: a slow reference from torch's own FP8 types, cases, memory.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/format/value_dtype.h"
#include "kernels/numerics/float8.h"
#include "kernels/quantize/quantize.h"
#include "test/cpp/cases/row_scale_reference.h"
#include "test/cpp/cases/stochastic_reference.h"
#ifdef QSHARD_WITH_CUDA
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace qshard::testing {

inline std::vector<at::Device> devices() {
  std::vector<at::Device> out{at::kCPU};
#ifdef QSHARD_WITH_CUDA
  if (c10::cuda::device_count() > 0) out.emplace_back(at::kCUDA, 0);
#endif
  return out;
}

inline Stream stream_of([[maybe_unused]] at::Device device) {
#ifdef QSHARD_WITH_CUDA
  if (device.is_cuda()) return {true, c10::cuda::getCurrentCUDAStream().stream()};
#endif
  return {};
}

/// A shard: its rows, and where they are in what.
struct Shape {
  int64_t rows, cols, logical_rows, matrix_rows, row_offset;
};

inline const Shape kShapes[] = {
    {1, 1, 1, 1, 0},          {128, 128, 128, 128, 0},
    {256, 512, 256, 256, 0},  {300, 200, 300, 300, 0},
    {130, 129, 130, 130, 0},  {5, 0, 5, 5, 0},
    {0, 16, 0, 0, 0},         {0, 16, 256, 256, 128},
    {77, 264, 300, 300, 100},  // begins and ends inside a block
    {300, 136, 512, 512, 60},  // three blocks' rows, none of them whole at the ends
    {140, 31, 300, 300, 200},  // 100 rows, then padding
    {9, 48, 300, 300, 300},    // padding only
    {9, 48, 300, 300, 300},    // padding alone, of a rank without rows
    {390, 64, 390, 130, 0},    // three matrices, a block and two rows each
    {200, 80, 390, 130, 120},  // crosses two matrices
    {12, 20, 12, 3, 0},        // matrices smaller than a block
    {600, 40, 512, 256, 0},    // whole, with padding
};

/// The layout with matrices of so many more rows as its format asks for.
inline Layout fitted(Layout layout) {
  if (!layout.format->columnwise) return layout;
  const int64_t matrices = layout.matrices();
  layout.matrix_rows = round_up(layout.matrix_rows, layout.format->columnwise->scale.block_rows);
  layout.logical_rows = matrices * layout.matrix_rows;
  return layout;
}

struct Quantized {
  at::Tensor amax;   // float32 (amax_numel,)
  at::Tensor grid;   // float32 (grid_rows, grid_cols)
  at::Tensor image;  // uint8 (rows, row_bytes)
};

/// Outputs full of garbage, on the device of `values`.
inline Quantized outputs_for(const at::Tensor& values, const Layout& layout,
                             const BoundaryBlocks& boundary = {}) {
  const auto floats = values.options().dtype(at::kFloat);
  return {at::full({amax_numel(layout, boundary)}, -1.f, floats),
          at::full({layout.grid_rows(), layout.grid_cols()}, -1.f, floats),
          at::full({layout.rows, layout.row_bytes()}, 255, values.options().dtype(at::kByte))};
}

inline QuantizeTask task_of(const at::Tensor& values, const Layout& layout,
                            const BoundaryBlocks& boundary, const Quantized& out) {
  QuantizeTask task;
  task.layout = layout;
  task.boundary = boundary;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.const_data_ptr();
  task.image = static_cast<uint8_t*>(out.image.mutable_data_ptr());
  task.amax = out.amax.mutable_data_ptr<float>();
  task.grid = out.grid.mutable_data_ptr<float>();
  return task;
}

/// Runs the library on `values` (rows, cols), on their device.
inline at::Tensor amax_of(const at::Tensor& values, const Layout& layout,
                          const BoundaryBlocks& boundary = {}) {
  const Quantized out = outputs_for(values, layout, boundary);
  const QuantizeTask task = task_of(values, layout, boundary, out);
  compute_amax({&task, 1}, stream_of(values.device()));
  return out.amax;
}

inline Quantized quantized(const at::Tensor& values, const Layout& layout, const at::Tensor& amax,
                           const BoundaryBlocks& boundary = {}) {
  Quantized out = outputs_for(values, layout, boundary);
  out.amax = amax;
  const QuantizeTask task = task_of(values, layout, boundary, out);
  quantize({&task, 1}, stream_of(values.device()));
  return out;
}

inline Quantized quantized(const at::Tensor& values, const Layout& layout) {
  return quantized(values, layout, amax_of(values, layout));
}

inline Quantized quantized_at_once(const at::Tensor& values, const Layout& layout) {
  const Quantized out = outputs_for(values, layout);
  at::Tensor grid_copy = at::full_like(out.grid, -1.f);
  QuantizeTask task = task_of(values, layout, {}, out);
  if (grid_copy.numel() > 0) task.grid_copy = grid_copy.mutable_data_ptr<float>();
  quantize_at_once({&task, 1}, stream_of(values.device()));
  EXPECT_TRUE(at::equal(grid_copy, out.grid));
  return out;
}

/// What the all-reduce makes of the ranks' amaxes: the maximum of the bits, so that NaN wins.
inline at::Tensor agree(const std::vector<at::Tensor>& amaxes) {
  return std::get<0>(at::stack(amaxes).view(at::kInt).max(0)).view(at::kFloat);
}

/// What the ranks of torch.chunk make of `values` (rows, cols), on the CPU, all shards in one call,
/// those without rows too. Their padding rows are full of `padding`, which must not count.
inline std::vector<Quantized> quantized_shards(const at::Tensor& values, const Layout& whole,
                                               int64_t chunk, int64_t ranks, at::Device device,
                                               double padding) {
  std::vector<at::Tensor> shards, amaxes;
  std::vector<Quantized> results;
  std::vector<QuantizeTask> tasks;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    Layout layout = whole;
    layout.rows = chunk;
    layout.row_offset = rank * chunk;
    at::Tensor shard = at::full({chunk, whole.cols}, padding).to(values.scalar_type());
    const int64_t first = std::min(whole.rows, layout.row_offset);
    const int64_t live = std::min(chunk, whole.rows - first);
    shard.narrow(0, 0, live).copy_(values.narrow(0, first, live));
    shards.push_back(shard.to(device));
    const BoundaryBlocks boundary = find_boundary_blocks(layout, ranks);
    results.push_back(outputs_for(shards.back(), layout, boundary));
    tasks.push_back(task_of(shards.back(), layout, boundary, results.back()));
    amaxes.push_back(results.back().amax);
  }
  compute_amax(tasks, stream_of(device));
  const at::Tensor agreed = agree(amaxes);
  for (const at::Tensor& amax : amaxes) amax.copy_(agreed);
  quantize(tasks, stream_of(device));
  return results;
}

inline at::Tensor dequantized(const Quantized& q, const Layout& layout, at::ScalarType dtype,
                              int64_t first_row, int64_t rows, bool columnwise = false) {
  at::Tensor values = at::full({rows, layout.cols}, 7, q.image.options().dtype(dtype));
  DequantizeTask task;
  task.layout = layout;
  task.image = static_cast<const uint8_t*>(q.image.const_data_ptr());
  task.grid = q.grid.const_data_ptr<float>();
  task.first_row = first_row;
  task.rows = rows;
  task.value_dtype = value_dtype(dtype);
  task.values = values.mutable_data_ptr();
  task.columnwise = columnwise;
  dequantize({&task, 1}, stream_of(q.image.device()));
  return values;
}

/// The scale formula, from the standard library.
inline float reference_scale(float amax, const Format& format) {
  if (!(amax > 0.f) || !std::isfinite(amax)) return 1.f;
  const float scale = std::min(format.code_max / amax, std::numeric_limits<float>::max());
  if (!format.scale.power_of_two) return scale;
  int exponent;
  std::frexp(scale, &exponent);
  return std::ldexp(1.f, exponent - 1);
}

inline uint8_t reference_code(float x, float scale) {
  if (std::isnan(x)) return std::signbit(x) ? 0xff : 0x7f;
  const float scaled = std::min(448.f, std::max(-448.f, x * scale));
  return c10::Float8_e4m3fn(scaled).x;
}

/// The layout of an image on its own, without those beside it.
inline Layout alone(Layout layout) {
  layout.pitch = 0;
  return layout;
}

/// Everything a shard must hold, element by element, when it is all there is of its blocks; null
/// rounds to nearest even.
inline Quantized reference(const at::Tensor& values, const Layout& layout,
                           const Rounding* rounding = nullptr) {
  if (layout.has_columnwise()) {
    Quantized out = reference(values, alone(layout.rowwise()), rounding);
    const Quantized columnwise = reference(values, alone(layout.columnwise()), rounding);
    out.image = at::cat({out.image, columnwise.image}, 1);
    return out;
  }
  const at::Tensor x = values.cpu().to(at::kFloat).contiguous();
  const float* data = x.const_data_ptr<float>();
  const Format& format = *layout.format;
  const int64_t width =
      format.scale.block_cols ? format.scale.block_cols : std::max<int64_t>(layout.cols, 1);
  const int64_t block_rows = layout.matrices() * layout.block_rows_per_matrix();
  const auto block_of = [&](int64_t row, int64_t col) {
    return layout.block_row(layout.row_offset + row) * layout.block_cols() + col / width;
  };
  const auto grow = [](float& largest, float abs) {
    if (std::isnan(abs) || abs > largest) largest = std::isnan(largest) ? largest : abs;
  };
  std::vector<float> amax(block_rows * layout.block_cols());
  for (int64_t row = 0; row < layout.live_rows(); ++row) {
    for (int64_t col = 0; col < layout.cols; ++col) {
      grow(amax[block_of(row, col)], std::fabs(data[row * layout.cols + col]));
    }
  }

  Quantized out;
  out.amax = at::zeros({layout.grid_numel()});
  out.grid = at::empty({layout.grid_rows(), layout.grid_cols()});
  out.image = at::zeros({layout.rows, layout.row_bytes()}, at::kByte);
  float* grid_amax = out.amax.mutable_data_ptr<float>();
  float* grid = out.grid.mutable_data_ptr<float>();
  auto* image = static_cast<uint8_t*>(out.image.mutable_data_ptr());
  const auto count = static_cast<int64_t>(amax.size());
  const int64_t blocks_per_entry =
      format.scale.is_in_grid() ? 1 : layout.block_rows_per_matrix() * layout.block_cols();
  for (int64_t i = 0; i < count && format.has_grid(); ++i) {
    grow(grid_amax[i / blocks_per_entry], amax[i]);
  }
  for (int64_t i = 0; i < layout.grid_numel(); ++i) {
    grid[i] = format.scale.is_in_grid() ? 1.f / reference_scale(grid_amax[i], format)
                                        : reference_tensor_scale_inv(grid_amax[i]);
  }
  std::vector<ReferenceScale> scales(count);
  for (int64_t i = 0; i < count; ++i) {
    scales[i] =
        format.scale.is_in_grid()
            ? ReferenceScale{0, reference_scale(amax[i], format), grid[i]}
            : reference_block_scale(format, amax[i],
                                    format.has_tensor_scale() ? grid[i / blocks_per_entry] : 1.f);
  }

  for (int64_t row = 0; row < layout.live_rows(); ++row) {
    uint8_t* bytes = image + row * layout.row_bytes();
    for (int64_t col = 0; col < layout.cols; ++col) {
      const float value = data[row * layout.cols + col];
      const ReferenceScale& scale = scales[block_of(row, col)];
      const float scaled = value * scale.encode;
      uint8_t code;
      if (rounding != nullptr) {
        const int64_t element = (layout.row_offset + row) * layout.cols + col;
        code = reference_stochastic_code(format.code_dtype, scaled,
                                         reference_word(*rounding, element));
      } else {
        code = format.code_bits == 8 ? reference_code(value, scale.encode) : reference_e2m1(scaled);
      }
      bytes[col * format.code_bits / 8] |= code << (col * format.code_bits % 8);
      if (format.scale.place == ScalePlace::kSlices) {
        const int64_t in_block =
            (layout.row_offset + row) % layout.matrix_rows % format.scale.block_rows;
        if (col / layout.row_scale_bytes() == in_block) {
          bytes[layout.row_scale_offset() + col % layout.row_scale_bytes()] = scale.byte;
        }
      } else if (!format.scale.is_in_grid()) {
        bytes[layout.row_scale_offset() + col / width] = scale.byte;
      }
    }
  }
  return out;
}

/// float32 values that an image and its grid stand for; of two images the rowwise one.
inline at::Tensor reference_values(const Quantized& q, const Layout& layout) {
  const Format& format = *layout.format;
  const int64_t width =
      format.scale.block_cols ? format.scale.block_cols : std::max<int64_t>(layout.cols, 1);
  at::Tensor out = at::zeros({layout.rows, layout.cols});
  const auto* image = static_cast<const uint8_t*>(q.image.const_data_ptr());
  const float* grid = q.grid.const_data_ptr<float>();
  for (int64_t row = 0; row < layout.live_rows(); ++row) {
    const uint8_t* bytes = image + row * layout.row_bytes();
    const int64_t grid_row = layout.grid_row(layout.row_offset + row);
    for (int64_t col = 0; col < layout.cols; ++col) {
      const uint8_t scale_byte =
          format.scale.is_in_grid() ? 0 : bytes[layout.row_scale_offset() + col / width];
      float scale;
      if (format.scale.dtype == DType::kFloat8E8M0) {
        scale = scale_byte == 0xff ? std::nanf("") : std::ldexp(1.f, scale_byte - 127);
      } else if (format.scale.dtype == DType::kFloat8E4M3) {
        scale = reference_e4m3(scale_byte) * grid[grid_row];
      } else {
        scale = grid[grid_row * layout.grid_cols() + col / width];
      }
      const uint8_t code =
          format.code_bits == 8 ? bytes[col] : (bytes[col / 2] >> (col % 2 ? 4 : 0)) & 0xf;
      const float value = format.code_bits == 8 ? reference_e4m3(code)
                                                : kE2M1Values[code & 7] * (code & 8 ? -1.f : 1.f);
      out.mutable_data_ptr<float>()[row * layout.cols + col] = value * scale;
    }
  }
  return out;
}

/// Formats of weights whose kernels differ, with every value type.
inline auto all_kernels() {
  return ::testing::Combine(::testing::Values("float8_tensorwise", "float8_tensorwise_fp32_scale",
                                              "float8_rowwise", "float8_rowwise_fp32_scale",
                                              "float8_blockwise", "float8_blockwise_fp32_scale",
                                              "mxfp8", "mxfp8_1x32", "nvfp4", "nvfp4_1x16"),
                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf));
}

inline std::string kernel_name(
    const ::testing::TestParamInfo<std::tuple<const char*, at::ScalarType>>& info) {
  std::string name =
      std::string(std::get<0>(info.param)) + "_" + c10::toString(std::get<1>(info.param));
  for (char& c : name) {
    if (!std::isalnum(static_cast<unsigned char>(c))) c = '_';
  }
  return name;
}

inline bool same_values(const at::Tensor& a, const at::Tensor& b) {
  return at::allclose(a.cpu(), b.cpu(), 0, 0, /*equal_nan=*/true);
}

/// Random values of very different sizes, with zeros.
inline at::Tensor random_values(int64_t rows, int64_t cols, at::ScalarType dtype) {
  const at::Tensor x = at::randn({rows, cols}) * at::pow(10., at::randn({rows, 1}));
  return at::where(at::rand({rows, cols}) < 0.05, at::zeros({}), x).to(dtype);
}

}  // namespace qshard::testing
