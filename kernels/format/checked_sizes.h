// Sizes and offsets that callers name. Sums and products of them may be beyond 2^63, where int64
// has undefined behaviour; a bound on what they can be makes all later arithmetic safe.
//
// kMostElements is far more than any memory holds and far less than overflows: a Layout multiplies
// a row's bytes (at most 64 a column, for two row images of one column) by rows, and a message adds
// scales and padding to its codes. Code that takes sizes from outside checks them here, once, so
// that code which computes with them afterwards need not.
#pragma once

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <initializer_list>
#include <span>

#include "kernels/format/layout.h"

namespace qshard {

constexpr int64_t kMostElements = int64_t{1} << 50;

/// Whether none of `sizes` is negative, and neither they nor their product are beyond `limit`.
constexpr bool product_fits(std::span<const int64_t> sizes, int64_t limit = kMostElements) {
  int64_t product = 1;
  bool is_empty = false;
  for (const int64_t size : sizes) {
    if (size < 0 || size > limit) return false;
    is_empty |= size == 0;
  }
  for (const int64_t size : sizes) {
    if (!is_empty && (__builtin_mul_overflow(product, size, &product) || product > limit)) {
      return false;
    }
  }
  return true;
}
constexpr bool product_fits(std::initializer_list<int64_t> sizes, int64_t limit = kMostElements) {
  return product_fits(std::span(sizes.begin(), sizes.size()), limit);
}

/// The product of sizes that an argument names.
/// @throws c10::ValueError naming operator and argument unless it fits.
inline int64_t checked_product(const char* op, const char* argument,
                               std::span<const int64_t> sizes) {
  TORCH_CHECK_VALUE(
      product_fits(sizes),
      fmt::format("{}: {} is no size of a tensor: [{}], none of which may be negative "
                  "and whose product may be 2^50 at most",
                  op, argument, fmt::join(sizes, ", ")));
  int64_t product = 1;
  for (const int64_t size : sizes) product *= size;
  return product;
}
inline int64_t checked_product(const char* op, const char* argument,
                               std::initializer_list<int64_t> sizes) {
  return checked_product(op, argument, std::span(sizes.begin(), sizes.size()));
}

/// Whether [start, start + count) lies within [0, end), all of them any numbers.
constexpr bool lies_within(int64_t start, int64_t count, int64_t end) {
  return start >= 0 && count >= 0 && start <= end && count <= end - start;
}

/// Whether no arithmetic on a layout with these sizes overflows, its elements of a full tensor
/// included.
constexpr bool sizes_fit(const Layout& layout) {
  const int64_t pitch = layout.full_cols ? layout.full_cols : layout.cols;
  const int64_t full_rows = layout.full_matrix_rows;
  return product_fits({layout.rows, layout.cols}) && layout.full_cols >= 0 &&
         product_fits({layout.logical_rows, pitch}) && layout.logical_rows >= 0 && full_rows >= 0 &&
         product_fits({layout.matrices(), full_rows, pitch}) && layout.matrix_rows >= 0 &&
         layout.matrix_rows <= kMostElements && layout.first_element >= 0 &&
         layout.first_element <= kMostElements && layout.row_offset >= 0 &&
         layout.row_offset <= kMostElements;
}

/// @throws c10::ValueError naming the operator unless the sizes of a layout fit.
inline const Layout& checked_sizes(const char* op, const Layout& layout) {
  TORCH_CHECK_VALUE(
      sizes_fit(layout),
      fmt::format("{}: {} rows from row_offset={} of logical_rows={}, of {} columns (element {} of "
                  "a tensor of {} columns on), are no sizes of a tensor: none may be negative or "
                  "beyond 2^50, nor may the elements be",
                  op, layout.rows, layout.row_offset, layout.logical_rows, layout.cols,
                  layout.first_element, layout.full_cols));
  return layout;
}

}  // namespace qshard
