#include "kernels/transpose/transpose.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "kernels/format/whole_layout.h"
#include "kernels/transpose/transpose_cpu.h"
#include "kernels/transpose/transpose_cuda.h"

namespace qshard {
Layout transposed_layout(const Layout& layout) {
  return whole_layout(*layout.format, layout.cols, layout.rows, round_up(layout.cols, 16));
}

void transpose_values(const TransposeTask& task, Stream stream) {
  TORCH_CHECK(task.padded_rows % 16 == 0 && task.padded_rows >= task.rows,
              fmt::format("qshard: transpose of {} x {} values cannot pad its rows to {}",
                          task.rows, task.cols, task.padded_rows));
  if (task.cols == 0 || task.padded_rows == 0) return;
  if (!stream.is_cuda) return cpu::transpose_values(task);
  cuda::transpose_values(task, stream.handle);
}

void transpose_image(const TransposeImageTask& task, Stream stream) {
  const Layout& layout = task.layout;
  const Format& format = *layout.format;
  TORCH_CHECK(!format.scale.is_in_grid() && format.scale.block_rows == format.scale.block_cols,
              fmt::format("qshard: a {} image of {} x {} has no transpose: its blocks are not "
                          "square, or their scales not in its rows",
                          format.name, layout.rows, layout.cols));
  TORCH_CHECK(layout.row_offset == 0 && layout.rows == layout.logical_rows &&
                  layout.rows == layout.matrix_rows,
              fmt::format("qshard: transpose of a {} image of {} x {} needs a whole matrix",
                          format.name, layout.rows, layout.cols));
  if (layout.rows == 0 || layout.cols == 0) return;
  if (!stream.is_cuda) return cpu::transpose_image(task);
  cuda::transpose_image(task, stream.handle);
}

}  // namespace qshard
