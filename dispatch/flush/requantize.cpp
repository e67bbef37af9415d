#include "dispatch/flush/requantize.h"

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <span>
#include <utility>

#include "dispatch/flush/amax_vector.h"
#include "dispatch/flush/sampled_weights.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/parts/storage.h"

namespace qshard {
namespace {

/// The state of one buffer on the device of its planes for the time of a flush. Nothing stays of a
/// flush that another is to follow: each rank knows its own amaxes alone, and scales that the next
/// step takes from them would not be those of its peers. Nor of a gathered weight's flush, whose
/// state is its shard's and whose values end with the gather.
class FlushedState {
 public:
  FlushedState(const QuantizedBuffer& buffer, float* amax, float* words, bool stays)
      : own_(buffer.scaling_state()),
        here_(stays && own_.device() == buffer.device() ? own_ : own_.copy_to(buffer.device())),
        stays_(stays) {
    task_.layout = buffer.layout();
    task_.value_dtype = value_dtype(buffer.dtype());
    task_.amax = amax;
    task_.words = words;
    if (here_.amax_history.defined()) {
      task_.amax_history = here_.amax_history.mutable_data_ptr<float>();
      task_.scaling_amax = here_.scaling_amax.mutable_data_ptr<float>();
    }
    if (here_.rounding.defined()) task_.rounding = here_.rounding.mutable_data_ptr<int32_t>();
  }

  const StateTask& task() const { return task_; }
  void write_back() {
    if (stays_ && own_.device() != here_.device()) own_.copy_from(here_);
  }

 private:
  ScalingState own_, here_;
  bool stays_;
  StateTask task_;
};

/// One buffer of a flush.
struct Entry {
  enum Needs {
    kCodes,   // and scales: its codes are not final
    kScales,  // of rows held elsewhere, in its grid; its codes are final
    kNothing  // others may need its amaxes
  };

  BufferPtr buffer;
  BoundaryBlocks boundary;
  Needs needs = kCodes;
  bool shares_scale = false;  // and its codes wait for those of others
  std::span<float> amax, words;
  /// In front, the amaxes of the full tensor where `amax` has those of blocks, too.
  std::span<float> tensor_amax;
  QuantizeTask task;
  ReadOnlyTensor values;  // that task reads
  at::Tensor snapshot;    // of the grid that task writes
  std::optional<FlushedState> state;
};

/// Whether its grid has, or may have, scales of other ranks' rows alone that are not known here.
bool lacks_scales(const QuantizedBuffer& buffer) {
  const Layout& layout = buffer.layout();
  return layout.format->has_grid() && !layout.format->has_tensor_scale() &&
         !layout.holds_all_rows();
}

Entry::Needs needs_of(const QuantizedBuffer& buffer, bool shares_scale) {
  if (!buffer.flush_state().codes_final() || shares_scale) return Entry::kCodes;
  return lacks_scales(buffer) ? Entry::kScales : Entry::kNothing;
}

/// The values that a task's rowwise image will have, in the values' dtype. Without a master they
/// are the tensor's value from then on, and the columnwise image must be made of them: a load could
/// not make it again from the values before.
at::Tensor rowwise_values(QuantizeTask task, const ReadOnlyTensor& values, Stream stream) {
  task.layout = task.layout.with_images(Images::kRowwise);
  task.boundary = {};
  const auto image =
      at::empty({task.layout.rows, task.layout.row_bytes()}, values.options().dtype(at::kByte));
  task.image = image.mutable_data_ptr<uint8_t>();
  quantize({&task, 1}, stream);
  auto rounded = at::empty(values.sizes(), values.options());
  const DequantizeTask read{task.layout,
                            task.image,
                            nullptr,
                            0,
                            task.layout.rows,
                            task.value_dtype,
                            rounded.mutable_data_ptr()};
  dequantize({&read, 1}, stream);
  return rounded;
}

/// The steps of one requantize().
class Requantization {
 public:
  Requantization(const Batch& batch, const RequantizeOptions& options)
      : batch_(batch),
        options_(options),
        stream_(current_stream(batch.device)),
        ranks_(ranks_of(batch.groups.shard)),
        entries_(entries_of(batch, ranks_)),
        sampled_in_front_(sampled(true)),
        sampled_behind_(sampled(false)),
        vector_(words_of(entries_) + sampled_in_front_.words() + sampled_behind_.words(),
                batch.device),
        sharing_(shared_scales(batch.buffers)) {
    for (const auto& group : sharing_) {
      for (const size_t i : group) entries_[i].shares_scale = true;
    }
  }

