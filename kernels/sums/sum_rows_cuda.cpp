#include "kernels/sums/sum_rows_cuda.h"

#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <limits>

#include "kernels/device/check_launch.h"
#include "kernels/format/value_dtype.h"
#include "kernels/sums/kernels.h"

namespace qshard::cuda {

void sum_rows(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& ends,
              const at::Tensor& out) {
  TORCH_CHECK(out.size(0) <= std::numeric_limits<int32_t>::max(),
              fmt::format("qshard::_sum_rows: {} sums are too many for the CUDA kernel; call it on "
                          "parts",
                          out.size(0)));
  const auto is_aligned = [](const at::Tensor& x) {
    return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 &&
           x.size(1) * x.element_size() % 16 == 0;
  };
  SumRowsTask task;
  task.rows = rows.const_data_ptr();
  task.places = places.const_data_ptr<int64_t>();
  task.ends = ends.const_data_ptr<int64_t>();
  task.out = out.mutable_data_ptr();
  task.row_count = rows.size(0);
  task.place_count = places.size(0);
  task.sums = out.size(0);
  task.cols = out.size(1);
  task.vectorized = is_aligned(rows) && is_aligned(out);
  check_launch(
      launch_sum_rows(task, value_dtype(rows.scalar_type()), c10::cuda::getCurrentCUDAStream()));
}

}  // namespace qshard::cuda
