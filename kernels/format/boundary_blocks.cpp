#include "kernels/format/boundary_blocks.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace qshard {
namespace {

/// Whether a boundary before this logical row lies inside a block.
bool splits_a_block(const Layout& layout, int64_t row) {
  return row > 0 && row < layout.logical_rows &&
         !layout.format->scale.begins_at(row % layout.matrix_rows);
}

}  // namespace

BoundaryBlocks find_boundary_blocks(const Layout& all_images, int64_t ranks) {
  const Layout layout = all_images.coarsest_image();
  BoundaryBlocks boundary;
  if (layout.format->scale.is_in_grid() || ranks <= 1 || layout.cols == 0) return boundary;
  // Dimension 0 is chunked: rows of one matrix, or whole matrices. A single matrix of a 3-D tensor
  // looks like a 2-D one: its list has block rows that no rank cuts, and no rank has entries of.
  std::vector<int64_t> rows;
  if (layout.matrices() == 1) {
    const int64_t chunk = ceil_div(layout.logical_rows, ranks);
    for (int64_t row = chunk; row < layout.logical_rows; row += chunk) {
      if (!splits_a_block(layout, row)) continue;
      const int64_t block_row = layout.block_row(row);
      if (rows.empty() || rows.back() != block_row) rows.push_back(block_row);
    }
  }
  boundary.rows = static_cast<int64_t>(rows.size());
  const int64_t live = layout.live_rows();
  if (live == 0) return boundary;
  const int64_t begin = layout.row_offset;
  const int64_t end = begin + live;
  const bool cuts_first = splits_a_block(layout, begin);
  const bool cuts_last = splits_a_block(layout, end);
  const auto index_of = [&](int64_t block_row) {
    const auto found = std::lower_bound(rows.begin(), rows.end(), block_row);
    if (found == rows.end() || *found != block_row) {
      throw std::invalid_argument(fmt::format(
          "rows [{}, {}) of {} are not a chunk of torch.chunk over {} ranks, and blocks of {} rows "
          "that it cuts cannot be agreed on",
          begin, end, layout.logical_rows, ranks, layout.format->scale.block_rows));
    }
    return int64_t{found - rows.begin()};
  };
  // A listed block that lies whole in this shard has no entry of it: a step that quantizes its
  // result reads no amax of other ranks.
  const int64_t first = layout.block_row(begin);
  const int64_t last = layout.block_row(end - 1);
  if (cuts_first || (cuts_last && first == last)) boundary.first = index_of(first);
  if (cuts_last || (cuts_first && first == last)) boundary.last = index_of(last);
  return boundary;
}

}  // namespace qshard
