#include "ops/wire/agree_on_ranges.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <span>
#include <utility>

#include "dispatch/flush/amax_vector.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/calls/found_inf.h"
#include "ops/calls/ops.h"
#include "ops/wire/flat_ranges.h"

namespace qshard {
namespace {

using at::Tensor;

constexpr const char* kOp = "qshard::_agree_on_ranges";

bool is_delayed(const FlatRange& range) { return range.weight.format->amax_history.length > 0; }

/// One range of a call.
struct Entry {
  FlatRange range;
  Tensor values, own, amax;  // the last two undefined where the caller has no use for them
  Tensor history, scaling;   // undefined without delayed scaling
  int64_t step = kNoStep;
  at::Device device = at::kCPU;  // where its ranks meet
  std::span<float> words, collected;
};

/// A step's bits, each of which is reduced on its own.
constexpr int64_t kBits[] = {kHeld, kReached};
constexpr int64_t kFlags = std::size(kBits);

/// Ranges of one device whose ranks meet.
struct Meeting {
  at::Device device;
  Groups groups;
  bool is_step;
  std::vector<Entry*> entries;
};

/// All words that are reduced: amaxes, then for a step what histories collected, then what each
/// rank knows of the step.
int64_t words_of(const Meeting& meeting) {
  int64_t words = 0;
  for (const Entry* entry : meeting.entries) {
    words += entry->range.weight.grid_numel();
    if (meeting.is_step && entry->history.defined()) words += kActivationRows + kFlags;
  }
  return words;
}

void check_state(const Entry& entry) {
  const int64_t length = entry.range.weight.format->amax_history.length;
  constexpr int64_t kRows = 1 + kActivationRows;
  const auto fits = [&](const Tensor& tensor, int64_t of_row) {
    return tensor.scalar_type() == at::kFloat && tensor.numel() == kRows * of_row &&
           tensor.is_contiguous() && tensor.device() == entry.device && !has_key(tensor);
  };
  TORCH_CHECK_VALUE(fits(entry.history, length) && fits(entry.scaling, kScalingAmaxes),
                    fmt::format("{}: this is not the state of a {} weight on {}: {} and {}", kOp,
                                entry.range.weight.format->name, entry.device.str(),
                                describe(entry.history), describe(entry.scaling)));
}

StateTask task_of(const Entry& entry) {
  StateTask task;
  task.layout = entry.range.weight;
  task.value_dtype = value_dtype(quantizable_dtype(entry.values));
  task.amax = entry.words.data();
  task.words = entry.collected.data();
  task.amax_history = entry.history.mutable_data_ptr<float>();
  task.scaling_amax = entry.scaling.mutable_data_ptr<float>();
  return task;
}

/// The steps of one meeting. It writes when the ranks have agreed.
class Agreement {
 public:
  explicit Agreement(Meeting& meeting)
      : meeting_(meeting), vector_(words_of(meeting), meeting.device) {
    for (Entry* entry : meeting.entries) {
      entry->words = vector_.take(entry->range.weight.grid_numel());
      if (entry->history.defined()) delayed_.push_back(entry);
    }
    if (meeting.is_step) {
      for (Entry* entry : delayed_) entry->collected = vector_.take(kActivationRows);
      flags_ = vector_.take(static_cast<int64_t>(delayed_.size()) * kFlags);
    }
  }

  void run(const std::optional<Tensor>& found_inf) {
    const c10::OptionalDeviceGuard device_guard(meeting_.device);
    fill();
    reduce();
    hear();
    apply(found_inf);
    std::vector<Tensor> to, from;
    for (const Entry* entry : meeting_.entries) {
      if (!entry->amax.defined()) continue;
      to.push_back(entry->amax.view(-1));
      from.push_back(vector_.tensor_of(entry->words));
    }
    if (!to.empty()) at::_foreach_copy_(to, from);
  }

 private:
  Meeting& meeting_;
  AmaxVector vector_;
  std::vector<Entry*> delayed_;
  std::span<float> flags_;

  bool meets() const { return meeting_.groups != Groups(); }

  void fill() {
    std::vector<Tensor> own;
    for (const Entry* entry : meeting_.entries)
      own.push_back(entry->own.to(meeting_.device).view(-1));
    const Tensor all = at::cat(own);
    vector_.words().narrow(0, 0, all.numel()).copy_(all);
    if (!meeting_.is_step || delayed_.empty()) return;
    std::vector<StateTask> tasks;
    std::vector<float> flags;
    for (const Entry* entry : delayed_) {
      tasks.push_back(task_of(*entry));
      for (const int64_t bit : kBits) flags.push_back((entry->step & bit) != 0 ? 1.f : 0.f);
    }
    vector_.collect(tasks);
    // A graph that is captured alone has no copy from the host.
    if (meets()) vector_.tensor_of(flags_).copy_(at::tensor(flags));
  }

