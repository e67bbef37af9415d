#include "kernels/linear/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <limits>
#include <utility>

#include "kernels/device/capture.h"
#include "kernels/format/value_dtype.h"
#include "kernels/gemm/gemm_report.h"
#include "kernels/linear/gemm_backend.h"
#include "kernels/linear/linear_amax.h"
#include "kernels/linear/linear_fp8.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {
namespace {

void check_weight(const QuantizedMatrix& weight) {
  const RowImage& rows = weight.row_image();
  const Layout& layout = rows.layout;
  TORCH_CHECK(
      rows.first_row >= 0 && weight.rows >= 0 && rows.first_row + weight.rows <= layout.rows,
      "qshard: weight rows [", rows.first_row, ", ", rows.first_row + weight.rows,
      ") lie outside an image of ", layout.rows, " rows");
  TORCH_CHECK(rows.image.scalar_type() == at::kByte && rows.image.is_contiguous() &&
                  rows.image.numel() == layout.image_bytes(),
              "qshard: a weight's image must be contiguous uint8 of ", layout.image_bytes(),
              " bytes");
  TORCH_CHECK(!layout.format->has_grid() || (rows.grid.defined() && rows.grid.is_contiguous() &&
                                             rows.grid.scalar_type() == at::kFloat &&
                                             rows.grid.numel() == layout.grid_numel()),
              "qshard: a weight's grid must be contiguous float32 of ", layout.grid_numel(),
              " scales");
}

// A gathered weight whose format has two row images may have one of them, as its recipe says.
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

void check_activation(const OperandProducer& x, const QuantizedMatrix& weight, int64_t cols,
                      const char* name) {
  const at::IntArrayRef sizes = x.sizes();
  const at::Device device = weight.row_image().image.device();
  TORCH_CHECK(sizes.size() == 2 && sizes[1] == cols,
              fmt::format("qshard: linear's {} must be (M, {}), got {}", name, cols, sizes));
  TORCH_CHECK(x.device() == device, "qshard: linear's ", name, " is on ", x.device(),
              ", its weight on ", device);
  TORCH_CHECK(at::isFloatingType(x.dtype()), "qshard: linear's ", name,
              " must be floating point, got ", x.dtype());
}

const int32_t* words_of(const at::Tensor& rounding) {
  return rounding.defined() ? rounding.const_data_ptr<int32_t>() : nullptr;
}

/// One linear's GEMMs: what they share.
struct LinearCall {
  const LinearWeight& weight;
  const QuantizedGemmBackend& backend;
  const Format& format;
  bool weight_only;

  LinearCall(const LinearWeight& weight, bool weight_only)
      : weight(weight),
        backend(quantized_backend(*weight.codes.format)),
        format(*weight.codes.format),
        weight_only(weight_only) {}

  bool reads_packed() const { return backend.operand_layout() == OperandLayout::kPacked; }
  DelayedAmax input_amax() const {
    return weight_only ? DelayedAmax{} : delayed_input_amax(weight);
  }
  DelayedAmax gradient_amax() const {
    return weight_only ? DelayedAmax{} : delayed_gradient_amax(weight);
  }

  /// Why the backend of codes cannot run a GEMM of x (M, ...).
  GemmFallback fallback(GemmDirection direction, const OperandProducer& x) const {
    if (weight_only) return GemmFallback::kWeightOnly;
    GemmProblem problem{direction,    &format,           x.device(),       x.dtype(),
                        x.sizes()[0], weight.codes.rows, weight.codes.cols};
    if (direction != GemmDirection::kGradWeight) problem.weight = &weight.codes;
    return backend.supports(problem);
  }

