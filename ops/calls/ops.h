// Implementations behind the schemas in schemas.cpp. Semantics, shapes, aliasing and what each
// throws are documented in qshard/ops/__init__.py. All throw c10::Error before they change
// anything, for tensors that are not quantized where one must be, and for shapes, dtypes and
// devices that do not go together; the message names the operator and the way out.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "dispatch/parts/rank_group.h"
#include "kernels/format/layout.h"
#include "kernels/linear/linear.h"

namespace qshard {

using at::Tensor;
using OptionalTensor = std::optional<at::Tensor>;
inline bool is_given(const OptionalTensor& tensor) { return tensor && tensor->defined(); }
/// Given, if a linear is to quantize its plain weight for this use: what that needs beside the
/// weight (dynamic_weight.h).
using WeightState = std::optional<std::vector<Tensor>>;

// ops/tensor/quantize.cpp
/// @throws c10::ValueError naming `op` and the known formats.
const Format& checked_format(c10::string_view name, const char* op);
/// @throws c10::ValueError naming `op` if no format has that name. A weight may have another one
/// than its module says: check_expected_format (linear_operands.h) is for where that matters.
void check_format_name(const Tensor& weight, std::optional<c10::string_view> format,
                       const char* op);
/// The rows [row_offset, ...) of a tensor of `logical_rows` rows, else of all there are.
/// @throws c10::ValueError naming `op` if `format` has no such shard.
Layout layout_of(at::IntArrayRef sizes, const Format& format, std::optional<int64_t> logical_rows,
                 int64_t row_offset, const char* op);
/// The `rows_of_each` rows of each matrix of a tensor of `logical_rows` rows, from row_offset of
/// each on; with 0, as above.
/// @throws c10::ValueError naming `op` if sizes are not those of such a shard;
/// c10::NotImplementedError if `format` cannot be cut so.
Layout layout_of(at::IntArrayRef sizes, const Format& format, std::optional<int64_t> logical_rows,
                 int64_t row_offset, int64_t rows_of_each, const char* op);
Tensor quantize(const Tensor& self, c10::string_view format, bool keep_master,
                std::optional<c10::SymInt> logical_rows, c10::SymInt row_offset);
/// Where a share lies: its rows within the logical tensor, that within the full one (Layout).
struct LogicalPlace {
  int64_t logical_rows;
  int64_t row_offset;
  int64_t rows_of_each;
  int64_t first_element;
  int64_t full_cols;
  int64_t full_matrix_rows;
};
/// quantize() of a share whose ranks are known.
Tensor quantize_placed(const Tensor& self, c10::string_view format, bool keep_master,
                       const LogicalPlace& place, const Groups& groups);
Tensor dequantize(const Tensor& self, std::optional<at::ScalarType> dtype);
bool is_quantized_op(const Tensor& self);
std::string format(const Tensor& self);
Tensor codes(const Tensor& self);
Tensor scale_inv(const Tensor& self);
Tensor tensor_scale_inv(const Tensor& self);
Tensor columnwise_codes(const Tensor& self);
Tensor columnwise_scale_inv(const Tensor& self);
OptionalTensor master(const Tensor& self);
void flush_op(at::TensorList self);

// ops/tensor/from_planes.cpp
Tensor from_planes(const Tensor& codes, const Tensor& scale_inv, c10::string_view format,
                   const OptionalTensor& tensor_scale_inv, at::ScalarType dtype, bool keep_master,
                   std::optional<int64_t> columns, std::optional<int64_t> logical_rows,
                   int64_t row_offset, int64_t rows_of_each);

// ops/tensor/row_image.cpp
Tensor row_image(const Tensor& self);
Tensor from_row_image(const Tensor& image, c10::string_view format, int64_t columns,
                      at::ScalarType dtype);

// ops/linear/linear.cpp
/// Rows of a tensor seen as a matrix of its last dimension, which may be empty: nothing is divided.
/// @throws c10::Error for a scalar.
inline int64_t leading_numel(const Tensor& tensor) {
  TORCH_CHECK(tensor.dim() >= 1, "qshard::linear: expected a tensor of 1 or more dimensions");
  return c10::multiply_integers(tensor.sizes().slice(0, tensor.dim() - 1));
}

/// While one lives, a linear of this thread that gets `input` shares its codes with others that
/// got it, if it is an activation of the graph (recorded_activation.h).
class InputCodeScope {
 public:
  explicit InputCodeScope(const Tensor& input);
  ~InputCodeScope();
  InputCodeScope(const InputCodeScope&) = delete;
  InputCodeScope& operator=(const InputCodeScope&) = delete;

 private:
  SharedInput input_;
  const SharedInput* previous_;
};

/// `format`: the weight's, where the caller knows it. Traced code cannot ask for it; knowing it, it
/// quantizes the input by an operator of its own, once for all linears of one input. `residual`:
/// added to the output, of its shape and dtype, within the GEMM where that can. `input_is_kept`:
/// something else keeps the input until backward, so wgrad's codes are made again there.
Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              bool weight_only, std::optional<c10::string_view> format,
              const WeightState& weight_state, const OptionalTensor& residual = {},
              bool input_is_kept = false);