  void reduce() {
    Groups groups = meeting_.groups;
    if (delayed_.empty()) groups.replicas.clear();  // they have the same values
    vector_.reduce(groups, meeting_.is_step ? FlushKind::kStep : FlushKind::kOutsideStep);
  }

  /// What other ranks know of the step. Where this one knows that it was of all weights, it does
  /// not wait for the answer.
  void hear() {
    const auto waits = [](const Entry* entry) { return entry->step != kOfIt; };
    if (!meets() || !meeting_.is_step || std::none_of(delayed_.begin(), delayed_.end(), waits)) {
      return;
    }
    const Tensor flags = vector_.tensor_of(flags_).cpu();
    const float* flag = flags.const_data_ptr<float>();
    for (Entry* entry : delayed_) {
      for (const int64_t bit : kBits) {
        if (*flag++ != 0) entry->step |= bit;
      }
    }
  }

  /// Replaces amaxes by those to scale by.
  void apply(const std::optional<Tensor>& found_inf) {
    std::vector<StateTask> steps, others;
    for (const Entry* entry : delayed_) {
      (entry->step == kOfIt ? steps : others).push_back(task_of(*entry));
    }
    vector_.apply(steps, FlushKind::kStep, found_inf.value_or(Tensor()));
    vector_.apply(others, FlushKind::kOutsideStep, Tensor());
  }
};

std::vector<Entry> entries_of(at::TensorList values, const std::vector<FlatRange>& ranges,
                              at::TensorList own, at::TensorList amax, at::TensorList state,
                              at::IntArrayRef steps) {
  std::vector<Entry> entries;
  size_t states = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    Entry& entry = entries.emplace_back();
    entry.range = ranges[i];
    entry.values = values[i];
    if (!own.empty()) entry.own = own[i];
    if (!amax.empty()) entry.amax = amax[i];
    entry.step = steps[i];
    entry.device = (amax.empty() ? values : amax)[i].device();
    TORCH_CHECK_VALUE(entry.step == kNoStep ||
                          (entry.step >= kStep && entry.step <= kOfIt && entry.step % 2 == 1),
                      fmt::format("{}: a step is 0, 1, 3, 5 or 7, got {}", kOp, entry.step));
    if (!is_delayed(ranges[i])) continue;
    TORCH_CHECK_VALUE(states + 2 <= state.size(), kOp, ": needs two state tensors for each weight ",
                      "of delayed scaling, got ", state.size());
    entry.history = state[states++];
    entry.scaling = state[states++];
    check_state(entry);
  }
  TORCH_CHECK_VALUE(states == state.size(), kOp, ": needs two state tensors for each weight of ",
                    "delayed scaling, ", states, " in all, got ", state.size());
  return entries;
}

/// Finds amaxes of values that are not known, those of one device together.
void find_own(std::vector<Entry>& entries, const c10::List<bool>& is_known) {
  std::vector<Entry*> left;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (is_known.empty() || !is_known[i]) left.push_back(&entries[i]);
  }
  std::vector<Tensor> to, from;
  while (!left.empty()) {
    const at::Device device = left.front()->values.device();
    std::vector<Entry*> here, elsewhere;
    std::vector<Tensor> values;
    std::vector<FlatRange> ranges;
    std::vector<int64_t> sizes;
    for (Entry* entry : left) {
      if (entry->values.device() != device) {
        elsewhere.push_back(entry);
        continue;
      }
      here.push_back(entry);
      values.push_back(entry->values);
      ranges.push_back(entry->range);
      sizes.push_back(entry->range.weight.grid_numel());
    }
    const auto found = amax_of_ranges(kOp, values, ranges).split_with_sizes(sizes);
    for (size_t i = 0; i < here.size(); ++i) {
      if (here[i]->own.defined()) {
        to.push_back(here[i]->own.view(-1));
        from.push_back(found[i]);
      } else {
        here[i]->own = found[i];
      }
    }
    left = std::move(elsewhere);
  }
  if (!to.empty()) at::_foreach_copy_(to, from);
}

/// In order of first appearance. Replicas have the same values.
std::vector<Meeting> meetings_of(std::vector<Entry>& entries, at::IntArrayRef groups) {
  std::vector<Meeting> meetings;
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = entries[i];
    const bool is_step = entry.step != kNoStep;
    Groups own = registered_groups(groups[i]);
    if (!is_step) own.replicas.clear();
    auto found = std::find_if(meetings.begin(), meetings.end(), [&](const Meeting& meeting) {
      return meeting.device == entry.device && meeting.is_step == is_step && meeting.groups == own;
    });
    if (found == meetings.end()) {
      meetings.push_back({entry.device, std::move(own), is_step, {}});
      found = meetings.end() - 1;
    }
    found->entries.push_back(&entry);
  }
  return meetings;
}

}  // namespace

