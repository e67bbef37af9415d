#include "kernels/linear.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>

#include "kernels/current_stream.h"
#include "kernels/gemm_report.h"
#include "kernels/linear_amax.h"
#include "kernels/value_dtype.h"
#ifdef QSHARD_WITH_CUDA
#include "kernels/cuda/linear_block_scaled.h"
#include "kernels/cuda/linear_fp8.h"
#include "kernels/cuda/shared_activation.h"
#endif

namespace qshard {
namespace {

bool device_has_fp8_gemm([[maybe_unused]] at::Device device,
                         [[maybe_unused]] const Format& format) {
#ifdef QSHARD_WITH_CUDA
  return cuda::has_fp8_gemm(device, format);
#else
  return false;
#endif
}

bool device_has_every_fp8_gemm([[maybe_unused]] at::Device device) {
#ifdef QSHARD_WITH_CUDA
  return cuda::has_every_fp8_gemm(device);
#else
  return false;
#endif
}

bool device_has_block_scaled_gemm([[maybe_unused]] at::Device device) {
#ifdef QSHARD_WITH_CUDA
  return cuda::has_block_scaled_gemm(device);
#else
  return false;
#endif
}

// The kernels count rows and tiles in 32 bits, and tiles of rows in 16.
bool is_too_large(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kMaxTileRows = 65535 * int64_t{128};
  return m > kMaxTileRows || n > kMaxTileRows || k > kMaxTileRows;
}

// Why a GEMM that does not read the weight (grad_weight) cannot run on codes.
GemmFallback shape_fallback(const Format& format, at::Device device, at::ScalarType dtype,
                            int64_t m, int64_t n, int64_t k) {
  if (device.is_cpu()) return GemmFallback::kCpu;
  if (!format.scales_in_grid()) {  // MXFP8 and NVFP4 GEMMs come with Blackwell
    if (!device_has_block_scaled_gemm(device)) return GemmFallback::kFormat;
  } else if (!device_has_fp8_gemm(device, format)) {
    return format.block_rows != 0 ? GemmFallback::kBlockDevice : GemmFallback::kDevice;
  }
  if (!is_value_dtype(dtype)) return GemmFallback::kDtype;
  if (n % 16 != 0) return GemmFallback::kOutFeatures;
  return is_too_large(m, n, k) ? GemmFallback::kTooLarge : GemmFallback::kNone;
}

// Why a GEMM that reads the weight in place cannot run on codes.
GemmFallback weight_fallback(const WeightOperand& weight, at::ScalarType dtype, int64_t m) {
  const Layout& layout = weight.layout;
  const GemmFallback shape =
      shape_fallback(*layout.format, weight.image.device(), dtype, m, weight.rows, layout.cols);
  if (shape != GemmFallback::kNone) return shape;
  const int64_t first = layout.first_logical_row() + weight.first_row;
  const int64_t in_matrix = first % layout.matrix_rows;
  const bool one_matrix = in_matrix + weight.rows <= layout.matrix_rows;
  const int64_t block = layout.format->block_rows;
  const bool usable =
      first + weight.rows <= layout.logical_rows && (block == 0 || in_matrix % block == 0) &&
      (one_matrix || (!layout.format->has_tensor_scale() && layout.matrix_rows % block == 0));
  if (!usable) return GemmFallback::kWindow;
  const bool aligned = reinterpret_cast<uintptr_t>(weight.image.const_data_ptr()) % 16 == 0;
  return aligned ? GemmFallback::kNone : GemmFallback::kAlignment;
}

// `columnwise`: from that image, if the format has one.
at::Tensor dequantize_weight(const WeightOperand& weight, at::ScalarType dtype,
                             bool columnwise = false) {
  const bool direct = is_value_dtype(dtype);
  at::Tensor values = at::empty({weight.rows, weight.layout.cols},
                                weight.image.options().dtype(direct ? dtype : at::kFloat));
  DequantizeTask task;
  task.layout = weight.layout;
  task.image = static_cast<const uint8_t*>(weight.image.const_data_ptr());
  task.grid = weight.grid.defined() ? weight.grid.const_data_ptr<float>() : nullptr;
  task.first_row = weight.first_row;
  task.rows = weight.rows;
  task.value_dtype = value_dtype(values.scalar_type());
  task.values = values.mutable_data_ptr();
  task.columnwise = columnwise && weight.layout.format->columnwise;
  dequantize({&task, 1}, current_stream(weight.image.device()));
  return direct ? values : values.to(dtype);
}

void check_weight(const WeightOperand& weight) {
  const Layout& layout = weight.layout;
  TORCH_CHECK(
      weight.first_row >= 0 && weight.rows >= 0 && weight.first_row + weight.rows <= layout.rows,
      "qshard: weight rows [", weight.first_row, ", ", weight.first_row + weight.rows,
      ") lie outside an image of ", layout.rows, " rows");
  TORCH_CHECK(weight.image.scalar_type() == at::kByte && weight.image.is_contiguous() &&
                  weight.image.numel() == layout.image_bytes(),
              "qshard: a weight's image must be contiguous uint8 of ", layout.image_bytes(),
              " bytes");
  TORCH_CHECK(!layout.format->has_grid() || (weight.grid.defined() && weight.grid.is_contiguous() &&
                                             weight.grid.scalar_type() == at::kFloat &&
                                             weight.grid.numel() == layout.grid_numel()),
              "qshard: a weight's grid must be contiguous float32 of ", layout.grid_numel(),
              " scales");
}

// Of a format of two row images a gathered weight may have one, as its recipe says.
void check_gathered_image(const Layout& layout, bool is_there, const char* gemm, const char* image,
                          const char* way_out) {
  TORCH_CHECK(
      is_there,
      fmt::format("qshard: {} of a {} weight reads its {} image, which was not gathered; {}", gemm,
                  layout.format->name, image, way_out));
}

void check_forward_image(const Layout& layout) {
  check_gathered_image(layout, layout.has_rowwise(), "linear's forward", "rowwise",
                       "a forward in backward, as under activation checkpointing, needs a recipe "
                       "with gather=\"both\"");
}

void check_dgrad_image(const Layout& layout) {
  check_gathered_image(layout, !layout.format->columnwise || layout.has_columnwise(),
                       "linear's dgrad", "columnwise",
                       "use a recipe with gather=\"both\", or fully_shard(..., "
                       "reshard_after_forward=True), also for the root module");
}

void check_activation(const at::Tensor& x, const WeightOperand& weight, int64_t cols,
                      const char* name) {
  TORCH_CHECK(x.dim() == 2 && x.size(1) == cols,
              fmt::format("qshard: linear's {} must be (M, {}), got {}", name, cols, x.sizes()));
  TORCH_CHECK(x.device() == weight.image.device(), "qshard: linear's ", name, " is on ", x.device(),
              ", its weight on ", weight.image.device());
  TORCH_CHECK(x.is_floating_point(), "qshard: linear's ", name, " must be floating point, got ",
              x.scalar_type());
}

// a @ b rounded once to `dtype`, where the device can.
at::Tensor mm_to(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  const bool widens = dtype == at::kFloat && a.scalar_type() != at::kFloat && a.is_cuda() &&
                      is_value_dtype(a.scalar_type());
  return widens ? at::mm(a, b, dtype) : at::mm(a, b).to(dtype);
}

at::Tensor dequantized_forward(const at::Tensor& input, const WeightOperand& weight,
                               const std::optional<at::Tensor>& bias) {
  const at::Tensor values = dequantize_weight(weight, input.scalar_type());
  return bias ? at::addmm(bias->to(input.scalar_type()), input, values.t())
              : at::mm(input, values.t());
}

}  // namespace

// The format is not known here, so only where all that would read the codes can. Where MXFP8 and
// NVFP4 GEMMs run, inputs are saved plain: NVFP4's wgrad reads an amax of its own, after the random
// Hadamard transform.
bool can_save_quantized_input(at::Device device, int64_t m, int64_t n, int64_t k) {
  return m > 0 && n > 0 && k > 0 && n % 16 == 0 && !is_too_large(m, n, k) && device.is_cuda() &&
         device_has_every_fp8_gemm(device);
}

int64_t saved_input_bytes(int64_t m, int64_t k) {
  return round_up(k, 16) * (round_up(m, 128) + 4 * ceil_div(m, 128));
}

int64_t input_rows_bytes(int64_t m, int64_t k) {
  const int64_t rows = round_up(m, 16);
  return rows * round_up(k, 16) + 4 * rows * ceil_div(k, 128);
}

bool multiplies_input_codes(const Format& format, at::Device device, at::ScalarType dtype,
                            int64_t m, int64_t n, int64_t k) {
  return m > 0 && k > 0 && format.scales_in_grid() &&
         shape_fallback(format, device, dtype, m, n, k) == GemmFallback::kNone;
}

QuantizedInput quantize_input(const at::Tensor& input, const Format& format, bool rows,
                              bool columns) {
  TORCH_CHECK(
      input.dim() == 2 && is_value_dtype(input.scalar_type()),
      fmt::format("qshard::quantize_input: needs a float32, bfloat16 or float16 matrix, got "
                  "{} of shape {}",
                  c10::toString(input.scalar_type()), input.sizes()));
  TORCH_CHECK(format.amax_history.length == 0,
              fmt::format("qshard::quantize_input: each {} linear scales its input by a history of "
                          "its own; call qshard::linear",
                          format.name));
  const auto bytes = input.options().dtype(at::kByte);
  QuantizedInput result{at::empty({0}, bytes), at::empty({0}, bytes)};
  if (!rows && !columns) return result;
  const bool is_read = rows ? device_has_fp8_gemm(input.device(), format)
                            : device_has_every_fp8_gemm(input.device());
  TORCH_CHECK(is_read && input.numel() > 0,
              fmt::format("qshard::quantize_input: {} has no FP8 GEMM for an input of shape {}",
                          input.device().str(), input.sizes()));
#ifdef QSHARD_WITH_CUDA
  const c10::OptionalDeviceGuard guard(input.device());
  const auto x = cuda::quantize_activation(input, format, DType::kFloat8E4M3, rows, columns, {});
  if (rows) result.rows = x.buffer;
  if (columns) result.columns = x.saved;
#endif
  return result;
}

LinearForward linear_forward(const at::Tensor& input, const WeightOperand& weight,
                             const std::optional<at::Tensor>& bias, bool save_quantized_input,
                             bool weight_only, [[maybe_unused]] const SharedInput& shared,
                             const at::Tensor& input_rows) {
  check_weight(weight);
  check_forward_image(weight.layout);
  check_activation(input, weight, weight.layout.cols, "input");
  const c10::OptionalDeviceGuard guard(input.device());
  const int64_t m = input.size(0);
  const int64_t n = weight.rows;
  const int64_t k = weight.layout.cols;
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == n),
              fmt::format("qshard: linear's bias must be ({},), got {}", n, bias->sizes()));
  TORCH_CHECK(!save_quantized_input || can_save_quantized_input(input.device(), m, n, k),
              fmt::format("qshard: linear cannot save an FP8 input of {} x {} on {}", m, k,
                          input.device().str()));
  TORCH_CHECK(
      !input_rows.defined() ||
          (!save_quantized_input && input_rows.scalar_type() == at::kByte &&
           input_rows.is_contiguous() && input_rows.numel() == input_rows_bytes(m, k)),
      fmt::format("qshard: linear's input_rows must be quantize_input's, uint8 of {} bytes, "
                  "and nothing is saved beside them",
                  input_rows_bytes(m, k)));
  LinearForward result;
  const auto no_bytes = input.options().dtype(at::kByte);
  result.saved = at::empty({0}, no_bytes);
  if (m == 0 || n == 0 || k == 0) {
    result.output = at::zeros({m, n}, input.options());
    if (bias) result.output.add_(*bias);
    return result;
  }
  GemmFallback fallback =
      weight_only ? GemmFallback::kWeightOnly : weight_fallback(weight, input.scalar_type(), m);
  const DelayedAmax amax = weight_only ? DelayedAmax{} : delayed_input_amax(weight);
  bool is_quantized = false;
