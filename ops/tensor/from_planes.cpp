// from_planes: a quantized tensor of codes and scales that other software made.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "dispatch/aten/registration.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/buffer/read_codes.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/checked_sizes.h"
#include "kernels/format/formats.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

constexpr const char* kOp = "qshard::from_planes";

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> what, Args&&... args) {
  TORCH_CHECK_VALUE(false, kOp, ": ", fmt::format(what, std::forward<Args>(args)...));
}

void check_plane(const Tensor& plane, const char* name, at::ScalarType dtype,
                 const std::vector<int64_t>& sizes, const Tensor& codes, const Format& format) {
  TORCH_CHECK_TYPE(
      !has_key(plane) && plane.layout() == at::kStrided && plane.scalar_type() == dtype,
      fmt::format("{}: {} needs a plain {} tensor as {}, got {}", kOp, format.name,
                  c10::toString(dtype), name, c10::toString(plane.scalar_type())));
  if (plane.device() != codes.device()) {
    refuse("{} is on {}, the codes are on {}", name, plane.device().str(), codes.device().str());
  }
  if (plane.sizes() != at::IntArrayRef(sizes)) {
    refuse("{} with codes of shape {} needs {} of shape {}, got {}", format.name,
           codes.sizes().vec(), name, sizes, plane.sizes().vec());
  }
}

/// Sizes of the tensor that has these codes.
std::vector<int64_t> sizes_of(const Tensor& codes, const Format& format,
                              std::optional<int64_t> columns) {
  const auto dtype = scalar_type(format.code_dtype);
  TORCH_CHECK_TYPE(
      !has_key(codes) && codes.layout() == at::kStrided && codes.scalar_type() == dtype,
      fmt::format("{}: {} needs a plain {} tensor as codes, got {}", kOp, format.name,
                  c10::toString(dtype), c10::toString(codes.scalar_type())));
  const auto device = codes.device();
  if (!device.is_cpu() && !device.is_cuda() && !device.is_meta()) {
    refuse("expected codes on cpu or cuda, got {}", device.str());
  }
  auto sizes = codes.sizes().vec();
  if (sizes.size() < 2) {
    refuse("expected codes of at least 2 dimensions (rows x columns), got shape {}", sizes);
  }
  const int64_t per_byte = 8 / format.code_bits;
  const int64_t bytes = sizes.back();
  sizes.back() = columns.value_or(checked_product(kOp, "codes", {bytes, per_byte}));
  if (!product_fits({sizes.back()}) || ceil_div(sizes.back(), per_byte) != bytes) {
    refuse("{} bytes of codes a row do not hold columns={} of {}", bytes, sizes.back(),
           format.name);
  }
  return sizes;
}

/// Shape of a plane that has `rows` x `cols` entries for each matrix, all of them in `all` rows.
std::vector<int64_t> plane_sizes(at::IntArrayRef sizes, int64_t all, int64_t per_matrix,
                                 int64_t cols) {
  if (sizes.size() == 2) return {all, cols};
  std::vector<int64_t> result(sizes.begin(), sizes.end() - 2);
  result.push_back(per_matrix);
  result.push_back(cols);
  return result;
}

/// What only the numbers tell; all checks are of a few of them, once per imported tensor.
void check_fp32_scales(const Tensor& scales, const Format& format, const char* name) {
  if (scales.numel() == 0) return;
  if (!(scales.isfinite() & (scales >= 0)).all().item<bool>()) {
    refuse("{} has entries that are negative, infinite or NaN", name);
  }
  if (!format.grid_scale()->power_of_two) return;
  if (!std::get<0>(at::frexp(scales)).eq(0.5).all().item<bool>()) {
    refuse("{} has entries that are not powers of two, as all of {} are; use {}_fp32_scale", name,
           format.name, format.name);
  }
}

/// Rows of one block have its scale in common: what lets one image serve the transpose, too.
void check_row_scales(const Tensor& bytes, const Layout& layout) {
  const Format& format = *layout.format;
  if (bytes.numel() == 0) return;
  if (format.scale.dtype == DType::kFloat8E4M3 && (bytes >= 0x7f).any().item<bool>()) {
    refuse("scale_inv has entries that are negative or NaN");
  }
  if (format.scale.block_rows == 1 || layout.rows < 2) return;
  const auto same_block = at::empty({layout.rows - 1, 1}, at::kBool);
  for (int64_t i = 0; i + 1 < layout.rows; ++i) {
    const int64_t row = layout.row_offset + i;
    same_block.mutable_data_ptr<bool>()[i] = layout.block_row(row) == layout.block_row(row + 1);
  }
  const auto differs = bytes.narrow(0, 1, layout.rows - 1).ne(bytes.narrow(0, 0, layout.rows - 1));
  if ((differs & same_block.to(bytes.device())).any().item<bool>()) {
    refuse(
        "{} has one scale for {}x{} codes, and rows within such blocks differ in theirs; use "
        "{}_1x{}",
        format.name, format.scale.block_rows, format.scale.block_cols, format.name,
        format.scale.block_cols);
  }
}

