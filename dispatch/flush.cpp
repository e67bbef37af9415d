#include "dispatch/flush.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "dispatch/kernel_bridge.h"
#include "dispatch/storage.h"

namespace qshard {
namespace {

GroupOperations g_group;

void all_reduce_max(at::Tensor bits, const std::string& group) {
  TORCH_INTERNAL_ASSERT(g_group.all_reduce_max != nullptr);
  g_group.all_reduce_max(bits, group);
}

enum class Pending { kDrop, kKeep };

/// Whether the codes of this dirty buffer are final, and the scales of its own rows.
bool is_settled(const QuantizedBuffer& buffer) { return buffer.knows_amax() && !buffer.is_stale(); }

/// Whether its grid has, or may have, scales of other ranks' rows alone that are not known here.
bool lacks_scales(const QuantizedBuffer& buffer) {
  const Layout& layout = buffer.layout;
  return layout.format->has_grid() && !layout.format->has_tensor_scale() &&
         !layout.holds_all_rows();
}

struct Batch {
  at::Device device;
  std::string group;           // empty: no collective
  std::string replica_groups;  // where there are replicas that see other activations
  std::vector<BufferPtr> buffers;
};

struct FlushOptions {
  FlushKind kind = FlushKind::kOthers;
  at::Tensor found_inf = {};
  Pending pending = Pending::kDrop;
  at::Tensor* amax = nullptr;  // takes the agreed amaxes of all buffers, one after the other
};

/// The state of one buffer on the device of its planes for the time of a flush.
class FlushedState {
 public:
  FlushedState(QuantizedBuffer& buffer, float* amax, float* words)
      : own_(buffer.state),
        here_(own_.device() == buffer.device() ? own_ : own_.copy_to(buffer.device())) {
    task_.layout = buffer.layout;
    task_.value_dtype = value_dtype(buffer.dtype);
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
    if (own_.device() != here_.device()) own_.copy_from(here_);
  }

