// What the kernel tests share: a slow reference from torch's own FP8 types, cases, memory.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/float8.h"
#include "kernels/quantize.h"
#include "kernels/value_dtype.h"
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

struct Quantized {
  at::Tensor amax;   // float32 (grid_rows, grid_cols)
  at::Tensor grid;   // float32 (grid_rows, grid_cols)
  at::Tensor image;  // uint8 (rows, row_bytes)
};

/// Runs the library on `values` (rows, cols), on their device; outputs start as garbage.
inline at::Tensor amax_of(const at::Tensor& values, const Layout& layout) {
  at::Tensor amax =
      at::full({layout.grid_rows(), layout.grid_cols()}, -1.f, values.options().dtype(at::kFloat));
  QuantizeTask task;
  task.layout = layout;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.const_data_ptr();
  task.amax = amax.mutable_data_ptr<float>();
  compute_amax({&task, 1}, stream_of(values.device()));
  return amax;
}

inline Quantized quantized(const at::Tensor& values, const Layout& layout, const at::Tensor& amax) {
  Quantized out;
  out.amax = amax;
  out.grid = at::full_like(amax, -1.f);
  out.image = at::full({layout.rows, layout.row_bytes()}, 255, values.options().dtype(at::kByte));
  QuantizeTask task;
  task.layout = layout;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.const_data_ptr();
  task.image = static_cast<uint8_t*>(out.image.mutable_data_ptr());
  task.amax = amax.mutable_data_ptr<float>();
  task.grid = out.grid.mutable_data_ptr<float>();
  quantize({&task, 1}, stream_of(values.device()));
  return out;
}

inline Quantized quantized(const at::Tensor& values, const Layout& layout) {
  return quantized(values, layout, amax_of(values, layout));
}

inline at::Tensor dequantized(const Quantized& q, const Layout& layout, at::ScalarType dtype,
                              int64_t first_row, int64_t rows) {
  at::Tensor values = at::full({rows, layout.cols}, 7, q.image.options().dtype(dtype));
  DequantizeTask task;
  task.layout = layout;
  task.image = static_cast<const uint8_t*>(q.image.const_data_ptr());
  task.grid = q.grid.const_data_ptr<float>();
  task.first_row = first_row;
  task.rows = rows;
  task.value_dtype = value_dtype(dtype);
  task.values = values.mutable_data_ptr();
  dequantize({&task, 1}, stream_of(q.image.device()));
  return values;
}

/// The scale formula, from the standard library.
inline float reference_scale(float amax, const Format& format) {
  if (!(amax > 0.f) || !std::isfinite(amax)) return 1.f;
  const float scale = std::min(format.code_max / amax, std::numeric_limits<float>::max());
  if (!format.power_of_two_scales) return scale;
  int exponent;
  std::frexp(scale, &exponent);
  return std::ldexp(1.f, exponent - 1);
}

inline uint8_t reference_code(float x, float scale) {
  if (std::isnan(x)) return std::signbit(x) ? 0xff : 0x7f;
  const float scaled = std::min(448.f, std::max(-448.f, x * scale));
  return c10::Float8_e4m3fn(scaled).x;
}

/// Everything a shard must hold, element by element.
inline Quantized reference(const at::Tensor& values, const Layout& layout) {
  const at::Tensor x = values.cpu().to(at::kFloat).contiguous();
  const float* data = x.const_data_ptr<float>();
  Quantized out;
  out.amax = at::zeros({layout.grid_rows(), layout.grid_cols()});
  const Format& format = *layout.format;
  const int64_t width = format.block_cols ? format.block_cols : std::max<int64_t>(layout.cols, 1);
  float* amax = out.amax.mutable_data_ptr<float>();
  const auto entry = [&](int64_t row, int64_t col) {
    return layout.grid_row(layout.row_offset + row) * layout.grid_cols() + col / width;
  };
  for (int64_t row = 0; row < layout.live_rows(); ++row) {
    for (int64_t col = 0; col < layout.cols; ++col) {
      float& largest = amax[entry(row, col)];
      const float abs = std::fabs(data[row * layout.cols + col]);
      if (std::isnan(abs) || abs > largest) largest = std::isnan(largest) ? largest : abs;
    }
  }
  out.grid = at::empty_like(out.amax);
  for (int64_t i = 0; i < out.grid.numel(); ++i) {
    out.grid.mutable_data_ptr<float>()[i] = 1.f / reference_scale(amax[i], format);
  }
  out.image = at::zeros({layout.rows, layout.row_bytes()}, at::kByte);
  auto* image = static_cast<uint8_t*>(out.image.mutable_data_ptr());
  for (int64_t row = 0; row < layout.live_rows(); ++row) {
    for (int64_t col = 0; col < layout.cols; ++col) {
      image[row * layout.row_bytes() + col] = reference_code(
          data[row * layout.cols + col], reference_scale(amax[entry(row, col)], format));
    }
  }
  return out;
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
