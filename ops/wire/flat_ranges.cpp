#include "ops/wire/flat_ranges.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <span>
#include <utility>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/checked_sizes.h"
#include "kernels/format/whole_layout.h"
#include "kernels/quantize/quantize.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

using at::Tensor;

constexpr int64_t kGeometry = 3;   // rows, cols, start
constexpr int64_t kMostParts = 3;  // of a range: the end of a row, rows, the beginning of one

void check_count(const char* op, at::TensorList tensors, const std::vector<FlatRange>& ranges,
                 const char* what) {
  TORCH_CHECK_VALUE(
      tensors.size() == ranges.size(),
      fmt::format("{}: {} ranges, and {} tensors of {}", op, ranges.size(), tensors.size(), what));
}

/// Rows of a range: where it begins or ends within a row, that one is taken by itself.
struct Part {
  int64_t first_row;  // of the weight
  int64_t rows;
  int64_t begin;   // of its elements in the range
  int64_t numel;   // less than rows * cols: a part of one row
  int64_t column;  // where that part begins

  bool is_cut(int64_t cols) const { return numel != rows * cols; }
};

std::vector<Part> parts_of(const FlatRange& range, int64_t numel) {
  const int64_t cols = range.weight.cols;
  std::vector<Part> parts;
  int64_t done = 0;
  while (done < numel) {
    const int64_t at = range.start + done;
    const int64_t column = at % cols;
    const int64_t left = numel - done;
    const bool is_cut = column != 0 || left < cols;
    const int64_t count = is_cut ? std::min(cols - column, left) : left / cols * cols;
    parts.push_back({at / cols, is_cut ? 1 : count / cols, done, count, column});
    done += count;
  }
  return parts;
}

Layout layout_of(const Layout& weight, const Part& part) {
  return weight.holding(part.rows).placed(part.first_row);
}

/// A part's values as whole rows: themselves, or zeros around them.
Tensor whole_rows(const Tensor& range, const Part& part, int64_t cols) {
  const Tensor values = range.narrow(0, part.begin, part.numel);
  if (!part.is_cut(cols)) return values;
  auto row = at::zeros({cols}, values.options());
  row.narrow(0, part.column, part.numel).copy_(values);
  return row;
}

/// Whether codes at some address are an image as they lie: rows of 16 bytes times n, aligned.
bool is_image(const Tensor& codes, const Layout& layout, const Part& part) {
  return !part.is_cut(layout.cols) && layout.row_bytes() == layout.cols &&
         reinterpret_cast<uintptr_t>(codes.const_data_ptr()) % 16 == 0;
}

/// The codes of a part in an image of its own.
Tensor codes_in(const Tensor& image, const Part& part, int64_t cols) {
  return part.is_cut(cols) ? image.narrow(1, part.column, part.numel) : image.narrow(1, 0, cols);
}

int64_t image_bytes(const Layout& layout) { return layout.rows * layout.row_bytes(); }

Tensor image_in(const Tensor& memory, const Layout& layout) {
  return memory.narrow(0, 0, image_bytes(layout)).view({layout.rows, layout.row_bytes()});
}

/// Tasks of one call, what they need until it is made, and what is copied after it.
template <typename Task>
struct Batch {
  std::vector<Task> tasks;
  std::vector<Tensor> kept, to, from;

  Tensor keep(Tensor tensor) { return kept.emplace_back(std::move(tensor)); }
  void copy_afterwards(const Tensor& target, const Tensor& source) {
    to.push_back(target);
    from.push_back(source);
  }
  void run(void (*kernels)(std::span<const Task>, Stream), Stream stream) {
    if (tasks.empty()) return;
    kernels(tasks, stream);
    if (!to.empty()) at::_foreach_copy_(to, from);
  }
};