 private:
  ScalingState own_, here_;
  StateTask task_;
};

/// What the rowwise image of a task will show, in the values' dtype. Without a master that is the
/// tensor's value from then on, and the columnwise image must be made of the same: made of the
/// values before, no load could make it again.
at::Tensor shown_rowwise(QuantizeTask task, const at::Tensor& values, Stream stream) {
  task.layout.images = Images::kRowwise;
  task.cuts = {};
  const auto image =
      at::empty({task.layout.rows, task.layout.row_bytes()}, values.options().dtype(at::kByte));
  task.image = image.mutable_data_ptr<uint8_t>();
  quantize({&task, 1}, stream);
  auto shown = at::empty(values.sizes(), values.options());
  const DequantizeTask read{task.layout,
                            task.image,
                            nullptr,
                            0,
                            task.layout.rows,
                            task.value_dtype,
                            shown.mutable_data_ptr()};
  dequantize({&read, 1}, stream);
  return shown;
}

/// Lets the allocator know that known amaxes, which are slices of a few vectors, are read on this
/// stream: it may be another than theirs (FSDP2's copy-in stream).
void record_known_amaxes(const std::vector<BufferPtr>& buffers) {
  at::Tensor recorded;
  for (const auto& buffer : buffers) {
    const at::Tensor& amax = buffer->known_amax;
    if (!amax.defined() || (recorded.defined() && recorded.is_alias_of(amax))) continue;
    record_on_current_stream(amax);
    recorded = amax;
  }
}

/// Where quantize() writes the grids a second time: what gathered tensors will be given, so that no
/// gather has to copy them. One allocation, a tensor for each task.
std::vector<at::Tensor> allocate_snapshots(std::vector<QuantizeTask>& tasks, at::Device device) {
  int64_t total = 0;
  for (const QuantizeTask& task : tasks) total += task.layout.grid_numel();
  std::vector<at::Tensor> snapshots(tasks.size());
  if (total == 0) return snapshots;
  const auto grids = at::empty({total}, at::TensorOptions().dtype(at::kFloat).device(device));
  record_on_default_stream(grids);
  int64_t offset = 0;
  for (size_t i = 0; i < tasks.size(); ++i) {
    const Layout& layout = tasks[i].layout;
    if (layout.grid_numel() == 0) continue;
    snapshots[i] =
        tensor_at(grids.storage(), at::kFloat, offset, {layout.grid_rows(), layout.grid_cols()});
    tasks[i].grid_copy = snapshots[i].mutable_data_ptr<float>();
    offset += layout.grid_numel() * static_cast<int64_t>(sizeof(float));
  }
  return snapshots;
}

/// Requantizes a batch's buffers, those that are settled as far as it takes. Nothing is written
/// before the ranks have agreed, so an error leaves every buffer as it was.
void requantize(const Batch& batch, const FlushOptions& options) {
  PlainGuard guard;
  const auto& [device, group, replica_groups, buffers] = batch;
  c10::OptionalDeviceGuard device_guard(device);
  const Stream stream = current_stream(device);

  const int64_t ranks = ranks_of(group);
  int64_t agreed = 0;
  std::vector<Cuts> cuts;
  record_known_amaxes(buffers);
  for (const auto& buffer : buffers) {
    cuts.push_back(find_cuts(buffer->layout, ranks));
    agreed += amax_numel(buffer->layout, cuts.back()) + state_words(*buffer->layout.format);
  }
  auto amax = at::empty({agreed}, at::TensorOptions().dtype(at::kFloat).device(device));

  std::vector<QuantizeTask> tasks;
  std::vector<QuantizeTask> settled;  // whose amaxes other ranks may need, and nothing more
  std::vector<BufferPtr> changed;     // buffers of `tasks`
  std::vector<at::Tensor> values;     // keeps dequantized values alive
  std::vector<FlushedState> states;
  tasks.reserve(buffers.size());
  float* next_amax = amax.mutable_data_ptr<float>();
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto& buffer = buffers[i];
    const int64_t amaxes = amax_numel(buffer->layout, cuts[i]);
    const int64_t numel = amaxes + state_words(*buffer->layout.format);
    buffer->detach_from_source();
    buffer->own_grid();
    QuantizeTask task{buffer->layout, cuts[i], value_dtype(buffer->dtype)};
    task.amax = next_amax;
    task.grid = buffer->grid.defined() ? buffer->grid.mutable_data_ptr<float>() : nullptr;
    if (buffer->knows_amax()) {
      task.known_amax = {buffer->known_amax.const_data_ptr<float>(),
                         static_cast<size_t>(buffer->known_amax.numel())};
    }
    if (is_settled(*buffer)) {
      if (numel > amaxes) {
        amax.narrow(0, next_amax + amaxes - amax.const_data_ptr<float>(), numel - amaxes).zero_();
      }
      task.layout.rows = 0;  // no code is written
      if (lacks_scales(*buffer)) {
        tasks.push_back(task);
        changed.push_back(buffer);
      } else {
        settled.push_back(task);
      }
    } else {
      values.push_back(buffer->value_plane());
      task.values = values.back().const_data_ptr();
      task.image = buffer->image.mutable_data_ptr<uint8_t>();
      tasks.push_back(task);
      changed.push_back(buffer);
      if (numel > amaxes) states.emplace_back(*buffer, next_amax, next_amax + amaxes);
      if (options.kind == FlushKind::kStep && buffer->state.rounding.defined()) {
        tasks.back().rounding =
            reinterpret_cast<const int32_t*>(next_amax + numel - kRoundingWords);
      }
      if (buffer->layout.has_columnwise() && !buffer->keeps_master()) {
        QuantizeTask own = tasks.back();
        // The words in the vector are not there yet; those of this rank are the same.
        if (own.rounding) own.rounding = states.back().task().rounding;
        values.push_back(shown_rowwise(own, values.back(), stream));
        tasks.back().values = values.back().const_data_ptr();
      }
    }
    next_amax += numel;
  }
  std::vector<StateTask> state_tasks;
  for (const auto& state : states) state_tasks.push_back(state.task());
  // With nobody and nothing to wait for, one pass over the values may do.
  const bool at_once = ranks == 1 && replica_groups.empty() && state_tasks.empty();
  if (!at_once) compute_amax(tasks, stream);
  compute_amax(settled, stream);
  collect_state(state_tasks, stream);
  // Every rank knows `agreed`: it depends on the logical tensors and the group only.
  if (!group.empty() && agreed > 0) all_reduce_max(amax.view(at::kInt), group);
  if (options.kind == FlushKind::kStep) {
    std::istringstream names(replica_groups);
    for (std::string name; names >> name;) all_reduce_max(amax.view(at::kInt), name);
  }
  // Applying states replaces amaxes by those to scale by.
  if (options.amax) *options.amax = state_tasks.empty() ? amax : amax.clone();
  at::Tensor found_inf;
  if (!state_tasks.empty() && options.found_inf.defined()) {
    found_inf = options.found_inf.to(device, at::kFloat);
  }
  apply_state(state_tasks, options.kind,
              found_inf.defined() ? found_inf.const_data_ptr<float>() : nullptr, stream);
  const auto snapshots =
      group.empty() ? std::vector<at::Tensor>(tasks.size()) : allocate_snapshots(tasks, device);
  if (at_once) {
    quantize_at_once(tasks, stream);
  } else {
    quantize(tasks, stream);
  }
  for (auto& state : states) state.write_back();

