#include "kernels/checks/small_products.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ldexp.h>
#include <ATen/ops/nan_to_num.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <fmt/format.h>

#include <limits>
#include <utility>
#include <vector>

#include "kernels/gemm/gemm_report.h"
#include "kernels/grouped/grouped_codes.h"
#include "kernels/grouped/grouped_paths.h"
#include "kernels/linear/block_scaled_operand.h"
#include "kernels/linear/emulated_gemms.h"
#include "kernels/linear/operand_producer.h"

namespace qshard {
namespace {

// Several tiles of scales each way, and tokens that are no multiple of a tile.
constexpr int64_t kTokens = 144;
constexpr int64_t kOut = 256;
constexpr int64_t kIn = 256;
constexpr int64_t kExperts = 3;

// How far a sum may be from the exact one, in what is added up without signs. Hopper's tensor cores
// add 32 products to the sum at a time, each of the 33 cut to 13 bits below the largest: a
// simulation of these products is off by half of this, and so are the GEMMs of an H200. Another
// scale, or another order of scales, is farther off by orders of magnitude.
constexpr double kOfSums = 33 * 0x1p-12;

double rounding_of(at::ScalarType dtype) { return dtype == at::kFloat ? 0x1p-23 : 0x1p-8; }

// Values of 9 bits that look random, those of 16x16 blocks of sizes of their own.
at::Tensor values(int64_t rows, int64_t cols, int64_t seed, at::Device device) {
  const auto longs = at::TensorOptions().dtype(at::kLong).device(device);
  const at::Tensor i = at::arange(rows, longs).unsqueeze(1);
  const at::Tensor j = at::arange(cols, longs);
  const at::Tensor mixed = i.mul(cols).add(j).mul(40503).add(seed).remainder(509).sub(254);
  const at::Tensor blocks = i.div(16, "floor").add(j.div(16, "floor"), 3);
  return at::ldexp(mixed.to(at::kFloat).div(256), blocks.remainder(5).sub(2)).to(at::kBFloat16);
}

// `matrices` weights, one after the other.
QuantizedMatrix weight_codes(const at::Tensor& values, const Format& format, int64_t matrices = 1) {
  const int64_t rows = values.size(0);
  const Layout layout{.format = &format,
                      .rows = rows,
                      .cols = values.size(1),
                      .logical_rows = rows,
                      .matrix_rows = rows / matrices};
  return matrix_of(quantized_as(values, layout, /*rounding=*/nullptr), rows);
}

// The same operand with codes of no sign: products of such add up to what bounds an error.
CodeImage without_signs(const CodeImage& codes, int64_t code_bits) {
  const int64_t mask = code_bits == 4 ? 0x77 : 0x7f;
  if (const auto* packed = std::get_if<PackedCodes>(&codes)) {
    PackedCodes other = *packed;
    other.buffer = packed->buffer.clone();
    other.buffer.narrow(0, 0, packed->code_bytes()).bitwise_and_(mask);
    return other;
  }
  if (const auto* rows = std::get_if<RowImage>(&codes)) {
    RowImage other = *rows;
    const at::Tensor image = rows->image.operand().clone();
    image.view({rows->layout.rows, rows->layout.row_bytes()})
        .narrow(1, 0, rows->layout.row_scale_offset())
        .bitwise_and_(mask);
    other.image = image;
    return other;
  }
  return codes;
}

QuantizedMatrix without_signs(QuantizedMatrix matrix) {
  const auto bits_of = [](const CodeImage& codes) {
    const auto* rows = std::get_if<RowImage>(&codes);
    return rows != nullptr ? rows->layout.format->code_bits : 8;
  };
  matrix.rowwise = without_signs(matrix.rowwise, bits_of(matrix.rowwise));
  matrix.columnwise = without_signs(matrix.columnwise, bits_of(matrix.columnwise));
  return matrix;
}

at::Tensor emulated(GemmDirection direction, const QuantizedMatrix& a, const QuantizedMatrix& b,
                    const at::TensorOptions& options) {
  switch (direction) {
    case GemmDirection::kForward:
      return emulated_forward(a, b, std::nullopt, options);
    case GemmDirection::kGradInput:
      return emulated_grad_input(a, b, options);
    case GemmDirection::kGradWeight:
      return emulated_grad_weight(a, b, options);
  }
  return {};
}

/// Operands of the GEMMs of one linear.
class Operands {
 public:
  Operands(const QuantizedGemmBackend& backend, const Format& format, const QuantizedMatrix& weight)
      : format_(format), layout_(backend.operand_layout()), weight_(weight) {}

  QuantizedMatrix of(GemmDirection direction, OperandRole role, const at::Tensor& values) const {
    const bool columns = direction == GemmDirection::kGradWeight;
    OperandRequest request{.format = &format_,
                           .operand_layout = layout_,
                           .role = role,
                           .orientations = {.rowwise = !columns, .columnwise = columns}};
    if (direction == GemmDirection::kGradInput && format_.gemm.folds_row_scales) {
      request.column_factors = weight_row_scales(weight_);
    }
    return PlainOperand(values).codes(request);
  }

 private:
  const Format& format_;
  OperandLayout layout_;
  const QuantizedMatrix& weight_;
};

/// Two operands and what they give by emulation.
struct Product {
  at::Tensor expected;
  at::Tensor magnitude;  // of what is added up