/// Calls the kernels for all parts of ranges. `describe(task, batch, i, part, codes, image)` fills
/// in the rest of the task of a part of range i. `image` is the part's codes where they lie as one,
/// else new, and then not filled.
///
/// Whole rows that go through an image of their own are a batch each, in the same memory one after
/// the other. All memory is taken before any result is written, so that a call for which there is
/// too little has written nothing.
template <typename Task, typename Describe>
void run_parts(const std::vector<FlatRange>& ranges, at::TensorList values, at::TensorList codes,
               void (*kernels)(std::span<const Task>, Stream), const Describe& describe) {
  if (ranges.empty()) return;
  c10::OptionalDeviceGuard device_guard(values[0].device());
  const Stream stream = current_stream(values[0].device());
  const auto add = [&](Batch<Task>& batch, size_t i, const Part& part, const Layout& layout,
                       const Tensor& bytes, const Tensor& image) {
    Task task;
    task.layout = layout;
    task.value_dtype = value_dtype(values[i].scalar_type());
    describe(task, batch, i, part, bytes, image);
    batch.tasks.push_back(task);
  };
  struct PartAlone {
    size_t range;
    Part part;
    Layout layout;
    Tensor bytes;
  };
  Batch<Task> together;
  std::vector<PartAlone> alone;
  int64_t most_bytes = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Layout& weight = ranges[i].weight;
    for (const Part& part : parts_of(ranges[i], values[i].numel())) {
      const Tensor bytes = codes[i].view(-1).narrow(0, part.begin, part.numel);
      const Layout layout = layout_of(weight, part);
      if (is_image(bytes, layout, part)) {
        add(together, i, part, layout, bytes, bytes);
      } else if (part.is_cut(weight.cols)) {
        const Tensor memory = together.keep(at::empty({image_bytes(layout)}, bytes.options()));
        add(together, i, part, layout, bytes, image_in(memory, layout));
      } else {
        alone.push_back({i, part, layout, bytes});
        most_bytes = std::max(most_bytes, image_bytes(layout));
      }
    }
  }
  if (!alone.empty()) {
    const Tensor memory = at::empty({most_bytes}, codes[0].options());
    for (const auto& [i, part, layout, bytes] : alone) {
      Batch<Task> batch;
      add(batch, i, part, layout, bytes, image_in(memory, layout));
      batch.run(kernels, stream);
    }
  }
  together.run(kernels, stream);
}

}  // namespace

std::vector<FlatRange> ranges_of(const char* op, const std::vector<std::string>& formats,
                                 at::IntArrayRef geometry) {
  TORCH_CHECK_VALUE(geometry.size() == kGeometry * formats.size(),
                    fmt::format("{}: {} ranges have {} numbers of rows, columns and start", op,
                                formats.size(), geometry.size()));
  std::vector<FlatRange> ranges;
  for (size_t i = 0; i < formats.size(); ++i) {
    const int64_t rows = geometry[kGeometry * i], cols = geometry[kGeometry * i + 1];
    const Layout weight =
        checked_sizes(op, whole_layout(checked_format(formats[i], op), rows, cols));
    TORCH_CHECK_VALUE(
        weight.format->scale.is_in_grid() && weight.format->code_bits == 8 && rows > 0 && cols > 0,
        fmt::format("{}: ranges of a {} weight of shape ({}, {}) cannot be quantized: its "
                    "scales lie in the rows, or it is empty",
                    op, weight.format->name, rows, cols));
    ranges.push_back({weight, geometry[kGeometry * i + 2]});
  }
  return ranges;
}

int64_t grid_numel(const char* op, const std::vector<FlatRange>& ranges) {
  int64_t numel = 0;
  for (const auto& range : ranges) {
    numel += range.weight.grid_numel();
    checked_product(op, "geometry", {numel});
  }
  return numel;
}

at::ScalarType quantizable_dtype(const Tensor& values) {
  return values.scalar_type() == at::kDouble ? at::kFloat : values.scalar_type();
}

Tensor quantizable(const Tensor& values) { return values.to(quantizable_dtype(values)); }

void check_values(const char* op, at::TensorList values, const std::vector<FlatRange>& ranges) {
  check_count(op, values, ranges, "values");
  for (size_t i = 0; i < values.size(); ++i) {
    const Tensor& range = values[i];
    TORCH_CHECK_TYPE(
        !has_key(range) && range.is_contiguous() &&
            (is_value_dtype(range.scalar_type()) || range.scalar_type() == at::kDouble),
        fmt::format("{}: a range must be plain, contiguous float32, bfloat16, float16 or float64, "
                    "got {}",
                    op, describe(range)));
    const auto& [weight, start] = ranges[i];
    TORCH_CHECK_VALUE(lies_within(start, range.numel(), weight.rows * weight.cols),
                      fmt::format("{}: {} elements from {} on do not lie within a weight of shape "
                                  "({}, {})",
                                  op, range.numel(), start, weight.rows, weight.cols));
  }
}

void check_amaxes(const char* op, at::TensorList amax, const std::vector<FlatRange>& ranges) {
  check_count(op, amax, ranges, "amaxes");
  for (size_t i = 0; i < amax.size(); ++i) {
    const auto& weight = ranges[i].weight;
    TORCH_CHECK_VALUE(
        amax[i].scalar_type() == at::kFloat && amax[i].is_contiguous() &&
            amax[i].numel() == weight.grid_numel() && !has_key(amax[i]),
        fmt::format("{}: a {} weight of shape ({}, {}) has {} amaxes, plain contiguous float32; "
                    "got {}",
                    op, weight.format->name, weight.rows, weight.cols, weight.grid_numel(),
                    describe(amax[i])));
  }
}

