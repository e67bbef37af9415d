#include "kernels/sums/sum_rows.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "kernels/sums/sum_rows_cuda.h"

namespace qshard {
namespace {

template <typename T>
void sum_rows_cpu(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& out) {
  const T* from = rows.const_data_ptr<T>();
  const auto* place = places.const_data_ptr<int64_t>();
  T* to = out.mutable_data_ptr<T>();
  const int64_t row_count = rows.size(0), cols = rows.size(1), per_sum = places.size(1);
  at::parallel_for(0, places.size(0), 16, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(cols);
    for (int64_t i = begin; i < end; ++i) {
      std::fill(sum.begin(), sum.end(), 0.f);
      for (int64_t j = 0; j < per_sum; ++j) {
        const int64_t row = place[i * per_sum + j];
        if (row < 0 || row >= row_count) continue;
        for (int64_t c = 0; c < cols; ++c) sum[c] += static_cast<float>(from[row * cols + c]);
      }
      for (int64_t c = 0; c < cols; ++c) to[i * cols + c] = static_cast<T>(sum[c]);
    }
  });
}

}  // namespace

void sum_rows(const at::Tensor& rows, const at::Tensor& places, const at::Tensor& out) {
  if (rows.is_cuda()) return cuda::sum_rows(rows, places, out);
  switch (rows.scalar_type()) {
    case at::kBFloat16:
      return sum_rows_cpu<at::BFloat16>(rows, places, out);
    case at::kHalf:
      return sum_rows_cpu<at::Half>(rows, places, out);
    default:
      return sum_rows_cpu<float>(rows, places, out);
  }
}

}  // namespace qshard
