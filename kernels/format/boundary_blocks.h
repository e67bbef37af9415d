// The blocks with row-local scales that shard boundaries split.
#pragma once

#include "kernels/format/layout.h"

namespace qshard {

/// Ranks that hold rows of one block must agree on its amax. A shard boundary can split only the
/// first and the last block row of a shard, so a rank needs the places of those two in the list of
/// all boundary block rows.
struct BoundaryBlocks {
  int64_t rows = 0;    // boundary block rows of the logical tensor, the same on all ranks
  int64_t first = -1;  // index among them of this shard's first block row, -1 if it is whole
  int64_t last = -1;   // index among them of its last block row, -1 if it is whole
};

/// The blocks that torch.chunk over `ranks` splits, as FSDP2 and DTensor chunk. Formats whose
/// scales are in the grid have none, because ranks agree on every entry of the grid.
/// @throws std::invalid_argument if this shard begins or ends where torch.chunk makes no boundary.
BoundaryBlocks find_boundary_blocks(const Layout& layout, int64_t ranks);

/// Entries of the vector that ranks agree on (kernels/quantize/quantize.h).
inline int64_t amax_numel(const Layout& layout, const BoundaryBlocks& boundary) {
  return layout.grid_numel() + boundary.rows * layout.coarsest_image().block_cols();
}

}  // namespace qshard