Tensor amax_of_ranges(const char* op, at::TensorList values, const std::vector<FlatRange>& ranges) {
  if (ranges.empty()) return at::empty({0}, at::kFloat);
  c10::OptionalDeviceGuard device_guard(values[0].device());
  const int64_t numel = grid_numel(op, ranges);
  const auto amaxes = at::zeros({kMostParts, numel}, values[0].options().dtype(at::kFloat));
  auto* const first = amaxes.mutable_data_ptr<float>();
  std::vector<QuantizeTask> tasks;
  std::vector<Tensor> kept;
  size_t most_parts = 1;
  int64_t at = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Layout& weight = ranges[i].weight;
    const Tensor flat = quantizable(values[i]).view(-1);
    const auto parts = parts_of(ranges[i], flat.numel());
    most_parts = std::max(most_parts, parts.size());
    for (size_t j = 0; j < parts.size(); ++j) {
      kept.push_back(whole_rows(flat, parts[j], weight.cols));
      QuantizeTask task;
      task.layout = layout_of(weight, parts[j]);
      task.value_dtype = value_dtype(flat.scalar_type());
      task.values = kept.back().const_data_ptr();
      task.amax = first + static_cast<int64_t>(j) * numel + at;
      tasks.push_back(task);
    }
    at += weight.grid_numel();
  }
  compute_amax(tasks, current_stream(values[0].device()));
  if (most_parts == 1) return amaxes[0];
  return amaxes.view(at::kInt).amax(0).view(at::kFloat);
}

std::vector<Tensor> scale_inv_of_ranges(const char* op, at::TensorList amax,
                                        const std::vector<FlatRange>& ranges) {
  if (ranges.empty()) return {};
  c10::OptionalDeviceGuard device_guard(amax[0].device());
  const Tensor all = at::empty({grid_numel(op, ranges)}, amax[0].options());
  std::vector<Tensor> scales;
  std::vector<QuantizeTask> tasks;
  int64_t at = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Layout& weight = ranges[i].weight;
    scales.push_back(all.narrow(0, at, weight.grid_numel()));
    QuantizeTask task;
    task.layout = weight.holding(0);                // no code is written
    task.amax = amax[i].mutable_data_ptr<float>();  // read only
    task.grid = scales.back().mutable_data_ptr<float>();
    tasks.push_back(task);
    at += weight.grid_numel();
  }
  quantize(tasks, current_stream(amax[0].device()));
  return scales;
}

void quantize_ranges(const char* op, at::TensorList values, const std::vector<FlatRange>& ranges,
                     at::TensorList amax, at::TensorList codes) {
  if (ranges.empty()) return;
  // The kernels say what the scales are, for which their callers have no use.
  const Tensor grids = at::empty({kMostParts * grid_numel(op, ranges)}, amax[0].options());
  auto* grid = grids.mutable_data_ptr<float>();
  run_parts<QuantizeTask>(ranges, values, codes, &quantize,
                          [&](QuantizeTask& task, auto& batch, size_t i, const Part& part,
                              const Tensor& out, const Tensor& image) {
                            const Layout& weight = ranges[i].weight;
                            const Tensor rows =
                                batch.keep(whole_rows(values[i].view(-1), part, weight.cols));
                            task.values = rows.const_data_ptr();
                            task.amax = amax[i].mutable_data_ptr<float>();  // read only
                            task.grid = std::exchange(grid, grid + weight.grid_numel());
                            task.image = image.mutable_data_ptr<uint8_t>();
                            if (image.is_same(out)) return;
                            const Tensor made = codes_in(image, part, weight.cols);
                            batch.copy_afterwards(out.view(made.sizes()), made);
                          });
}

void dequantize_ranges(at::TensorList codes, const std::vector<FlatRange>& ranges,
                       at::TensorList scale_inv, at::TensorList values) {
  run_parts<DequantizeTask>(
      ranges, values, codes, &dequantize,
      [&](DequantizeTask& task, auto& batch, size_t i, const Part& part, const Tensor& in,
          const Tensor& image) {
        const int64_t cols = ranges[i].weight.cols;
        if (!image.is_same(in)) {
          image.zero_();
          const Tensor given = codes_in(image, part, cols);
          given.copy_(in.view(given.sizes()));
        }
        const Tensor target = values[i].view(-1).narrow(0, part.begin, part.numel);
        task.image = static_cast<const uint8_t*>(image.const_data_ptr());
        task.values = target.mutable_data_ptr();
        if (part.is_cut(cols)) {
          const Tensor row = batch.keep(at::empty({cols}, target.options()));
          task.values = row.mutable_data_ptr();
          batch.copy_afterwards(target, row.narrow(0, part.column, part.numel));
        }
        task.grid = scale_inv[i].const_data_ptr<float>();
        task.rows = part.rows;
      });
}

}  // namespace qshard