std::vector<int64_t> agree_on_ranges(at::TensorList values, const std::vector<std::string>& formats,
                                     at::IntArrayRef geometry, at::TensorList own,
                                     const c10::List<bool>& is_known, at::TensorList amax,
                                     at::TensorList state, at::IntArrayRef steps,
                                     at::IntArrayRef groups,
                                     const std::optional<Tensor>& found_inf) {
  PlainGuard guard;
  const auto ranges = ranges_of(kOp, formats, geometry);
  check_values(kOp, values, ranges);
  if (!own.empty()) check_amaxes(kOp, own, ranges);
  if (!amax.empty()) check_amaxes(kOp, amax, ranges);
  grid_numel(kOp, ranges);
  TORCH_CHECK_VALUE(
      steps.size() == ranges.size() && groups.size() == ranges.size() &&
          (is_known.empty() || is_known.size() == own.size()),
      fmt::format("{}: {} ranges, {} steps, {} groups, own amaxes of {}, of which {} are known or "
                  "not",
                  kOp, ranges.size(), steps.size(), groups.size(), own.size(), is_known.size()));
  check_found_inf(kOp, found_inf, values);
  auto entries = entries_of(values, ranges, own, amax, state, steps);
  auto meetings = meetings_of(entries, groups);
  find_own(entries, is_known);
  for (Meeting& meeting : meetings) Agreement(meeting).run(found_inf);
  std::vector<int64_t> is_stepped;
  for (const Entry& entry : entries) is_stepped.push_back(entry.step == kOfIt);
  return is_stepped;
}

std::vector<int64_t> agree_on_histories(at::TensorList amax_history, at::IntArrayRef levels,
                                        int64_t groups, at::Device device) {
  PlainGuard guard;
  const char* const op = "qshard::_agree_on_histories";
  TORCH_CHECK_VALUE(amax_history.size() == levels.size(), op, ": ", amax_history.size(),
                    " histories and ", levels.size(), " levels");
  const auto count = static_cast<int64_t>(levels.size());
  TORCH_CHECK_VALUE(!device.is_meta(), op, ": ranks cannot meet on meta");
  if (count == 0) return {};
  constexpr int64_t kRows = 1 + kActivationRows;
  const auto collected = [](const Tensor& history) {
    return history.view({kRows, -1}).select(1, 0).narrow(0, 1, kActivationRows);
  };
  std::vector<float> known;
  for (size_t i = 0; i < amax_history.size(); ++i) {
    const Tensor& history = amax_history[i];
    TORCH_CHECK_VALUE(history.scalar_type() == at::kFloat && history.is_contiguous() &&
                          history.numel() % kRows == 0 && !has_key(history),
                      fmt::format("{}: a history is plain contiguous float32 of {} rows, got {}",
                                  op, kRows, describe(history)));
    TORCH_CHECK_VALUE(
        levels[i] >= kNothing && levels[i] <= kWasStepped,
        fmt::format("{}: a level is 0 to {}, got {}", op, int64_t{kWasStepped}, levels[i]));
    known.push_back(static_cast<float>(levels[i]));
  }
  const Groups& ranks = registered_groups(groups);
  AmaxVector vector(count * (kActivationRows + 1), device);
  const c10::OptionalDeviceGuard device_guard(device);
  const std::span<float> flags = vector.take(count);
  vector.tensor_of(flags).copy_(at::tensor(known));
  std::vector<Tensor> rows, histories;
  for (const Tensor& history : amax_history) {
    const std::span<float> words = vector.take(kActivationRows);
    if (history.numel() == 0) {
      vector.zero(words);
      continue;
    }
    rows.push_back(vector.tensor_of(words));
    histories.push_back(collected(history));
  }
  if (!rows.empty()) at::_foreach_copy_(rows, histories);
  vector.reduce(ranks, FlushKind::kStep);
  if (!rows.empty()) at::_foreach_copy_(histories, rows);
  const auto is_most = [](int64_t level) { return level == kWasStepped; };
  if (std::all_of(levels.begin(), levels.end(), is_most)) return levels.vec();  // without waiting
  const Tensor agreed = vector.tensor_of(flags).cpu();
  std::vector<int64_t> largest;
  for (int64_t i = 0; i < count; ++i) {
    largest.push_back(static_cast<int64_t>(agreed.const_data_ptr<float>()[i]));
  }
  return largest;
}

}  // namespace qshard
