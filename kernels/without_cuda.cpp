// What a build without CUDA has in the place of its kernels' host side: questions are answered by
// no, and what should run on a CUDA tensor is an error.
#include <c10/util/Exception.h>

#include "kernels/adamw/adamw_cuda.h"
#include "kernels/device/capture.h"
#include "kernels/device/compute_capability.h"
#include "kernels/device/current_stream.h"
#include "kernels/device/memory.h"
#include "kernels/grouped/grouped_codes.h"
#include "kernels/grouped/grouped_gemm.h"
#include "kernels/grouped/grouped_swiglu.h"
#include "kernels/linear/input_code_cache.h"
#include "kernels/linear/linear_block_scaled.h"
#include "kernels/linear/linear_fp8.h"
#include "kernels/linear/norm_quantize.h"
#include "kernels/linear/swiglu_quantize.h"
#include "kernels/loss/cross_entropy_cuda.h"
#include "kernels/messages/activation_message_cuda.h"
#include "kernels/messages/gradient_message_cuda.h"
#include "kernels/norm/normalization.h"
#include "kernels/quantize/quantize_cuda.h"
#include "kernels/rotary/rotary_cuda.h"
#include "kernels/scaling/scaling_state_cuda.h"
#include "kernels/statistics/statistics_cuda.h"
#include "kernels/sums/sum_rows_cuda.h"
#include "kernels/tensors/last_input_amax.h"
#include "kernels/transpose/transpose_cuda.h"

