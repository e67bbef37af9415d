// linear on plain and quantized tensors, below autograd.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <variant>

#include "dispatch/aten/matmul.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/linear/block_scaled_operand.h"
#include "kernels/linear/linear.h"
#include "ops/calls/ops.h"
#include "ops/linear/autograd.h"
#include "ops/linear/dynamic_weight.h"
#include "ops/linear/grouped_linear.h"
#include "ops/linear/linear_operands.h"
#include "ops/linear/recorded_activation.h"

namespace qshard {
namespace {

thread_local const SharedInput* t_shared_input = nullptr;

// A mode may hand the operator another tensor than it was called with.
const SharedInput& shared_as(const Tensor& input) {
  static const SharedInput not_shared;
  const bool is_shared = t_shared_input != nullptr && t_shared_input->tensor.is_same(input);
  return is_shared ? *t_shared_input : not_shared;
}

/// Operands of a known few kinds, held without an allocation.
using ForwardOperand = std::variant<SharedOperand, QuantizedOperand, ArrivedOperand>;

/// The input of forward: codes that quantize_input made of it, that it arrived in, or itself.
ForwardOperand input_operand(const Tensor& input, const Format& format, const OptionalTensor& rows,
                             bool save_quantized_input) {
  if (!is_given(rows)) {
    if (auto arrived = arrived_operand(input, format, "qshard::linear")) return *std::move(arrived);
    return SharedOperand(as_matrix(input), shared_as(input));
  }
  const Tensor matrix = as_matrix(input);
  const int64_t m = matrix.size(0);
  const int64_t k = matrix.size(1);
  TORCH_CHECK(!save_quantized_input && is_packed_buffer(*rows, packed_rowwise_bytes(m, k), matrix),
              fmt::format("qshard: linear's input_rows must be quantize_input's, uint8 of {} bytes "
                          "on {}, and nothing is saved beside them",
                          packed_rowwise_bytes(m, k), matrix.device().str()));
  return QuantizedOperand(packed_matrix(format, OperandRole::kInput, m, k, *rows, {}), matrix);
}

}  // namespace

/// Compiled code saves a quantized weight as any tensor, and a hook may have made values of it; so
/// does eager code where the image that backward reads comes by a later gather.
/// Quantizing them gives its codes back where these follow from the values alone.
void check_codes_can_be_made_again(const Format& format, const char* op) {
  TORCH_CHECK(format.amax_history.length == 0 && !format.stochastic_rounding && !format.columnwise,
              fmt::format("{}: a hook on saved tensors made plain values of a {} weight, whose "
                          "codes do not follow from them; use one that keeps tensors as they are, "
                          "as save_on_cpu() without pin_memory does",
                          op, format.name));
}

LinearWeight weight_for_use(const Tensor& weight, std::optional<c10::string_view> format,
                            const WeightState& state, WeightUse use, const char* op) {
  const bool is_handed_back = !state && format && use != WeightUse::kForward;
  if (has_key(weight) || (!state && !is_handed_back)) {
    check_format_name(weight, format, op);
    LinearWeight used = linear_weight(weight, op);
    if (state && state->size() == 2) {  // delayed scaling's, of a tensor over saved planes
      used.amax_history = (*state)[0];
      used.scaling_amax = (*state)[1];
    }
    return used;
  }
  TORCH_CHECK_VALUE(format,
                    fmt::format("{}: weight_state is given, so format must name the weight's", op));
  const Format& own = checked_format(*format, op);
  if (is_handed_back) check_codes_can_be_made_again(own, op);
  return quantize_for_use(weight, own, state ? at::TensorList(*state) : at::TensorList(), use, op);
}

void check_format_name(const Tensor& weight, std::optional<c10::string_view> format,
                       const char* op) {
  if (!format || (is_quantized(weight) && buffer_of(weight).layout().format->name == *format)) {
    return;
  }
  checked_format(*format, op);
}

Tensor as_matrix(const Tensor& tensor) {
  const Tensor values = value_or_itself(tensor);
  return values.reshape({leading_numel(values), values.size(-1)});
}

void check_linear_shapes(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  TORCH_CHECK(
      input.dim() >= 1 && input.size(-1) == weight.size(1),
      fmt::format("qshard::linear: input of shape {} does not fit a weight of shape {}; the "
                  "last input dimension must be {}",
                  input.sizes().vec(), weight.sizes().vec(), weight.size(1)));
  TORCH_CHECK(
      !bias || (bias->dim() == 1 && bias->size(0) == weight.size(0)),
      fmt::format("qshard::linear: bias of shape {} does not fit a weight of shape {}",
                  bias ? bias->sizes().vec() : std::vector<int64_t>{}, weight.sizes().vec()));
  TORCH_CHECK(
      is_value_dtype(input.scalar_type()),
      fmt::format("qshard::linear: input dtype {} is not supported; use float32, bfloat16 or "
                  "float16",
                  c10::toString(input.scalar_type())));
  TORCH_CHECK(input.device() == weight.device(),
              fmt::format("qshard::linear: input is on {} but the weight is on {}",
                          input.device().str(), weight.device().str()));
}

Tensor residual_matrix(const OptionalTensor& residual, const Tensor& input, const Tensor& weight) {
  if (!residual || !residual->defined()) return {};
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  TORCH_CHECK(!has_key(*residual) && residual->sizes() == at::IntArrayRef(sizes) &&
                  residual->scalar_type() == input.scalar_type() &&
                  residual->device() == input.device(),
              fmt::format("qshard::linear: a residual must be a plain {} tensor of shape {} on {}, "
                          "as the output, got {} of shape {} on {}; add it to the output",
                          c10::toString(input.scalar_type()), sizes, input.device().str(),
                          c10::toString(residual->scalar_type()), residual->sizes().vec(),
                          residual->device().str()));
  return as_matrix(*residual).contiguous();
}

void check_expected_format(const LinearWeight& weight, std::optional<c10::string_view> format) {
  if (!format) return;
  const Format* actual = weight.codes.format;
  TORCH_CHECK(
      &checked_format(*format, "qshard::linear") == actual,
      fmt::format(
          "qshard::linear: the input was quantized for a {} weight, and the weight is {}; a "
          "compiled module whose weight was replaced needs qshard.quantize_(module, recipe) "
          "for the new format",
          checked_format(*format, "qshard::linear").name, actual->name));
}

bool is_packed_buffer(const Tensor& bytes, int64_t numel, const Tensor& beside) {
  return bytes.scalar_type() == at::kByte && bytes.is_contiguous() && bytes.numel() == numel &&
         bytes.device() == beside.device();
}

Tensor bytes_or_none(const CodeImage& codes, const Tensor& beside) {
  const Tensor bytes = bytes_of(codes);
  return bytes.defined() ? bytes : at::empty({0}, beside.options().dtype(at::kByte));
}

InputCodeScope::InputCodeScope(const Tensor& input) : previous_(t_shared_input) {
  input_.record = record_of_activation(input);
  if (input_.record) input_.tensor = input;
  t_shared_input = &input_;
}
InputCodeScope::~InputCodeScope() { t_shared_input = previous_; }

void check_codes_can_be_read(at::TensorList weights) {
  for (const Tensor& weight : weights) {
    ensure_codes_current(impl_of(weight).buffer(), "qshard::linear");
  }
}

bool shares_input_codes(const Tensor& input) {
  return static_cast<bool>(record_of_activation(input));
}

std::tuple<Tensor, Tensor> linear_forward_op(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias, bool save_quantized_input,
                                             bool weight_only, const OptionalTensor& input_rows,
                                             std::optional<c10::string_view> format,
                                             const WeightState& weight_state,
                                             const OptionalTensor& residual,
                                             const OptionalTensor& offs) {
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(weight.device());
  if (is_given(offs)) {
    TORCH_CHECK(!is_given(bias) && !is_given(residual) && !is_given(input_rows) && !weight_state,
                "qshard::linear_forward: offs go with an input of values and a quantized weight "
                "alone: no bias, residual, input_rows or weight_state");
    auto made =
        grouped_linear_forward(input, weight, *offs, weight_only, format, save_quantized_input);
    return {made.output, made.saved.defined() ? made.saved : bytes_or_none({}, input)};
  }
  auto used = weight_for_use(weight, format, weight_state, WeightUse::kForward, "qshard::linear");
  check_expected_format(used, format);
  check_linear_shapes(input, weight, bias);
  take_arrived_tally(used, kWatchedInput, input);
  const auto operand = input_operand(input, *used.codes.format, input_rows, save_quantized_input);
  auto result = linear_forward(producer_of(operand), used, bias, save_quantized_input, weight_only,
                               residual_matrix(residual, input, weight));
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  // Detached from the 2-D result, so that N-D outputs are no views (FSDP2 warns about those).
  if (input.dim() != 2) result.output = at::_unsafe_view(result.output, sizes);
  return {result.output, bytes_or_none(result.saved.columnwise, input)};
}

Tensor transposed_operand(const Tensor& x, bool hadamard) {
  PlainGuard guard;
  TORCH_CHECK(x.dim() == 2 && !has_key(x) && is_value_dtype(x.scalar_type()),
              fmt::format("qshard::_transposed_operand: needs a plain float32, bfloat16 or float16 "
                          "matrix, got {}",
                          describe(x)));
  c10::OptionalDeviceGuard device_guard(x.device());
  return transposed_values(x, hadamard);
}

std::tuple<Tensor, Tensor> quantize_input_op(const Tensor& input, c10::string_view format,
                                             bool rows, bool columns) {
  PlainGuard guard;
  const Format& found = checked_format(format, "qshard::quantize_input");
  const auto arrived = arrived_operand(input, found, "qshard::quantize_input");
  const bool is_read = arrived && (rows || columns) && input.numel() > 0 &&
                       multiplies_input_codes(found, input.device(), input.scalar_type(),
                                              arrived->sizes()[0], /*n=*/16, arrived->sizes()[1]);
  // Rows with one scale each stay where they are, so that there are no packed bytes of them.
  const bool of_rows = rows && is_read && !arrived->has_row_scales();
  QuantizedMatrix codes;
  if (of_rows || (is_read && columns)) {
    codes = arrived->codes({.format = &found, .orientations = {of_rows, columns}});
  }
  const Orientations left{rows && !of_rows, columns && !is_read};
  if (left.rowwise || left.columnwise) {
    QuantizedMatrix made = quantize_input(as_matrix(input), found, left);
    if (left.rowwise) codes.rowwise = std::move(made.rowwise);
    if (left.columnwise) codes.columnwise = std::move(made.columnwise);
  }
  return {bytes_or_none(codes.rowwise, input), bytes_or_none(codes.columnwise, input)};
}

std::tuple<Tensor, Tensor> quantize_kept_input(const Tensor& input, c10::string_view format,
                                               bool columns, const OptionalTensor& amax,
                                               const OptionalTensor& weight) {
  PlainGuard guard;
  const char* op = "qshard::_quantize_kept_input";
  TORCH_CHECK(
      !has_key(input) && (!amax || (amax->numel() == 1 && amax->device() == input.device() &&
                                    amax->scalar_type() == at::kFloat)),
      fmt::format("{}: needs a plain input, and its amax as float32 (1,) or none", op));
  Tensor known = amax.value_or(Tensor());
  LastInputAmax* last =
      weight && has_key(*weight) ? &buffer_of(*weight).remembered().last_input : nullptr;
  const auto codes = quantize_input(as_matrix(input), checked_format(format, op),
                                    {.rowwise = !columns, .columnwise = columns}, &known, last);
  const bool is_found = known.defined() && !amax;
  return {bytes_or_none(columns ? codes.columnwise : codes.rowwise, input),
          is_found ? known : at::empty({0}, input.options().dtype(at::kFloat))};
}

bool is_quantized_on_use(const Tensor& weight, std::optional<c10::string_view> format) {
  if (!format || has_key(weight) || weight.is_meta()) return false;
  if (is_traced_or_subclass(weight)) return false;
  if (weight.is_leaf() && weight.requires_grad()) {
    TORCH_WARN_ONCE(fmt::format(
        "qshard::linear: the weight of a quantized module is a plain parameter, which is quantized "
        "to {} at each use and gathered in full by FSDP2. Where it was assigned to stay, call "
        "qshard.quantize_(model, recipe) again",
        std::string(*format)));
  }
  return true;
}

Tensor quantized_on_use(const Tensor& weight, std::optional<c10::string_view> format) {
  return is_quantized_on_use(weight, format) ? quantize(weight, *format, false, std::nullopt, 0)
                                             : weight;
}

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              bool weight_only, std::optional<c10::string_view> format,
              const WeightState& weight_state, const OptionalTensor& residual, bool) {
  const bool is_dynamic = weight_state.has_value();
  check_format_name(weight, format, "qshard::linear");
  if (goes_the_way_of_matmul(weight)) {
    return linear_of_view(input, weight, bias, weight_only, residual);
  }
  const Tensor quantized = is_dynamic ? weight : quantized_on_use(weight, format);
  return std::get<0>(linear_forward_op(input, quantized, bias, /*save_quantized_input=*/false,
                                       weight_only, std::nullopt,
                                       is_dynamic ? format : std::nullopt, weight_state, residual));
}

