#include "kernels/sums/sum_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "kernels/sums/sum_rows_cuda.h"

namespace qshard {
namespace {

template <typename T>
void sum_rows_cpu(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& ends,
                  const at::Tensor& out) {
  const T* from = rows.const_data_ptr<T>();
  const auto* place = places.const_data_ptr<int64_t>();
  const auto* end_of = ends.const_data_ptr<int64_t>();
  T* to = out.mutable_data_ptr<T>();
  const int64_t row_count = rows.size(0), cols = rows.size(1), count = places.size(0);
  at::parallel_for(0, ends.size(0), 16, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(cols);
    for (int64_t i = begin; i < end; ++i) {
      std::fill(sum.begin(), sum.end(), 0.f);
      const int64_t first = i == 0 ? 0 : std::max<int64_t>(end_of[i - 1], 0);
      for (int64_t j = first; j < std::min(end_of[i], count); ++j) {
        const int64_t row = place[j];
        if (row < 0 || row >= row_count) continue;
        for (int64_t c = 0; c < cols; ++c) sum[c] += static_cast<float>(from[row * cols + c]);
      }
      for (int64_t c = 0; c < cols; ++c) to[i * cols + c] = static_cast<T>(sum[c]);
    }
  });
}

}  // namespace

void sum_rows(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& ends,
              const at::Tensor& out) {
  if (rows.is_cuda()) return cuda::sum_rows(rows, places, ends, out);
  switch (rows.scalar_type()) {
    case at::kBFloat16:
      return sum_rows_cpu<at::BFloat16>(rows, places, ends, out);
    case at::kHalf:
      return sum_rows_cpu<at::Half>(rows, places, ends, out);
    default:
      return sum_rows_cpu<float>(rows, places, ends, out);
  }
}

}  // namespace qshard