namespace qshard {
namespace {

[[noreturn]] void no_cuda(const char* operation) {
  TORCH_CHECK(false, "qshard: cannot ", operation,
              " on a CUDA tensor: this library was built without CUDA (nvcc was not found)");
}

}  // namespace

Stream current_stream(at::Device device) { return {device.is_cuda(), nullptr}; }
bool is_capturing(at::Device) { return false; }
LastInputAmax::Use LastInputAmax::use(at::Device) { return {}; }

std::tuple<at::Tensor, at::Tensor> normalized(const at::Tensor&, const Normalization&) {
  no_cuda("normalize");
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> normalization_gradients(const at::Tensor&,
                                                                       const at::Tensor&,
                                                                       const at::Tensor&,
                                                                       const Normalization&, bool,
                                                                       const at::Tensor&) {
  no_cuda("normalize");
}

bool has_grouped_gemm(at::Device) { return false; }
at::Tensor grouped_gemm(const char* op, const GroupedOperands& operands) {
  TORCH_CHECK(false, op, ": needs a GPU of compute capability 9.0, got ", operands.a.device());
}
GroupCodes quantize_packed_groups(const GivenOperand&, const Format&, OperandRole, Orientations,
                                  const RowGroups&, const DelayedAmax&) {
  no_cuda("quantize an activation");
}
int64_t saved_columns_bytes(const Format&, int64_t, int64_t, int64_t) {
  no_cuda("quantize an activation");
}
GroupCodes restored_codes(const at::Tensor&, const at::Tensor&, const Format&, OperandRole, int64_t,
                          int64_t, const RowGroups&) {
  no_cuda("quantize an activation");
}
bool has_group_swiglu(const Format&) { return false; }
GroupCodes quantize_swiglu_groups(const at::Tensor&, const at::Tensor&, const Format&, Orientations,
                                  const RowGroups&) {
  no_cuda("quantize an activation");
}
GroupSwigluBackward quantize_swiglu_backward_groups(const at::Tensor&, const at::Tensor&,
                                                    const at::Tensor&, const GroupSwigluRequest&,
                                                    const RowGroups&) {
  no_cuda("quantize a gradient");
}
at::Tensor multiply_by_packed_codes(const GroupCodes&, const ExpertWeights&, const RowGroups&, bool,
                                    at::ScalarType) {
  no_cuda("multiply codes");
}
at::Tensor multiply_packed_columns(const GroupCodes&, const GroupCodes&, int64_t, const RowGroups&,
                                   at::ScalarType, const at::Tensor&) {
  no_cuda("multiply codes");
}

namespace cuda {

c10::Allocator* allocator() { no_cuda("allocate codes"); }
void zero(void*, int64_t, c10::Device) { no_cuda("allocate codes"); }
void copy(void*, const void*, int64_t, c10::Device) { no_cuda("copy codes"); }

void compute_amax(std::span<const QuantizeTask>, void*) { no_cuda("compute an amax"); }
void quantize(std::span<const QuantizeTask>, void*) { no_cuda("quantize"); }
std::vector<QuantizeTask> quantize_tiles(std::span<const QuantizeTask>, void*) {
  no_cuda("quantize");
}
void dequantize(std::span<const DequantizeTask>, void*) { no_cuda("dequantize"); }
void fused_adamw(std::span<const AdamWTask>, const AdamWOptions&, void*) {
  no_cuda("run _fused_adamw_");
}

void collect_state(std::span<const StateTask>, void*) { no_cuda("collect amaxes"); }
void apply_state(std::span<const StateTask>, FlushKind, const float*, void*) {
  no_cuda("roll amax histories");
}
void delay_amax(float*, const DelayedAmax&, void*) { no_cuda("scale by earlier amaxes"); }

void add_statistics(const CodedMatrix&, int64_t*, void*) { no_cuda("compute statistics"); }

void transpose_values(const TransposeTask&, void*) { no_cuda("transpose"); }
void transpose_image(const TransposeImageTask&, void*) { no_cuda("transpose"); }
void rotate(const at::Tensor&, const Rotation&, const at::Tensor&) { no_cuda("rotate"); }
void sum_rows(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_cuda("add up rows");
}

void cross_entropy_losses(const CrossEntropyTask&, at::ScalarType) { no_cuda("compute a loss"); }
void cross_entropy_gradient(const CrossEntropyTask&, const at::Tensor&) {
  no_cuda("compute a loss");
}
QuantizedMatrix cross_entropy_codes(const CrossEntropyTask&, const OperandRequest&,
                                    const at::TensorOptions&) {
  no_cuda("compute a loss");
}

void encode_activation(const EncodeActivationTask&, void*) { no_cuda("gather activations"); }
void decode_activations(const DecodeActivationsTask&, void*) { no_cuda("gather activations"); }
void encode_messages(const EncodeMessagesTask&, void*) { no_cuda("quantize gradients"); }
void sum_messages(const SumMessagesTask&, void*) { no_cuda("quantize gradients"); }

int compute_capability(at::Device) { return 0; }
bool has_fp8_gemm(at::Device, ScaleMode) { return false; }
bool has_every_fp8_gemm(at::Device) { return false; }
bool can_quantize_swiglu_backward(const at::Tensor&, const SwigluBackwardRequest&) { return false; }

QuantizedMatrix quantize_activation(const at::Tensor&, const OperandRequest&, at::Tensor&) {
  no_cuda("quantize an activation");
}
QuantizedMatrix repack_activation(const QuantizedMatrix&, const OperandRequest&) {
  no_cuda("quantize an activation");
}
QuantizedMatrix quantize_cached_activation(const SharedInput&, const at::Tensor&,
                                           const OperandRequest&) {
  no_cuda("quantize an activation");
}
QuantizedMatrix quantize_norm(const at::Tensor&, const Normalization&, const OperandRequest&,
                              at::Tensor&, at::Tensor&) {
  no_cuda("quantize an activation");
}
QuantizedMatrix quantize_swiglu(const at::Tensor&, const at::Tensor&, Activation,
                                const OperandRequest&, at::Tensor&) {
  no_cuda("quantize an activation");
}
SwigluBackward quantize_swiglu_backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                        const SwigluBackwardRequest&) {
  no_cuda("quantize a gradient");
}

at::Tensor fp8_forward(const QuantizedMatrix&, const QuantizedMatrix&,
                       const std::optional<at::Tensor>&, const at::TensorOptions&,
                       const at::Tensor&) {
  no_cuda("multiply codes");
}
at::Tensor fp8_grad_input(const QuantizedMatrix&, const QuantizedMatrix&, const at::TensorOptions&,
                          const at::Tensor&) {
  no_cuda("multiply codes");
}
at::Tensor fp8_grad_weight(const QuantizedMatrix&, const QuantizedMatrix&,
                           const at::TensorOptions&) {
  no_cuda("multiply codes");
}
bool fp8_add_grad_weight(const QuantizedMatrix&, const QuantizedMatrix&, const at::Tensor&) {
  return false;
}
at::Tensor block_scaled_forward(const QuantizedMatrix&, const QuantizedMatrix&,
                                const std::optional<at::Tensor>&, const at::TensorOptions&,
                                const at::Tensor&) {
  no_cuda("multiply codes");
}
at::Tensor block_scaled_grad_input(const QuantizedMatrix&, const QuantizedMatrix&,
                                   const at::TensorOptions&) {
  no_cuda("multiply codes");
}
at::Tensor block_scaled_grad_weight(const QuantizedMatrix&, const QuantizedMatrix&,
                                    const at::TensorOptions&) {
  no_cuda("multiply codes");
}

}  // namespace cuda
}  // namespace qshard
