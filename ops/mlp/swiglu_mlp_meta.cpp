// Shapes of swiglu_mlp and of what it is made of. Codes are asked for only where all sizes are
// known (ops/mlp/swiglu_mlp_autograd.cpp).
#include <initializer_list>

#include "kernels/linear/swiglu_operand.h"
#include "ops/mlp/swiglu_mlp_arguments.h"

namespace qshard {
namespace {

using Sizes = std::vector<c10::SymInt>;

Tensor with_last(const Tensor& x, const c10::SymInt& last) {
  auto sizes = x.sym_sizes().vec();
  sizes.back() = last;
  return at::empty_symint(sizes, x.options());
}

Tensor wgrad_of(const Tensor& weight, bool is_needed, std::optional<at::ScalarType> dtype) {
  const Sizes none{0};
  return at::empty_symint(is_needed ? weight.sym_sizes().vec() : none,
                          weight.options().dtype(dtype.value_or(weight.scalar_type())));
}

void check_formats(const char* op, std::initializer_list<OptionalFormat> formats) {
  for (const OptionalFormat& format : formats) {
    if (format) checked_format(*format, op);
  }
}

/// `experts`: the weight is a stack of matrices.
void check_features(const char* op, const Tensor& x, const Tensor& weight, int64_t dim,
                    bool experts = false) {
  TORCH_CHECK(x.dim() >= 1 && weight.dim() == (experts ? 3 : 2), op,
              ": needs tensors of 1 or more dimensions and a weight of ", experts ? 3 : 2);
  if (experts) ++dim;
  TORCH_SYM_CHECK(x.sym_size(-1).sym_eq(weight.sym_size(dim)), op, ": a tensor of shape ",
                  x.sym_sizes(), " does not fit a weight of shape ", weight.sym_sizes());
}

}  // namespace

Tensor swiglu_mlp_meta(const Tensor& input, const Tensor& gate, const OptionalTensor&,
                       const Tensor& down, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, bool, c10::string_view format,
                       c10::string_view down_format, const WeightState&, const WeightState&,
                       const WeightState&, const OptionalTensor&, const OptionalTensor&,
                       const OptionalTensor&, double, bool, bool, c10::string_view activation) {
  mlp_activation("qshard::swiglu_mlp", activation);
  check_formats("qshard::swiglu_mlp", {format, down_format});
  check_features("qshard::swiglu_mlp", input, gate, 1);
  return with_last(input, down.sym_size(0));
}

std::tuple<Tensor, Tensor> swiglu_linear_forward_meta(const Tensor& gate, const OptionalTensor&,
                                                      const Tensor& weight, const OptionalTensor&,
                                                      bool keep_maxima, bool, OptionalFormat format,
                                                      const WeightState&, const OptionalTensor&,
                                                      const OptionalTensor& offs,
                                                      c10::string_view activation) {
  mlp_activation("qshard::swiglu_linear_forward", activation);
  check_formats("qshard::swiglu_linear_forward", {format});
  check_features("qshard::swiglu_linear_forward", gate, weight, 1, is_given(offs));
  c10::SymInt numel = 0;
  if (keep_maxima) {
    const auto k = gate.sym_size(-1);
    numel = swiglu_maxima_numel(gate.sym_numel() / k.max(1), k);
  }
  return {with_last(gate, weight.sym_size(-2)),
          at::empty_symint({numel}, gate.options().dtype(at::kFloat))};
}

SwigluLinearGrads swiglu_linear_backward_meta(
    const Tensor& grad, const Tensor& gate, const OptionalTensor&, const Tensor& weight,
    const Tensor&, bool needs_weight, bool rows, bool columns, bool joined,
    OptionalFormat grad_format, bool, std::optional<at::ScalarType> grad_dtype,
    OptionalFormat format, const WeightState&, const OptionalTensor& weight_grad,
    const OptionalTensor& offs, c10::string_view activation, const OptionalTensor&) {
  const bool gated = mlp_activation("qshard::swiglu_linear_backward", activation).gated;
  check_formats("qshard::swiglu_linear_backward", {format, grad_format});
  check_features("qshard::swiglu_linear_backward", grad, weight, 0, is_given(offs));
  check_features("qshard::swiglu_linear_backward", gate, weight, 1, is_given(offs));
  const bool is_added = is_given(weight_grad);
  const auto dtype = is_added ? std::optional(weight_grad->scalar_type()) : grad_dtype;
  const Tensor grad_weight = wgrad_of(weight, needs_weight && !is_added, dtype);
  const auto bytes = [&](int64_t count) {
    return at::empty({count}, gate.options().dtype(at::kByte));
  };
  if (!grad_format) {
    const bool is_asked = rows || columns;
    const auto k = gate.sym_size(-1);
    return {grad_weight, is_asked ? with_last(gate, joined ? k * 2 : k) : bytes(0), bytes(0),
            is_asked && gated && !joined ? with_last(gate, k) : bytes(0), bytes(0)};
  }
  const int64_t m = leading_numel(gate);
  const int64_t k = gate.size(-1) * (joined ? 2 : 1);
  const int64_t row_bytes = rows ? packed_rowwise_bytes(m, k) : 0;
  const int64_t column_bytes = columns ? packed_columnwise_bytes(m, k) : 0;
  return {grad_weight, bytes(row_bytes), bytes(column_bytes),
          bytes(joined || !gated ? 0 : row_bytes), bytes(joined || !gated ? 0 : column_bytes)};
}

}  // namespace qshard
