#include "kernels/grouped/grouped_codes.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kernels/activation/kernels.h"
#include "kernels/device/check_launch.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/value_dtype.h"
#include "kernels/grouped/group_image.h"
#include "kernels/grouped/grouped_gemm.h"

namespace qshard {
namespace {

constexpr const char* kOp = "qshard::grouped_linear";

/// The scales behind packed codes, (outer, inner) as the kernels write them.
at::Tensor scales_behind(const PackedCodes& codes, int64_t outer, int64_t inner) {
  const int64_t bytes = codes.code_bytes();
  const int64_t of_scales = outer * inner * static_cast<int64_t>(sizeof(float));
  return codes.buffer.narrow(0, bytes, of_scales).view(at::kFloat).view({outer, inner});
}

/// Columns of `total` rows: those of each expert begin at a multiple of 128.
int64_t columns_width(int64_t total, int64_t count) {
  return cuda::most_row_tiles(total, count) * 128;
}

/// The bytes of the columns' codes and scales; those of groups lie behind them.
int64_t columns_bytes(int64_t width, int64_t k) {
  return round_up(packed_columnwise_bytes(width, k), 16);
}

void check_bytes(const at::Tensor& bytes, int64_t numel, const RowGroups& groups) {
  TORCH_CHECK(bytes.scalar_type() == at::kByte && bytes.is_contiguous() && bytes.numel() == numel &&
                  bytes.device() == groups.offs.device(),
              fmt::format("{}: codes of {} experts must be uint8 of {} bytes on {}, got {} of {} "
                          "on {}",
                          kOp, groups.count(), numel, groups.offs.device().str(),
                          c10::toString(bytes.scalar_type()), bytes.sizes(), bytes.device().str()));
}

/// Codes of rows stay where they are; their scales are written as the GEMM reads them.
GroupCodes arrived_groups(const ArrivedOperand& x, const Format& format, OperandRole role,
                          Orientations orientations, const RowGroups& groups) {
  const int64_t total = x.sizes()[0], k = x.sizes()[1];
  const auto [rows, columns] = orientations;
  const GroupImage image(format, role, total, k, {.columnwise = columns}, groups, x.device());
  GroupCodes made = image.codes();
  cuda::ActivationTask task = image.task();
  const bool by_row = x.has_row_scales();
  if (rows) {
    made.rows = x.image().image.operand().narrow(1, 0, round_up(k, 16)).view(at::kFloat8_e4m3fn);
    task.m_padded = round_up(total, 16);
    task.rows_written = task.m_padded;
    const auto floats = at::TensorOptions().dtype(at::kFloat).device(x.device());
    at::Tensor& scales = by_row ? made.row_vector : made.row_scales;
    scales =
        by_row ? at::empty({total}, floats) : at::empty({ceil_div(k, 128), task.m_padded}, floats);
    task.scale_inv = scales.mutable_data_ptr<float>();
  }
  const cuda::CodedRows from = cuda::coded_rows(x.image());
  const auto stream = static_cast<cudaStream_t>(current_stream(x.device()).handle);
  at::Tensor places;
  if (columns) places = row_tiles(groups, total, stream);
  const auto* of_tiles =
      columns ? reinterpret_cast<const cuda::RowTile*>(places.const_data_ptr<int32_t>()) : nullptr;
  if (by_row) {
    const int64_t count = groups.count();
    cuda::LargestScales largest;
    at::Tensor of_groups;
    if (columns) {
      made.columns = made.columns.view(at::kFloat8_e4m3fn);  // a gradient's, too
      made.group_scales = image.group_scales();
      task.scale_inv_t = made.group_scales.mutable_data_ptr<float>();
      of_groups = at::empty({count}, groups.offs.options());
      largest = {of_groups.mutable_data_ptr<int32_t>(), count, of_tiles, image.tiles(), count};
    }
    cuda::check_launch(cuda::launch_repack_in_rows(from, task, largest, stream));
  } else if (columns) {
    cuda::check_launch(cuda::launch_repack_groups(from, task, of_tiles, image.tiles(), stream));
  } else {  // whose scales each row has of its own
    cuda::check_launch(cuda::launch_repack(from, task, stream));
  }
  return made;
}

}  // namespace

at::Tensor row_tiles(const RowGroups& groups, int64_t total, cudaStream_t stream) {
  const int64_t count = cuda::most_row_tiles(total, groups.count());
  static_assert(sizeof(cuda::RowTile) == 4 * sizeof(int32_t));
  at::Tensor tiles = at::empty({count, 4}, groups.offs.options());
  cuda::check_launch(cuda::launch_row_tiles(
      groups.offs.const_data_ptr<int32_t>(), groups.count(), total,
      reinterpret_cast<cuda::RowTile*>(tiles.mutable_data_ptr<int32_t>()), count, stream));
  return tiles;
}

GroupImage::GroupImage(const Format& format, OperandRole role, int64_t total, int64_t k,
                       Orientations orientations, const RowGroups& groups, at::Device device)
    : GroupImage(
          format, role, total, k, groups,
          orientations.rowwise ? cuda::empty_bytes(packed_rowwise_bytes(total, k), device)
                               : at::Tensor(),
          orientations.columnwise
              ? cuda::empty_bytes(saved_columns_bytes(format, total, k, groups.count()), device)
              : at::Tensor()) {}

GroupImage::GroupImage(const Format& format, OperandRole role, int64_t total, int64_t k,
                       const RowGroups& groups, const at::Tensor& rows, const at::Tensor& columns)
    : total_(total),
      k_(k),
      width_(columns_width(total, groups.count())),
      rows_(rows),
      columns_(columns) {
  if (rows.defined()) check_bytes(rows, packed_rowwise_bytes(total, k), groups);
  matrix_ = packed_matrix(format, role, total, k, rows, {});
  if (!columns.defined()) return;
  check_bytes(columns, saved_columns_bytes(format, total, k, groups.count()), groups);
  const at::Tensor bytes = columns.narrow(0, 0, packed_columnwise_bytes(width_, k));
  matrix_.columnwise = packed_matrix(format, role, width_, k, {}, bytes).columnwise;
}

cuda::ActivationTask GroupImage::task() const {
  cuda::ActivationTask task = cuda::activation_task(matrix_);
  task.m_padded_t = width_;
  return task;
}

at::Tensor GroupImage::group_scales() const {
  const int64_t begin = columns_bytes(width_, k_);
  return columns_.narrow(0, begin, columns_.size(0) - begin).view(at::kFloat);
}

GroupCodes GroupImage::codes() const {
  GroupCodes made;
  made.saved_rows = rows_;
  made.saved = columns_;
  const bool by_group = cuda::has_one_scale(*matrix_.format);
  if (const auto* rows = std::get_if<PackedCodes>(&matrix_.rowwise)) {
    made.rows = packed_codes(*rows, matrix_.code_dtype).narrow(0, 0, total_);
    if (!by_group) made.row_scales = scales_behind(*rows, ceil_div(k_, 128), rows->rows);
  }
  if (const auto* columns = std::get_if<PackedCodes>(&matrix_.columnwise)) {
    made.square_columns = columns->scale_mode == ScaleMode::kBlock128x128;
    made.columns = packed_codes(*columns, matrix_.code_dtype).narrow(0, 0, k_);
    if (by_group) return made;
    made.column_scales = made.square_columns
                             ? scales_behind(*columns, ceil_div(k_, 128), round_up(tiles(), 4))
                             : scales_behind(*columns, tiles(), columns->rows);
  }
  return made;
}

int64_t saved_columns_bytes(const Format& format, int64_t total, int64_t k, int64_t count) {
  const int64_t of_groups = cuda::has_one_scale(format) ? count * sizeof(float) : 0;
  return columns_bytes(columns_width(total, count), k) + of_groups;
}

GroupCodes restored_codes(const at::Tensor& rows, const at::Tensor& columns, const Format& format,
                          OperandRole role, int64_t total, int64_t k, const RowGroups& groups) {
  const bool by_group = cuda::has_one_scale(format);
  TORCH_CHECK(!rows.defined() || !by_group, kOp, ": rows of ", format.name,
              " are made where they are multiplied");
  const GroupImage image(format, role, total, k, groups, rows, columns);
  GroupCodes made = image.codes();
  if (by_group && columns.defined()) made.group_scales = image.group_scales();
  return made;
}

GroupCodes quantize_packed_groups(const GivenOperand& x, const Format& format, OperandRole role,
                                  Orientations orientations, const RowGroups& groups,
                                  const DelayedAmax& delayed) {
  if (x.arrived() != nullptr && x.arrived()->meets(format)) {
    return arrived_groups(*x.arrived(), format, role, orientations, groups);
  }
  const at::Tensor values = x.values().contiguous();
  const int64_t total = values.size(0), k = values.size(1);
  const GroupImage image(format, role, total, k, orientations, groups, x->device());
  GroupCodes made = image.codes();
  cuda::ActivationTask task = image.task();
  task.values = values.const_data_ptr();
  const auto stream = static_cast<cudaStream_t>(current_stream(x->device()).handle);
  const DType dtype = value_dtype(values.scalar_type());
  const bool by_group = cuda::has_one_scale(format);
  at::Tensor places;
  if (by_group || orientations.columnwise) places = row_tiles(groups, total, stream);
  const auto* of_tiles =
      places.defined() ? reinterpret_cast<const cuda::RowTile*>(places.const_data_ptr<int32_t>())
                       : nullptr;
  if (by_group) {
    const int64_t count = groups.count();
    const at::Tensor floats = at::empty({3, count}, values.options().dtype(at::kFloat));
    auto* first = floats.mutable_data_ptr<float>();
    made.group_scales = orientations.columnwise ? image.group_scales() : floats.select(0, 2);
    task.scale_inv = task.scale_inv_t = made.group_scales.mutable_data_ptr<float>();
    const cuda::GroupScales scales{count, first, first + count, delayed};
    cuda::check_launch(cuda::launch_quantize_groups_tensorwise(
        task, of_tiles, image.tiles(), scales, dtype, packed_code_dtype(format, role), stream));
  } else if (orientations.columnwise) {
    cuda::check_launch(
        cuda::launch_quantize_groups_in_blocks(task, of_tiles, image.tiles(), dtype, stream));
  } else {  // whose scales each row has of its own
    cuda::check_launch(cuda::launch_quantize_activation_in_blocks(task, dtype, stream));
  }
  return made;
}

at::Tensor multiply_by_packed_codes(const GroupCodes& x, const ExpertWeights& weights,
                                    const RowGroups& groups, bool contract, at::ScalarType dtype) {
  const RowImage& image = weights.stack.codes.row_image();
  const Layout& layout = image.layout;
  const int64_t experts = weights.count, rows = weights.rows;
  const int64_t of_one = layout.format->scale.block_rows;  // 0: the matrix
  const int64_t block_rows = of_one == 0 ? 1 : ceil_div(rows, of_one);
  GroupedOperands operands;
  operands.a = x.rows;
  operands.a_scale_inv = x.row_scales;
  operands.b = image.image.operand()
                   .narrow(0, image.first_row, experts * rows)
                   .view({experts, rows, layout.row_bytes()});
  const at::Tensor scales =
      image.grid.operand()
          .view({layout.grid_rows(), layout.grid_cols()})
          .narrow(0, layout.grid_row(layout.row_offset + image.first_row), experts * block_rows);
  if (x.row_vector.defined()) {
    operands.a_row_vector = x.row_vector;
    operands.b_group_scales = scales.view({experts});
  } else if (x.group_scales.defined()) {
    operands.a_group_scales = x.group_scales;
    operands.b_group_scales = scales.view({experts});
  } else {
    operands.b_scale_inv = scales.view({experts, block_rows, layout.grid_cols()});
  }
  operands.offs = groups.offs;
  operands.tokens = x.rows.size(0);
  operands.contract_rows = contract;
  operands.columns = contract ? layout.cols : rows;
  operands.dtype = dtype;
  return grouped_gemm(kOp, operands);
}

at::Tensor multiply_packed_columns(const GroupCodes& gradient, const GroupCodes& input,
                                   int64_t total, const RowGroups& groups, at::ScalarType dtype,
                                   const at::Tensor& sum) {
  GroupedOperands operands;
  operands.a = gradient.columns;
  operands.a_scale_inv = gradient.column_scales;
  operands.b = input.columns;
  operands.b_scale_inv = input.column_scales;
  operands.a_group_scales = gradient.group_scales;
  operands.b_group_scales = input.group_scales;
  operands.offs = groups.offs;
  operands.tokens = total;
  operands.square_scales = input.square_columns;
  operands.dtype = dtype;
  operands.sum = sum;
  return grouped_gemm(kOp, operands);
}

}  // namespace qshard
