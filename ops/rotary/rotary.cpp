#include "ops/rotary/rotary.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>
#include <vector>

#include "kernels/format/value_dtype.h"
#include "kernels/rotary/rotary.h"
#include "ops/calls/overlap.h"
#include "ops/calls/saved_state.h"
#include "ops/linear/autograd.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

Tensor empty_result(const Tensor& input, at::OptionalSymIntArrayRef stride) {
  if (!stride) return at::empty_like(input);
  TORCH_CHECK(stride->size() == 4 && (*stride)[3] == 1,
              "qshard::rotary_embedding: stride must have four entries, the last one 1, got ",
              *stride);
  TORCH_CHECK_VALUE(!may_overlap(input.sym_sizes(), *stride),
                    "qshard::rotary_embedding: stride=", *stride,
                    " puts elements of a result of shape ", input.sym_sizes(),
                    " into the same memory, or is negative");
  return at::empty_strided_symint(input.sym_sizes(), *stride, input.options());
}

struct RotaryState {
  int64_t dim;
  bool interleaved, inverse;
  /// The gradient comes back as linears laid the input out, whatever attention made of it.
  std::vector<int64_t> stride;
  auto fields() { return std::tie(dim, interleaved, inverse, stride); }
};

struct RotaryFunction : Function<RotaryFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& cos,
                        const Tensor& sin, int64_t dim, bool interleaved, bool inverse,
                        std::optional<std::vector<c10::SymInt>> stride) {
    at::AutoDispatchBelowAutograd guard;
    static const auto op = typed_op<decltype(rotary_embedding)>("qshard::rotary_embedding");
    const at::OptionalSymIntArrayRef wanted =
        stride ? at::OptionalSymIntArrayRef(*stride) : at::OptionalSymIntArrayRef();
    const Tensor out = op.call(input, cos, sin, dim, interleaved, inverse, wanted);
    ctx->save_for_backward({cos, sin});
    RotaryState state{dim, interleaved, inverse, {}};
    if (!out.key_set().has(c10::DispatchKey::Python) && out.stride(3) == 1) {
      state.stride = out.strides().vec();
    }
    save_state(ctx, std::move(state));
    return out;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list result(7);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const auto state = load_state<RotaryState>(ctx);
    const std::vector<c10::SymInt> stride(state.stride.begin(), state.stride.end());
    // With a graph of its own, if that is asked for: it is linear.
    static const auto op = typed_op<decltype(rotary_embedding)>("qshard::rotary_embedding");
    result[0] =
        op.call(grads[0], saved[0], saved[1], state.dim, state.interleaved, !state.inverse,
                stride.empty() ? at::OptionalSymIntArrayRef() : at::OptionalSymIntArrayRef(stride));
    return result;
  }
};

}  // namespace

void check_rotary(const char* op, const Tensor& input, const Tensor& cos, const Tensor& sin,
                  int64_t dim) {
  const auto is_table = [&](const Tensor& table) {
    return (table.dim() == 2 || table.dim() == 3) && table.scalar_type() == at::kFloat &&
           table.is_contiguous() && table.device() == input.device() && !has_key(table);
  };
  const bool fits = input.dim() == 4 && dim >= 0 && dim < 3 &&
                    is_value_dtype(input.scalar_type()) && !has_key(input) && is_table(cos) &&
                    is_table(sin) && cos.sym_sizes() == sin.sym_sizes() &&
                    cos.sym_size(-2) >= input.sym_size(dim) &&
                    cos.sym_size(-1) <= input.sym_size(3) && cos.sym_size(-1) % 2 == 0 &&
                    (cos.dim() == 2 || cos.sym_size(0) == input.sym_size(dim == 0 ? 1 : 0));
  TORCH_CHECK(
      fits, op,
      ": needs a float32, bfloat16 or float16 input of four "
      "dimensions, the last its channels, and contiguous float32 tables of cos and sin (",
      "positions, an even number of its channels) beside it, or of (sequences, positions, an even "
      "number of its channels), positions being dimension 0, 1 or 2, and sequences dimension 0, or "
      "1 where positions are 0; got an input of ",
      input.sym_sizes(), " in ", input.scalar_type(), " on ", input.device(),
      ", positions in dimension ", dim, ", cos ", cos.sym_sizes(), " and sin ", sin.sym_sizes(),
      " in ", cos.scalar_type(), " on ", cos.device());
}

Tensor rotary_embedding(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t dim,
                        bool interleaved, bool inverse, at::OptionalSymIntArrayRef stride) {
  check_rotary("qshard::rotary_embedding", input, cos, sin, dim);
  const c10::OptionalDeviceGuard guard(input.device());
  Tensor out = empty_result(input, stride);
  if (out.numel() > 0) rotate(input, {cos, sin, dim, interleaved, inverse}, out);
  return out;
}

Tensor rotary_embedding_meta(const Tensor& input, const Tensor& cos, const Tensor& sin, int64_t dim,
                             bool, bool, at::OptionalSymIntArrayRef stride) {
  check_rotary("qshard::rotary_embedding", input, cos, sin, dim);
  return empty_result(input, stride);
}

Tensor rotary_embedding_autograd(const Tensor& input, const Tensor& cos, const Tensor& sin,
                                 int64_t dim, bool interleaved, bool inverse,
                                 at::OptionalSymIntArrayRef stride) {
  TORCH_CHECK(!at::GradMode::is_enabled() || (!cos.requires_grad() && !sin.requires_grad()),
              "qshard::rotary_embedding: cos and sin have no gradients; detach them");
  std::optional<std::vector<c10::SymInt>> wanted;
  if (stride) wanted = stride->vec();
  return RotaryFunction::apply(input, cos, sin, dim, interleaved, inverse, wanted);
}

}  // namespace qshard
