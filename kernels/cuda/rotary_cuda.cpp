#include "kernels/cuda/rotary_cuda.h"

#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <limits>

#include "kernels/cuda/check_launch.h"
#include "kernels/cuda/rotary_kernel.h"
#include "kernels/value_dtype.h"

namespace qshard::cuda {
namespace {

bool is_aligned(const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

bool begins_vectors(const at::Tensor& x, int64_t vector) {
  const auto is_multiple = [&](int64_t i) { return x.size(i) <= 1 || x.stride(i) % vector == 0; };
  return is_aligned(x.const_data_ptr()) && is_multiple(0) && is_multiple(1) && is_multiple(2);
}

}  // namespace

void rotate(const at::Tensor& values, const Rotation& rotation, const at::Tensor& out) {
  const at::Tensor x = values.stride(3) == 1 || values.size(3) <= 1 ? values : values.contiguous();
  const int64_t rows = x.size(0) * x.size(1) * x.size(2);
  TORCH_CHECK(rows <= std::numeric_limits<int32_t>::max() &&
                  x.size(3) <= std::numeric_limits<int32_t>::max() / 2,
              fmt::format("qshard::rotary_embedding: {} rows of {} channels are too many for the "
                          "CUDA kernel; call it on parts",
                          rows, x.size(3)));
  // Neighbouring threads take neighbouring memory, and share angles where heads are neighbours.
  std::array<int, 3> order{0, 1, 2};
  std::ranges::stable_sort(order, [&](int a, int b) { return x.stride(a) > x.stride(b); });
  RotaryTask task;
  task.values = x.const_data_ptr();
  task.out = out.mutable_data_ptr();
  task.cos = rotation.cos.const_data_ptr<float>();
  task.sin = rotation.sin.const_data_ptr<float>();
  for (int i = 0; i < 3; ++i) {
    task.size[i] = static_cast<uint32_t>(x.size(order[i]));
    task.stride[i] = x.stride(order[i]);
    task.out_stride[i] = out.stride(order[i]);
    if (order[i] == rotation.dim) task.position = i;
  }
  task.channels = static_cast<int>(x.size(3));
  task.rotated = static_cast<int>(rotation.cos.size(1));
  task.inverse = rotation.inverse;
  const DType dtype = value_dtype(x.scalar_type());
  const int64_t vector = 16 / value_size(dtype);
  const int64_t unit = rotation.interleaved ? vector : 2 * vector;
  const bool vectorized = begins_vectors(x, vector) && begins_vectors(out, vector) &&
                          task.rotated % unit == 0 && task.channels % vector == 0 &&
                          is_aligned(task.cos) && is_aligned(task.sin);
  check_launch(launch_rotary(task, dtype, rotation.interleaved, vectorized,
                             c10::cuda::getCurrentCUDAStream()));
}

}  // namespace qshard::cuda
