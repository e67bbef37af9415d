#include "dispatch/aten/matmul.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unordered_map>
#include <vector>

#include "dispatch/aten/native_kernels.h"
#include "dispatch/buffer/read_codes.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/checks/first_use.h"
#include "kernels/gemm/gemm_report.h"

namespace qshard {

namespace {

void check_has_key(const at::Tensor& weight, const char* op) {
  TORCH_CHECK(
      has_key(weight),
      fmt::format("{}: the weight is a plain {} tensor, not a quantized one. Quantize it with "
                  "qshard.quantize_(model, recipe); after load_state_dict(assign=True), again",
                  op, c10::toString(weight.scalar_type())));
}

/// Whether the tensor is quantized, has `dim` dimensions, and shows whole rows of its buffer.
bool is_window_of_rows(const at::Tensor& tensor, int64_t dim) {
  return has_key(tensor) && tensor.dim() == dim && row_window(tensor) &&
         tensor.size(-1) == buffer_of(tensor).layout().cols;
}

/// The `count` rows that a window of whole rows has.
LinearWeight weight_of_rows(const at::Tensor& window, int64_t count, const char* op) {
  const BufferPtr& buffer = impl_of(window).buffer();
  ensure_codes_current(buffer, op);
  check_gemms_at_first_use(*buffer->layout().format, buffer->device());
  const Planes& planes = buffer->planes();
  const ScalingState& state = buffer->scaling_state();
  const Layout& layout = buffer->layout();
  const int64_t first = row_window(window)->first;
  TORCH_CHECK(
      run_from(layout, first, count) == count,
      fmt::format(
          "{}: this rank has {} of {} rows of each matrix of a {}, as Shard(1) cuts a stack; "
          "FSDP2 gathers the others before a forward. If tensor parallelism cut it, say so: "
          "qshard.quantize_(model, recipe, tp_mesh=tp_mesh)",
          op, layout.rows_of_each, layout.matrix_rows, describe(window)));
  return {matrix_of({with_run(layout, first), planes.image(), planes.grid().read(), first}, count),
          state.amax_history, state.scaling_amax, &buffer->remembered().last_input,
          buffer->remembered().watched};
}

}  // namespace

LinearWeight linear_weight(const at::Tensor& weight, const char* op) {
  check_has_key(weight, op);
  TORCH_CHECK(
      is_row_window(weight),
      fmt::format("{}: the weight must be a 2-D window of whole rows, not {} with strides {}", op,
                  describe(weight), weight.strides().vec()));
  return weight_of_rows(weight, weight.size(0), op);
}

bool is_row_window(const at::Tensor& tensor) { return is_window_of_rows(tensor, 2); }

bool is_stack(const at::Tensor& tensor) { return is_window_of_rows(tensor, 3); }

bool is_transposed_stack(const at::Tensor& tensor) {
  return has_key(tensor) && tensor.dim() == 3 && !is_stack(tensor) &&
         is_stack(tensor.transpose(1, 2));
}

ExpertWeights expert_weights(const at::Tensor& weight, const char* op) {
  check_has_key(weight, op);
  const bool transposed = is_transposed_stack(weight);
  TORCH_CHECK(transposed || is_stack(weight),
              fmt::format("{}: the weight must be a stack of whole matrices (experts, out, in), or "
                          "the transpose of one, not {} with strides {}; give it a copy, "
                          "weight.contiguous()",
                          op, describe(weight), weight.strides().vec()));
  const at::Tensor lying = transposed ? weight.transpose(1, 2) : weight;
  const int64_t count = lying.size(0), rows = lying.size(1);
  ExpertWeights experts{weight_of_rows(lying, count * rows, op), count, rows, rows, transposed};
  experts.stack.watched = nullptr;  // no kernel of groups adds statistics, so no path does
  return experts;
}

std::optional<RowWindow> rows_of_their_own(const at::Tensor& x) {
  if (!is_quantized(x) || x.dim() < 2 || impl_of(x).is_export()) return std::nullopt;
  const QuantizedBuffer& buffer = buffer_of(x);
  const bool has_them = has_rows_of_their_own(buffer) && x.size(-1) == buffer.layout().cols;
  return has_them ? row_window(x) : std::nullopt;
}

std::optional<ArrivedOperand> arrived_operand(const at::Tensor& x, const Format& format,
                                              const char* op) {
  const auto rows = rows_of_their_own(x);
  if (!rows) return std::nullopt;
  const BufferPtr& buffer = impl_of(x).buffer();
  const Layout& layout = buffer->layout();
  if (format.activations.row_format != layout.format) {
    record_dequantized(*layout.format, op);
    return std::nullopt;
  }
  ensure_codes_current(buffer, op);
  return ArrivedOperand({layout, buffer->planes().image(), at::Tensor(), rows->first}, rows->count,
                        x.options());
}

GivenOperand given_operand(const at::Tensor& x, const Format& format, const char* op) {
  if (auto arrived = arrived_operand(x, format, op)) return *std::move(arrived);
  const at::Tensor values = value_or_itself(x);
  return values.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

at::Tensor dequantized_codes(const at::Tensor& tensor, const char* op) {
  if (!has_key(tensor)) return tensor;
  const BufferPtr& buffer = impl_of(tensor).buffer();
  ensure_codes_current(buffer, op);
  record_dequantized(*buffer->layout().format, op);
  return window(dequantized_rows(*buffer, buffer->dtype()), tensor);
}

std::span<const std::string_view> arguments_read_as_codes(std::string_view op) {
  using Arguments = std::vector<std::string_view>;
  static const std::unordered_map<std::string_view, Arguments> known{
      {"aten::embedding", {"weight"}},
      {"aten::_embedding_bag", {"weight"}},
      {"aten::_embedding_bag_forward_only", {"weight"}},
      {"aten::convolution", {"input", "weight"}},
      {"aten::convolution_backward", {"input", "weight"}},
      {"aten::mm", {"self", "mat2"}},  // with out=, and of a sparse matrix
      {"aten::addmm", {"mat1", "mat2"}},
      {"aten::addmm_", {"mat1", "mat2"}},
      {"aten::_sparse_addmm", {"mat1", "mat2"}},
      // These come here with out= alone; without it they are made of the others.
      {"aten::matmul", {"self", "other"}},
      {"aten::linalg_matmul", {"self", "other"}},
      {"aten::inner", {"self", "other"}},
      {"aten::tensordot", {"self", "other"}},
      {"aten::linalg_multi_dot", {"tensors"}},
      {"aten::chain_matmul", {"matrices"}},
      {"aten::linear", {"input", "weight"}},
      {"aten::bmm", {"self", "mat2"}},
      {"aten::mv", {"self", "vec"}},
      {"aten::addmv", {"mat", "vec"}},
      {"aten::addbmm", {"batch1", "batch2"}},
      {"aten::baddbmm", {"batch1", "batch2"}},
      {"aten::_addmm_activation", {"mat1", "mat2"}},
      {"aten::linear", {"weight"}},  // of nested inputs
      {"aten::linear_backward", {"weight"}},
      // nn.MultiheadAttention's and nn.TransformerEncoderLayer's in eval mode
      {"aten::_native_multi_head_attention", {"qkv_weight", "proj_weight"}},
      {"aten::_transformer_encoder_layer_fwd",
       {"qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2"}},
  };
  const auto found = known.find(op);
  return found == known.end() ? std::span<const std::string_view>() : found->second;
}

namespace {

void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* op) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type(),
              fmt::format("{}: expected both matrices to have the same dtype, but got {} and {}",
                          op, c10::toString(a.scalar_type()), c10::toString(b.scalar_type())));
}

