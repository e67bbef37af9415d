#include "dispatch/flush/flush.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>

#include "dispatch/flush/requantize.h"
#include "dispatch/flush/rounding_keys.h"
#include "dispatch/flush/sampled_weights.h"
#include "dispatch/parts/kernel_bridge.h"
#include "kernels/device/capture.h"

namespace qshard {
namespace {

using Pending = QuantizedBuffer::Pending;

Batch alone(const BufferPtr& buffer) { return {buffer->device(), {}, {buffer}}; }

bool has_activation_amaxes(const QuantizedBuffer& buffer) {
  return buffer.layout().format->amax_history.length > 0;
}

/// The groups whose ranks take part in a flush of this buffer.
Groups groups_of_flush(const QuantizedBuffer& buffer, FlushKind kind) {
  const Placement& placement = buffer.placement();
  Groups groups{placement.group(), placement.groups_of_full_tensor(), {}};
  // Replicas hold the same weights, and so the same amaxes of them.
  const bool is_watched = kind == FlushKind::kStep && is_sampled(buffer);
  if (has_activation_amaxes(buffer) || is_watched) groups.replicas = placement.groups().replicas;
  // The statistics are of all parts, also where each part has scales of its own.
  if (is_watched && groups.tensor.empty()) groups.tensor = placement.groups().tensor;
  return groups;
}

/// Whether buffers of both can be of one batch: all go through the first all-reduce, and those that
/// have a part in the second lie in front.
bool fit_together(const Groups& a, const Groups& b) {
  return a.shard == b.shard && a.replicas == b.replicas &&
         (a.tensor.empty() || b.tensor.empty() || a.tensor == b.tensor);
}

/// By device and groups, in order of first appearance; each buffer once.
std::vector<Batch> batches_of(const std::vector<BufferPtr>& buffers, FlushKind kind) {
  std::vector<Batch> batches;
  for (const auto& buffer : buffers) {
    if (buffer->device().is_meta()) continue;
    Groups groups = groups_of_flush(*buffer, kind);
    auto batch = std::find_if(batches.begin(), batches.end(), [&](const Batch& b) {
      return b.device == buffer->device() && fit_together(b.groups, groups);
    });
    if (batch == batches.end()) {
      batches.push_back({buffer->device(), std::move(groups), {}});
      batch = batches.end() - 1;
    } else if (batch->groups.tensor.empty()) {
      batch->groups.tensor = std::move(groups.tensor);
    }
    const auto& seen = batch->buffers;
    if (std::find(seen.begin(), seen.end(), buffer) == seen.end()) batch->buffers.push_back(buffer);
  }
  return batches;
}

void check_group_is_known(const QuantizedBuffer& buffer) {
  if (buffer.placement().is_alone() || buffer.placement().group()) return;
  if (buffer.layout().holds_all_rows()) return;  // of a part of the full tensor
  const Layout& layout = buffer.layout();
  TORCH_CHECK(false,
              fmt::format("qshard::flush: this tensor holds rows [{}, {}) of {} and no reduction "
                          "group is known for it yet. FSDP2's first all-gather, optimizer.step() "
                          "and qshard.flush(model) know the group",
                          layout.row_offset, layout.row_offset + layout.rows, layout.logical_rows));
}

/// Whether a buffer without a group has nothing left to do in a flush.
bool is_done_alone(const QuantizedBuffer& buffer) {
  // Replicas agree on amaxes of activations, where there are any.
  return buffer.flush_state().codes_final() && !has_activation_amaxes(buffer);
}

/// Whether other ranks take part in its flush.
bool has_peers(const Batch& batch) { return batch.groups.shard || !batch.groups.tensor.empty(); }

/// Threads that serve one model may all be the first that read or flush a weight: one of them
/// requantizes it, while the others wait. Flushes by agreement take no turns, since ranks may be
/// threads of one process (torch's MultiThreadedTestCase), which wait for each other.
std::unique_lock<std::mutex> take_turn(const Groups& agreed_with = {}) {
  static std::mutex mutex;
  return agreed_with == Groups() ? std::unique_lock(mutex) : std::unique_lock<std::mutex>();
}

/// The tables of a scaling state as int32 words, which are bits of amaxes and keys: none is
/// negative. Undefined where a format has none.
at::Tensor words_of_state(const ScalingState& state, at::Device device) {
  std::vector<at::Tensor> words;
  for (const auto& [name, tensor] : state.tensors()) {
    words.push_back(tensor.to(device).view(at::kInt).flatten());
  }
  return words.empty() ? at::Tensor() : at::cat(words);
}

int64_t numel_of(const ScalingState& state) {
  int64_t numel = 0;
  for (const auto& [name, tensor] : state.tensors()) numel += tensor.numel();
  return numel;
}

void set_state(const ScalingState& state, const at::Tensor& words) {
  int64_t next = 0;
  for (const auto& [name, tensor] : state.tensors()) {
    const auto own = words.narrow(0, next, tensor.numel());
    tensor.copy_(own.view(tensor.scalar_type()).view(tensor.sizes()));
    next += tensor.numel();
  }
}

/// Ranks tell one another what they know of these buffers, in a vector of which the largest words
/// win: whether each is written, whether a rank with rows of it kept its scaling state, the state
/// that such ranks have, and that of the others. What ranks that hold parts of full tensors agree
/// on lies in front.
class Comparison {
 public:
  explicit Comparison(const Batch& batch) : batch_(batch), buffers_(batch.buffers) {
    const auto rest = std::stable_partition(
        buffers_.begin(), buffers_.end(),
        [](const BufferPtr& b) { return !b->placement().groups_of_full_tensor().empty(); });
    parts_ = rest - buffers_.begin();
  }

