// What swiglu_mlp checks of its arguments, and decides from them.
#pragma once

#include "kernels/format/formats.h"
#include "kernels/numerics/activations.h"
#include "ops/mlp/swiglu_mlp.h"

namespace qshard {

/// The format of a quantized tensor; of what is traced, which hides it, the one that was named.
const Format& format_of(const Tensor& weight, c10::string_view name);

/// What an MLP computes between its linears: function(gate) * up, or function(gate) if not `gated`.
struct MlpActivation {
  Activation function = Activation::kSilu;
  bool gated = true;
};
/// By the names of TransformerEngine: swiglu, geglu, reglu and sreglu are gated; silu, gelu, relu
/// and srelu are not.
/// @throws c10::ValueError for another name.
MlpActivation mlp_activation(const char* op, c10::string_view name);

/// What the first linears gave, (..., inner): the halves of `gate` if it has both. `up`: undefined
/// where it is joined, or where nothing is multiplied.
struct GateAndUp {
  Tensor gate;
  OptionalTensor up;

  GateAndUp(const Tensor& gate, const Tensor& up, bool is_joined);
};

/// Returns what `activation` is.
/// @throws c10::Error for shapes that do not go together.
MlpActivation check_swiglu_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                               const Tensor& down, const OptionalTensor& gate_bias,
                               const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                               c10::string_view activation);
void check_norm(const Tensor& input, const OptionalTensor& norm_weight,
                const OptionalTensor& norm_bias, bool rms);
/// Whether weights are plain ones that are quantized for each use.
/// @throws c10::ValueError for states of some weights.
bool are_dynamic(const OptionalTensor& up, const WeightState& gate_state,
                 const WeightState& up_state, const WeightState& down_state);
/// Whether gate and up multiply codes that are made of the input as it is normalized.
bool reads_normed_codes(const Tensor& input, const OptionalTensor& norm_weight,
                        const OptionalTensor& norm_bias, const Tensor& gate,
                        const OptionalTensor& up, const OptionalTensor& gate_bias,
                        const OptionalTensor& up_bias, bool weight_only, bool is_dynamic,
                        c10::string_view format);

/// What is decided from sizes, device, dtype and formats: a traced call must decide as the real one
/// does.
struct SwigluUse {
  bool gives_codes = false;   // the gradients of gate and up reach their linears in codes
  bool keeps_maxima = false;  // of gate, up and their product, for backward

  SwigluUse() = default;
  SwigluUse(const Tensor& input, const Tensor& gate, const Tensor& down, bool weight_only,
            const Format& format, const Format& down_format);
};

}  // namespace qshard