  void run() {
    agree_on_rounding();
    wait_for_writes();
    reserve_amaxes();
    for (Entry& entry : entries_) prepare(entry);
    const auto states = state_tasks();
    // If no other rank's amaxes are needed, one pass over the values may do.
    const Groups& groups = batch_.groups;
    const bool agrees = groups.shard || !groups.tensor.empty();
    const bool at_once = ranks_ == 1 && groups.tensor.empty() && groups.replicas.empty() &&
                         states.empty() && sharing_.empty();
    auto tasks = tasks_of({Entry::kCodes, Entry::kScales});
    if (!at_once) compute_amax(tasks, stream_);
    compute_amax(tasks_of({Entry::kNothing}), stream_);
    vector_.collect(states);
    sampled_in_front_.write(sampled_words_in_front_);
    sampled_behind_.write(sampled_words_behind_);
    vector_.reduce(groups, options_.kind);
    sampled_in_front_.leave(sampled_words_in_front_);
    sampled_behind_.leave(sampled_words_behind_);
    share_scales();
    if (options_.amax) *options_.amax = states.empty() ? vector_.words() : vector_.words().clone();
    vector_.apply(states, options_.kind, options_.found_inf);
    if (agrees) allocate_snapshots();
    tasks = tasks_of({Entry::kCodes, Entry::kScales});
    if (at_once) {
      quantize_at_once(tasks, stream_);
    } else {
      quantize(tasks, stream_);
    }
    commit();
  }

 private:
  const Batch& batch_;
  const RequantizeOptions& options_;
  const Stream stream_;
  const int64_t ranks_;
  std::vector<Entry> entries_;
  const SampledWeights sampled_in_front_, sampled_behind_;
  AmaxVector vector_;
  at::Tensor sampled_words_in_front_, sampled_words_behind_;
  std::vector<std::vector<size_t>> sharing_;  // positions of entries

  static std::vector<Entry> entries_of(const Batch& batch, int64_t ranks) {
    std::vector<Entry> entries(batch.buffers.size());
    for (size_t i = 0; i < entries.size(); ++i) {
      entries[i].buffer = batch.buffers[i];
      entries[i].boundary = find_boundary_blocks(batch.buffers[i]->layout(), ranks);
    }
    return entries;
  }

  static int64_t of_full_tensor(const Entry& entry) {
    return entry.buffer->placement().amaxes_of_full_tensor();
  }

  static int64_t words_of(const std::vector<Entry>& entries) {
    int64_t words = 0;
    for (const Entry& entry : entries) {
      const Layout& layout = entry.buffer->layout();
      // Those of the full tensor perhaps twice (reserve_amaxes).
      words +=
          amax_numel(layout, entry.boundary) + of_full_tensor(entry) + state_words(*layout.format);
    }
    return words;
  }

  bool is_in_front(const Entry& entry) const {
    return !batch_.groups.tensor.empty() &&
           !entry.buffer->placement().groups_of_full_tensor().empty();
  }

  /// What a watch has found in this step: in front, of weights of which other ranks hold other
  /// parts.
  SampledWeights sampled(bool in_front) const {
    if (options_.kind != FlushKind::kStep) return {};
    std::vector<BufferPtr> buffers;
    for (const Entry& entry : entries_) {
      const bool has_parts = !entry.buffer->placement().groups().tensor.empty();
      if (has_parts == in_front) buffers.push_back(entry.buffer);
    }
    const Groups& all = batch_.groups;
    std::vector<RankGroupPtr> groups = {all.shard};
    if (in_front) groups.insert(groups.end(), all.tensor.begin(), all.tensor.end());
    groups.insert(groups.end(), all.replicas.begin(), all.replicas.end());
    return {buffers, groups};
  }

  at::Tensor take_words(const SampledWeights& of) {
    return vector_.tensor_of(vector_.take(of.words())).view(at::kInt);
  }

  /// Ranks that quantized a weight apart, each with the seed that it had then, round by the largest
  /// key from their first step on: replicas would drift apart. Once, which all of them know.
  void agree_on_rounding() {
    if (options_.kind != FlushKind::kStep) return;
    std::vector<std::pair<Groups, std::vector<QuantizedBuffer*>>> to_agree;
    for (const BufferPtr& buffer : batch_.buffers) {
      const bool rounds = buffer->scaling_state().rounding.defined();
      if (!rounds || buffer->placement().agrees_on_rounding()) continue;
      const Groups& groups = buffer->placement().groups();
      auto found = std::find_if(to_agree.begin(), to_agree.end(),
                                [&](const auto& known) { return known.first == groups; });
      if (found == to_agree.end()) found = to_agree.insert(found, {groups, {}});
      found->second.push_back(buffer.get());
    }
    for (const auto& [groups, buffers] : to_agree) {
      if (groups != Groups()) agree_on_keys(groups, buffers);
      for (QuantizedBuffer* buffer : buffers) buffer->placement().agreed_on_rounding();
    }
  }

