#include "kernels/grouped/grouped_paths.h"

#include <algorithm>
#include <limits>

#include "kernels/grouped/block_scaled_codes.h"
#include "kernels/grouped/grouped_gemm.h"
#include "kernels/grouped/grouped_values.h"
#include "kernels/linear/gemm_backend.h"

namespace qshard {
namespace {

bool is_packed(const Format& format) { return format.gemm.kind == GemmKind::kPacked; }

/// Whether the grouped GEMM of packed codes multiplies those that are scaled so: E4M3 in blocks, or
/// one scale and gradients in E5M2.
bool has_grouped_gemm_of_packed(const Format& format, at::Device device) {
  const ActivationCodes& activations = format.activations;
  if (format.emulated || activations.packed_input_dtype != DType::kFloat8E4M3 ||
      !has_grouped_gemm(device)) {
    return false;
  }
  const auto is_scaled = [&](ScaleMode weight, ScaleMode rows, DType gradient) {
    return format.gemm.scale_mode == weight && activations.packed_rows == rows &&
           activations.packed_gradient_dtype == gradient;
  };
  return is_scaled(ScaleMode::kBlock128x128, ScaleMode::kBlock1x128, DType::kFloat8E4M3) ||
         is_scaled(ScaleMode::kTensor, ScaleMode::kTensor, DType::kFloat8E5M2);
}

/// Whether scales lie at equal distances from one expert's matrix to the next: those of each begin
/// where its rows do.
bool has_regular_scales(const ExpertWeights& weights) {
  const RowImage& image = weights.stack.codes.row_image();
  const Layout& layout = image.layout;
  const ScaleLevel& scale = layout.format->scale;
  if (weights.count <= 1) return true;
  if (weights.step != weights.rows) return false;
  const bool is_whole = weights.rows == layout.matrix_rows &&
                        (layout.row_offset + image.first_row) % layout.matrix_rows == 0;
  return is_whole || (!layout.format->has_tensor_scale() && scale.begins_at(weights.rows) &&
                      scale.begins_at(layout.matrix_rows));
}

/// The kernels count rows, tiles and scales in 32 bits, and tiles of rows in 16.
bool is_too_large(const ExpertWeights& weights, int64_t total) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kMostTiles = 65535;
  const int64_t cols = weights.stack.codes.cols;
  return weights.count * std::max(weights.rows, cols) > kMost ||
         total / 128 + 1 + weights.count > kMostTiles;
}

GemmFallback codes_fallback(const GroupedProblem& problem, const ExpertWeights& weights) {
  if (problem.weight_only) return GemmFallback::kWeightOnly;
  const Format& format = *weights.stack.codes.format;
  const QuantizedGemmBackend& backend = quantized_backend(format);
  const LinearWeight ends[] = {weights.matrix(0), weights.matrix(weights.count - 1)};
  for (const LinearWeight& matrix : ends) {
    GemmProblem of_one{problem.direction, &format,      problem.device,          problem.dtype,
                       problem.total,     weights.rows, weights.stack.codes.cols};
    if (problem.direction != GemmDirection::kGradWeight) of_one.weight = &matrix.codes;
    const GemmFallback fallback = backend.supports(of_one);
    if (fallback != GemmFallback::kNone) return fallback;
  }
  const bool has_gemm = is_packed(format)
                            ? has_grouped_gemm_of_packed(format, problem.device)
                            : has_block_scaled_grouped_gemm(format, problem.device, problem.dtype);
  const bool reads_weights = problem.direction != GemmDirection::kGradWeight;
  // The other paths say that this image was not gathered.
  const bool has_image = weights.stack.codes.row_image().layout.has_rowwise();
  if (!has_gemm || (reads_weights && !has_image)) return GemmFallback::kNoGroupedGemm;
  const bool too_large = is_packed(format) ? is_too_large(weights, problem.total)
                                           : is_too_large_for_block_scaled(weights, problem.total);
  if (too_large) return GemmFallback::kTooLarge;
  return reads_weights && !has_regular_scales(weights) ? GemmFallback::kWindow
                                                       : GemmFallback::kNone;
}

}  // namespace

GroupedChoice choose_grouped_path(const GroupedProblem& problem, const ExpertWeights& weights) {
  if (weights.count == 0 || weights.rows == 0) return {GroupedPath::kEach, GemmFallback::kNone};
  // The gradient of matrices that lie as (in, out) is that of a plain product, for one expert, too.
  const bool is_plain = weights.transposed && problem.direction == GemmDirection::kGradWeight;
  const GemmFallback why = is_plain ? GemmFallback::kNone : codes_fallback(problem, weights);
  if (why == GemmFallback::kNone && !is_plain) return {GroupedPath::kCodes, why};
  // What emulates a GEMM of codes does so expert by expert.
  const bool emulates = weights.stack.codes.format->emulated && !problem.weight_only && !is_plain;
  const bool at_once = !emulates && has_grouped_gemm_of_values(problem.device, problem.dtype);
  return {at_once ? GroupedPath::kValues : GroupedPath::kEach, why};
}

bool runs_on_codes(GemmDirection direction, const GivenOperand& x, const ExpertWeights& weights,
                   bool weight_only) {
  const GroupedProblem problem{direction, x->device(), x->dtype(), x.rows(), weight_only};
  return choose_grouped_path(problem, weights).path == GroupedPath::kCodes;
}

GroupedPath record_path(GemmDirection direction, const GivenOperand& x,
                        const ExpertWeights& weights, bool weight_only) {
  // Where matrices lie as (in, out), forward reads them as dgrad does, and dgrad as forward.
  GemmDirection as_lying = direction;
  if (weights.transposed && direction != GemmDirection::kGradWeight) {
    as_lying =
        direction == GemmDirection::kForward ? GemmDirection::kGradInput : GemmDirection::kForward;
  }
  const GroupedChoice choice =
      choose_grouped_path({as_lying, x->device(), x->dtype(), x.rows(), weight_only}, weights);
  record_grouped_gemm(*weights.stack.codes.format, direction, choice.path, choice.why,
                      x->device().is_cuda());
  return choice.path;
}

GroupCodes quantize_groups(const GivenOperand& x, const Format& format, OperandRole role,
                           Orientations orientations, const RowGroups& groups,
                           const DelayedAmax& delayed, const GradientRounding& rounding) {
  return is_packed(format)
             ? quantize_packed_groups(x, format, role, orientations, groups, delayed)
             : quantize_block_scaled_groups(x, format, orientations, groups, rounding);
}

at::Tensor multiply_by_codes(const GroupCodes& x, const ExpertWeights& weights,
                             const RowGroups& groups, bool contract, at::ScalarType dtype) {
  return is_packed(*weights.stack.codes.format)
             ? multiply_by_packed_codes(x, weights, groups, contract, dtype)
             : multiply_by_block_scaled_codes(x, weights, groups, contract);
}

at::Tensor multiply_columns(const GroupCodes& gradient, const GroupCodes& input, int64_t total,
                            const RowGroups& groups, at::ScalarType dtype, const at::Tensor& sum) {
  return gradient.columns.defined()
             ? multiply_packed_columns(gradient, input, total, groups, dtype, sum)
             : multiply_block_scaled_columns(gradient, input, groups, dtype, sum);
}

}  // namespace qshard
