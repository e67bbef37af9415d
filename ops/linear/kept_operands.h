// What the autograd functions of linears keep between forward and backward.
//
// The gradient of a linear's input reads the weight, the gradient of its weight reads the input,
// and neither reads the other operand. So each function asks here which operands it keeps, and what
// backward's operators get in place of one that was not kept.
#pragma once

#include <torch/csrc/autograd/custom_function.h>

#include <optional>
#include <string>
#include <vector>

#include "ops/calls/ops.h"
#include "ops/calls/saved_state.h"

namespace qshard {

/// Which gradients of one linear backward may be asked for.
struct LinearNeeds {
  bool input = false;
  bool weight = false;

  /// `records`: whether autograd records (the engine's answers are of backward's time). `input`: of
  /// what the linear multiplies, perhaps of what that was made of.
  LinearNeeds(bool records, bool input, const Tensor& weight)
      : input(records && input), weight(records && weight.requires_grad()) {}
  LinearNeeds(bool records, const Tensor& input, const Tensor& weight)
      : LinearNeeds(records, input.requires_grad(), weight) {}

  bool reads_weight() const { return input; }
  /// The same of experts, if `offs` are given: how these lie decides how their gradient is
  /// computed.
  bool reads_weight(const Tensor& weight, const OptionalTensor& offs) const {
    return reads_weight() || (offs && offs->defined() && !weight.is_contiguous());
  }
  bool reads_input() const { return weight; }
};

/// What a function's state holds of a weight, beside the tensors that are saved.
struct WeightFacts {
  /// Stands for a weight whose values no gradient reads.
  struct Shape {
    std::vector<c10::SymInt> sizes;
    at::ScalarType dtype;
    auto fields() { return std::tie(sizes, dtype); }
  };
  std::optional<std::string> format;
  std::optional<std::vector<Tensor>> state;
  Tensor twin;  // the weight without its bytes, where its planes are saved
  std::optional<Shape> shape;
  auto fields() { return std::tie(format, state, twin, shape); }
};

/// A weight between forward and backward, kept in one of four ways:
/// - whole, as torch's own linear keeps it;
/// - where hooks on saved tensors are active, as its planes: one byte per element for what they do
///   with it. torch's own offloading (save_on_cpu(pin_memory=True)) copies what it is given into a
///   plain tensor, which for a quantized one would be its values;
/// - a plain weight that is quantized for each use as it is, beside what it is scaled by;
/// - where only its own gradient will be asked for, as format, sizes and the state of delayed
///   scaling: no tensor, so that a step between two backwards is no error.
class KeptWeight {
 public:
  /// The tensors to save, some undefined.
  static constexpr size_t kSaved = 2;

  /// `format`: the weight's, of one that does not tell. `state`: of a plain one that is quantized
  /// for each use.
  KeptWeight(const Tensor& weight, bool is_read, std::optional<c10::string_view> format,
             const WeightState& state);

  /// Whether backward trusts the format that the caller named, so that forward has to check it.
  bool trusts_format() const { return way_ == Way::kFactsByName; }
  /// Appends kSaved tensors to `saved`, and returns the rest.
  WeightFacts save(torch::autograd::variable_list& saved) const;

 private:
  enum class Way : int8_t { kWhole, kPlanes, kFactsOfItself, kFactsByName };

  Tensor weight_;
  Way way_ = Way::kWhole;
  std::optional<std::string> format_;
  std::optional<std::vector<Tensor>> state_;
};

/// The same in backward, as the operators of a linear's gradients take it.
struct RestoredWeight {
  Tensor weight;  // of what was not kept a plain tensor of its sizes, in memory of one element
  std::optional<std::string> format;
  std::optional<std::vector<Tensor>> state;

  /// `saved`: the first of KeptWeight::kSaved. `grad`: a tensor beside the weight.
  RestoredWeight(const WeightFacts& facts, const Tensor* saved, const Tensor& grad);
};

/// An input that was kept, or where none was what stands for it: nothing reads it.
inline const Tensor& restored_input(const Tensor& saved, const Tensor& grad) {
  return saved.defined() ? saved : grad;
}

}  // namespace qshard