  for (size_t i = 0; i < changed.size(); ++i) {
    const auto& buffer = changed[i];
    buffer->generation = QuantizedBuffer::next_generation();
    buffer->grid_snapshot = snapshots[i];
    // With them the flush that is still to come would take these codes for its own.
    if (buffer->is_stale()) buffer->known_amax.reset();
    if (options.pending == Pending::kKeep) continue;
    // The flush may run on another stream than the one `pending` was allocated on (FSDP2's copy-in
    // stream), so the allocator has to be told before it is let go.
    record_on_current_stream(buffer->pending);
    buffer->pending.reset();
  }
}

/// Whether a buffer without a group has nothing left to do in a flush.
bool is_final(const BufferPtr& buffer) {
  // Amaxes of activations, where there are any, are agreed on with replicas.
  return is_settled(*buffer) && buffer->layout.format->amax_history.length == 0;
}

Batch alone(const BufferPtr& buffer) { return {buffer->device(), "", "", {buffer}}; }

/// By device and reduction group, in order of first appearance; each buffer once.
std::vector<Batch> batches_of(const std::vector<BufferPtr>& buffers) {
  std::vector<Batch> batches;
  for (const auto& buffer : buffers) {
    if (buffer->is_meta()) continue;
    // Replicas hold the same weights, and so the same amaxes of them.
    const bool has_activations = buffer->layout.format->amax_history.length > 0;
    const std::string replicas = has_activations ? buffer->replica_groups : std::string();
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) {
      return b.device == buffer->device() && b.group == buffer->group &&
             b.replica_groups == replicas;
    });
    if (batch == batches.end()) {
      batches.push_back({buffer->device(), buffer->group, replicas, {}});
      batch = batches.end() - 1;
    }
    const auto& seen = batch->buffers;
    if (std::find(seen.begin(), seen.end(), buffer) == seen.end()) batch->buffers.push_back(buffer);
  }
  return batches;
}

void check_group_is_known(const QuantizedBuffer& buffer) {
  TORCH_CHECK(
      !buffer.group.empty() || buffer.layout.row_offset != Layout::kOpen,
      fmt::format("qshard::flush: this tensor is a shard of {} rows, made by new_zeros, "
                  "new_empty or empty_like, and does not know yet which rows it holds. Copy "
                  "from a quantized tensor, or write plain values, first",
                  buffer.layout.logical_rows));
  TORCH_CHECK(
      !buffer.group.empty() || buffer.layout.holds_all_rows(),
      fmt::format("qshard::flush: this tensor holds rows [{}, {}) of {} and no reduction "
                  "group is known for it yet. FSDP2's first all-gather, optimizer.step() and "
                  "qshard.flush(model) know the group",
                  buffer.layout.row_offset, buffer.layout.row_offset + buffer.layout.rows,
                  buffer.layout.logical_rows));
}

}  // namespace

