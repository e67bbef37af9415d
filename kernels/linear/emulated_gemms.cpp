#include "kernels/linear/emulated_gemms.h"

#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "kernels/device/capture.h"
#include "kernels/linear/block_scaled_operand.h"

namespace qshard {
namespace {

constexpr int64_t kBlock = 128;

/// One operand of a product that contracts along its columns: values, times scales that values
/// cannot hold exactly.
struct Factor {
  at::Tensor values;        // float32, bfloat16 or float8 (rows, contracted)
  at::Tensor block_scales;  // float32 (rows, ceil(contracted / 128)), or undefined
  at::Tensor tensor_scale;  // float32 (1,), or undefined
  at::Tensor row_scales;    // float32 (rows,), or undefined
};

/// FP8 codes with scales of blocks, in either of the two ways.
Factor scaled_in_blocks(const at::Tensor& codes, const at::Tensor& block_scales,
                        bool power_of_two) {
  if (!power_of_two) return {codes, block_scales, {}, {}};
  const at::Tensor scales = block_scales.repeat_interleave(kBlock, 1).narrow(1, 0, codes.size(1));
  return {codes.to(at::kFloat).mul_(scales), {}, {}, {}};
}

/// The codes of (rows, contracted), without what pads them.
Factor factor_of(const PackedCodes& packed, const QuantizedMatrix& matrix, int64_t rows,
                 int64_t contracted) {
  const at::Tensor codes =
      packed_codes(packed, matrix.code_dtype).narrow(0, 0, rows).narrow(1, 0, contracted);
  if (packed.scale_mode == ScaleMode::kTensor) return {codes, {}, packed.scales(), {}};
  if (packed.scale_mode == ScaleMode::kRow) {
    return {codes, {}, {}, packed.scales().narrow(0, 0, rows)};
  }
  return scaled_in_blocks(codes, packed_block_scales(packed).narrow(0, 0, rows),
                          matrix.format->activations.power_of_two_scales);
}

/// The first `rows`. What pads them is left: the random Hadamard transform mixes values into it.
Factor factor_of(const RowImage& image, int64_t rows) {
  const Layout& layout = image.layout;
  if (!layout.format->outer_scale) {
    return {dequantized(matrix_of(image, rows), at::kFloat), {}, {}, {}};
  }
  // E2M1 code times E4M3 scale has six bits, which bfloat16 holds.
  RowImage unscaled = image;
  unscaled.grid = at::ones_like(image.grid.operand());
  return {dequantized(matrix_of(unscaled, rows), at::kBFloat16), {}, image.grid.operand(), {}};
}

/// An activation or gradient, along its rows or, transposed, along its columns.
Factor factor_of(const QuantizedMatrix& matrix, bool columnwise) {
  const CodeImage& image = columnwise ? matrix.columnwise : matrix.rowwise;
  const int64_t rows = columnwise ? matrix.cols : matrix.rows;
  const int64_t contracted = columnwise ? matrix.rows : matrix.cols;
  const auto* packed = std::get_if<PackedCodes>(&image);
  return packed != nullptr ? factor_of(*packed, matrix, rows, contracted)
                           : factor_of(std::get<RowImage>(image), rows);
}

/// A weight (N, K) whose scales lie in the grid; `transposed`: (K, N).
Factor grid_scaled_weight(const QuantizedMatrix& weight, bool transposed) {
  const RowImage& window = weight.row_image();
  const Layout& layout = window.layout;
  const Format& format = *layout.format;
  const int64_t n = weight.rows;
  const int64_t k = weight.cols;
  at::Tensor codes = window.image.view({layout.rows, layout.row_bytes()})
                         .narrow(0, window.first_row, n)
                         .narrow(1, 0, k)
                         .operand()
                         .view(at::kFloat8_e4m3fn);
  const int64_t first = layout.grid_row(layout.row_offset + window.first_row);
  const at::Tensor grid = window.grid.operand().view({layout.grid_rows(), layout.grid_cols()});
  if (format.gemm.scale_mode == ScaleMode::kTensor) {
    return {transposed ? codes.t() : codes, {}, grid.narrow(0, first, 1).view({1}), {}};
  }
  if (format.gemm.scale_mode == ScaleMode::kRow) {
    // Transposed it meets a gradient that has been multiplied by its scales.
    return {transposed ? codes.t() : codes,
            {},
            {},
            transposed ? at::Tensor() : weight_row_scales(weight)};
  }
  at::Tensor scales = grid.narrow(0, first, ceil_div(n, format.scale.block_rows));
  if (transposed) {
    codes = codes.t();
    scales = scales.t();
  }
  scales = scales.repeat_interleave(kBlock, 0).narrow(0, 0, codes.size(0));
  return scaled_in_blocks(codes, scales, format.scale.power_of_two);
}

Factor weight_factor(const QuantizedMatrix& weight, bool transposed) {
  if (weight.format->scale.is_in_grid()) return grid_scaled_weight(weight, transposed);
  Factor factor = factor_of(weight_rows(weight), weight.rows);
  if (transposed) factor.values = factor.values.t();
  return factor;
}

/// Whether bfloat16 holds all values. E4M3 codes times powers of two are in its range but for the
/// smallest: 2^-124 is the least scale whose subnormal codes it holds. That is read back from the
/// device, which a CUDA graph under capture cannot do: there the answer is no.
bool is_exact_in_bfloat16(const at::Tensor& values) {
  if (values.scalar_type() != at::kFloat) return true;
  if (is_capturing(values.device())) return false;
  return at::equal(values.to(at::kBFloat16).to(at::kFloat), values);
}

/// a @ b^T in fp32, of values that a product of two fp32 numbers holds exactly.
at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  // A backward that users call within autocast is on its thread, and mm would give its dtype.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  if (!a.is_cuda()) return at::mm(a.to(at::kFloat), b.to(at::kFloat).t());
  if (is_exact_in_bfloat16(a) && is_exact_in_bfloat16(b)) {
    // torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction does not matter here:
    // cuBLAS reduces in less than fp32 only where the output has less (cuBLAS documentation,
    // cublasMath_t).
    return at::mm(a.to(at::kBFloat16), b.to(at::kBFloat16).t(), at::kFloat);
  }
  // Users may have let fp32 GEMMs round their operands to TF32.
  return at::mm(a.to(at::kDouble), b.to(at::kDouble).t()).to(at::kFloat);
}

/// The same of operands with fp32 scales of blocks.
at::Tensor product_in_blocks(const Factor& a, const Factor& b) {
  const int64_t contracted = a.values.size(1);
  at::Tensor sum = at::zeros({a.values.size(0), b.values.size(0)}, a.block_scales.options());
  for (int64_t begin = 0; begin < contracted; begin += kBlock) {
    const int64_t size = std::min(kBlock, contracted - begin);
    const auto scales = [&](const Factor& factor) {
      return factor.block_scales.narrow(1, begin / kBlock, 1);
    };
    const at::Tensor part =
        product(a.values.narrow(1, begin, size), b.values.narrow(1, begin, size));
    sum.addcmul_(part, scales(a).mul(scales(b).t()));
  }
  return sum;
}

/// a @ b^T in fp32, with all scales.
at::Tensor scaled_product(const Factor& a, const Factor& b) {
  at::Tensor out = a.block_scales.defined() ? product_in_blocks(a, b) : product(a.values, b.values);
  // The factor of a sum is the product of the two scales, as cuBLASLt's alpha is of NVFP4.
  if (a.tensor_scale.defined()) out.mul_(a.tensor_scale.mul(b.tensor_scale));
  if (a.row_scales.defined()) out.mul_(a.row_scales.unsqueeze(1));
  // Rows that arrived meet a weight with one scale.
  if (!a.tensor_scale.defined() && b.tensor_scale.defined()) out.mul_(b.tensor_scale);
  if (b.row_scales.defined()) out.mul_(b.row_scales);
  return out;
}

at::ScalarType dtype_of(const at::TensorOptions& options) {
  return c10::typeMetaToScalarType(options.dtype());
}

}  // namespace

at::Tensor emulated_forward(const QuantizedMatrix& x, const QuantizedMatrix& weight,
                            const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                            const at::Tensor& added) {
  at::Tensor out = scaled_product(factor_of(x, /*columnwise=*/false),
                                  weight_factor(weight, /*transposed=*/false));
  if (bias) out.add_(*bias);
  if (added.defined()) out.add_(added);
  return out.to(dtype_of(options));
}

at::Tensor emulated_grad_input(const QuantizedMatrix& grad, const QuantizedMatrix& weight,
                               const at::TensorOptions& options) {
  return scaled_product(factor_of(grad, /*columnwise=*/false),
                        weight_factor(weight, /*transposed=*/true))
      .to(dtype_of(options));
}

at::Tensor emulated_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                                const at::TensorOptions& options) {
  return scaled_product(factor_of(grad, /*columnwise=*/true), factor_of(x, /*columnwise=*/true))
      .to(dtype_of(options));
}

}  // namespace qshard
