// The layout of a matrix that no other rank holds rows of.
#pragma once

#include "kernels/format/layout.h"

namespace qshard {

/// One matrix of `rows` x `cols`, and rows of padding behind it up to `held_rows` (0: none).
inline Layout whole_layout(const Format& format, int64_t rows, int64_t cols,
                           int64_t held_rows = 0) {
  return {.format = &format,
          .rows = held_rows ? held_rows : rows,
          .cols = cols,
          .logical_rows = rows,
          .matrix_rows = rows};
}

}  // namespace qshard