void set_group_operations(GroupOperations operations) { g_group = operations; }

int64_t ranks_of(const std::string& group) {
  if (group.empty()) return 1;
  TORCH_INTERNAL_ASSERT(g_group.size != nullptr);
  return g_group.size(group);
}

bool can_flush_locally(const QuantizedBuffer& buffer) {
  return buffer.group.empty() && buffer.layout.holds_all_rows();
}

void flush_locally(const BufferPtr& buffer) {
  check_group_is_known(*buffer);
  if (!buffer->is_meta()) {
    at::Tensor amax;
    requantize(alone(buffer), {.amax = buffer->keeps_master() ? nullptr : &amax});
    if (!buffer->keeps_master()) {
      buffer->known_amax = amax.narrow(0, 0, buffer->layout.grid_numel());
    }
  }
  buffer->mark_flushed(/*agreed=*/false);
}

void require_fresh_image(const BufferPtr& buffer, const char* op) {
  buffer->check_is_allocated();
  if (!buffer->is_stale()) return;
  if (can_flush_locally(*buffer)) return flush_locally(buffer);
  if (buffer->layout.owns_its_blocks()) {
    // The codes are final, the grid rows of other ranks are not: the flush still has to come, from
    // the written values.
    requantize(alone(buffer), {.pending = Pending::kKeep});
    buffer->mark_flushed(/*agreed=*/false);
    return;
  }
  TORCH_CHECK(
      false,
      fmt::format("{}: rows [{}, {}) of a {} tensor of {} rows were written and share scales "
                  "with rows on other ranks. Call qshard.flush(model) on all ranks first",
                  op, buffer->layout.row_offset,
                  buffer->layout.row_offset + buffer->layout.live_rows(),
                  buffer->layout.format->name, buffer->layout.logical_rows));
}

void flush(const std::vector<BufferPtr>& buffers, FlushKind kind, const at::Tensor& found_inf) {
  for (auto& batch : batches_of(buffers)) {
    std::erase_if(batch.buffers, [](const BufferPtr& b) { return !b->is_dirty(); });
    if (batch.buffers.empty()) continue;
    for (const auto& buffer : batch.buffers) check_group_is_known(*buffer);
    Batch left = batch;
    // Nobody waits for their amaxes.
    if (batch.group.empty()) std::erase_if(left.buffers, is_final);
    if (!left.buffers.empty()) requantize(left, {.kind = kind, .found_inf = found_inf});
    for (const auto& buffer : batch.buffers) buffer->mark_flushed(/*agreed=*/true);
  }
}

void flush_any_dirty(const std::vector<BufferPtr>& buffers) {
  for (auto& batch : batches_of(buffers)) {
    for (const auto& buffer : batch.buffers) check_group_is_known(*buffer);
    if (!batch.group.empty()) {
      PlainGuard guard;
      auto flags = at::zeros({static_cast<int64_t>(batch.buffers.size())}, at::kInt);
      for (size_t i = 0; i < batch.buffers.size(); ++i) {
        flags.mutable_data_ptr<int32_t>()[i] = batch.buffers[i]->is_dirty();
      }
      auto agreed = flags.to(batch.device);
      all_reduce_max(agreed, batch.group);
      flags = agreed.cpu();
      for (size_t i = 0; i < batch.buffers.size(); ++i) {
        if (flags.const_data_ptr<int32_t>()[i]) batch.buffers[i]->mark_written();
      }
    }
    std::erase_if(batch.buffers, [](const BufferPtr& b) { return !b->is_dirty(); });
    if (batch.buffers.empty()) continue;
    requantize(batch, {});
    for (const auto& buffer : batch.buffers) buffer->mark_flushed(/*agreed=*/true);
  }
}

at::Tensor grid_snapshot(QuantizedBuffer& buffer) {
  if (buffer.grid.defined() && !buffer.grid_snapshot.defined()) {
    PlainGuard guard;
    buffer.grid_snapshot = buffer.grid.clone();
    record_on_default_stream(buffer.grid_snapshot);
  }
  return buffer.grid_snapshot;
}

}  // namespace qshard
