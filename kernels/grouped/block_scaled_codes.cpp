#include "kernels/grouped/block_scaled_codes.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "kernels/device/capture.h"
#include "kernels/device/compute_capability.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/whole_layout.h"
#include "kernels/grouped/grouped_values.h"
#include "kernels/linear/block_scaled_operand.h"
#include "kernels/linear/gemm_backend.h"
#include "kernels/transpose/transpose.h"

namespace qshard {
namespace {

// The operator takes multiples of these: of codes that are contracted, of columns of a product.
constexpr int64_t kContracted = 32, kColumns = 16;

at::Tensor image_rows(const RowImage& image) {
  return image.image.operand().view({image.layout.rows, image.layout.row_bytes()});
}

/// The codes in rows of an image, padded to a multiple of 32.
at::Tensor codes_in(const at::Tensor& rows, const Layout& layout) {
  const int64_t bytes = round_up(layout.cols, kContracted) * layout.format->code_bits / 8;
  const int64_t held = std::min(bytes, layout.row_scale_offset());
  return at::constant_pad_nd(rows.narrow(1, 0, held), {0, bytes - held}).contiguous();
}

at::Tensor scales_in(const at::Tensor& rows, const Layout& layout) {
  return rows.narrow(1, layout.row_scale_offset(), layout.block_cols());
}

/// The image of matrices of `matrix_rows` rows, those of an expert with one tensor scale.
RowImage quantized_by_expert(const at::Tensor& values, const Format& format, int64_t matrix_rows,
                             const at::Tensor& expert_of, int64_t experts,
                             const int32_t* rounding) {
  const int64_t rows = values.size(0);
  const Layout layout{.format = &activation_format(format),
                      .rows = rows,
                      .cols = values.size(1),
                      .logical_rows = rows,
                      .matrix_rows = matrix_rows};
  return quantized_as(values, layout, rounding, [&](const at::Tensor& amax) {
    const at::Tensor bits = amax.view(at::kInt);  // among which NaN's are the largest
    const at::Tensor is_of = expert_of == at::arange(experts, expert_of.options()).unsqueeze(1);
    const at::Tensor largest = at::where(is_of, bits, at::zeros({}, bits.options())).amax(1);
    bits.copy_(largest.index_select(0, expert_of));
  });
}

/// What the rows of one call are quantized by.
class BlockScaledGroups {
 public:
  BlockScaledGroups(const GivenOperand& x, const Format& format, const RowGroups& groups)
      : x_(x),
        format_(format),
        is_coded_(x.arrived() != nullptr && x.arrived()->meets(format)),
        has_tensor_scale_(activation_format(format).has_tensor_scale()),
        total_(x.rows()),
        given_ends_(groups.ends(total_)),
        aligned_(given_ends_, total_, kGroupAlignment),
        expert_of_tile_(aligned_.expert_of.view({-1, kGroupAlignment}).select(1, 0)) {}

  at::Tensor ends() const { return aligned_.ends; }

  BlockScaledCodes rows(const int32_t* rounding) const {
    BlockScaledCodes made;
    made.rows = total_;
    if (!has_tensor_scale_) {  // each row has scales of its own
      const RowImage image =
          is_coded_ ? x_.arrived()->image() : quantized_rows(x_.values(), format_, rounding);
      const at::Tensor lying = image_rows(image);
      made.codes = codes_in(lying, image.layout);
      made.scales = swizzled(aligned_.of(scales_in(lying, image.layout)));
      return made;
    }
    const RowImage image = quantized_by_expert(aligned_.of(x_.values()), format_, kGroupAlignment,
                                               expert_of_tile_, experts(), rounding);
    const at::Tensor lying = image_rows(image);
    const at::Tensor places = aligned_.places(given_ends_, total_);
    made.codes = codes_in(lying.index_select(0, places), image.layout);
    made.scales = swizzled(scales_in(lying, image.layout));
    made.tensor_scales = tensor_scales(image);
    return made;
  }

