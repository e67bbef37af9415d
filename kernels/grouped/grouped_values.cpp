#include "kernels/grouped/grouped_values.h"

#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>

#include "kernels/device/compute_capability.h"
#include "kernels/format/layout.h"

namespace qshard {
namespace {

/// What the GEMM's copies ask of a row: 16 bytes.
constexpr int64_t kMultiple = 8;

at::Tensor padded(const at::Tensor& tensor, int64_t columns, int64_t rows) {
  if (columns == 0 && rows == 0) {
    const at::Tensor lying = tensor.contiguous();
    const bool aligned = reinterpret_cast<uintptr_t>(lying.const_data_ptr()) % 16 == 0;
    return aligned ? lying : lying.clone();
  }
  return at::constant_pad_nd(tensor, {0, columns, 0, rows});
}

int64_t missing(int64_t size) { return round_up(size, kMultiple) - size; }

}  // namespace

bool has_grouped_gemm_of_values(at::Device device, at::ScalarType dtype) {
  if (!device.is_cuda() || dtype != at::kBFloat16) return false;
  const int capability = cuda::compute_capability(device);
  return capability == 90 || capability / 10 == 10;
}

at::Tensor multiply_by_values(const at::Tensor& rows, const ExpertWeights& weights,
                              const RowGroups& groups, bool contract) {
  const int64_t total = rows.size(0), lying = weights.rows, width = weights.stack.codes.cols;
  const int64_t columns = contract ? width : lying;
  if (total == 0 || columns == 0 || weights.count == 0) {
    return at::zeros({total, columns}, rows.options());
  }
  const auto dtype = rows.scalar_type();
  const at::Tensor values = (contract ? dequantized_columnwise(weights.stack.codes, dtype)
                                      : dequantized(weights.stack.codes, dtype))
                                .view({weights.count, lying, width});
  const at::Tensor matrices = padded(values, missing(width), missing(lying));
  const at::Tensor ends = groups.ends(total);
  at::Tensor product =
      at::_grouped_mm(padded(rows, missing(rows.size(1)), 0),
                      contract ? matrices : matrices.transpose(1, 2), ends, std::nullopt, dtype);
  product = product.narrow(1, 0, columns).contiguous();
  zero_rows_of_none(product, ends);
  return product;
}

at::Tensor multiply_transposed(const at::Tensor& left, const at::Tensor& right,
                               const RowGroups& groups, at::ScalarType dtype,
                               const at::Tensor& sum) {
  const int64_t total = left.size(0), a = left.size(1), b = right.size(1);
  if (total == 0 || a == 0 || b == 0 || groups.count() == 0) {
    return sum.defined() ? sum : at::zeros({groups.count(), a, b}, left.options().dtype(dtype));
  }
  const AlignedRows aligned(groups.ends(total), total);
  const at::Tensor product = at::_grouped_mm(aligned.of(padded(left, missing(a), 0)).t(),
                                             aligned.of(padded(right, missing(b), 0)), aligned.ends,
                                             std::nullopt, left.scalar_type())
                                 .narrow(1, 0, a)
                                 .narrow(2, 0, b);
  return weight_gradient(product, aligned.lengths, dtype, sum);
}

at::Tensor weight_gradient(const at::Tensor& product, const at::Tensor& lengths,
                           at::ScalarType dtype, const at::Tensor& sum) {
  // An expert without rows: -0 leaves any value that it is added to as it is.
  product.masked_fill_((lengths == 0).view({-1, 1, 1}), sum.defined() ? -0.0 : 0.0);
  if (sum.defined()) {
    at::Tensor out = sum;
    return out.add_(product);
  }
  return product.to(dtype).contiguous();
}

}  // namespace qshard
