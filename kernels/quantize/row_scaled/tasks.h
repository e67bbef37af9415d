// Batches of tasks with row-local scales: one format and one value type each.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernels/device/batcher.h"
#include "kernels/format/quantize_tasks.h"
#include "kernels/quantize/row_scaled/kernels.h"

namespace qshard::cuda {

/// A task as the kernels see it, in tiles of `tile_rows` rows. If there are two images, its cut
/// blocks are those of the columnwise one; the rest is the same for both.
RowScaledTask describe_row_scaled(const QuantizeTask& task, int64_t tile_rows);
/// The same in tiles of kCodeTileRows rows, of a task that rounds stochastically.
inline StochasticRowScaledTask describe_stochastic(const QuantizeTask& task) {
  const Layout& layout = task.layout;
  return {describe_row_scaled(task, kCodeTileRows), task.rounding,
          layout.element(layout.row_offset), layout.element_pitch()};
}

/// What the tasks of a batch share.
struct RowScaledBatchKind {
  const Format* format;
  DType value_dtype;
  bool operator==(const RowScaledBatchKind&) const = default;
};

template <typename Task>
RowScaledBatchKind batch_kind_of(const Task& task) {
  return {task.layout.format, task.value_dtype};
}

/// Calls add(batcher, task) for each task with row-local scales and no columnwise image, kind by
/// kind, and launch(batch, format, type) for what was added.
template <typename Batch, typename Task, typename Launch, typename Add>
void launch_by_kind(std::span<const Task> tasks, const Launch& launch, const Add& add) {
  const auto is_ours = [](const Task& task) {
    const ScaleLevel& scale = task.layout.format->scale;
    return scale.place == ScalePlace::kRows && !task.layout.has_columnwise();
  };
  std::vector<RowScaledBatchKind> kinds;
  for (const Task& task : tasks) {
    const RowScaledBatchKind kind = batch_kind_of(task);
    if (is_ours(task) && std::ranges::find(kinds, kind) == kinds.end()) kinds.push_back(kind);
  }
  for (const RowScaledBatchKind& kind : kinds) {
    auto batcher = make_batcher<Batch>(
        [&](const Batch& batch) { return launch(batch, *kind.format, kind.value_dtype); });
    for (const Task& task : tasks) {
      if (is_ours(task) && batch_kind_of(task) == kind) add(batcher, task);
    }
    batcher.flush();
  }
}

}  // namespace qshard::cuda