#ifdef QSHARD_WITH_CUDA
  const Format& format = *weight.layout.format;
  const bool block_scaled = fallback == GemmFallback::kNone && !format.scales_in_grid();
  if (block_scaled) {
    result.output = cuda::block_scaled_forward(input, weight, bias);
    if (!result.output.defined()) fallback = GemmFallback::kNoKernel;
  }
  const bool fp8 = fallback == GemmFallback::kNone && !block_scaled;
  is_quantized = fp8 || save_quantized_input;
  if (fp8 && input_rows.defined()) {
    const auto rows = cuda::rows_operand(input_rows, format, m, k);
    result.output = cuda::fp8_forward(rows, m, weight, bias, input.options());
    if (!result.output.defined()) fallback = GemmFallback::kNoKernel;
  } else if (is_quantized) {
    // Delayed scaling scales the input of each linear by that linear's own history.
    const cuda::Fp8Activation x =
        shared.tensor.defined() && !amax
            ? cuda::quantize_shared_activation(shared, input, format, /*rows=*/fp8,
                                               save_quantized_input)
            : cuda::quantize_activation(input, format, DType::kFloat8E4M3, /*rows=*/fp8,
                                        save_quantized_input, amax);
    if (save_quantized_input) result.saved = x.saved;
    if (fp8) result.output = cuda::fp8_forward(x.rows, m, weight, bias, input.options());
    if (fp8 && !result.output.defined()) fallback = GemmFallback::kNoKernel;
  }
