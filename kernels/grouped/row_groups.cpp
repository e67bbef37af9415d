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

at::Tensor rows_up_to(int64_t count, const at::Tensor& beside) {
  return at::arange(count, beside.options().dtype(at::kLong));
}

/// The expert of each row, by where experts end.
at::Tensor experts_of(const at::Tensor& row, const at::Tensor& ends) {
  return at::searchsorted(ends, row, /*out_int32=*/false, /*right=*/true)
      .clamp_max(ends.size(0) - 1);
}

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

at::Tensor starts_of(const at::Tensor& ends) { return at::constant_pad_nd(ends, {1, -1}); }

AlignedRows::AlignedRows(const at::Tensor& ends_of_experts, int64_t total, int64_t alignment) {
  const at::Tensor begin = starts_of(ends_of_experts);
  lengths = ends_of_experts - begin;
  const at::Tensor aligned = (lengths + (alignment - 1)).div(alignment, "floor") * alignment;
  ends = at::cumsum(aligned, 0, at::kInt);
  const int64_t most = total + (alignment - 1) * ends.size(0);
  const at::Tensor row = rows_up_to(most / alignment * alignment, ends);
  expert_of = experts_of(row, ends);
  const at::Tensor within = row - starts_of(ends).index_select(0, expert_of);
  is_there = (within < lengths.index_select(0, expert_of)).unsqueeze(1);
  row_of = (begin.index_select(0, expert_of) + within).clamp(0, std::max<int64_t>(total - 1, 0));
}

at::Tensor AlignedRows::of(const at::Tensor& matrix) const {
  return matrix.index_select(0, row_of).masked_fill_(is_there.logical_not(), 0);
}

at::Tensor AlignedRows::places(const at::Tensor& ends_of_experts, int64_t total) const {
  const at::Tensor row = rows_up_to(total, ends);
  const at::Tensor expert = experts_of(row, ends_of_experts);
  const at::Tensor moved = starts_of(ends) - starts_of(ends_of_experts);
  return (row + moved.index_select(0, expert)).clamp_max(expert_of.size(0) - 1);
}

}  // namespace qshard
