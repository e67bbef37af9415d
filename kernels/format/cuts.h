// Which blocks with row-local scales are cut by shard boundaries.
#pragma once

#include "kernels/format/layout.h"

namespace qshard {

/// Ranks that hold rows of one block must agree on its amax. Only a shard's first and last block
/// row can be cut, so what a rank needs to know is where those two are in the list of all cut ones.
struct Cuts {
  int64_t rows = 0;    // cut block rows of the logical tensor, the same on all ranks
  int64_t first = -1;  // index among them of this shard's first block row, -1 if that is not cut
  int64_t last = -1;   // the same of its last block row
};

/// The cuts that torch.chunk over `ranks` makes, as FSDP2 and DTensor do. None for formats whose
/// scales are in the grid: there every entry is agreed on.
/// @throws std::invalid_argument if this shard is cut where torch.chunk does not cut.
Cuts find_cuts(const Layout& layout, int64_t ranks);

/// Entries of the vector that ranks agree on (kernels/quantize/quantize.h).
inline int64_t amax_numel(const Layout& layout, const Cuts& cuts) {
  return layout.grid_numel() + cuts.rows * layout.tallest().block_cols();
}

}  // namespace qshard