  void run() {
    add_facts();
    add_states(0, parts_);
    const int64_t front = numel_;
    add(facts_.narrow(0, count() + parts_, count() - parts_));
    add_states(parts_, count());
    words_ = at::cat(to_send_);
    if (batch_.groups.shard) batch_.groups.shard->all_reduce_max(words_);
    for (const RankGroupPtr& group : batch_.groups.tensor) {
      group->all_reduce_max(words_.narrow(0, 0, front));
    }
    const at::Tensor host = words_.cpu();
    const auto* word = host.const_data_ptr<int32_t>();
    take_over(0, parts_, word, word + count(), count() + parts_);
    take_over(parts_, count(), word, word + front - parts_, front + count() - parts_);
  }

 private:
  const Batch& batch_;
  std::vector<BufferPtr> buffers_;
  int64_t parts_;  // how many are of full tensors
  at::Tensor facts_, words_;
  std::vector<at::Tensor> to_send_;
  int64_t numel_ = 0;  // how many words to_send_ has

  int64_t count() const { return static_cast<int64_t>(buffers_.size()); }

  /// A rank without rows has the state of its peers, or has taken over another one where they, who
  /// copied some of their rows, have not.
  static bool keeps_state(const QuantizedBuffer& buffer) {
    const MayDiffer& may_differ = buffer.flush_state().may_differ();
    return buffer.layout().live_rows() > 0 &&
           (may_differ.kept_scaling_state || !may_differ.in_writes);
  }

  void add(const at::Tensor& words) {
    to_send_.push_back(words);
    numel_ += words.numel();
  }

  void add_facts() {
    const auto facts = at::empty({2 * count()}, at::kInt);
    auto* fact = facts.mutable_data_ptr<int32_t>();
    for (int64_t i = 0; i < count(); ++i) {
      fact[i] = buffers_[i]->flush_state().is_written_here();
      fact[count() + i] = keeps_state(*buffers_[i]);
    }
    facts_ = facts.to(batch_.device);
    add(facts_.narrow(0, 0, count() + parts_));
  }

  void add_states(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const at::Tensor state = words_of_state(buffers_[i]->scaling_state(), batch_.device);
      if (!state.defined()) continue;
      const at::Tensor none = at::zeros_like(state);
      const bool is_kept = keeps_state(*buffers_[i]);
      add(is_kept ? state : none);
      add(is_kept ? none : state);
    }
  }

