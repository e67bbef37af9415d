#include "ops/wire/sum_rows.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "kernels/format/value_dtype.h"
#include "kernels/sums/sum_rows.h"

namespace qshard {
namespace {

void check_sum_rows(const Tensor& rows, const Tensor& places) {
  TORCH_CHECK(rows.dim() == 2 && is_value_dtype(rows.scalar_type()) && !has_key(rows) &&
                  places.dim() == 2 && places.scalar_type() == at::kLong && !has_key(places) &&
                  places.device() == rows.device(),
              "qshard::_sum_rows: needs rows (R, N) of float32, bfloat16 or float16 and int64 "
              "places (T, k) beside them; got rows ",
              rows.sym_sizes(), " in ", rows.scalar_type(), " on ", rows.device(), " and places ",
              places.sym_sizes(), " in ", places.scalar_type(), " on ", places.device());
}

}  // namespace

Tensor sum_rows_op(const Tensor& rows, const Tensor& places) {
  check_sum_rows(rows, places);
  const c10::OptionalDeviceGuard guard(rows.device());
  Tensor out = at::empty({places.size(0), rows.size(1)}, rows.options());
  if (out.numel() > 0) sum_rows(rows.contiguous(), places.contiguous(), out);
  return out;
}

Tensor sum_rows_meta(const Tensor& rows, const Tensor& places) {
  check_sum_rows(rows, places);
  return at::empty_symint({places.sym_size(0), rows.sym_size(1)}, rows.options());
}

}  // namespace qshard