  OperandRequest packed(OperandRole role, Orientations orientations,
                        const DelayedAmax& delayed) const {
    return {.format = &format,
            .role = role,
            .orientations = orientations,
            .delayed = delayed,
            .last_input = role == OperandRole::kInput ? weight.last_input : nullptr};
  }
  OperandRequest row_image(Orientations orientations, const at::Tensor& rounding = {}) const {
    return {.format = &format,
            .operand_layout = OperandLayout::kRowImage,
            .orientations = orientations,
            .rounding = words_of(rounding)};
  }
};

/// Runs the GEMM on codes; where that has no kernel, says so in `fallback`.
at::Tensor run_on_codes(const LinearCall& call, const GemmTask& task, GemmFallback& fallback) {
  at::Tensor out = call.backend.run(task);
  if (!out.defined()) fallback = GemmFallback::kNoKernel;
  return out;
}

/// `product` becomes `sum`, if there is one and no GEMM has added to it.
void add_to(at::Tensor sum, at::Tensor& product) {
  if (sum.defined() && !product.is_same(sum)) product = sum.add_(product);
}

/// What quantizing an operand to these codes lost, where a watch samples the weight's step. A graph
/// that is being captured would add to the same tally for good.
void add_statistics(const LinearCall& call, WatchedOperand operand, const OperandProducer& x,
                    const QuantizedMatrix& codes, const at::Tensor& column_factors = {}) {
  Watched* watched = call.weight.watched.get();
  if (watched == nullptr || !watched->is_sampled() || is_capturing(x.device())) return;
  if (!x.has_values()) {
    watched->add_kept(operand, bytes_of(codes.rowwise));
    return;
  }
  const at::Tensor values = x.values(x.dtype()).contiguous();
  watched->add(operand, coded_matrix(codes, values, column_factors), x.device());
}

/// The GEMMs of linear_backward that run on codes, as far as their fallbacks are kNone.
LinearBackward backward_on_codes(const LinearBackwardTask& task, const LinearCall& call,
                                 GemmFallback& for_input, GemmFallback& for_weight) {
  LinearBackward result;
  const OperandProducer& grad = *task.grad;
  const bool is_packed = call.reads_packed();
  const bool input = task.needs_input && for_input == GemmFallback::kNone;
  const bool weight = task.input != nullptr && for_weight == GemmFallback::kNone;
  const auto drawn = [&](at::Tensor GradientRounding::*words) {
    at::Tensor* shared = task.rounding == nullptr ? nullptr : &(task.rounding->*words);
    return gradient_rounding(call.format, grad.device(), shared, task.group);
  };
  QuantizedMatrix both;  // packed codes are made in one pass, row images one by one
  if (is_packed && (input || weight)) {
    auto request = call.packed(OperandRole::kGradient, {input, weight}, call.gradient_amax());
    if (input && call.format.gemm.folds_row_scales) {
      request.column_factors = weight_row_scales(call.weight.codes);
    }
    both = grad.codes(request);
    if (input) {
      add_statistics(call, kWatchedGradient, grad, both, request.column_factors);
    }
  }
  if (input) {
    const auto rounding = is_packed ? at::Tensor() : drawn(&GradientRounding::rows);
    QuantizedMatrix rows;
    if (!is_packed) {
      rows = grad.codes(call.row_image({.rowwise = true}, rounding));
      add_statistics(call, kWatchedGradient, grad, rows);
    }
    result.grad_input = run_on_codes(call,
                                     {.direction = GemmDirection::kGradInput,
                                      .a = {.codes = is_packed ? &both : &rows},
                                      .b = {.codes = &call.weight.codes},
                                      .out = grad.options(),
                                      .sum = task.input_sum},
                                     for_input);
  }
  if (weight) {
    constexpr Orientations kColumns{.columnwise = true};
    const auto rounding = is_packed ? at::Tensor() : drawn(&GradientRounding::columns);
    const auto x =
        task.input->codes(is_packed ? call.packed(OperandRole::kInput, kColumns, call.input_amax())
                                    : call.row_image(kColumns));
    QuantizedMatrix columns;
    if (!is_packed) columns = grad.codes(call.row_image(kColumns, rounding));
    result.grad_weight = run_on_codes(call,
                                      {.direction = GemmDirection::kGradWeight,
                                       .a = {.codes = is_packed ? &both : &columns},
                                       .b = {.codes = &x},
                                       .out = grad.options().dtype(task.weight_grad_dtype),
                                       .sum = task.sum},
                                      for_weight);
  }
  return result;
}

}  // namespace

