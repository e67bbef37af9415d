#include "kernels/grouped/grouped_gemm.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "kernels/device/check_launch.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/layout.h"
#include "kernels/format/value_dtype.h"
#include "kernels/gemm/sm90/gemm.h"
#include "kernels/linear/linear_fp8.h"

namespace qshard {
namespace {

constexpr int64_t kBlock = 128;

std::string shown(const at::Tensor& tensor) {
  return fmt::format("{} {} {} of strides {}", tensor.device().str(),
                     c10::toString(tensor.scalar_type()), tensor.sizes(), tensor.strides());
}

bool is_aligned(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

bool is_e4m3(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat8_e4m3fn || tensor.scalar_type() == at::kByte;
}

/// Rows of codes as the copy engine takes them; matrices of them lie one after the other.
bool has_rows_of_codes(const at::Tensor& codes, bool wide = false) {
  const int64_t row = codes.dim() - 2;
  const int64_t columns = codes.size(-1);
  const bool fits = wide ? codes.scalar_type() == at::kFloat8_e5m2 : is_e4m3(codes);
  if (!fits || columns % 16 != 0) return false;
  if (codes.numel() == 0) return true;
  const int64_t ld = codes.stride(row);
  const bool is_whole = row == 0 || codes.size(0) == 1 || codes.stride(0) == codes.size(1) * ld;
  return codes.stride(-1) == 1 && ld % 16 == 0 && ld >= columns && is_whole && is_aligned(codes);
}

bool has_row_scales(const at::Tensor& scales, const at::Tensor& codes) {
  return scales.scalar_type() == at::kFloat && scales.dim() == 2 && scales.is_contiguous() &&
         scales.size(1) % 4 == 0 && scales.size(0) == ceil_div(codes.size(1), kBlock) &&
         scales.size(1) >= codes.size(0) && is_aligned(scales);
}

bool has_square_scales(const at::Tensor& scales, const at::Tensor& codes) {
  if (scales.scalar_type() != at::kFloat || scales.dim() != codes.dim()) return false;
  const int64_t row = codes.dim() - 2;
  return scales.size(row) == ceil_div(codes.size(row), kBlock) &&
         scales.size(row + 1) >= ceil_div(codes.size(row + 1), kBlock) &&
         (row == 0 || scales.size(0) == codes.size(0));
}

bool has_constant_scales(const GroupedOperands& with) {
  return with.a_group_scales.defined() || with.a_row_vector.defined();
}

bool is_wide(const GroupedOperands& with) {
  return has_constant_scales(with) && with.a.scalar_type() == at::kFloat8_e5m2;
}

/// One scale for each group, or a vector of them, and not both.
bool fits(const at::Tensor& of_groups, const at::Tensor& vector, at::IntArrayRef vector_sizes,
          const GroupedOperands& with) {
  if (of_groups.defined() == vector.defined()) return false;
  const at::Tensor& scales = vector.defined() ? vector : of_groups;
  return scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
         scales.sizes() == (vector.defined() ? vector_sizes : with.offs.sizes()) &&
         scales.device() == with.a.device();
}

bool have_constant_scales(const GroupedOperands& with, int64_t n) {
  const int64_t groups = with.offs.size(0);
  const bool cuts_rows = with.b.dim() == 3;
  const int64_t of_a[] = {groups, with.a.size(0)}, of_b[] = {groups, n};
  const at::IntArrayRef a_sizes = cuts_rows ? at::IntArrayRef(of_a).slice(1) : of_a;
  return fits(with.a_group_scales, with.a_row_vector, a_sizes, with) &&
         fits(with.b_group_scales, with.b_row_vector, of_b, with);
}

int64_t product_columns(const GroupedOperands& with) {
  const int64_t all = with.b.size(with.b.dim() == 2 ? 0 : with.contract_rows ? 2 : 1);
  return with.columns != 0 ? with.columns : all;
}

void check(const char* op, const GroupedOperands& with) {
  const auto& [a, a_scales, b, b_scales, offs, tokens, contract_rows, square_scales, tile_rows,
               dtype, columns, sum, a_group_scales, b_group_scales, a_row_vector, b_row_vector] =
      with;
  const bool cuts_rows = b.dim() == 3;
  TORCH_CHECK(a.dim() == 2 && (cuts_rows || b.dim() == 2) && has_rows_of_codes(a, is_wide(with)) &&
                  has_rows_of_codes(b) && (cuts_rows || !contract_rows) &&
                  a.size(1) == b.size(contract_rows ? 1 : -1),
              fmt::format("{}: needs E4M3 codes (T, K) and (groups, N, K), or (M, T') and (N, T'), "
                          "of rows that are multiples of 16 bytes and aligned to them, got {} "
                          "and {}",
                          op, shown(a), shown(b)));
  TORCH_CHECK(
      offs.dim() == 1 && offs.scalar_type() == at::kInt && offs.is_contiguous() &&
          offs.device() == a.device() && (!cuts_rows || offs.size(0) == b.size(0)),
      fmt::format("{}: offs must be int32 ({},) on {}, got {}", op,
                  cuts_rows ? std::to_string(b.size(0)) : "groups", a.device().str(), shown(offs)));
  const bool by_group = has_constant_scales(with);
  TORCH_CHECK(!by_group || have_constant_scales(with, product_columns(with)),
              fmt::format("{}: needs float32 scales of both operands, for each of {} groups or for "
                          "each row",
                          op, offs.size(0)));
  const auto fit = [&] {
    return has_row_scales(a_scales, a) &&
           (square_scales ? has_square_scales(b_scales, b)
                          : !cuts_rows && has_row_scales(b_scales, b));
  };
  TORCH_CHECK(by_group || fit(),
              fmt::format("{}: scales of {} and of {} do not fit codes {} and {}", op,
                          shown(a_scales), shown(b_scales), a.sizes(), b.sizes()));
  TORCH_CHECK(
      cuts_rows ? tokens == a.size(0) : tokens >= 0 && a.size(1) >= round_up(tokens, kBlock),
      fmt::format("{}: {} tokens do not fit codes {}", op, tokens, a.sizes()));
  TORCH_CHECK(tile_rows == 0 || tile_rows == 64 || tile_rows == 128 || tile_rows == 256,
              fmt::format("{}: tiles have 64, 128 or 256 rows, got {}", op, tile_rows));
  TORCH_CHECK(
      is_value_dtype(dtype) && columns >= 0 &&
          (columns == 0 || (cuts_rows && columns <= b.size(contract_rows ? 2 : 1))),
      fmt::format("{}: the product is float32, bfloat16 or float16, of no more columns than "
                  "{} gives, got {} of {} columns",
                  op, b.sizes(), c10::toString(dtype), columns));
  TORCH_CHECK(
      !sum.defined() || (!cuts_rows && sum.is_contiguous() && sum.scalar_type() == dtype &&
                         sum.device() == a.device() && is_aligned(sum) &&
                         sum.sizes() == at::IntArrayRef{offs.size(0), a.size(0), b.size(0)}),
      fmt::format("{}: cannot add to {}", op, sum.defined() ? shown(sum) : ""));
}

}  // namespace

bool has_grouped_gemm(at::Device device) { return cuda::has_every_fp8_gemm(device); }

at::Tensor grouped_gemm(const char* op, const GroupedOperands& with) {
  TORCH_CHECK(
      has_grouped_gemm(with.a.device()),
      fmt::format("{}: needs a GPU of compute capability 9.0, got {}", op, with.a.device().str()));
  check(op, with);
  const bool cuts_rows = with.b.dim() == 3;
  const int64_t n = product_columns(with);
  cuda::GroupedGemm gemm;
  gemm.along = cuts_rows ? cuda::GroupsAlong::kRows : cuda::GroupsAlong::kContraction;
  gemm.groups = with.offs.size(0);
  gemm.total = with.tokens;
  gemm.n = n;
  gemm.transposes_b = with.contract_rows;
  const auto options = with.a.options().dtype(with.dtype);
  at::Tensor out = with.sum.defined() ? with.sum
                   : cuts_rows        ? at::empty({with.tokens, n}, options)
                                      : at::empty({with.offs.size(0), with.a.size(0), n}, options);
  const auto codes_of = [](const at::Tensor& codes, const at::Tensor& scales, bool has_scales) {
    cuda::GroupedCodes operand;
    operand.codes = static_cast<const uint8_t*>(codes.const_data_ptr());
    operand.columns = codes.size(-1);
    operand.rows = codes.dim() == 3 ? codes.size(0) * codes.size(1) : codes.size(0);
    operand.ld = codes.stride(-2);
    if (has_scales) {
      operand.scales = scales.const_data_ptr<float>();
      operand.scale_ld = scales.size(1);
    }
    return operand;
  };
  const bool by_group = has_constant_scales(with);
  gemm.a = codes_of(with.a, with.a_scale_inv, !by_group);
  gemm.b = codes_of(with.b, with.b_scale_inv, !by_group && !with.square_scales);
  if (by_group) {
    const auto floats = [](const at::Tensor& scales) {
      return scales.defined() ? scales.const_data_ptr<float>() : nullptr;
    };
    gemm.a.group_scales = floats(with.a_group_scales);
    gemm.a.row_vector = floats(with.a_row_vector);
    gemm.b.group_scales = floats(with.b_group_scales);
    gemm.b.row_vector = floats(with.b_row_vector);
    gemm.a.is_wide = is_wide(with);
  } else if (with.square_scales) {
    const at::Tensor& scales = with.b_scale_inv;
    gemm.square_scales = {scales.const_data_ptr<float>(), cuts_rows ? scales.stride(0) : 0,
                          scales.stride(-2), scales.stride(-1)};
    if (gemm.transposes_b) std::swap(gemm.square_scales.rows, gemm.square_scales.block);
  }
  gemm.offs = with.offs.const_data_ptr<int32_t>();
  gemm.d = out.mutable_data_ptr();
  gemm.d_type = value_dtype(with.dtype);
  gemm.adds = with.sum.defined();
  const int tile_rows =
      with.tile_rows != 0 ? static_cast<int>(with.tile_rows) : cuda::tile_rows_for(gemm);
  const Stream stream = current_stream(with.a.device());
  cuda::check_launch(
      cuda::grouped_gemm_sm90(gemm, tile_rows, static_cast<cudaStream_t>(stream.handle)));
  return out;
}

}  // namespace qshard