bool shapes_fit(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0);
}

/// x @ weight.t() and x @ weight run as the linear layer's forward and dgrad do; this is what
/// DTensor decomposes F.linear and its backward into. None for other operands.
std::optional<at::Tensor> product_with_weight(const at::Tensor& a, const at::Tensor& b,
                                              const std::optional<at::Tensor>& bias,
                                              const char* op) {
  const bool is_operand = !has_key(a) || rows_of_their_own(a);
  if (!is_operand || !has_key(b) || !shapes_fit(a, b)) return std::nullopt;
  const bool is_transposed = is_row_window(b.t());
  if (!is_transposed && !is_row_window(b)) return std::nullopt;
  check_same_dtype(a, b, op);
  c10::OptionalDeviceGuard device_guard(b.device());
  const LinearWeight weight = linear_weight(is_transposed ? b.t() : b, op);
  const GivenOperand operand = given_operand(a, *weight.codes.format, op);
  if (is_transposed) return linear_forward(*operand, weight, bias, false).output;
  const at::Tensor product =
      linear_backward({.grad = &*operand, .needs_input = true}, weight).grad_input;
  return bias ? product + *bias : product;
}

at::Tensor mm(const at::Tensor& a, const at::Tensor& b) {
  constexpr const char* kOp = "aten::mm";
  PlainGuard guard;
  if (auto product = product_with_weight(a, b, std::nullopt, kOp)) return *std::move(product);
  return at::mm(dequantized_codes(a, kOp), dequantized_codes(b, kOp));
}

