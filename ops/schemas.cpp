// The public operators: every schema, then which function implements it for which key.
//
// `linear_forward` and `linear_backward` are what `linear` is made of under autograd, and where it
// is compiled `quantize_input`; list them in selective activation checkpointing policies. Names
// with a leading underscore serve the embedded Python (fsdp/*.py) and may change.
#include <torch/library.h>

#include "dispatch/aten/registration.h"
#include "ops/calls/checked_call.h"
#include "ops/calls/ops.h"
#include "ops/linear/dynamic_weight.h"
#include "ops/linear/grouped_gemm.h"
#include "ops/linear/grouped_linear.h"
#include "ops/linear/norm_linear.h"
#include "ops/linear/normalization.h"
#include "ops/loss/linear_cross_entropy.h"
#include "ops/mlp/swiglu_mlp.h"
#include "ops/rotary/rotary.h"
#include "ops/rotary/rotary_heads.h"
#include "ops/wire/activations.h"
#include "ops/wire/agree_on_ranges.h"
#include "ops/wire/range_messages.h"
#include "ops/wire/sum_rows.h"
#include "ops/wire/tokens.h"

namespace qshard {

TORCH_LIBRARY(qshard, m) {
  // Quantize and look inside.
  m.def(
      "quantize(Tensor self, str format, *, bool keep_master=False, SymInt? logical_rows=None, "
      "SymInt row_offset=0) -> Tensor");
  m.def(
      "from_planes(Tensor codes, Tensor scale_inv, str format, *, Tensor? tensor_scale_inv=None, "
      "ScalarType dtype=float, bool keep_master=False, int? columns=None, int? logical_rows=None, "
      "int row_offset=0, int rows_of_each=0) -> Tensor");
  m.def(
      "from_row_image(Tensor image, str format, *, int columns, ScalarType dtype=float) -> "
      "Tensor");
  m.def("dequantize(Tensor self, *, ScalarType? dtype=None) -> Tensor");
  m.def("is_quantized(Tensor self) -> bool");
  m.def("format(Tensor self) -> str");
  m.def("codes(Tensor(a) self) -> Tensor(a)");
  m.def("scale_inv(Tensor(a) self) -> Tensor(a)");
  m.def("tensor_scale_inv(Tensor(a) self) -> Tensor(a)");
  m.def("columnwise_codes(Tensor(a) self) -> Tensor(a)");
  m.def("columnwise_scale_inv(Tensor self) -> Tensor");
  m.def("row_image(Tensor(a) self) -> Tensor(a)");
  m.def("master(Tensor(a) self) -> Tensor(a)?");
  m.def("flush(Tensor[] self) -> ()");

  // Linear.
  m.def(
      "linear(Tensor input, Tensor weight, Tensor? bias=None, *, bool weight_only=False, "
      "str? format=None, Tensor[]? weight_state=None, Tensor? residual=None, "
      "bool input_is_kept=False) -> Tensor");
  m.def(
      "linear_forward(Tensor input, Tensor weight, Tensor? bias, bool save_quantized_input, "
      "bool weight_only=False, Tensor? input_rows=None, str? format=None, "
      "Tensor[]? weight_state=None, Tensor? residual=None, Tensor? offs=None) "
      "-> (Tensor output, Tensor saved_input)");
  m.def(
      "quantize_input(Tensor input, str format, bool rows, bool columns) "
      "-> (Tensor rows, Tensor columns)");
  m.def(
      "_quantize_kept_input(Tensor input, str format, bool columns, Tensor? amax=None, "
      "Tensor? weight=None) "
      "-> (Tensor codes, Tensor amax)");
  m.def(
      "linear_backward(Tensor grad, Tensor weight, Tensor input, bool input_is_quantized, "
      "bool needs_input, bool needs_weight, bool weight_only=False, ScalarType? grad_dtype=None, "
      "str? format=None, Tensor[]? weight_state=None, *, Tensor? grad_columns=None, "
      "int[]? grad_size=None, ScalarType? value_dtype=None, Tensor(a!)? input_sum=None, "
      "Tensor(b!)? weight_grad=None, Tensor? offs=None, Tensor? grad_scale=None) "
      "-> (Tensor grad_input, Tensor grad_weight)");
  m.def(
      "grouped_linear(Tensor input, Tensor weight, Tensor offs, *, bool weight_only=False, "
      "str? format=None) -> Tensor");
  m.def(
      "swiglu_mlp(Tensor input, Tensor gate, Tensor? up, Tensor down, Tensor? gate_bias=None, "
      "Tensor? up_bias=None, Tensor? down_bias=None, *, bool weight_only=False, str format, "
      "str down_format, Tensor[]? gate_state=None, Tensor[]? up_state=None, "
      "Tensor[]? down_state=None, Tensor? residual=None, Tensor? norm_weight=None, "
      "Tensor? norm_bias=None, float eps=0.0, bool rms=False, bool zero_centered_gamma=False, "
      "str activation=\"swiglu\") -> Tensor");
  m.def(
      "swiglu_experts(Tensor input, Tensor gate, Tensor? up, Tensor down, Tensor offs, *, "
      "bool weight_only=False, str? format=None, str? down_format=None) -> Tensor");
  m.def(
      "swiglu_linear_forward(Tensor gate, Tensor? up, Tensor weight, Tensor? bias, bool "
      "keep_maxima, "
      "bool weight_only=False, str? format=None, Tensor[]? weight_state=None, "
      "Tensor? residual=None, Tensor? offs=None, str activation=\"swiglu\") "
      "-> (Tensor output, Tensor maxima)");
  m.def(
      "swiglu_linear_backward(Tensor grad, Tensor gate, Tensor? up, Tensor weight, Tensor maxima, "
      "bool needs_weight, bool rows, bool columns, bool joined, str? grad_format=None, "
      "bool weight_only=False, ScalarType? grad_dtype=None, str? format=None, "
      "Tensor[]? weight_state=None, *, Tensor(a!)? weight_grad=None, Tensor? offs=None, "
      "str activation=\"swiglu\", Tensor(b!)? bias_grads=None) "
      "-> (Tensor grad_weight, Tensor gate, Tensor gate_columns, Tensor up, Tensor up_columns)");
  m.def(
      "norm_linear(Tensor input, Tensor norm_weight, Tensor? norm_bias, Tensor[] weights, "
      "Tensor[]? biases=None, *, float eps, bool rms, bool zero_centered_gamma=False, "
      "str? format=None, bool with_input=False) -> Tensor[]");
  m.def(
      "_norm_linear_reads_codes(Tensor input, Tensor norm_weight, Tensor? norm_bias, "
      "Tensor[] weights, str? format=None) -> bool");
  m.def(
      "_norm_linear_forward(Tensor input, Tensor norm_weight, Tensor? norm_bias, "
      "Tensor[] weights, Tensor[]? biases, float eps, bool rms, bool zero_centered_gamma, "
      "str format) -> (Tensor[] outputs, Tensor statistics, Tensor amax)");
  m.def(
      "linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *, "
      "Tensor? linear_bias=None, str reduction='mean', int ignore_index=-100, "
      "float label_smoothing=0.0, str? format=None, Tensor[]? weight_state=None, "
      "str? forward_precision=None) -> Tensor");
  m.def(
      "cross_entropy_and_gradient(Tensor logits, Tensor target, *, int ignore_index=-100, "
      "float label_smoothing=0.0, str? grad_format=None, bool rows=False, bool columns=False) "
      "-> (Tensor losses, Tensor totals, Tensor rows, Tensor columns)");
  m.def(
      "rotary_embedding(Tensor input, Tensor cos, Tensor sin, int dim=1, *, "
      "bool interleaved=False, bool inverse=False, SymInt[]? stride=None) -> Tensor");
  m.def(
      "split_rotary_embedding(Tensor input, Tensor cos, Tensor sin, int[] heads, int dim=1, *, "
      "bool interleaved=False, bool inverse=False) -> (Tensor query, Tensor key, Tensor value)");
  m.def(
      "join_rotary_embedding(Tensor query, Tensor key, Tensor value, Tensor cos, Tensor sin, "
      "int[] heads, int dim=1, *, bool interleaved=False, bool inverse=False) -> Tensor");

  // Other names of linear_backward and swiglu_linear_backward.
  m.def(
      "linear_backward_accumulate(Tensor grad, Tensor weight, Tensor input, "
      "bool input_is_quantized, bool needs_input, Tensor(a!) weight_grad, bool weight_only=False, "
      "str? format=None, Tensor[]? weight_state=None) "
      "-> Tensor grad_input");
  m.def(
      "linear_backward_codes(Tensor rows, Tensor columns, int[] size, ScalarType dtype, "
      "Tensor weight, Tensor input, bool input_is_quantized, bool needs_input, bool needs_weight, "
      "ScalarType? grad_dtype=None, str? format=None, Tensor[]? weight_state=None, "
      "Tensor(a!)? input_sum=None) "
      "-> (Tensor grad_input, Tensor grad_weight)");
  m.def(
      "linear_backward_codes_accumulate(Tensor rows, Tensor columns, int[] size, ScalarType dtype, "
      "Tensor weight, Tensor input, bool input_is_quantized, bool needs_input, "
      "Tensor(a!) weight_grad, str? format=None, Tensor[]? weight_state=None, "
      "Tensor(b!)? input_sum=None) "
      "-> Tensor grad_input");
  m.def(
      "swiglu_linear_backward_accumulate(Tensor grad, Tensor gate, Tensor? up, Tensor weight, "
      "Tensor maxima, Tensor(a!) weight_grad, bool rows, bool columns, bool joined, "
      "str? grad_format=None, bool weight_only=False, str? format=None, "
      "Tensor[]? weight_state=None, str activation=\"swiglu\") "
      "-> (Tensor gate, Tensor gate_columns, Tensor up, Tensor up_columns)");

  // What norm_linear and the modules are made of.
  m.def("_can_normalize(Tensor input, Tensor weight, Tensor? bias) -> bool");
  m.def(
      "_normalize(Tensor input, Tensor weight, Tensor? bias, float eps, bool rms, "
      "bool zero_centered_gamma) -> (Tensor output, Tensor statistics)");
  m.def(
      "_quantize_normalized(Tensor input, Tensor weight, Tensor? bias, float eps, bool rms, "
      "bool zero_centered_gamma, str format, bool rows, bool columns, Tensor? statistics=None, "
      "Tensor? amax=None) -> (Tensor rows, Tensor columns, Tensor statistics)");
  m.def(
      "_normalize_backward(Tensor grad, Tensor input, Tensor weight, Tensor statistics, "
      "bool zero_centered_gamma, bool needs_parameters, Tensor? added=None) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("_transposed_operand(Tensor self, *, bool hadamard=False) -> Tensor");
  m.def(
      "_grouped_gemm(Tensor a, Tensor a_scale_inv, Tensor b, Tensor b_scale_inv, Tensor offs, *, "
      "int? tokens=None, bool contract_rows=False, bool square_scales=True, int tile_rows=0) -> "
      "Tensor");

  // Weights that stay plain, in the ranges that flat parameters cut.
  m.def("_quantize_for_uses(Tensor weight, str format, Tensor[] state) -> Tensor");
  m.def(
      "_agree_on_ranges(Tensor[] values, str[] formats, int[] geometry, Tensor(a!)[] own, "
      "bool[] is_known, Tensor(b!)[] amax, Tensor(c!)[] state, int[] steps, int[] groups, "
      "Tensor? found_inf=None) -> int[]");
  m.def(
      "_agree_on_histories(Tensor(a!)[] amax_history, int[] levels, int groups, Device device) "
      "-> int[]");
  m.def(
      "_write_message(Tensor shard, int rank, int world, str[] formats, int[] geometry, "
      "Tensor[] amax, ScalarType dtype) -> Tensor");
  m.def(
      "_read_messages(Tensor messages, str[] formats, int[] geometry, Tensor[] amax, "
      "Tensor(a!) out) -> ()");

  // Gradients on the wire.
  m.def(
      "quantize_gradients(Tensor values, str format, int chunks, int chunk_numel, *, "
      "Tensor? rounding=None, int first_noise=0) -> Tensor");
  m.def(
      "sum_gradients(Tensor messages, str format, int chunk_numel, Tensor(a!) out, *, "
      "float factor=1.) -> ()");

  // Activations on the wire of tensor parallelism.
  m.def("_message_amax(Tensor self, str format) -> Tensor");
  m.def("_encode_activation(Tensor self, str format, bool is_gradient, Tensor amax) -> Tensor");
  m.def(
      "_decode_activations(Tensor messages, str format, bool is_gradient, int[] size, int dim, "
      "ScalarType dtype) -> Tensor");
  m.def("_gather_tokens(Tensor self, int dim, str format, bool is_gradient, str group) -> Tensor");
  m.def("_sum_and_scatter_tokens(Tensor self, int dim, str group) -> Tensor");
  m.def("_sum_rows(Tensor rows, Tensor places, Tensor ends) -> Tensor");

  // Tracing, for qshard/_runtime/fakes.py.
  m.def("_plane_copy(Tensor self, str plane) -> Tensor?");

  // Reports.
  m.def("formats() -> str[]");
  m.def("format_info(str name) -> str");
  m.def("backend_report() -> str");

  // FSDP2 and checkpoints, implemented in fsdp/.
  m.def("_pre_all_gather(Tensor self, str group) -> Tensor");
  m.def("_gather_over_mesh(Tensor self, str mesh) -> Tensor?");
  m.def("_post_all_gather(Tensor self, Tensor image, ScalarType dtype) -> Tensor");
  m.def("_refresh_gathered(Tensor self, Tensor image, Tensor unsharded) -> ()");
  m.def("_groups_of_specs(Tensor[] self, int[] specs) -> int[]");
  m.def(
      "_quantize_share(Tensor self, str format, *, bool keep_master, int logical_rows, "
      "int row_offset, int rows_of_each, int first_element, int full_cols, int full_matrix_rows, "
      "int groups) -> Tensor");
  m.def(
      "_flush_after_step(Tensor[] self, int[] groups, bool[] has_grad, Tensor? found_inf, "
      "bool is_step=True, bool kernels_tell=True) -> ()");
  m.def("_mark_written(Tensor self) -> ()");
}

TORCH_LIBRARY_IMPL(qshard, CompositeExplicitAutograd, m) {
  implement<"quantize", &quantize, Takes::kValuesOrMeta>(m);
  implement<"from_planes", &from_planes, Takes::kEachDevice>(m);
  implement<"from_row_image", &from_row_image, Takes::kValuesOrMeta>(m);
  implement<"dequantize", &dequantize, Takes::kValuesOrMeta>(m);
  implement<"is_quantized", &is_quantized_op, Takes::kAnything>(m);
  implement<"format", &format, Takes::kValuesOrMeta>(m);
  implement<"codes", &codes, Takes::kValuesOrMeta>(m);
  implement<"scale_inv", &scale_inv, Takes::kValuesOrMeta>(m);
  implement<"tensor_scale_inv", &tensor_scale_inv, Takes::kValuesOrMeta>(m);
  implement<"columnwise_codes", &columnwise_codes, Takes::kValuesOrMeta>(m);
  implement<"columnwise_scale_inv", &columnwise_scale_inv, Takes::kValuesOrMeta>(m);
  implement<"row_image", &row_image, Takes::kValuesOrMeta>(m);
  implement<"master", &master, Takes::kValuesOrMeta>(m);
  implement<"flush", &flush_op, Takes::kEachDevice>(m);

  implement<"linear", &linear>(m);
  implement<"linear_forward", &linear_forward_op>(m);
  implement<"quantize_input", &quantize_input_op>(m);
  implement<"_quantize_kept_input", &quantize_kept_input>(m);
  implement<"linear_backward", &linear_backward_op>(m);
  implement<"grouped_linear", &grouped_linear>(m);
  implement<"swiglu_mlp", &swiglu_mlp>(m);
  implement<"swiglu_experts", &swiglu_experts>(m);
  implement<"swiglu_linear_forward", &swiglu_linear_forward>(m);
  implement<"swiglu_linear_backward", &swiglu_linear_backward>(m);
  implement<"norm_linear", &norm_linear>(m);
  implement<"_norm_linear_reads_codes", &norm_linear_reads_codes, Takes::kAnything>(m);
  implement<"_norm_linear_forward", &norm_linear_forward>(m);
  implement<"linear_cross_entropy", &linear_cross_entropy>(m);
  implement<"cross_entropy_and_gradient", &cross_entropy_and_gradient>(m);
  implement<"rotary_embedding", &rotary_embedding>(m);
  implement<"split_rotary_embedding", &split_rotary_embedding>(m);
  implement<"join_rotary_embedding", &join_rotary_embedding>(m);
  implement<"_can_normalize", &can_normalize, Takes::kAnything>(m);
  implement<"_normalize", &normalize>(m);
  implement<"_quantize_normalized", &quantize_normalized>(m);
  implement<"_normalize_backward", &normalize_backward>(m);
  implement<"_transposed_operand", &transposed_operand>(m);
  implement<"_grouped_gemm", &grouped_gemm_op>(m);

  implement<"_quantize_for_uses", &quantize_for_uses>(m);
  implement<"_agree_on_ranges", &agree_on_ranges, Takes::kValuesAnywhere>(m);
  implement<"_agree_on_histories", &agree_on_histories, Takes::kValuesAnywhere>(m);
  implement<"_write_message", &write_message, Takes::kValuesOrMeta>(m);
  implement<"_read_messages", &read_messages, Takes::kValuesOrMeta>(m);

  implement<"quantize_gradients", &quantize_gradients>(m);
  implement<"sum_gradients", &sum_gradients>(m);

  implement<"_message_amax", &message_amax>(m);
  implement<"_encode_activation", &encode_activation_op>(m);
  implement<"_decode_activations", &decode_activations_op>(m);
  implement<"_gather_tokens", &gather_tokens>(m);
  implement<"_sum_and_scatter_tokens", &sum_and_scatter_tokens>(m);
  implement<"_sum_rows", &sum_rows_op>(m);

  implement<"_plane_copy", &plane_copy, Takes::kValuesOrMeta>(m);

  implement<"formats", &format_names, Takes::kAnything>(m);
  implement<"format_info", &format_info_op, Takes::kAnything>(m);
  implement<"backend_report", &backend_report_op, Takes::kAnything>(m);
}

TORCH_LIBRARY_IMPL(qshard, CompositeImplicitAutograd, m) {
  implement<"linear_backward_accumulate", &linear_backward_accumulate, Takes::kAlias>(m);
  implement<"linear_backward_codes", &linear_backward_codes, Takes::kAlias>(m);
  implement<"linear_backward_codes_accumulate", &linear_backward_codes_accumulate, Takes::kAlias>(
      m);
  implement<"swiglu_linear_backward_accumulate", &swiglu_linear_backward_accumulate, Takes::kAlias>(
      m);
}

// Shapes for fake tensors. What depends on the format (`quantize`, the accessors) has them in
// qshard/_runtime/fakes.py.
TORCH_LIBRARY_IMPL(qshard, Meta, m) {
  implement<"dequantize", &dequantize_meta, Takes::kMeta>(m);
  implement<"_gather_tokens", &gather_tokens_meta, Takes::kMeta>(m);
  implement<"_sum_and_scatter_tokens", &sum_and_scatter_tokens_meta, Takes::kMeta>(m);
  implement<"_sum_rows", &sum_rows_meta, Takes::kMeta>(m);
  implement<"linear", &linear_meta, Takes::kMeta>(m);
  implement<"linear_forward", &linear_forward_meta, Takes::kMeta>(m);
  implement<"quantize_input", &quantize_input_meta, Takes::kMeta>(m);
  implement<"_quantize_kept_input", &quantize_kept_input_meta, Takes::kMeta>(m);
  implement<"linear_backward", &linear_backward_meta, Takes::kMeta>(m);
  implement<"grouped_linear", &grouped_linear_meta, Takes::kMeta>(m);
  implement<"swiglu_mlp", &swiglu_mlp_meta, Takes::kMeta>(m);
  implement<"swiglu_experts", &swiglu_experts_meta, Takes::kMeta>(m);
  implement<"swiglu_linear_forward", &swiglu_linear_forward_meta, Takes::kMeta>(m);
  implement<"swiglu_linear_backward", &swiglu_linear_backward_meta, Takes::kMeta>(m);
  implement<"norm_linear", &norm_linear_meta, Takes::kMeta>(m);
  implement<"_norm_linear_forward", &norm_linear_forward_meta, Takes::kMeta>(m);
  implement<"_quantize_normalized", &quantize_normalized_meta, Takes::kMeta>(m);
  implement<"_normalize_backward", &normalize_backward_meta, Takes::kMeta>(m);
  implement<"linear_cross_entropy", &linear_cross_entropy_meta, Takes::kMeta>(m);
  implement<"cross_entropy_and_gradient", &cross_entropy_and_gradient_meta, Takes::kMeta>(m);
  implement<"rotary_embedding", &rotary_embedding_meta, Takes::kMeta>(m);
  implement<"split_rotary_embedding", &split_rotary_embedding_meta, Takes::kMeta>(m);
  implement<"join_rotary_embedding", &join_rotary_embedding_meta, Takes::kMeta>(m);
  implement<"quantize_gradients", &quantize_gradients_meta, Takes::kMeta>(m);
  implement<"sum_gradients", &sum_gradients_meta, Takes::kMeta>(m);
}

// Before the fallbacks that torch has for them.
TORCH_LIBRARY_IMPL(qshard, Negative, m) { refuse_lazy_views(m); }
TORCH_LIBRARY_IMPL(qshard, Conjugate, m) { refuse_lazy_views(m); }

// Checked here, too: some compute by torch's operators before they call ours.
TORCH_LIBRARY_IMPL(qshard, Autograd, m) {
  implement<"quantize", &quantize_autograd, Takes::kValuesOrMeta>(m);
  implement<"dequantize", &dequantize_autograd, Takes::kValuesOrMeta>(m);
  implement<"codes", &codes_autograd, Takes::kValuesOrMeta>(m);
  implement<"scale_inv", &scale_inv_autograd, Takes::kValuesOrMeta>(m);
  implement<"tensor_scale_inv", &tensor_scale_inv_autograd, Takes::kValuesOrMeta>(m);
  implement<"columnwise_codes", &columnwise_codes_autograd, Takes::kValuesOrMeta>(m);
  implement<"columnwise_scale_inv", &columnwise_scale_inv_autograd, Takes::kValuesOrMeta>(m);
  implement<"row_image", &row_image_autograd, Takes::kValuesOrMeta>(m);
  implement<"master", &master_autograd, Takes::kValuesOrMeta>(m);
  implement<"linear", &linear_autograd, Takes::kValuesOrMeta>(m);
  implement<"grouped_linear", &grouped_linear_autograd, Takes::kValuesOrMeta>(m);
  implement<"swiglu_mlp", &swiglu_mlp_autograd, Takes::kValuesOrMeta>(m);
  implement<"swiglu_experts", &swiglu_experts_autograd, Takes::kValuesOrMeta>(m);
  implement<"norm_linear", &norm_linear_autograd, Takes::kValuesOrMeta>(m);
  implement<"linear_cross_entropy", &linear_cross_entropy_autograd, Takes::kValuesOrMeta>(m);
  implement<"rotary_embedding", &rotary_embedding_autograd, Takes::kValuesOrMeta>(m);
  implement<"split_rotary_embedding", &split_rotary_embedding_autograd, Takes::kValuesOrMeta>(m);
  implement<"join_rotary_embedding", &join_rotary_embedding_autograd, Takes::kValuesOrMeta>(m);
}

// F.linear must not decompose into matmul before it gets here (DTensor never does: it acts above).
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) {
  if (!key_is_ours()) return;
  m.impl("linear", &aten_linear_autograd);
  m.impl("_grouped_mm", &aten_grouped_mm_autograd);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) {
  if (key_is_ours()) m.impl("linear", &aten_linear);
}

// transformers defines both when it is imported, before or after this library is loaded. Boxed,
// because the dispatcher compares the signature of an unboxed kernel with the schema, and another
// schema in a later transformers would then be an error of `import transformers`.
TORCH_LIBRARY_IMPL(transformers, PrivateUse3, m) {
  if (!key_is_ours()) return;
  m.impl("grouped_mm_fallback",
         torch::CppFunction::makeFromBoxedFunction<&transformers_grouped_mm>());
  m.impl("grouped_mm_fallback_backward",
         torch::CppFunction::makeFromBoxedFunction<&transformers_grouped_mm_backward>());
}

}  // namespace qshard