/// Whether a module that knows its weight's format was given a plain weight, which it quantizes.
bool is_quantized_on_use(const Tensor& weight, std::optional<c10::string_view> format);
/// Such a weight quantized, below autograd or by it; any other weight as it is.
Tensor quantized_on_use(const Tensor& weight, std::optional<c10::string_view> format);
Tensor quantized_on_use_autograd(const Tensor& weight, std::optional<c10::string_view> format);
/// Whether a quantized weight is no matrix of whole rows (w.t() of a tied autoencoder, w[:, :n],
/// w[::2]), whose codes linear cannot multiply: matmul takes any, by its codes where they can be
/// multiplied, else by their values.
bool goes_the_way_of_matmul(const Tensor& weight);
/// linear of such a weight, which weight_only multiplies by its values.
Tensor linear_of_view(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                      bool weight_only, const OptionalTensor& residual);
Tensor linear_by_matmul(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);
/// aten::linear where autograd has no part: inference_mode.
Tensor aten_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);
std::tuple<Tensor, Tensor> linear_forward_op(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias, bool save_quantized_input,
                                             bool weight_only, const OptionalTensor& input_rows,
                                             std::optional<c10::string_view> format,
                                             const WeightState& weight_state,
                                             const OptionalTensor& residual = {},
                                             const OptionalTensor& offs = {});
std::tuple<Tensor, Tensor> quantize_input_op(const Tensor& input, c10::string_view format,
                                             bool rows, bool columns);
/// quantize_input in one orientation, of an input that is there in backward, too: (codes, amax),
/// amax float32 (1,) of formats with one scale. Backward knows it and gets (0,). `weight`: the
/// linear's, whose last input guesses the scale.
std::tuple<Tensor, Tensor> quantize_kept_input(const Tensor& input, c10::string_view format,
                                               bool columns, const OptionalTensor& amax,
                                               const OptionalTensor& weight);

// ops/linear/linear_backward.cpp
/// (grad_input, grad_weight), (0,) what is not needed or was added. `grad` is values, or with
/// grad_columns the codes by rows of a gradient of grad_size in value_dtype. grad_dtype: the weight
/// gradient's, else the weight's own. input_sum: contiguous, of the dtype of the gradient's values;
/// weight_grad: contiguous float32, bfloat16 or float16: each is added to in place, within the GEMM
/// where that can. offs: of experts' linears (grouped_linear.h). grad_scale: float32 (1,), what the
/// values that codes stand for are multiplied by.
std::tuple<Tensor, Tensor> linear_backward_op(
    const Tensor& grad, const Tensor& weight, const Tensor& input, bool input_is_quantized,
    bool needs_input, bool needs_weight, bool weight_only, std::optional<at::ScalarType> grad_dtype,
    std::optional<c10::string_view> format, const WeightState& weight_state,
    const OptionalTensor& grad_columns, at::OptionalIntArrayRef grad_size,
    std::optional<at::ScalarType> value_dtype, const OptionalTensor& input_sum,
    const OptionalTensor& weight_grad, const OptionalTensor& offs,
    const OptionalTensor& grad_scale);
/// Other names of it, which call it by the dispatcher.
Tensor linear_backward_accumulate(const Tensor& grad, const Tensor& weight, const Tensor& input,
                                  bool input_is_quantized, bool needs_input,
                                  const Tensor& weight_grad, bool weight_only,
                                  std::optional<c10::string_view> format,
                                  const WeightState& weight_state);
std::tuple<Tensor, Tensor> linear_backward_codes(
    const Tensor& rows, const Tensor& columns, at::IntArrayRef size, at::ScalarType dtype,
    const Tensor& weight, const Tensor& input, bool input_is_quantized, bool needs_input,
    bool needs_weight, std::optional<at::ScalarType> grad_dtype,
    std::optional<c10::string_view> format, const WeightState& weight_state,
    const OptionalTensor& input_sum);
Tensor linear_backward_codes_accumulate(
    const Tensor& rows, const Tensor& columns, at::IntArrayRef size, at::ScalarType dtype,
    const Tensor& weight, const Tensor& input, bool input_is_quantized, bool needs_input,
    const Tensor& weight_grad, std::optional<c10::string_view> format,
    const WeightState& weight_state, const OptionalTensor& input_sum);

/// Whether it is traced, or a subclass: only its own kernels know what it is, and an operator that
/// writes it may be given a copy.
inline bool is_traced_or_subclass(const Tensor& x) {
  return x.key_set().has_any(c10::python_ks) || x.key_set().has(c10::DispatchKey::Functionalize);
}

/// Whether eager linears that autograd records share the codes of `input`, on a device that has
/// FP8 GEMMs.
bool shares_input_codes(const Tensor& input);
/// What a linear of these weights is about to ask, before it sends anything: an error where codes
/// wait for a flush that other ranks take part in.
void check_codes_can_be_read(at::TensorList weights);

/// x (M, K) as the values that wgrad contracts along M: kernels/linear/block_scaled_operand.h.
Tensor transposed_operand(const Tensor& x, bool hadamard);

