// Whether a tensor's elements share memory.
#pragma once

#include <c10/core/SymIntArrayRef.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/format/checked_sizes.h"

namespace qshard {

/// Whether elements of these sizes and strides share memory, unless each dimension's stride steps
/// over all that the smaller ones reach. Symbols whose values are open are not looked at: the
/// kernel will be given numbers.
inline bool may_overlap(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride, size
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto size = sizes[i].maybe_as_int();
    const auto stride = strides[i].maybe_as_int();
    if (!size || !stride) return false;
    if (*size == 0) return false;
    if (*size > 1) steps.emplace_back(*stride, *size);
  }
  std::ranges::sort(steps);
  int64_t reach = 0;  // of the dimensions so far, from their first to their last element
  for (const auto& [stride, size] : steps) {
    if (stride <= reach || !product_fits({stride, size})) return true;
    reach += stride * (size - 1);
  }
  return false;
}

}  // namespace qshard
