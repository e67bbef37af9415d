#include "kernels/rotary/rotary_cuda.h"

#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>
#include <span>

#include "kernels/device/check_launch.h"
#include "kernels/format/value_dtype.h"
#include "kernels/rotary/kernels.h"

namespace qshard::cuda {
namespace {

bool is_aligned(const void* x, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(x) % bytes == 0;
}

/// Whether each row begins at a multiple of `count` values.
bool rows_begin_at(const at::Tensor& x, int64_t count) {
  if (!is_aligned(x.const_data_ptr(), count * x.element_size())) return false;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) {
    if (x.size(i) > 1 && x.stride(i) % count != 0) return false;
  }
  return true;
}

/// How many values a thread may take in one access.
int values_at_once(const at::Tensor& x, const at::Tensor& out, const Rotation& rotation,
                   const RotaryTask& task) {
  const auto fits = [&](int64_t count) {
    const int64_t unit = rotation.interleaved ? count : 2 * count;
    const int64_t of_table = std::min<int64_t>(count * sizeof(float), 16);
    return task.rotated % unit == 0 && task.channels % count == 0 && rows_begin_at(x, count) &&
           rows_begin_at(out, count) && is_aligned(task.cos, of_table) &&
           is_aligned(task.sin, of_table);
  };
  auto count = static_cast<int>(16 / x.element_size());
  while (count > 1 && !fits(count)) count /= 2;
  return count;
}

/// Elements from one index of a dimension to the angles of the next.
int64_t stride_of_tables(const Rotation& rotation, int64_t dim) {
  if (dim == rotation.dim) return rotation.rotated();
  const bool is_of_sequences = rotation.has_tables_of_sequences() && dim == rotation.sequence_dim();
  return is_of_sequences ? rotation.cos.size(1) * rotation.rotated() : 0;
}

}  // namespace

void rotate(const at::Tensor& values, const Rotation& rotation, const at::Tensor& out) {
  const int64_t channels = values.size(-1);
  const int64_t rows = channels == 0 ? 0 : values.numel() / channels;
  TORCH_CHECK(rows <= std::numeric_limits<int32_t>::max() &&
                  channels <= std::numeric_limits<int32_t>::max() / 2,
              fmt::format("qshard::rotary_embedding: {} rows of {} channels are too many for the "
                          "CUDA kernel; call it on parts",
                          rows, channels));
  const at::Tensor x = values.stride(-1) == 1 || channels <= 1 ? values : values.contiguous();
  // Neighbouring threads take neighbouring memory, and share angles where heads are neighbours.
  const auto dims = static_cast<int>(x.dim()) - 1;
  std::array<int, RotaryTask::kDims> memory_order{0, 1, 2, 3};
  const std::span order(memory_order.data(), dims);
  std::ranges::stable_sort(order, [&](int a, int b) { return x.stride(a) > x.stride(b); });
  RotaryTask task;
  task.values = x.const_data_ptr();
  task.out = out.mutable_data_ptr();
  task.cos = rotation.cos.const_data_ptr<float>();
  task.sin = rotation.sin.const_data_ptr<float>();
  std::ranges::fill(task.size, 1);
  for (int i = 0; i < dims; ++i) {
    const int at = RotaryTask::kDims - dims + i;
    task.size[at] = static_cast<uint32_t>(x.size(order[i]));
    task.stride[at] = x.stride(order[i]);
    task.out_stride[at] = out.stride(order[i]);
    task.table_stride[at] = stride_of_tables(rotation, order[i]);
  }
  task.channels = static_cast<int>(channels);
  task.rotated = static_cast<int>(rotation.rotated());
  task.inverse = rotation.inverse;
  const DType dtype = value_dtype(x.scalar_type());
  check_launch(launch_rotary(task, dtype, rotation.interleaved,
                             values_at_once(x, out, rotation, task),
                             c10::cuda::getCurrentCUDAStream()));
}

}  // namespace qshard::cuda
