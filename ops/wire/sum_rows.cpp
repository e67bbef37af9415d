#include "ops/wire/sum_rows.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/format/value_dtype.h"
#include "kernels/sums/sum_rows.h"

namespace qshard {
namespace {

void check_sum_rows(const Tensor& rows, const Tensor& places, const Tensor& ends) {
  const auto is_list = [&](const Tensor& numbers) {
    return numbers.dim() == 1 && numbers.scalar_type() == at::kLong && !has_key(numbers) &&
           numbers.device() == rows.device();
  };
  TORCH_CHECK(!has_key(rows), "qshard::_sum_rows: needs rows of values; dequantize these first");
  TORCH_CHECK(
      rows.dim() == 2 && is_value_dtype(rows.scalar_type()) && is_list(places) && is_list(ends),
      "qshard::_sum_rows: needs rows (R, N) of float32, bfloat16 or float16, and int64 "
      "places (P,) and ends (T,) beside them; got rows ",
      rows.sym_sizes(), " in ", rows.scalar_type(), " on ", rows.device(), ", places ",
      places.sym_sizes(), " in ", places.scalar_type(), " on ", places.device(), " and ends ",
      ends.sym_sizes(), " in ", ends.scalar_type(), " on ", ends.device());
}

}  // namespace

Tensor sum_rows_op(const Tensor& rows, const Tensor& places, const Tensor& ends) {
  check_sum_rows(rows, places, ends);
  const c10::OptionalDeviceGuard guard(rows.device());
  Tensor out = at::empty({ends.size(0), rows.size(1)}, rows.options());
  if (out.numel() > 0) sum_rows(rows.contiguous(), places.contiguous(), ends.contiguous(), out);
  return out;
}

Tensor sum_rows_meta(const Tensor& rows, const Tensor& places, const Tensor& ends) {
  check_sum_rows(rows, places, ends);
  return at::empty_symint({ends.sym_size(0), rows.sym_size(1)}, rows.options());
}

}  // namespace qshard