at::Tensor gradient_rounding(const Format& format, at::Device device, at::Tensor* shared,
                             int64_t group) {
  if (!format.activations.stochastic_gradients) return {};
  at::Tensor words = shared == nullptr ? at::Tensor() : *shared;
  if (!words.defined()) {
    words = at::randint(std::numeric_limits<int32_t>::max(), {kRoundingWords},
                        at::TensorOptions().dtype(at::kInt).device(device));
    if (shared != nullptr) *shared = words;
  }
  if (group == 0) return words;
  words = words.clone();
  words[kRoundingWords - 1].add_(group).bitwise_and_(std::numeric_limits<int32_t>::max());
  return words;
}

// The format is not known here, so only where all that would read the codes can. Where MXFP8 and
// NVFP4 GEMMs run, inputs are saved plain: NVFP4's wgrad reads an amax of its own, after the random
// Hadamard transform.
bool can_save_quantized_input(at::Device device, int64_t m, int64_t n, int64_t k) {
  return m > 0 && n > 0 && k > 0 && n % 16 == 0 && !is_too_large(m, n, k) && device.is_cuda() &&
         cuda::has_every_fp8_gemm(device);
}

bool can_save_quantized_input(const Format& format, at::Device device, int64_t m, int64_t n,
                              int64_t k) {
  if (can_save_quantized_input(device, m, n, k)) return true;
  const bool is_there = m > 0 && n > 0 && k > 0;
  return is_there && format.emulated && format.gemm.kind == GemmKind::kPacked && n % 16 == 0 &&
         !is_too_large(m, n, k);
}

bool multiplies_input_codes(const Format& format, at::Device device, at::ScalarType dtype,
                            int64_t m, int64_t n, int64_t k) {
  const GemmProblem problem{GemmDirection::kForward, &format, device, dtype, m, n, k};
  return m > 0 && k > 0 && format.gemm.kind == GemmKind::kPacked &&
         quantized_backend(format).supports(problem) == GemmFallback::kNone;
}

bool gradient_quantizes_input(const Format& format, at::Device device, at::ScalarType dtype,
                              int64_t m, int64_t n, int64_t k) {
  return quantized_backend(format).supports(
             {GemmDirection::kGradWeight, &format, device, dtype, m, n, k}) == GemmFallback::kNone;
}

bool gradient_reads_plain_input(const Format& format, at::Device device, at::ScalarType dtype,
                                int64_t m, int64_t n, int64_t k) {
  return quantized_backend(format).operand_layout() == OperandLayout::kRowImage &&
         gradient_quantizes_input(format, device, dtype, m, n, k);
}

QuantizedMatrix quantize_input(const at::Tensor& input, const Format& format,
                               Orientations orientations, at::Tensor* amax,
                               LastInputAmax* last_input) {
  TORCH_CHECK(
      input.dim() == 2 && is_value_dtype(input.scalar_type()),
      fmt::format("qshard::quantize_input: needs a float32, bfloat16 or float16 matrix, got "
                  "{} of shape {}",
                  c10::toString(input.scalar_type()), input.sizes()));
  TORCH_CHECK(format.amax_history.length == 0,
              fmt::format("qshard::quantize_input: each {} linear scales its input by a history of "
                          "its own; call qshard::linear",
                          format.name));
  if (!orientations.rowwise && !orientations.columnwise) {
    return {&format, format.activations.packed_input_dtype, input.size(0), input.size(1)};
  }
  const bool is_read =
      format.emulated ||
      (orientations.rowwise ? cuda::has_fp8_gemm(input.device(), packed_scale_mode(format))
                            : cuda::has_every_fp8_gemm(input.device()));
  TORCH_CHECK(is_read && input.numel() > 0,
              fmt::format("qshard::quantize_input: {} has no FP8 GEMM for an input of shape {}",
                          input.device().str(), input.sizes()));
  const c10::OptionalDeviceGuard guard(input.device());
  const PlainOperand operand(input, amax != nullptr ? *amax : at::Tensor());
  QuantizedMatrix codes =
      operand.codes({.format = &format, .orientations = orientations, .last_input = last_input});
  if (amax != nullptr) *amax = operand.amax();
  return codes;
}