  void take_over(int64_t begin, int64_t end, const int32_t* is_written, const int32_t* is_kept,
                 int64_t next_state) const {
    for (int64_t i = begin; i < end; ++i) {
      FlushState& flush_state = buffers_[i]->flush_state();
      if (is_written[i]) flush_state.mark_remote_write();
      flush_state.may_differ() = {};
      const ScalingState& state = buffers_[i]->scaling_state();
      const int64_t numel = numel_of(state);
      if (numel == 0) continue;
      set_state(state, words_.narrow(0, is_kept[i] ? next_state : next_state + numel, numel));
      next_state += 2 * numel;
    }
  }
};

/// The buffers in which ranks may differ: they tell one another. Some of the rows of a tensor,
/// without a group, wait for one; all of its rows do not, and their flush is done here
/// (flush_batch).
void compare_copies(const Batch& batch) {
  Batch compared{batch.device, batch.groups, {}};
  for (const BufferPtr& buffer : batch.buffers) {
    const bool waits = buffer->placement().awaits_groups() && !has_peers(batch);
    if (buffer->flush_state().may_differ().in_writes && !waits) compared.buffers.push_back(buffer);
  }
  if (compared.buffers.empty()) return;
  PlainGuard guard;
  if (!has_peers(batch)) {
    for (const BufferPtr& buffer : compared.buffers) buffer->flush_state().may_differ() = {};
  } else if (is_capturing(batch.device)) {
    // No answer can be waited for while a CUDA graph is captured, which all ranks do.
    for (const BufferPtr& buffer : compared.buffers) buffer->flush_state().mark_remote_write();
  } else {
    Comparison(compared).run();
  }
}

/// The groups of a batch whose ranks agree on more than statistics.
Groups groups_of_values(const Batch& batch) {
  Groups groups = batch.groups;
  const bool has_parts = std::any_of(
      batch.buffers.begin(), batch.buffers.end(),
      [](const BufferPtr& b) { return !b->placement().groups_of_full_tensor().empty(); });
  if (!has_parts) groups.tensor.clear();
  return groups;
}

/// If one of the weights that share a scale is written, all are, where all of them are here.
void spread_writes(const Batch& batch) {
  for (const auto& group : shared_scales(batch.buffers)) {
    const auto is_written = [&](size_t i) {
      return batch.buffers[i]->flush_state().is_written_here();
    };
    if (std::none_of(group.begin(), group.end(), is_written)) continue;
    for (const size_t i : group) {
      if (!is_written(i)) batch.buffers[i]->flush_state().mark_remote_write();
    }
  }
}

/// Takes the buffers out of a batch that share a scale with some that are not in it.
std::vector<BufferPtr> take_apart(Batch& batch) {
  std::vector<bool> is_apart(batch.buffers.size());
  for (size_t i = 0; i < is_apart.size(); ++i) {
    is_apart[i] = batch.buffers[i]->placement().scale_group().id != 0;
  }
  for (const auto& group : shared_scales(batch.buffers)) {
    for (const size_t i : group) is_apart[i] = false;
  }
  std::vector<BufferPtr> together, apart;
  for (size_t i = 0; i < is_apart.size(); ++i) {
    (is_apart[i] ? apart : together).push_back(batch.buffers[i]);
  }
  batch.buffers = std::move(together);
  return apart;
}

/// The written buffers of a batch, after the ranks of its group know which those are.
void flush_batch(Batch batch, const RequantizeOptions& options) {
  std::erase_if(batch.buffers,
                [](const BufferPtr& b) { return !b->flush_state().is_written_here(); });
  if (batch.buffers.empty()) return;
  if (!batch.groups.shard) {
    // Rows without a group keep scales of their own until a group adopts them and agrees on its
    // own.
    std::erase_if(batch.buffers, [](const BufferPtr& buffer) {
      if (buffer->layout().holds_all_rows()) return false;
      if (!buffer->flush_state().codes_current()) flush_alone(buffer);
      return true;
    });
  }
  // They stay written, for the flush that they all are in.
  if (const auto apart = take_apart(batch); !apart.empty()) {
    RequantizeOptions own = options;
    if (own.kind != FlushKind::kStep) own.pending = Pending::kKeep;
    requantize({batch.device, batch.groups, apart}, own);
    for (const auto& buffer : apart) buffer->flush_state().mark_codes_current();
  }
  Batch left = batch;
  // No other rank needs these amaxes, so buffers whose codes are final skip the flush.
  if (!batch.groups.shard && batch.groups.tensor.empty()) {
    std::erase_if(left.buffers, [&](const BufferPtr& b) {
      const bool is_read = options.kind == FlushKind::kStep && is_sampled(*b);
      return is_done_alone(*b) && b->placement().scale_group().id == 0 && !is_read;
    });
  }
  if (!left.buffers.empty()) requantize(left, options);
  for (const auto& buffer : batch.buffers) buffer->flush_state().mark_scales_synced();
}

}  // namespace