// ops/wire/gradients.cpp (kernels/messages/gradient_message.h)
/// `values`, of any shape, as uint8 messages (chunks, bytes) of `chunk_numel` values each; zeros
/// where values are missing. `rounding`: null for nearest even, or int32 (key_low, key_high,
/// count).
/// @throws c10::Error for an unknown format, values that the messages cannot hold, or a `rounding`
/// that is not 3 contiguous int32 beside the values.
Tensor quantize_gradients(const Tensor& values, c10::string_view format, int64_t chunks,
                          int64_t chunk_numel, const OptionalTensor& rounding, int64_t first_noise);
/// out = sums of uint8 messages (chunks, peers, bytes) over peers, in fp32 and in their order,
/// times `factor`; chunk by chunk, as far as `out` goes.
/// @throws c10::Error for messages of another size, and an `out` larger than they are.
void sum_gradients(const Tensor& messages, c10::string_view format, int64_t chunk_numel,
                   const Tensor& out, double factor);
Tensor quantize_gradients_meta(const Tensor& values, c10::string_view format, int64_t chunks,
                               int64_t chunk_numel, const OptionalTensor& rounding,
                               int64_t first_noise);
void sum_gradients_meta(const Tensor& messages, c10::string_view format, int64_t chunk_numel,
                        const Tensor& out, double factor);

// ops/tensor/traced.cpp
/// A quantized tensor on the meta device with the layout of the whole buffer behind `self`.
Tensor meta_replica(const Tensor& self);
/// What the accessor of that name gives, strides included, in memory of its own.
OptionalTensor plane_copy(const Tensor& self, c10::string_view plane);

// ops/tensor/report.cpp
std::vector<std::string> format_names();
std::string format_info_op(c10::string_view name);
std::string backend_report_op();
c10::Dict<std::string, std::string> why_dequantized_op(at::Device device);
/// What is known of the GEMMs that the device has, by format: kernels/gemm/gemm_verdicts.h.
c10::Dict<std::string, std::string> gemm_verdicts_op(at::Device device);
std::string foreign_owner_of_key_op();
void set_fallback_tracing_op(bool enabled);
void set_in_step_op(bool in_step);
void make_shards_op(std::optional<int64_t> rank);
c10::Dict<std::string, int64_t> traced_fallbacks_op(bool reads_only);

// ops/linear/meta.cpp: shapes and dtypes only. FakeTensor describes a quantized tensor as a plain
// strided one of its nominal dtype, so nothing here may ask for a format (qshard/_runtime/fakes.py
// can).
Tensor dequantize_meta(const Tensor& self, std::optional<at::ScalarType> dtype);
Tensor linear_meta(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   bool weight_only, std::optional<c10::string_view> format,
                   const WeightState& weight_state, const OptionalTensor& residual,
                   bool input_is_kept);
std::tuple<Tensor, Tensor> linear_forward_meta(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    bool save_quantized_input, bool weight_only, const OptionalTensor& input_rows,
    std::optional<c10::string_view> format, const WeightState& weight_state,
    const OptionalTensor& residual, const OptionalTensor& offs);
std::tuple<Tensor, Tensor> quantize_input_meta(const Tensor& input, c10::string_view format,
                                               bool rows, bool columns);
std::tuple<Tensor, Tensor> quantize_kept_input_meta(const Tensor& input, c10::string_view format,
                                                    bool columns, const OptionalTensor& amax,
                                                    const OptionalTensor& weight);
std::tuple<Tensor, Tensor> linear_backward_meta(
    const Tensor& grad, const Tensor& weight, const Tensor& input, bool input_is_quantized,
    bool needs_input, bool needs_weight, bool weight_only, std::optional<at::ScalarType> grad_dtype,
    std::optional<c10::string_view> format, const WeightState& weight_state,
    const OptionalTensor& grad_columns, at::OptionalIntArrayRef grad_size,
    std::optional<at::ScalarType> value_dtype, const OptionalTensor& input_sum,
    const OptionalTensor& weight_grad, const OptionalTensor& offs,
    const OptionalTensor& grad_scale);

// ops/linear/autograd.cpp
Tensor quantize_autograd(const Tensor& self, c10::string_view format, bool keep_master,
                         std::optional<c10::SymInt> logical_rows, c10::SymInt row_offset);
Tensor dequantize_autograd(const Tensor& self, std::optional<at::ScalarType> dtype);
Tensor codes_autograd(const Tensor& self);
Tensor scale_inv_autograd(const Tensor& self);
Tensor tensor_scale_inv_autograd(const Tensor& self);
Tensor columnwise_codes_autograd(const Tensor& self);
Tensor columnwise_scale_inv_autograd(const Tensor& self);
Tensor row_image_autograd(const Tensor& self);
OptionalTensor master_autograd(const Tensor& self);
Tensor linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                       bool weight_only, std::optional<c10::string_view> format,
                       const WeightState& weight_state, const OptionalTensor& residual = {},
                       bool input_is_kept = false);
Tensor aten_linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias);

}  // namespace qshard