LinearForward linear_forward(const OperandProducer& input, const LinearWeight& weight,
                             const std::optional<at::Tensor>& bias, bool save_quantized_input,
                             bool weight_only, const at::Tensor& added) {
  const QuantizedMatrix& codes = weight.codes;
  check_weight(codes);
  check_forward_image(codes.row_image().layout);
  check_activation(input, codes, codes.cols, "input");
  const c10::OptionalDeviceGuard guard(input.device());
  const int64_t m = input.sizes()[0];
  const int64_t n = codes.rows;
  const int64_t k = codes.cols;
  TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == n),
              fmt::format("qshard: linear's bias must be ({},), got {}", n, bias->sizes()));
  TORCH_CHECK(
      !added.defined() ||
          (added.sizes() == at::IntArrayRef{m, n} && added.is_contiguous() &&
           added.scalar_type() == input.dtype() && added.device() == input.device()),
      fmt::format("qshard: a linear's product can only be added to a contiguous {} tensor of "
                  "({}, {}) on {}",
                  c10::toString(input.dtype()), m, n, input.device().str()));
  TORCH_CHECK(
      !save_quantized_input || can_save_quantized_input(*codes.format, input.device(), m, n, k),
      fmt::format("qshard: linear cannot save an FP8 input of {} x {} on {}", m, k,
                  input.device().str()));
  LinearForward result;
  if (m == 0 || n == 0 || k == 0) {
    result.output = at::zeros({m, n}, input.options());
    if (bias) result.output.add_(*bias);
    if (added.defined()) result.output.add_(added);
    return result;
  }
  const LinearCall call(weight, weight_only);
  GemmFallback fallback = call.fallback(GemmDirection::kForward, input);
  const DelayedAmax amax = call.input_amax();
  GemmTask task{
      .direction = GemmDirection::kForward, .b = {.codes = &codes}, .out = input.options()};
  task.bias = bias;
  task.added = added;
  const bool on_codes = fallback == GemmFallback::kNone;
  const bool packed = on_codes && call.reads_packed();
  if (on_codes && !packed) {
    const QuantizedMatrix x = input.codes(call.row_image({.rowwise = true}));
    add_statistics(call, kWatchedInput, input, x);
    task.a.codes = &x;
    result.output = run_on_codes(call, task, fallback);
  }
  if (packed || save_quantized_input) {
    const Orientations orientations{.rowwise = packed, .columnwise = save_quantized_input};
    QuantizedMatrix x = input.codes(call.packed(OperandRole::kInput, orientations, amax));
    if (packed) add_statistics(call, kWatchedInput, input, x);
    task.a.codes = &x;
    if (packed) result.output = run_on_codes(call, task, fallback);
    if (save_quantized_input) {
      result.saved = std::move(x);
      result.saved.rowwise = {};
    }
  } else {
    input.collect_amax(amax);
  }
  record_gemm(call.format, GemmDirection::kForward, fallback);
  if (!result.output.defined()) {
    task.a = {.values = input.values(input.dtype())};
    result.output = dequantized_gemms().run(task);
  }
  return result;
}