  void agree_on_keys(const Groups& groups, const std::vector<QuantizedBuffer*>& buffers) const {
    std::vector<at::Tensor> keys;
    for (const QuantizedBuffer* buffer : buffers) {
      keys.push_back(buffer->scaling_state().rounding.to(batch_.device));
    }
    const at::Tensor agreed = at::stack(keys);
    groups.all_reduce_max(agreed);
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i]->scaling_state().rounding.copy_(agreed[static_cast<int64_t>(i)]);
    }
  }

  void reserve_amaxes() {
    for (Entry& entry : entries_) {
      if (!is_in_front(entry)) continue;
      const Layout& layout = entry.buffer->layout();
      const int64_t of_tensor = of_full_tensor(entry);
      entry.words = vector_.take(state_words(*layout.format));
      if (of_tensor == amax_numel(layout, entry.boundary)) {
        entry.amax = vector_.take(of_tensor);
      } else {
        entry.tensor_amax = vector_.take(of_tensor);
      }
    }
    sampled_words_in_front_ = take_words(sampled_in_front_);
    vector_.end_full_tensor_prefix();
    for (Entry& entry : entries_) {
      const Layout& layout = entry.buffer->layout();
      if (entry.amax.empty()) entry.amax = vector_.take(amax_numel(layout, entry.boundary));
      if (!is_in_front(entry)) entry.words = vector_.take(state_words(*layout.format));
      const std::span<float> front = entry.tensor_amax;
      if (!front.empty()) vector_.stands_for(front, entry.amax.first(front.size()));
    }
    sampled_words_behind_ = take_words(sampled_behind_);
  }

  /// Values may have been written, and amaxes left, on other streams than this one.
  void wait_for_writes() {
    std::optional<std::optional<c10::Stream>> waited;
    at::Tensor recorded;
    for (const Entry& entry : entries_) {
      const FlushState& state = entry.buffer->flush_state();
      if (const auto stream = state.write_stream(); !waited || *waited != stream) {
        wait_for_stream(stream, batch_.device);
        waited = stream;
      }
      // They are slices of a few vectors.
      const at::Tensor& amax = state.known_amax();
      if (!amax.defined() || (recorded.defined() && recorded.is_alias_of(amax))) continue;
      record_on_current_stream(amax);
      recorded = amax;
    }
  }

  void prepare(Entry& entry) {
    QuantizedBuffer& buffer = *entry.buffer;
    const Layout& layout = buffer.layout();
    const WritableCodes codes = buffer.write_codes();
    entry.needs = needs_of(buffer, entry.shares_scale);
    QuantizeTask& task = entry.task;
    task.layout = layout;
    task.boundary = entry.boundary;
    task.value_dtype = value_dtype(buffer.dtype());
    task.amax = entry.amax.data();
    task.grid = codes.grid;
    if (const FlushState& state = buffer.flush_state(); state.knows_amax()) {
      task.known_amax = {state.known_amax().const_data_ptr<float>(),
                         static_cast<size_t>(state.known_amax().numel())};
    }
    if (entry.needs == Entry::kCodes) {
      prepare_codes(entry, codes.image);
    } else {
      vector_.zero(entry.words);
      task.layout = layout.holding(0);  // no code is written
    }
  }

  void prepare_codes(Entry& entry, uint8_t* image) {
    QuantizedBuffer& buffer = *entry.buffer;
    QuantizeTask& task = entry.task;
    entry.values = buffer.value();
    task.values = entry.values.const_data_ptr();
    task.image = image;
    if (const at::Tensor made_by = buffer.flush_state().speculative_scale_inv();
        made_by.defined()) {
      task.speculative_scale_inv = made_by.mutable_data_ptr<float>();
    }
    if (!entry.words.empty()) {
      entry.state.emplace(
          buffer, entry.amax.data(), entry.words.data(),
          options_.pending == QuantizedBuffer::Pending::kDrop && !buffer.placement().is_gathered());
    }
    if (options_.kind == FlushKind::kStep && buffer.scaling_state().rounding.defined()) {
      task.rounding = reinterpret_cast<const int32_t*>(entry.words.last(kRoundingWords).data());
    }
    if (buffer.layout().has_columnwise() && !buffer.keeps_master()) {
      QuantizeTask own = task;
      // The vector is not filled yet. This rank's own state has the same rounding words.
      if (own.rounding) own.rounding = entry.state->task().rounding;
      entry.values = rowwise_values(own, entry.values, stream_);
      task.values = entry.values.const_data_ptr();
    }
  }

