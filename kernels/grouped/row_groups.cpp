#include "kernels/grouped/row_groups.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/searchsorted.h>

#include <algorithm>
#include <tuple>

namespace qshard {
namespace {

constexpr int64_t kAlignment = 8;

at::Tensor rows_up_to(int64_t count, const at::Tensor& beside) {
  return at::arange(count, beside.options().dtype(at::kLong));
}

/// How many rows end before each: the ends, moved by one.
at::Tensor starts(const at::Tensor& ends) { return at::constant_pad_nd(ends, {1, -1}); }

}  // namespace

at::Tensor RowGroups::ends(int64_t total) const {
  if (count() == 0) return offs;
  return std::get<0>(at::cummax(offs.clamp(0, total), 0)).to(at::kInt);
}

void zero_rows_of_none(const at::Tensor& matrix, const at::Tensor& ends) {
  if (ends.size(0) == 0) {
    matrix.zero_();
    return;
  }
  const at::Tensor last = ends.narrow(0, ends.size(0) - 1, 1);
  matrix.masked_fill_((rows_up_to(matrix.size(0), ends) >= last).unsqueeze(1), 0);
}

AlignedRows::AlignedRows(const at::Tensor& ends_of_experts, int64_t total) {
  const int64_t experts = ends_of_experts.size(0);
  const at::Tensor begin = starts(ends_of_experts);
  lengths = ends_of_experts - begin;
  const at::Tensor aligned = (lengths + (kAlignment - 1)).div(kAlignment, "floor") * kAlignment;
  ends = at::cumsum(aligned, 0, at::kInt);
  const at::Tensor row = rows_up_to(total + (kAlignment - 1) * experts, ends_of_experts);
  const at::Tensor expert =
      at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true).clamp_max(experts - 1);
  const at::Tensor within = row - starts(ends).index_select(0, expert);
  is_there = (within < lengths.index_select(0, expert)).unsqueeze(1);
  row_of = (begin.index_select(0, expert) + within).clamp(0, std::max<int64_t>(total - 1, 0));
}

at::Tensor AlignedRows::of(const at::Tensor& matrix) const {
  return matrix.index_select(0, row_of).masked_fill_(is_there.logical_not(), 0);
}

}  // namespace qshard