at::Tensor addmm(const at::Tensor& bias, const at::Tensor& a, const at::Tensor& b,
                 const at::Scalar& beta, const at::Scalar& alpha) {
  constexpr const char* kOp = "aten::addmm";
  PlainGuard guard;
  const bool adds_bias = !has_key(bias) && bias.dim() == 1 && b.dim() == 2 &&
                         bias.size(0) == b.size(1) && bias.scalar_type() == b.scalar_type() &&
                         beta.equal(1) && alpha.equal(1);
  if (adds_bias) {
    if (auto product = product_with_weight(a, b, bias, kOp)) return *std::move(product);
  }
  return at::addmm(value_or_itself(bias), dequantized_codes(a, kOp), dequantized_codes(b, kOp),
                   beta, alpha);
}

/// Experts multiply as their linears do. torch's own kernel multiplies values of other operands.
at::Tensor grouped_mm(const at::Tensor& a, const at::Tensor& b,
                      const std::optional<at::Tensor>& offs, const std::optional<at::Tensor>& bias,
                      std::optional<at::ScalarType> out_dtype) {
  constexpr const char* kOp = "aten::_grouped_mm";
  PlainGuard guard;
  if (!multiplies_experts(a, b, offs, bias, out_dtype)) {
    return at::_grouped_mm(dequantized_codes(a, kOp), dequantized_codes(b, kOp), offs, bias,
                           out_dtype);
  }
  const at::Tensor weight = b.transpose(1, 2);
  check_same_dtype(a, b, kOp);
  check_groups(a, weight, *offs, kOp);
  c10::OptionalDeviceGuard device_guard(b.device());
  const ExpertWeights experts = expert_weights(weight, kOp);
  return grouped_forward(given_operand(a, *experts.stack.codes.format, kOp), experts,
                         {offs->contiguous()}, /*weight_only=*/false)
      .output;
}

at::Tensor bmm(const at::Tensor& a, const at::Tensor& b) {
  PlainGuard guard;
  return at::bmm(dequantized_codes(a, "aten::bmm"), dequantized_codes(b, "aten::bmm"));
}

}  // namespace

bool multiplies_experts(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& offs,
                        const std::optional<at::Tensor>& bias,
                        std::optional<at::ScalarType> out_dtype) {
  const bool is_plain = (!has_key(x) || rows_of_their_own(x)) && x.dim() == 2 && offs &&
                        offs->defined() && !has_key(*offs) && !(bias && bias->defined()) &&
                        out_dtype.value_or(x.scalar_type()) == x.scalar_type();
  return is_plain && (is_stack(weight) || is_transposed_stack(weight));
}

void check_groups(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offs,
                  const char* op) {
  TORCH_CHECK(weight.dim() == 3 && x.dim() == 2 && x.size(1) == weight.size(2),
              fmt::format("{}: needs an input (rows, in) and a weight (experts, out, in), got {} "
                          "and {}",
                          op, x.sizes(), weight.sizes()));
  TORCH_CHECK(is_value_dtype(x.scalar_type()),
              fmt::format("{}: input dtype {} is not supported; use float32, bfloat16 or float16",
                          op, c10::toString(x.scalar_type())));
  TORCH_CHECK(offs.dim() == 1 && offs.size(0) == weight.size(0) && offs.scalar_type() == at::kInt &&
                  !has_key(offs),
              fmt::format("{}: offs must be a plain int32 tensor of shape ({},), where the rows of "
                          "each expert end, got {} {}",
                          op, weight.size(0), c10::toString(offs.scalar_type()), offs.sizes()));
  TORCH_CHECK(x.device() == weight.device() && offs.device() == x.device(),
              fmt::format("{}: the input is on {}, the weight on {} and offs on {}; all tensors "
                          "must be on one device",
                          op, x.device().str(), weight.device().str(), offs.device().str()));
}

void register_matmul(torch::Library& aten) {
  aten.impl("mm", &mm);
  aten.impl("addmm", &addmm);
  aten.impl("bmm", &bmm);
  aten.impl("_grouped_mm", &grouped_mm);
}

}  // namespace qshard
