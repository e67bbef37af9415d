// Quantized weights as GEMM operands.
#pragma once

#include <ATen/ATen.h>

#include <span>
#include <string_view>

#include "dispatch/buffer/quantized_buffer.h"
#include "kernels/grouped/grouped_linear.h"
#include "kernels/linear/linear.h"

namespace qshard {

/// The weight (N, K) as a linear multiplies it: codes and scales, never the master, so that an
/// unsharded weight that keeps one multiplies exactly as the gathered one does.
/// @throws c10::Error naming `op` if the weight is not quantized, not a window of whole rows, or
/// has an update pending that only a collective can flush.
LinearWeight linear_weight(const at::Tensor& weight, const char* op);

/// Whether linear_weight takes the tensor: a quantized matrix of whole rows.
bool is_row_window(const at::Tensor& tensor);

/// The weights (experts, out, in) of experts, in the same way: matrices that lie one after the
/// other, or the transposes of such.
/// @throws c10::Error as linear_weight does.
ExpertWeights expert_weights(const at::Tensor& weight, const char* op);

/// Whether expert_weights takes the tensor as it lies, or as it lies transposed.
bool is_stack(const at::Tensor& tensor);
bool is_transposed_stack(const at::Tensor& tensor);

/// The rows of a tensor whose value are codes that hold all that each row stands for: no master,
/// and no scales beside the rows.
std::optional<RowWindow> rows_of_their_own(const at::Tensor& x);
/// Such rows (..., K) to meet a weight of `format`; none where its GEMMs would not read them, which
/// backend_report() lists.
std::optional<ArrivedOperand> arrived_operand(const at::Tensor& x, const Format& format,
                                              const char* op);
/// The same, or else the value of x, as a matrix.
GivenOperand given_operand(const at::Tensor& x, const Format& format, const char* op);

/// @throws c10::Error naming `op` unless x is (T, in) beside the weight (experts, out, in), and
/// offs int32 (experts,) beside both.
void check_groups(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& offs,
                  const char* op);
/// Whether _grouped_mm of x and weight (experts, in, out) is what grouped_forward computes.
bool multiplies_experts(const at::Tensor& x, const at::Tensor& weight,
                        const std::optional<at::Tensor>& offs,
                        const std::optional<at::Tensor>& bias,
                        std::optional<at::ScalarType> out_dtype);

/// What a gathered weight serves reads codes, master or not, so that one process, DDP and FSDP2
/// agree: linear, mm, addmm, bmm, _grouped_mm, and of the operators that have no kernel here these
/// arguments. Every other operator reads the value.
std::span<const std::string_view> arguments_read_as_codes(std::string_view op);
/// The values that such an argument stands for: dequantized codes, in the nominal dtype.
at::Tensor dequantized_codes(const at::Tensor& tensor, const char* op);

}  // namespace qshard
