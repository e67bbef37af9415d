#include "ops/linear/kept_operands.h"

#include <ATen/SavedTensorHooks.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "dispatch/aten/matmul.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {
namespace {

using torch::autograd::variable_list;

/// Delayed scaling's tensors, or none.
std::vector<Tensor> delayed_state(const QuantizedBuffer& buffer) {
  const ScalingState& state = buffer.scaling_state();
  if (!state.amax_history.defined()) return {};
  return {state.amax_history, state.scaling_amax};
}

/// The same as of a single matrix, which they are to the linear of one of several: the rows of its
/// input and of its gradient stand behind that of the last matrix.
std::vector<Tensor> delayed_state_of_one(const QuantizedBuffer& buffer) {
  auto state = delayed_state(buffer);
  const int64_t first = buffer.layout().matrices() - 1;
  if (first <= 0) return state;
  for (Tensor& tensor : state) tensor = tensor.narrow(0, first, 1 + kActivationRows);
  return state;
}

/// Whether hooks see codes and scales: of matrices that have the image which backward reads.
/// A gather by phase brings another image for backward, to the weight itself.
bool shows_planes(const Tensor& weight) {
  if (!(is_row_window(weight) || is_stack(weight)) || weight.is_meta()) return false;
  const Layout& layout = buffer_of(weight).layout();
  return !layout.format->columnwise || layout.has_columnwise();
}

/// `weight`'s rows without their bytes.
Tensor without_bytes(const Tensor& weight) {
  const QuantizedBuffer& buffer = buffer_of(weight);
  const auto rows = *row_window(weight);
  const Layout& all = buffer.layout();
  const Layout layout = run_alone(all, rows.first, rows.count);
  auto planes = Planes::allocate(layout, buffer.dtype(), false, at::kMeta, Fill::kNothing);
  auto twin =
      c10::make_intrusive<QuantizedBuffer>(Placement(layout), buffer.dtype(), std::move(planes));
  twin->remembered().watched = buffer.remembered().watched;
  return make_tensor(std::move(twin), weight.sizes());
}

void check_handed_back(const Tensor& plane, const ReadOnlyTensor& like, const Tensor& grad) {
  const bool is_freed = plane.defined() && plane.numel() > 0 && plane.has_storage() &&
                        !plane.unsafeGetTensorImpl()->storage_initialized();
  TORCH_CHECK(plane.defined() && plane.sizes() == like.sizes() &&
                  plane.scalar_type() == like.scalar_type() && plane.device() == grad.device() &&
                  !is_freed,
              fmt::format("qshard::linear: a hook on saved tensors was given a weight's codes, {} "
                          "{} on {}, and handed back {}; it must hand back what it was given",
                          c10::toString(like.scalar_type()), like.sizes(), grad.device().str(),
                          is_freed ? "freed memory" : describe(plane)));
}

/// A quantized tensor over planes that were saved.
Tensor over_planes(const Tensor& twin, const Tensor& image, const Tensor& grid,
                   const Tensor& grad) {
  const QuantizedBuffer& of = buffer_of(twin);
  check_handed_back(image, of.planes().image(), grad);
  const Grid& known = of.planes().grid();
  if (known.defined()) check_handed_back(grid, known.read(), grad);
  const Layout& layout = of.layout();
  auto planes = Planes::over_image(
      image.contiguous(), Grid::snapshot(grid.defined() ? grid.contiguous() : Tensor()), layout);
  auto buffer =
      c10::make_intrusive<QuantizedBuffer>(Placement(layout), of.dtype(), std::move(planes));
  buffer->remembered().watched = of.remembered().watched;
  return make_tensor(std::move(buffer), twin.sizes());
}

}  // namespace

KeptWeight::KeptWeight(const Tensor& weight, bool is_read, std::optional<c10::string_view> format,
                       const WeightState& state)
    : weight_(weight) {
  const bool tells = has_key(weight);
  if (format && !tells) format_ = std::string(*format);
  if (state) state_ = *state;
  if (is_read) {
    if (!tells || !at::SavedTensorDefaultHooks::get_hooks().has_value()) return;
    if (!shows_planes(weight)) {
      // For backward to say what a hook has made of it.
      format_ = std::string(buffer_of(weight).layout().format->name);
      return;
    }
    way_ = Way::kPlanes;
    if (auto delayed = delayed_state(buffer_of(weight)); !delayed.empty()) {
      state_ = std::move(delayed);
    }
    return;
  }
  if (tells) {
    way_ = Way::kFactsOfItself;
    format_ = std::string(buffer_of(weight).layout().format->name);
    state_ = delayed_state_of_one(buffer_of(weight));
  } else if (state) {
    way_ = Way::kFactsOfItself;
  } else if (format && checked_format(*format, "qshard::linear").amax_history.length == 0) {
    // What is traced, or wrapped, hides the state of delayed scaling: that is kept with it.
    way_ = Way::kFactsByName;
    state_.emplace();
  }
}

WeightFacts KeptWeight::save(variable_list& saved) const {
  WeightFacts facts{format_, state_, {}, {}};
  if (way_ == Way::kWhole) {
    saved.insert(saved.end(), {weight_, Tensor()});
    return facts;
  }
  if (way_ == Way::kPlanes) {
    const Planes& planes = buffer_of(weight_).planes();
    const auto rows = *row_window(weight_);
    const ReadOnlyTensor& grid = planes.grid().read();
    saved.push_back(planes.image().narrow(0, rows.first, rows.count).operand());
    saved.push_back(grid.defined() ? grid.operand().alias() : Tensor());
    facts.twin = without_bytes(weight_);
    return facts;
  }
  saved.insert(saved.end(), {Tensor(), Tensor()});
  facts.shape = {weight_.sym_sizes().vec(), weight_.scalar_type()};
  return facts;
}

RestoredWeight::RestoredWeight(const WeightFacts& facts, const Tensor* saved, const Tensor& grad)
    : format(facts.format), state(facts.state) {
  if (facts.twin.defined()) {
    weight = over_planes(facts.twin, saved[0], saved[1], grad);
  } else if (facts.shape) {
    const auto& [sizes, dtype] = *facts.shape;
    weight = grad.new_empty(std::vector<int64_t>(sizes.size(), 1), grad.options().dtype(dtype))
                 .expand_symint(sizes);
  } else {
    weight = saved[0];
  }
}

}  // namespace qshard