LinearBackward linear_backward(const LinearBackwardTask& task, const LinearWeight& weight) {
  const OperandProducer& grad = *task.grad;
  const QuantizedMatrix& codes = weight.codes;
  const bool needs_weight = task.input != nullptr;
  if (task.needs_input) {
    check_weight(codes);
    check_dgrad_image(codes.row_image().layout);
  }
  check_activation(grad, codes, codes.rows, "gradient");
  const c10::OptionalDeviceGuard guard(grad.device());
  const int64_t m = grad.sizes()[0];
  const int64_t n = codes.rows;
  const int64_t k = codes.cols;
  const at::Tensor& sum = task.sum;
  TORCH_CHECK(
      !sum.defined() ||
          (needs_weight && sum.sizes() == at::IntArrayRef{n, k} && sum.is_contiguous() &&
           sum.scalar_type() == task.weight_grad_dtype && sum.device() == grad.device()),
      fmt::format("qshard: linear's grad_weight can only be added to a contiguous {} tensor "
                  "of ({}, {}) on {}",
                  c10::toString(task.weight_grad_dtype), n, k, grad.device().str()));
  const at::Tensor& input_sum = task.input_sum;
  TORCH_CHECK(!input_sum.defined() ||
                  (task.needs_input && input_sum.sizes() == at::IntArrayRef{m, k} &&
                   input_sum.is_contiguous() && input_sum.scalar_type() == grad.dtype() &&
                   input_sum.device() == grad.device()),
              fmt::format("qshard: linear's grad_input can only be added to a contiguous {} tensor "
                          "of ({}, {}) on {}",
                          c10::toString(grad.dtype()), m, k, grad.device().str()));
  const at::TensorOptions weight_grad = grad.options().dtype(task.weight_grad_dtype);
  LinearBackward result;
  if (m == 0 || n == 0 || k == 0) {
    if (task.needs_input) {
      result.grad_input = input_sum.defined() ? input_sum : at::zeros({m, k}, grad.options());
    }
    if (needs_weight) result.grad_weight = sum.defined() ? sum : at::zeros({n, k}, weight_grad);
    return result;
  }
  if (needs_weight) {
    check_activation(*task.input, codes, k, "input");
    TORCH_CHECK(task.input->sizes()[0] == m,
                fmt::format("qshard: linear's input has {} rows, its gradient {}",
                            task.input->sizes()[0], m));
  }
  const LinearCall call(weight, task.weight_only);
  GemmFallback for_input = GemmFallback::kNone;
  GemmFallback for_weight = GemmFallback::kNone;
  if (task.needs_input) for_input = call.fallback(GemmDirection::kGradInput, grad);
  if (needs_weight) {
    for_weight = call.fallback(GemmDirection::kGradWeight, grad);
    if (for_weight == GemmFallback::kNone && !is_value_dtype(task.input->dtype())) {
      for_weight = GemmFallback::kDtype;
    }
  }
  const bool on_codes = (task.needs_input && for_input == GemmFallback::kNone) ||
                        (needs_weight && for_weight == GemmFallback::kNone);
  if (on_codes) result = backward_on_codes(task, call, for_input, for_weight);
  // What was saved as codes is made values of before the memory of other GEMMs is taken.
  at::Tensor input;
  if (needs_weight && !result.grad_weight.defined()) input = task.input->values(grad.dtype());
  if (!on_codes || !call.reads_packed()) grad.collect_amax(call.gradient_amax());
  at::Tensor values;
  const auto gradient = [&]() -> const at::Tensor& {
    if (!values.defined()) values = grad.values(grad.dtype());
    return values;
  };
  if (task.needs_input) {
    record_gemm(call.format, GemmDirection::kGradInput, for_input);
    if (!result.grad_input.defined()) {
      result.grad_input = dequantized_gemms().run({.direction = GemmDirection::kGradInput,
                                                   .a = {.values = gradient()},
                                                   .b = {.codes = &codes},
                                                   .out = grad.options()});
    }
    add_to(input_sum, result.grad_input);
  }
  if (needs_weight) {
    record_gemm(call.format, GemmDirection::kGradWeight, for_weight);
    if (!result.grad_weight.defined()) {
      result.grad_weight = dequantized_gemms().run({.direction = GemmDirection::kGradWeight,
                                                    .a = {.values = gradient()},
                                                    .b = {.values = input},
                                                    .out = weight_grad,
                                                    .sum = sum});
    }
    add_to(sum, result.grad_weight);
  }
  return result;
}

std::string backend_report() { return gemm_report(); }

std::string why_dequantized(const Format& format, at::Device device) {
  const GemmProblem problem{GemmDirection::kForward, &format, device, at::kBFloat16, 128, 128, 128};
  return std::string(gemm_fallback_reason(format, quantized_backend(format).supports(problem)));
}

}  // namespace qshard