void flush_alone(const BufferPtr& buffer) {
  buffer->arrivals().settle(*buffer);
  check_group_is_known(*buffer);
  // A one-row weight looks whole on one of two ranks, and the others have its state.
  const Share* share = buffer->placement().share();
  const bool may_be_share = share && share->is_slice && buffer->scaling_state().is_defined();
  const bool shares_scale = buffer->placement().scale_group().id != 0;
  if (!buffer->layout().holds_all_rows() || may_be_share || shares_scale) {
    // The flush of all ranks still has to come, from the written values.
    if (!buffer->device().is_meta()) requantize(alone(buffer), {.pending = Pending::kKeep});
    return buffer->flush_state().mark_codes_current();
  }
  at::Tensor amax;
  if (!buffer->device().is_meta()) {
    requantize(alone(buffer), {.amax = buffer->keeps_master() ? nullptr : &amax});
    // A one-row weight on two ranks looks whole on one of them, and they must still meet: the
    // values are rounded by then, and have other amaxes.
    if (amax.defined()) amax = amax.narrow(0, 0, buffer->layout().grid_numel());
  }
  buffer->flush_state().mark_codes_current(amax);
}

void ensure_codes_current(const BufferPtr& buffer, const char* op) {
  buffer->check_is_allocated();
  FlushState& state = buffer->flush_state();
  if (state.is_ready()) return;
  const auto turn = take_turn();
  state.watch().settle();
  const Placement& placement = buffer->placement();
  const bool asks_others = placement.group() && !placement.ranks_own_their_blocks();
  if (state.codes_current() && !(asks_others && state.may_differ().in_codes)) {
    state.may_differ().in_codes = false;
    return;
  }
  buffer->materialize();
  if (placement.is_alone()) return flush_alone(buffer);
  const Layout& layout = buffer->layout();
  if (placement.ranks_own_their_blocks()) {
    // The codes are final, the grid rows of other ranks are not.
    requantize(alone(buffer), {.pending = Pending::kKeep});
    return state.mark_codes_current();
  }
  TORCH_CHECK(
      asks_others || !layout.holds_all_rows(),
      fmt::format("{}: this rank's part of a {} tensor was written, and its scale is agreed "
                  "on with the other parts. Call qshard.flush(model) on all ranks first",
                  op, layout.format->name));
  TORCH_CHECK(
      false,
      fmt::format("{}: rows [{}, {}) of a {} tensor of {} rows were written and share scales "
                  "with rows on other ranks. Call qshard.flush(model) on all ranks first",
                  op, layout.row_offset, layout.row_offset + layout.live_rows(),
                  layout.format->name, layout.logical_rows));
}

void flush(const std::vector<BufferPtr>& buffers, FlushKind kind, const at::Tensor& found_inf) {
  for (const BufferPtr& buffer : buffers) buffer->arrivals().settle(*buffer);
  if (kind == FlushKind::kStep) tell_rounding_keys_apart(buffers);
  for (const auto& batch : batches_of(buffers, kind)) {
    const auto turn = take_turn(batch.groups);
    compare_copies({batch.device, groups_of_values(batch), batch.buffers});
    spread_writes(batch);
    for (const auto& buffer : batch.buffers) {
      if (buffer->flush_state().is_written_here()) check_group_is_known(*buffer);
    }
    flush_batch(batch, {.kind = kind, .found_inf = found_inf});
  }
  if (kind == FlushKind::kStep) begin_next_step(buffers);
}

void flush_any_written(const std::vector<BufferPtr>& buffers) {
  for (const BufferPtr& buffer : buffers) buffer->arrivals().settle(*buffer);
  for (const auto& batch : batches_of(buffers, FlushKind::kOutsideStep)) {
    const auto turn = take_turn(batch.groups);
    for (const auto& buffer : batch.buffers) check_group_is_known(*buffer);
    if (has_peers(batch)) {
      PlainGuard guard;
      Comparison(batch).run();
    } else {
      compare_copies(batch);
    }
    spread_writes(batch);
    flush_batch(batch, {});
  }
}

at::Tensor written_by_rank(const std::vector<BufferPtr>& buffers,
                           const std::vector<bool>& is_written, int64_t rank, int64_t world) {
  PlainGuard guard;
  auto all = at::zeros({static_cast<int64_t>(buffers.size()), world}, at::kInt);
  const auto groups_of = [&](size_t i) -> const Groups& {
    return buffers[i]->placement().groups();
  };
  for (size_t begin = 0, end = 0; begin < buffers.size(); begin = end) {
    const Groups& groups = groups_of(begin);
    const at::Device device = buffers[begin]->device();
    while (end < buffers.size() && buffers[end]->device() == device && groups_of(end) == groups)
      ++end;
    auto rows = all.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin));
    for (size_t i = begin; i < end; ++i) {
      rows[static_cast<int64_t>(i - begin)][rank] = is_written[i] ? 2 : 1;
    }
    if (buffers[begin]->device().is_meta()) continue;
    auto words = rows.to(device);
    groups.all_reduce_max(words);
    rows.copy_(words);
  }
  return all;
}

}  // namespace qshard
