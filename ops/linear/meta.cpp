#include <ATen/ATen.h>
#include <fmt/format.h>

#include "kernels/linear/linear.h"
#include "ops/calls/ops.h"
#include "ops/linear/grouped_linear.h"

namespace qshard {

namespace {

/// The checks of ops/linear/linear.cpp and kernels/linear/linear.cpp, of sizes that may be symbols.
void check_sizes(const char* op, const char* name, const Tensor& x, const Tensor& weight,
                 int64_t weight_dim) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2,
              fmt::format("{}: needs {} of 1 or more dimensions and a weight of 2, got {} and {}",
                          op, name, x.dim(), weight.dim()));
  TORCH_SYM_CHECK(x.sym_size(-1).sym_eq(weight.sym_size(weight_dim)),
                  fmt::format("{}: {} of shape {} does not fit a weight of shape {}", op, name,
                              c10::str(x.sym_sizes()), c10::str(weight.sym_sizes())));
}

}  // namespace

Tensor dequantize_meta(const Tensor& self, std::optional<at::ScalarType> dtype) {
  return at::empty_symint(self.sym_sizes(),
                          self.options().dtype(dtype.value_or(self.scalar_type())));
}

Tensor linear_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, bool,
                   std::optional<c10::string_view> format, const WeightState&,
                   const OptionalTensor&, bool) {
  if (format) checked_format(*format, "qshard::linear");
  check_sizes("qshard::linear", "an input", input, weight, 1);
  if (bias && bias->defined()) check_sizes("qshard::linear", "a bias", *bias, weight, 0);
  auto sizes = input.sym_sizes().vec();
  sizes.back() = weight.sym_size(0);
  return at::empty_symint(sizes, input.options());
}

std::tuple<Tensor, Tensor> linear_forward_meta(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    bool save_quantized_input, bool, const OptionalTensor&, std::optional<c10::string_view> format,
    const WeightState&, const OptionalTensor&, const OptionalTensor& offs) {
  if (is_given(offs)) {
    return {grouped_linear_meta(input, weight, *offs, false, format),
            at::empty_symint({0}, input.options().dtype(at::kByte))};
  }
  c10::SymInt saved_bytes = 0;
  if (save_quantized_input) {
    // Only asked for when all sizes are known (ops/linear/autograd.cpp).
    saved_bytes = packed_columnwise_bytes(leading_numel(input), input.size(-1));
  }
  return {linear_meta(input, weight, bias, false, format, std::nullopt, std::nullopt, false),
          at::empty_symint({saved_bytes}, input.options().dtype(at::kByte))};
}

std::tuple<Tensor, Tensor> quantize_input_meta(const Tensor& input, c10::string_view format,
                                               bool rows, bool columns) {
  checked_format(format, "qshard::quantize_input");
  int64_t row_bytes = 0;
  int64_t column_bytes = 0;
  if (rows || columns) {  // as above, all sizes are known
    const int64_t m = leading_numel(input);
    const int64_t k = input.size(-1);
    if (rows) row_bytes = packed_rowwise_bytes(m, k);
    if (columns) column_bytes = packed_columnwise_bytes(m, k);
  }
  const auto bytes = input.options().dtype(at::kByte);
  return {at::empty({row_bytes}, bytes), at::empty({column_bytes}, bytes)};
}

std::tuple<Tensor, Tensor> quantize_kept_input_meta(const Tensor& input, c10::string_view format,
                                                    bool columns, const OptionalTensor& amax,
                                                    const OptionalTensor&) {
  const int64_t m = leading_numel(input);
  const int64_t k = input.size(-1);
  const Format& own = checked_format(format, "qshard::_quantize_kept_input");
  const bool is_found = packed_scale_mode(own) == ScaleMode::kTensor && !amax;
  return {at::empty({columns ? packed_columnwise_bytes(m, k) : packed_rowwise_bytes(m, k)},
                    input.options().dtype(at::kByte)),
          at::empty({is_found ? 1 : 0}, input.options().dtype(at::kFloat))};
}

std::tuple<Tensor, Tensor> linear_backward_meta(
    const Tensor& grad, const Tensor& weight, const Tensor&, bool, bool needs_input,
    bool needs_weight, bool, std::optional<at::ScalarType> grad_dtype,
    std::optional<c10::string_view> format, const WeightState&, const OptionalTensor&,
    at::OptionalIntArrayRef grad_size, std::optional<at::ScalarType> value_dtype,
    const OptionalTensor& input_sum, const OptionalTensor& weight_grad, const OptionalTensor& offs,
    const OptionalTensor&) {
  if (format) checked_format(*format, "qshard::linear_backward");
  std::vector<c10::SymInt> sizes;
  if (grad_size) {
    sizes.assign(grad_size->begin(), grad_size->end());
  } else {
    if (is_given(offs)) {
      check_grouped_sizes("qshard::linear_backward", grad, weight, 1, *offs);
    } else {
      check_sizes("qshard::linear_backward", "a gradient", grad, weight, 0);
    }
    sizes = grad.sym_sizes().vec();
  }
  TORCH_CHECK(!sizes.empty(), "qshard::linear_backward: grad_size is empty");
  sizes.back() = weight.sym_size(-1);
  const auto wgrad_dtype = is_given(weight_grad) ? weight_grad->scalar_type()
                                                 : grad_dtype.value_or(weight.scalar_type());
  const std::vector<c10::SymInt> none{0};
  const bool returns_input = needs_input && !is_given(input_sum);
  const bool returns_weight = needs_weight && !is_given(weight_grad);
  // The gradient of a stack that is given transposed lies as the stack does.
  const bool is_transposed =
      returns_weight && is_given(offs) && !weight.is_contiguous() && weight.mT().is_contiguous();
  const Tensor shape = is_transposed ? weight.mT() : weight;
  const Tensor grad_weight = at::empty_symint(returns_weight ? shape.sym_sizes().vec() : none,
                                              weight.options().dtype(wgrad_dtype));
  return {at::empty_symint(returns_input ? sizes : none,
                           grad.options().dtype(value_dtype.value_or(grad.scalar_type()))),
          is_transposed ? grad_weight.mT() : grad_weight};
}

}  // namespace qshard
