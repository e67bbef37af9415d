#include "dispatch/parts/scaling_state.h"

#include <ATen/CPUGeneratorImpl.h>

namespace qshard {
namespace {

constexpr int64_t kKeyHalf = int64_t{1} << 31;

at::Tensor copy_of(const at::Tensor& tensor, at::Device device) {
  if (!tensor.defined()) return tensor;
  if (tensor.is_meta()) return at::zeros(tensor.sizes(), tensor.options().device(device));
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace

at::Device ScalingState::device() const {
  return (rounding.defined() ? rounding : amax_history).device();
}

int64_t ScalingState::nbytes() const {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors()) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

std::vector<std::pair<const char*, at::Tensor>> ScalingState::tensors() const {
  std::vector<std::pair<const char*, at::Tensor>> result;
  if (amax_history.defined()) {
    result.emplace_back("amax_history", amax_history);
    result.emplace_back("scaling_amax", scaling_amax);
  }
  if (rounding.defined()) result.emplace_back("rounding", rounding);
  return result;
}

ScalingState ScalingState::copy_to(at::Device device) const {
  ScalingState copy;
  copy.amax_history = copy_of(amax_history, device);
  copy.scaling_amax = copy_of(scaling_amax, device);
  copy.rounding = copy_of(rounding, device);
  copy.rounding_key = rounding_key;
  if (rounding.defined() && rounding.is_meta()) copy.set_rounding_key(rounding_key);
  return copy;
}

ScalingState ScalingState::copy_of_matrices(const Layout& layout, int64_t first, int64_t run,
                                            const at::Tensor& index) const {
  ScalingState copy;
  if (amax_history.defined()) {
    const at::Tensor runs = index.to(amax_history.device(), at::kLong);
    const at::Tensor matrices =
        runs.mul(run).add(first).unsqueeze(1) + at::arange(run, runs.options());
    const at::Tensor rows = at::cat(
        {matrices.flatten(), at::arange(input_row(layout), scaling_rows(layout), runs.options())});
    copy.amax_history = amax_history.index_select(0, rows);
    copy.scaling_amax = scaling_amax.index_select(0, rows);
  }
  if (rounding.defined()) copy.rounding = rounding.clone();
  copy.rounding_key = rounding_key;
  return copy;
}

void ScalingState::copy_from(const ScalingState& other) {
  if (amax_history.defined()) {
    amax_history.copy_(other.amax_history);
    scaling_amax.copy_(other.scaling_amax);
  }
  if (rounding.defined()) rounding.copy_(other.rounding);
}

ScalingState ScalingState::fresh(const Layout& layout, at::Device device) {
  ScalingState state;
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
  if (const int64_t length = layout.format->amax_history.length; length > 0) {
    state.amax_history = at::zeros({scaling_rows(layout), length}, floats);
    state.scaling_amax = at::zeros({scaling_rows(layout), kScalingAmaxes}, floats);
  }
  if (layout.format->stochastic_rounding) {
    state.rounding = at::empty({kRoundingWords}, floats.dtype(at::kInt));
    const uint64_t seed = at::detail::getDefaultCPUGenerator().current_seed();
    state.set_rounding_key(static_cast<int64_t>(seed % (uint64_t{1} << 62)));
  }
  return state;
}

ScalingState ScalingState::of(const Layout& layout, at::TensorList tensors) {
  const bool has_history = layout.format->amax_history.length > 0;
  const bool rounds = layout.format->stochastic_rounding;
  TORCH_CHECK(tensors.size() == (has_history ? 2u : 0u) + (rounds ? 1u : 0u),
              "qshard: this is not the state of a quantized tensor of its format");
  ScalingState state;
  if (has_history) {
    state.amax_history = tensors[0];
    state.scaling_amax = tensors[1];
  }
  if (rounds) state.rounding = tensors.back();
  return state;
}

void ScalingState::set_rounding_key(int64_t key) {
  rounding_key = key;
  if (rounding.is_meta()) return;
  const int32_t words[kRoundingWords] = {static_cast<int32_t>(key % kKeyHalf),
                                         static_cast<int32_t>(key / kKeyHalf), 0};
  const auto host = at::tensor(at::ArrayRef<int32_t>(words), at::kInt);
  rounding.copy_(host);
}

}  // namespace qshard