  Product(GemmDirection direction, const QuantizedMatrix& a, const QuantizedMatrix& b,
          at::Device device) {
    const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
    expected = emulated(direction, a, b, floats);
    magnitude = emulated(direction, without_signs(a), without_signs(b), floats);
  }
};

/// The largest error as a share of what is allowed; infinite if anything is NaN.
double largest_share(const at::Tensor& got, const at::Tensor& expected,
                     const at::Tensor& magnitude) {
  const at::Tensor allowed =
      magnitude.mul(kOfSums).add_(expected.abs().mul_(rounding_of(got.scalar_type())));
  const at::Tensor share = got.to(at::kFloat)
                               .sub(expected)
                               .abs_()
                               .div_(allowed.clamp_min_(std::numeric_limits<float>::min()));
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  return at::nan_to_num(share, kInfinite, kInfinite, kInfinite).max().item<double>();
}

std::string said(double share, GemmDirection direction, const char* of) {
  return fmt::format(
      "{}{} with {} rows, {} out and {} in features is off by {} times what its arithmetic allows",
      name_of(direction), of, kTokens, kOut, kIn, fmt::format("{:.3g}", share));
}

constexpr GemmDirection kDirections[] = {GemmDirection::kForward, GemmDirection::kGradInput,
                                         GemmDirection::kGradWeight};

/// The dtypes in which training asks for them.
at::ScalarType dtype_of(GemmDirection direction) {
  return direction == GemmDirection::kGradWeight ? at::kFloat : at::kBFloat16;
}

}  // namespace

std::string wrong_product(const QuantizedGemmBackend& backend, const Format& format,
                          at::Device device) {
  const at::Tensor x = values(kTokens, kIn, 1, device);
  const at::Tensor grad = values(kTokens, kOut, 2, device);
  const QuantizedMatrix weight = weight_codes(values(kOut, kIn, 3, device), format);
  const Operands operands(backend, format, weight);
  for (const GemmDirection direction : kDirections) {
    GemmProblem problem{direction, &format, device, at::kBFloat16, kTokens, kOut, kIn};
    const bool reads_weight = direction != GemmDirection::kGradWeight;
    if (reads_weight) problem.weight = &weight;
    if (backend.supports(problem) != GemmFallback::kNone) continue;
    const bool is_forward = direction == GemmDirection::kForward;
    const QuantizedMatrix a =
        operands.of(direction, is_forward ? OperandRole::kInput : OperandRole::kGradient,
                    is_forward ? x : grad);
    QuantizedMatrix columns;
    if (!reads_weight) columns = operands.of(direction, OperandRole::kInput, x);
    const QuantizedMatrix& b = reads_weight ? weight : columns;
    const at::Tensor got = backend.run({.direction = direction,
                                        .a = {.codes = &a},
                                        .b = {.codes = &b},
                                        .out = x.options().dtype(dtype_of(direction))});
    if (!got.defined()) continue;  // linears dequantize where cuBLASLt has no kernel
    const Product product(direction, a, b, device);
    const double share = largest_share(got, product.expected, product.magnitude);
    if (share > 1) return said(share, direction, "");
  }
  return "";
}

std::string wrong_grouped_product(const Format& format, at::Device device) {
  const at::Tensor x = values(kTokens, kIn, 4, device);
  const at::Tensor grad = values(kTokens, kOut, 5, device);
  const QuantizedMatrix stack =
      weight_codes(values(kExperts * kOut, kIn, 6, device), format, kExperts);
  const ExpertWeights weights{{stack}, kExperts, kOut, kOut};
  constexpr int64_t kEnds[] = {0, 100, 100, kTokens};  // the second expert has no row
  const RowGroups groups{
      at::tensor({kEnds[1], kEnds[2], kEnds[3]}, at::TensorOptions().dtype(at::kInt)).to(device)};
  for (const GemmDirection direction : kDirections) {
    const GroupedProblem problem{direction, device, at::kBFloat16, kTokens};
    if (choose_grouped_path(problem, weights).path != GroupedPath::kCodes) continue;
    const bool is_forward = direction == GemmDirection::kForward;
    const bool is_wgrad = direction == GemmDirection::kGradWeight;
    const Orientations orientations{.rowwise = !is_wgrad, .columnwise = is_wgrad};
    const auto codes_of = [&](const at::Tensor& of, OperandRole role) {
      return quantize_groups(of, format, role, orientations, groups, {});
    };
    const at::ScalarType dtype = dtype_of(direction);
    const at::Tensor got =
        is_wgrad ? multiply_columns(codes_of(grad, OperandRole::kGradient),
                                    codes_of(x, OperandRole::kInput), kTokens, groups, dtype, {})
        : is_forward
            ? multiply_by_codes(codes_of(x, OperandRole::kInput), weights, groups, false, dtype)
            : multiply_by_codes(codes_of(grad, OperandRole::kGradient), weights, groups, true,
                                dtype);
    for (int64_t expert = 0; expert < kExperts; ++expert) {
      const int64_t first = kEnds[expert], count = kEnds[expert + 1] - first;
      if (count == 0) continue;
      const QuantizedMatrix matrix = weights.matrix(expert).codes;
      const Operands operands(quantized_backend(format), format, matrix);
      const auto rows = [&](const at::Tensor& of) { return of.narrow(0, first, count); };
      const QuantizedMatrix a =
          operands.of(direction, is_forward ? OperandRole::kInput : OperandRole::kGradient,
                      rows(is_forward ? x : grad));
      const QuantizedMatrix b =
          is_wgrad ? operands.of(direction, OperandRole::kInput, rows(x)) : matrix;
      const Product product(direction, a, b, device);
      const double share = largest_share(is_wgrad ? got.select(0, expert) : rows(got),
                                         product.expected, product.magnitude);
      if (share > 1) return said(share, direction, " of experts");
    }
  }
  return "";
}

}  // namespace qshard