#endif
  if (!is_quantized) collect_amax(input, amax);
  record_gemm(*weight.layout.format, GemmDirection::kForward, fallback);
  if (!result.output.defined()) result.output = dequantized_forward(input, weight, bias);
  return result;
}

LinearBackward linear_backward(const at::Tensor& grad, const WeightOperand& weight,
                               const at::Tensor& input, bool input_is_quantized, bool needs_input,
                               bool needs_weight, at::ScalarType weight_grad_dtype,
                               bool weight_only, const at::Tensor& sum) {
  check_weight(weight);
  if (needs_input) check_dgrad_image(weight.layout);
  check_activation(grad, weight, weight.rows, "gradient");
  const c10::OptionalDeviceGuard guard(grad.device());
  const Format& format = *weight.layout.format;
  const int64_t m = grad.size(0);
  const int64_t n = weight.rows;
  const int64_t k = weight.layout.cols;
  TORCH_CHECK(
      !sum.defined() ||
          (needs_weight && sum.sizes() == at::IntArrayRef{n, k} && sum.is_contiguous() &&
           sum.scalar_type() == weight_grad_dtype && sum.device() == grad.device()),
      fmt::format("qshard: linear's grad_weight can only be added to a contiguous {} tensor "
                  "of ({}, {}) on {}",
                  c10::toString(weight_grad_dtype), n, k, grad.device().str()));
  LinearBackward result;
  if (m == 0 || n == 0 || k == 0) {
    if (needs_input) result.grad_input = at::zeros({m, k}, grad.options());
    if (needs_weight) {
      result.grad_weight =
          sum.defined() ? sum : at::zeros({n, k}, grad.options().dtype(weight_grad_dtype));
    }
    return result;
  }
  if (needs_weight && input_is_quantized) {
    TORCH_CHECK(
        can_save_quantized_input(grad.device(), m, n, k) && input.scalar_type() == at::kByte &&
            input.numel() == saved_input_bytes(m, k),
        fmt::format("qshard: linear's saved input must be uint8 of {} bytes, got {} {}",
                    saved_input_bytes(m, k), c10::toString(input.scalar_type()), input.sizes()));
  } else if (needs_weight) {
    check_activation(input, weight, k, "input");
    TORCH_CHECK(
        input.size(0) == m,
        fmt::format("qshard: linear's input has {} rows, its gradient {}", input.size(0), m));
  }
  GemmFallback for_input = GemmFallback::kWeightOnly;
  GemmFallback for_weight = GemmFallback::kWeightOnly;
  if (!weight_only) {
    for_input = weight_fallback(weight, grad.scalar_type(), m);
    for_weight = shape_fallback(format, grad.device(), grad.scalar_type(), m, n, k);
  }
  // Square blocks alone have the same scales when transposed.
  if (for_input == GemmFallback::kNone && format.block_rows == 1) {
    for_input = GemmFallback::kOneRowBlocks;
  }
  at::Tensor values = input;
  const DelayedAmax amax = weight_only ? DelayedAmax{} : delayed_gradient_amax(weight);
  bool is_quantized = false;
#ifdef QSHARD_WITH_CUDA
  const bool codes_input = needs_input && for_input == GemmFallback::kNone;
  const bool codes_weight = needs_weight && for_weight == GemmFallback::kNone &&
                            (input_is_quantized || is_value_dtype(input.scalar_type()));
  const bool fp8_input = codes_input && format.scales_in_grid();
  const bool fp8_weight = codes_weight && format.scales_in_grid();
  if (codes_input && !fp8_input) {
    result.grad_input = cuda::block_scaled_grad_input(grad, weight);
    if (!result.grad_input.defined()) for_input = GemmFallback::kNoKernel;
  }
  if (codes_weight && !fp8_weight) {
    result.grad_weight = cuda::block_scaled_grad_weight(grad, input, format, weight_grad_dtype);
    if (!result.grad_weight.defined()) for_weight = GemmFallback::kNoKernel;
  }
  is_quantized = fp8_input || fp8_weight;
  if (is_quantized) {
    const cuda::Fp8Activation dy =
        cuda::quantize_activation(grad, format, format.grad_dtype, fp8_input, fp8_weight, amax);
    if (fp8_input) {
      result.grad_input = cuda::fp8_grad_input(dy.rows, m, weight, grad.options());
      if (!result.grad_input.defined()) for_input = GemmFallback::kNoKernel;
    }
    if (fp8_weight) {
      at::Tensor saved = input;
      if (!input_is_quantized) {
        saved = cuda::quantize_activation(input, format, DType::kFloat8E4M3, /*rows=*/false,
                                          /*columns=*/true, delayed_input_amax(weight))
                    .saved;
      }
      const ScaledOperand x = cuda::saved_operand(saved, format, m, k);
      result.grad_weight =
          sum.defined() && cuda::fp8_add_grad_weight(dy.columns, x, sum)
              ? sum
              : cuda::fp8_grad_weight(dy.columns, x, n, k, grad.options().dtype(weight_grad_dtype));
      if (!result.grad_weight.defined()) for_weight = GemmFallback::kNoKernel;
    }
  }
  if (needs_weight && input_is_quantized && !result.grad_weight.defined()) {
    values = cuda::dequantize_saved(input, format, m, k, grad.scalar_type());
  }
#endif
  if (!is_quantized) collect_amax(grad, amax);
  if (needs_input) {
    record_gemm(format, GemmDirection::kGradInput, for_input);
    if (!result.grad_input.defined()) {
      result.grad_input =
          at::mm(grad, dequantize_weight(weight, grad.scalar_type(), /*columnwise=*/true));
    }
  }
  if (needs_weight) {
    record_gemm(format, GemmDirection::kGradWeight, for_weight);
    if (!result.grad_weight.defined()) {
      values = values.to(grad.scalar_type());
      // Saves the memory of a second gradient. On CPU, where that is of no matter, a product that
      // is added as it is computed has other bits than autograd's sum, by threads and columns.
      if (sum.defined() && sum.is_cuda() && sum.scalar_type() == grad.scalar_type()) {
        at::Tensor out = sum;
        result.grad_weight = at::addmm_out(out, sum, grad.t(), values);
      } else {
        result.grad_weight = mm_to(grad.t(), values, weight_grad_dtype);
      }
    }
    if (sum.defined() && !result.grad_weight.is_same(sum)) {
      result.grad_weight = at::Tensor(sum).add_(result.grad_weight);
    }
  }
  return result;
}

std::string backend_report() { return gemm_report(); }

std::string why_dequantized(const Format& format, at::Device device) {
  return gemm_fallback_reason(shape_fallback(format, device, at::kBFloat16, 128, 128, 128));
}

}  // namespace qshard