/// The second image, of the values that the first one shows.
void quantize_columnwise(const Layout& layout, const Tensor& image) {
  auto rowwise = make_buffer_of_codes(Placement(layout), at::kFloat, false, image, {});
  // Whole blocks: no other rank's rows have a part in them.
  const bool is_matrix = layout.matrix_rows == layout.logical_rows;
  const Layout own = own_tensor(layout, is_matrix ? layout.rows : layout.matrix_rows);
  const auto requantized =
      make_buffer_of_values(Placement(own), dequantized_rows(*rowwise, at::kFloat), false);
  flush_alone(requantized);
  const int64_t offset = layout.columnwise_offset();
  image.narrow(1, offset, layout.image_row_bytes())
      .copy_(requantized->planes().image().narrow(1, offset, layout.image_row_bytes()).operand());
}

}  // namespace

Tensor from_planes(const Tensor& codes, const Tensor& scale_inv, c10::string_view format_name,
                   const OptionalTensor& tensor_scale_inv, at::ScalarType dtype, bool keep_master,
                   std::optional<int64_t> columns, std::optional<int64_t> logical_rows,
                   int64_t row_offset, int64_t rows_of_each) {
  check_key_is_ours(kOp);
  const Format& format = checked_format(format_name, kOp);
  TORCH_CHECK_TYPE(is_value_dtype(dtype),
                   fmt::format("{}: expected dtype float32, bfloat16 or float16, got {}", kOp,
                               c10::toString(dtype)));
  if (keep_master && format.stochastic_rounding) {
    refuse(
        "{} with keep_master=True: a master holds what stochastic rounding is for; use one of "
        "the two",
        format.name);
  }
  const auto sizes = sizes_of(codes, format, columns);
  const Layout layout = layout_of(sizes, format, logical_rows, row_offset, rows_of_each, kOp);
  const int64_t matrix_grid = layout.matrices() ? layout.grid_rows() / layout.matrices() : 0;
  const auto grid_sizes = [&] {
    const bool is_stack = sizes.size() > 2 && layout.rows == layout.logical_rows;
    return is_stack ? plane_sizes(sizes, layout.grid_rows(), matrix_grid, layout.grid_cols())
                    : std::vector<int64_t>{layout.grid_rows(), layout.grid_cols()};
  }();
  const bool has_row_scales = !format.scale.is_in_grid();
  const bool needs_tensor_scale = format.outer_scale.has_value();
  if (needs_tensor_scale != (tensor_scale_inv && tensor_scale_inv->defined())) {
    refuse("{} {} tensor_scale_inv", format.name, needs_tensor_scale ? "needs" : "has no");
  }
  auto scale_sizes = grid_sizes;
  if (has_row_scales) {
    scale_sizes = sizes;
    scale_sizes.back() = layout.block_cols();
  }
  check_plane(scale_inv, "scale_inv", scalar_type(format.scale.dtype), scale_sizes, codes, format);
  if (needs_tensor_scale) {
    check_plane(*tensor_scale_inv, "tensor_scale_inv", at::kFloat, grid_sizes, codes, format);
  }
  if (layout.has_columnwise() &&
      (layout.row_offset % layout.coarsest_image().format->scale.block_rows ||
       layout.rows % layout.coarsest_image().format->scale.block_rows)) {
    refuse(
        "{} has blocks of {} rows, which rows [{}, {}) cut; give whole blocks, and take a window "
        "of the result",
        format.name, layout.coarsest_image().format->scale.block_rows, row_offset,
        row_offset + layout.rows);
  }

  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(codes.device());
  Tensor grid;
  if (format.has_grid()) {
    const Tensor& scales = needs_tensor_scale ? *tensor_scale_inv : scale_inv;
    if (!codes.is_meta()) {
      check_fp32_scales(scales, format, needs_tensor_scale ? "tensor_scale_inv" : "scale_inv");
    }
    grid = scales.reshape({layout.grid_rows(), layout.grid_cols()});
  }
  const auto image = at::zeros({layout.rows, layout.row_bytes()}, codes.options().dtype(at::kByte));
  if (!codes.is_meta()) {
    image.narrow(1, 0, layout.code_bytes())
        .copy_(codes.view(at::kByte).reshape({layout.rows, layout.code_bytes()}));
    if (layout.cols * format.code_bits % 8 != 0) {
      image.select(1, layout.code_bytes() - 1).bitwise_and_(0x0f);
    }
  }
  if (has_row_scales && !codes.is_meta()) {
    const auto bytes = scale_inv.view(at::kByte).reshape({layout.rows, layout.block_cols()});
    check_row_scales(bytes, layout);
    image.narrow(1, layout.row_scale_offset(), layout.block_cols()).copy_(bytes);
    if (layout.has_columnwise() && layout.rows > 0) quantize_columnwise(layout, image);
  }
  Placement placement(layout);
  if (logical_rows) placement.adopt(Groups());
  return make_tensor(make_buffer_of_codes(placement, dtype, keep_master, image, grid), sizes);
}

}  // namespace qshard