  std::vector<QuantizeTask> tasks_of(std::initializer_list<Entry::Needs> needs) const {
    std::vector<QuantizeTask> tasks;
    tasks.reserve(entries_.size());
    for (const Entry& entry : entries_) {
      if (std::find(needs.begin(), needs.end(), entry.needs) != needs.end()) {
        tasks.push_back(entry.task);
      }
    }
    return tasks;
  }

  std::vector<StateTask> state_tasks() const {
    std::vector<StateTask> tasks;
    for (const Entry& entry : entries_) {
      if (entry.state) tasks.push_back(entry.state->task());
    }
    return tasks;
  }

  /// Matrix by matrix: the largest bits are the largest amax, with NaN on top.
  void share_scales() {
    std::vector<at::Tensor> largest, copies, sources;
    const auto amax_of = [&](size_t i) {
      const Entry& entry = entries_[i];
      const auto numel = static_cast<size_t>(of_full_tensor(entry));
      return vector_.tensor_of(entry.amax.first(numel)).view(at::kInt);
    };
    for (const auto& group : sharing_) largest.push_back(amax_of(group.front()));
    for (size_t member = 1;; ++member) {
      std::vector<at::Tensor> of, others;
      for (size_t g = 0; g < sharing_.size(); ++g) {
        if (member >= sharing_[g].size()) continue;
        of.push_back(largest[g]);
        others.push_back(amax_of(sharing_[g][member]));
      }
      if (of.empty()) break;
      at::_foreach_maximum_(of, others);
      sources.insert(sources.end(), of.begin(), of.end());
      copies.insert(copies.end(), others.begin(), others.end());
    }
    if (!copies.empty()) at::_foreach_copy_(copies, sources);
  }

  /// Where quantize() writes the grids a second time: what gathered tensors will be given, so that
  /// no gather has to copy them. One allocation, a tensor for each entry.
  void allocate_snapshots() {
    int64_t total = 0;
    for (const Entry& entry : entries_) {
      if (entry.needs != Entry::kNothing) total += entry.task.layout.grid_numel();
    }
    if (total == 0) return;
    const auto grids = at::empty({total}, vector_.words().options());
    record_on_default_stream(grids);
    int64_t offset = 0;
    for (Entry& entry : entries_) {
      const Layout& layout = entry.task.layout;
      if (entry.needs == Entry::kNothing || layout.grid_numel() == 0) continue;
      entry.snapshot =
          tensor_at(grids.storage(), at::kFloat, offset, {layout.grid_rows(), layout.grid_cols()});
      entry.task.grid_copy = entry.snapshot.mutable_data_ptr<float>();
      offset += layout.grid_numel() * static_cast<int64_t>(sizeof(float));
    }
  }

  void commit() {
    const FlushEvent event = FlushEvent::record(batch_.device);
    for (Entry& entry : entries_) {
      if (entry.state) entry.state->write_back();
      if (entry.needs != Entry::kNothing) {
        entry.buffer->requantized(std::move(entry.snapshot), event, options_.pending);
      }
    }
  }
};

}  // namespace

std::vector<std::vector<size_t>> shared_scales(const std::vector<BufferPtr>& buffers) {
  std::vector<std::pair<ScaleGroup, std::vector<size_t>>> known;
  for (size_t i = 0; i < buffers.size(); ++i) {
    const ScaleGroup& group = buffers[i]->placement().scale_group();
    if (group.id == 0) continue;
    auto found = std::find_if(known.begin(), known.end(),
                              [&](const auto& entry) { return entry.first == group; });
    if (found == known.end()) found = known.insert(found, {group, {}});
    found->second.push_back(i);
  }
  std::vector<std::vector<size_t>> complete;
  for (auto& [group, members] : known) {
    if (static_cast<int64_t>(members.size()) == group.members) {
      complete.push_back(std::move(members));
    }
  }
  return complete;
}

void requantize(const Batch& batch, const RequantizeOptions& options) {
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(batch.device);
  Requantization(batch, options).run();
}

}  // namespace qshard