  BlockScaledCodes columns(const int32_t* rounding) const {
    // In float32 each code that arrived times its scale is exact.
    const at::Tensor values = aligned_.of(is_coded_ ? x_->values(at::kFloat) : x_.values());
    const int64_t k = values.size(1), tiles = values.size(0) / kGroupAlignment;
    // With a scale for each expert, 128 tokens are a matrix, and lie below the ones before.
    const int64_t matrices = has_tensor_scale_ ? tiles : 1;
    RowImage image;
    if (has_tensor_scale_) {
      const at::Tensor by_tile = transposed_values(values, format_.activations.hadamard_columns)
                                     .view({k, tiles, kGroupAlignment})
                                     .transpose(0, 1)
                                     .reshape({tiles * k, kGroupAlignment});
      image = quantized_by_expert(by_tile, format_, k, expert_of_tile_, experts(), rounding);
    } else {
      image = quantized_columns(values, format_, rounding);
    }
    const Layout& layout = image.layout;
    const at::Tensor lying = image_rows(image).view({matrices, -1, layout.row_bytes()});
    const int64_t rows = lying.size(1);
    const auto beside_each_other = [&](int64_t first, int64_t bytes) {
      const at::Tensor joined =
          lying.narrow(2, first, bytes).transpose(0, 1).reshape({rows, matrices * bytes});
      return at::constant_pad_nd(joined, {0, 0, 0, round_up(k, kColumns) - rows}).contiguous();
    };
    BlockScaledCodes made;
    made.rows = k;
    made.codes = beside_each_other(0, layout.code_bytes());
    const at::Tensor scales = beside_each_other(layout.row_scale_offset(), layout.block_cols());
    const int64_t block = layout.format->scale.block_cols;
    made.scales = swizzled_by_group(scales, aligned_.ends.div(block, "floor"));
    if (has_tensor_scale_) made.tensor_scales = tensor_scales(image);
    return made;
  }

 private:
  int64_t experts() const { return aligned_.ends.size(0); }
  /// float32 (experts,): that of each, any for one without rows.
  at::Tensor tensor_scales(const RowImage& image) const {
    const int64_t tiles = expert_of_tile_.size(0);
    const at::Tensor first = starts_of(aligned_.ends).div(kGroupAlignment, "floor");
    return image.grid.operand().view({-1}).index_select(0, first.clamp_max(tiles - 1));
  }

