// An input of linears that is normalized on its way to them: what an autograd function keeps of it,
// and what it makes of that. On CUDA, where the GEMMs of all weights read packed codes, norm(x) is
// quantized as it is made, in forward by rows and in backward again by columns; neither its values
// nor its columns are kept, unless the gradients of the weights are all that will be asked for:
// then the columns are all that is.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include "ops/calls/ops.h"
#include "ops/calls/saved_state.h"

namespace qshard {

/// The normalization, over the last dimension: gamma (columns,) and beta, or no beta.
struct NormArguments {
  Tensor weight;
  OptionalTensor bias;
  double eps;
  bool rms;
  bool zero_centered_gamma;

  bool has_bias() const { return bias && bias->defined(); }
  /// Whether an input, of one dimension at least, can be normalized so; RMSNorm has no beta.
  bool fits(const Tensor& input) const;
};

/// The format of all the weights, if their GEMMs, wgrads too, read packed codes of the input which
/// is quantized once for all: decided from sizes, devices, dtypes and formats. Traced tensors do
/// not show their formats, so `format` says it; without it null.
const Format* input_codes_format(const Tensor& input, at::TensorList weights,
                                 std::optional<c10::string_view> format);
/// Whether that is so of norm(input), and NormOperand makes the codes.
bool norm_linear_reads_codes(const Tensor& input, const Tensor& norm_weight,
                             const OptionalTensor& norm_bias, at::TensorList weights,
                             std::optional<c10::string_view> format);

/// norm(input), rounded once, by torch's operators, as qshard/nn/parts/norms.py.
Tensor normalized_by_torch(const Tensor& input, const NormArguments& norm);

/// What a function's state holds of a normed input, beside the tensors that are saved.
struct NormFacts {
  double eps = 0.;
  bool rms = false;
  bool zero_centered_gamma = false;
  bool has_bias = false;
  std::string format;
  auto fields() { return std::tie(eps, rms, zero_centered_gamma, has_bias, format); }
};

/// What is kept between forward and backward.
class NormedInput {
 public:
  /// (norm(input) @ weight^T + bias for each of the weights, what to keep). `biases` of all, or
  /// empty; `format` is that of all weights.
  static std::pair<std::vector<Tensor>, NormedInput> multiply(const Tensor& input,
                                                              const NormArguments& norm,
                                                              at::TensorList weights,
                                                              at::TensorList biases,
                                                              const std::string& format);

  /// Which gradients backward may be asked for.
  struct Needs {
    bool normed = false;   // of norm(input), for those of the input, gamma or beta
    bool weights = false;  // of any weight

    /// `records`: whether autograd records.
    Needs(bool records, const Tensor& input, const Tensor& norm_weight,
          const OptionalTensor& norm_bias, at::TensorList weights);
  };
  /// Appends the tensors to save, kSaved of them, some undefined, and returns the rest.
  enum : size_t { kSaved = 6 };
  NormFacts save(const Needs& needs, torch::autograd::variable_list& saved) const;
  /// `saved`: the first of the kSaved.
  static NormedInput restore(const NormFacts& facts, const Tensor* saved);

  bool has_bias() const { return has_bias_; }
  /// Columnwise codes of norm(input), for wgrads.
  Tensor columns() const;
  /// Gradients of input (+ added, if defined), gamma and beta.
  std::tuple<Tensor, Tensor, Tensor> backward(const Tensor& grad, const Tensor& added,
                                              bool needs_parameters) const;

 private:
  Tensor input_;
  NormArguments norm_;
  std::string format_;
  Tensor statistics_, amax_;  // as NormOperand takes them; amax (0,) where there is none
  Tensor columns_;            // if they were kept
  bool has_bias_ = false;     // in forward
};

}  // namespace qshard