Tensor aten_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  PlainGuard guard;
  const auto plain = [](const Tensor& tensor) { return dequantized_codes(tensor, "aten::linear"); };
  const auto plain_bias = bias && bias->defined() ? OptionalTensor(plain(*bias)) : std::nullopt;
  if (!has_key(weight)) return at::linear(plain(input), weight, plain_bias);
  if (goes_the_way_of_matmul(weight)) return linear_by_matmul(plain(input), weight, plain_bias);
  return linear(rows_of_their_own(input) ? input : plain(input), weight, plain_bias,
                /*weight_only=*/false, std::nullopt, std::nullopt);
}

bool goes_the_way_of_matmul(const Tensor& weight) {
  return has_key(weight) && (weight.dim() == 1 || weight.dim() == 2) && !is_row_window(weight);
}

Tensor linear_of_view(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      bool weight_only, const OptionalTensor& residual) {
  // Through the dispatcher: with autograd's kernel where that is on.
  static const auto values = typed_op<decltype(dequantize_autograd)>("qshard::dequantize");
  const Tensor product = weight_only
                             ? at::linear(input, values.call(weight, input.scalar_type()), bias)
                             : linear_by_matmul(input, weight, bias);
  return residual && residual->defined() ? *residual + product : product;
}

Tensor linear_by_matmul(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const bool has_bias = bias && bias->defined();
  if (!has_bias || weight.dim() != 2 || input.dim() == 0) {
    const Tensor product = at::matmul(input, weight.t());
    return has_bias ? product + *bias : product;
  }
  // One rounding of product and bias, as at::linear of matrices.
  auto sizes = input.sym_sizes().vec();
  const Tensor rows =
      input.reshape_symint({c10::multiply_integers(sizes.begin(), sizes.end() - 1), sizes.back()});
  sizes.back() = weight.sym_size(0);
  return at::addmm(*bias, rows, weight.t()).view_symint(sizes);
}

}  // namespace qshard