  const GivenOperand& x_;
  const Format& format_;
  bool is_coded_;  // it arrived in the codes that are asked for
  bool has_tensor_scale_;
  int64_t total_;
  at::Tensor given_ends_;
  AlignedRows aligned_;
  at::Tensor expert_of_tile_;  // int64 (tiles of 128 aligned rows,)
};

}  // namespace

bool has_block_scaled_grouped_gemm(const Format& format, at::Device device, at::ScalarType dtype) {
  const ScaleMode mode = format.gemm.scale_mode;
  const bool is_of_mode = mode == ScaleMode::kBlock1x32 || mode == ScaleMode::kBlock1x16;
  // torch has no such kernel on the CPU. One that is registered there multiplies what is emulated.
  if (!is_of_mode || dtype != at::kBFloat16 || format.emulated != device.is_cpu()) return false;
  if (device.is_cuda() && cuda::compute_capability(device) / 10 != 10) return false;
  if (!has_scaled_grouped_mm(device)) return false;
  static std::mutex mutex;
  static std::map<std::pair<ScaleMode, c10::DeviceIndex>, bool> tried;
  const std::lock_guard lock(mutex);
  const auto [found, is_new] = tried.try_emplace({mode, device.index()}, false);
  if (is_new && is_capturing(device)) {
    tried.erase(found);
    return false;
  }
  if (is_new) found->second = tries_scaled_grouped_mm(mode, device);
  return found->second;
}

bool is_too_large_for_block_scaled(const ExpertWeights& weights, int64_t total) {
  constexpr int64_t kMostExperts = 1024;  // each is a thread of one block of MSLK's
  const int64_t n = round_up(weights.rows, kGroupAlignment);
  const int64_t k = round_up(weights.stack.codes.cols, kGroupAlignment);
  const int64_t rows = total + kGroupAlignment * weights.count;
  return weights.count > kMostExperts || is_too_large(rows, weights.count * n, k) ||
         rows * std::max(n, k) / kColumns > std::numeric_limits<int32_t>::max();
}

GroupCodes quantize_block_scaled_groups(const GivenOperand& x, const Format& format,
                                        Orientations orientations, const RowGroups& groups,
                                        const GradientRounding& rounding) {
  GroupCodes made;
  made.block_rows.rows = x.rows();
  made.block_columns.rows = x->sizes()[1];
  if (x.rows() == 0 || x->sizes()[1] == 0) return made;
  const BlockScaledGroups of(x, format, groups);
  const auto words = [](const at::Tensor& drawn) {
    return drawn.defined() ? drawn.const_data_ptr<int32_t>() : nullptr;
  };
  if (orientations.rowwise) made.block_rows = of.rows(words(rounding.rows));
  if (orientations.columnwise) {
    made.block_columns = of.columns(words(rounding.columns));
    made.column_ends = of.ends();
  }
  return made;
}

BlockScaledCodes block_scaled_weights(const ExpertWeights& weights, bool transposes) {
  const RowImage& image = weights.stack.codes.row_image();
  const Layout& layout = image.layout;
  const int64_t experts = weights.count, n = weights.rows, k = layout.cols;
  at::Tensor rows = image_rows(image).narrow(0, image.first_row, experts * n);
  BlockScaledCodes made;
  if (layout.format->has_tensor_scale()) {
    const int64_t first = layout.grid_row(layout.row_offset + image.first_row);
    made.tensor_scales = image.grid.operand().view({-1}).narrow(0, first, experts);
  }
  if (!transposes) {
    made.rows = n;
    made.codes = codes_in(rows, layout).view({experts, n, -1});
    made.scales = swizzled(scales_in(rows, layout).unflatten(0, {experts, n}));
    return made;
  }
  made.rows = k;
  // Rows of zeros, so that blocks of the one transposed matrix belong to one expert.
  const int64_t padded = round_up(n, kContracted);
  if (padded != n) {
    rows = at::constant_pad_nd(rows.view({experts, n, -1}), {0, 0, 0, padded - n});
  }
  const Layout from = whole_layout(*layout.format, experts * padded, k).with_images(layout.images);
  const Layout to = transposed_layout(from);
  const at::Tensor out = at::empty({to.rows, to.row_bytes()}, rows.options());
  transpose_image(
      {from, static_cast<const uint8_t*>(rows.const_data_ptr()), out.mutable_data_ptr<uint8_t>()},
      current_stream(rows.device()));
  const auto of_each = [&](int64_t first, int64_t bytes) {
    return out.narrow(1, first, bytes).unflatten(1, {experts, -1}).transpose(0, 1);
  };
  made.codes = of_each(0, to.code_bytes()).contiguous();
  made.scales = swizzled(of_each(to.row_scale_offset(), to.block_cols()));
  return made;
}

at::Tensor multiply_by_block_scaled_codes(const GroupCodes& x, const ExpertWeights& weights,
                                          const RowGroups& groups, bool contract) {
  const BlockScaledCodes& rows = x.block_rows;
  const int64_t columns = contract ? weights.stack.codes.cols : weights.rows;
  if (!rows.codes.defined() || columns == 0) {
    return at::zeros({rows.rows, columns}, groups.offs.options().dtype(at::kBFloat16));
  }
  const at::Tensor ends = groups.ends(rows.rows);
  const at::Tensor product = scaled_grouped_mm(weights.stack.codes.format->gemm.scale_mode, rows,
                                               block_scaled_weights(weights, contract), ends)
                                 .narrow(1, 0, columns)
                                 .contiguous();
  zero_rows_of_none(product, ends);
  return product;
}

at::Tensor multiply_block_scaled_columns(const GroupCodes& gradient, const GroupCodes& input,
                                         const RowGroups& groups, at::ScalarType dtype,
                                         const at::Tensor& sum) {
  const BlockScaledCodes &a = gradient.block_columns, &b = input.block_columns;
  if (!a.codes.defined() || !b.codes.defined()) {
    const auto options = groups.offs.options().dtype(dtype);
    return sum.defined() ? sum : at::zeros({groups.count(), a.rows, b.rows}, options);
  }
  const ScaleMode mode = a.tensor_scales.defined() ? ScaleMode::kBlock1x16 : ScaleMode::kBlock1x32;
  const at::Tensor& ends = gradient.column_ends;
  const at::Tensor product =
      scaled_grouped_mm(mode, a, b, ends).narrow(1, 0, a.rows).narrow(2, 0, b.rows);
  return weight_gradient(product, ends - starts_of(ends), dtype, sum);
}

}  // namespace qshard
