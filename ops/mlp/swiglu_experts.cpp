#include <fmt/format.h>

#include "ops/linear/autograd.h"
#include "ops/linear/grouped_linear.h"
#include "ops/mlp/swiglu_mlp.h"
#include "ops/mlp/swiglu_mlp_arguments.h"

namespace qshard {
namespace {

constexpr const char* kOp = "qshard::swiglu_experts";

}  // namespace

void check_swiglu_experts(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                          const Tensor& down, const Tensor& offs) {
  const bool joined = !is_given(up);
  const bool fits = input.dim() == 2 && gate.dim() == 3 && down.dim() == 3 &&
                    (joined || (up->dim() == 3 && up->sym_sizes() == gate.sym_sizes())) &&
                    input.sym_size(1) == gate.sym_size(2) && gate.sym_size(0) == down.sym_size(0) &&
                    gate.sym_size(1) == down.sym_size(2) * (joined ? 2 : 1) && offs.dim() == 1 &&
                    offs.sym_size(0) == gate.sym_size(0) && offs.scalar_type() == at::kInt;
  TORCH_CHECK(fits, kOp, ": input ", input.sym_sizes(), ", gate ", gate.sym_sizes(), ", up ",
              joined ? std::string("none") : c10::str(up->sym_sizes()), ", down ", down.sym_sizes(),
              " and offs ", offs.scalar_type(), " ", offs.sym_sizes(),
              " do not go together: the input is (rows, columns), gate and up are (experts, inner, "
              "columns), or gate alone is (experts, 2 inner, columns), down is (experts, outputs, "
              "inner), and offs are int32 (experts,)");
}

Tensor swiglu_experts(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                      const Tensor& down, const Tensor& offs, bool weight_only,
                      OptionalFormat format, OptionalFormat down_format) {
  check_swiglu_experts(input, gate, up, down, offs);
  check_format_name(down, down_format, kOp);
  const auto values_of = [&](const Tensor& weight) {
    return grouped_linear(input, weight, offs, weight_only, format);
  };
  const bool has_up = is_given(up);
  const GateAndUp of(values_of(gate), has_up ? values_of(*up) : Tensor(), /*is_joined=*/!has_up);
  return std::get<0>(swiglu_linear_forward(
      of.gate, of.up, quantized_on_use(down, down_format), std::nullopt,
      /*keep_maxima=*/false, weight_only, std::nullopt, std::nullopt, std::nullopt, offs));
}

Tensor swiglu_experts_meta(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const Tensor& down, const Tensor& offs, bool, OptionalFormat format,
                           OptionalFormat down_format) {
  for (const OptionalFormat& name : {format, down_format}) {
    if (name) checked_format(*name, kOp);
  }
  check_swiglu_experts(input, gate, up, down, offs);
  return at::empty_symint({input.sym_size(0), down.sym_size(1)}, input.options());
}

}  // namespace qshard
