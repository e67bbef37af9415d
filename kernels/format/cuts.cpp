#include "kernels/format/cuts.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace qshard {
namespace {

/// Whether a boundary before this logical row lies inside a block.
bool cuts_a_block(const Layout& layout, int64_t row) {
  return row > 0 && row < layout.logical_rows &&
         !layout.format->scale.begins_at(row % layout.matrix_rows);
}

}  // namespace

Cuts find_cuts(const Layout& all_images, int64_t ranks) {
  const Layout layout = all_images.tallest();
  Cuts cuts;
  if (layout.format->scale.is_in_grid() || ranks <= 1 || layout.cols == 0) return cuts;
  // Dimension 0 is cut: rows of one matrix, or whole matrices. Taking a single matrix of a 3-D
  // tensor for a 2-D one lists cuts that no rank has, which does no harm.
  std::vector<int64_t> rows;
  if (layout.matrices() == 1) {
    const int64_t chunk = ceil_div(layout.logical_rows, ranks);
    for (int64_t row = chunk; row < layout.logical_rows; row += chunk) {
      if (!cuts_a_block(layout, row)) continue;
      const int64_t block_row = layout.block_row(row);
      if (rows.empty() || rows.back() != block_row) rows.push_back(block_row);
    }
  }
  cuts.rows = static_cast<int64_t>(rows.size());
  const int64_t live = layout.live_rows();
  if (live == 0) return cuts;
  const int64_t begin = layout.row_offset;
  const int64_t end = begin + live;
  const auto index_of = [&](int64_t block_row, bool is_cut) {
    const auto found = std::lower_bound(rows.begin(), rows.end(), block_row);
    if (found != rows.end() && *found == block_row) return int64_t{found - rows.begin()};
    if (is_cut) {
      throw std::invalid_argument(fmt::format(
          "rows [{}, {}) of {} are not a chunk of torch.chunk over {} ranks, and blocks of {} rows "
          "that it cuts cannot be agreed on",
          begin, end, layout.logical_rows, ranks, layout.format->scale.block_rows));
    }
    return int64_t{-1};
  };
  cuts.first = index_of(layout.block_row(begin), cuts_a_block(layout, begin));
  cuts.last = index_of(layout.block_row(end - 1), cuts_a_block(layout, end));
  return cuts;
}

}  // namespace qshard
