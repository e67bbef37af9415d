#include "kernels/cuda/linear_fp8.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/activation_kernels.h"
#include "kernels/cuda/quantize_cuda.h"
#include "kernels/value_dtype.h"

namespace qshard::cuda {
namespace {

at::Tensor empty_bytes(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

bool is_blockwise(const Format& format) { return format.block_rows != 0; }

ScaleMode activation_scale_mode(const Format& format) {
  return is_blockwise(format) ? ScaleMode::kBlock1x128 : ScaleMode::kTensor;
}

// Codes of `rows` rows of `ld` bytes at the start of a buffer, their scales after them.
Fp8Operand operand_in(const at::Tensor& buffer, int64_t rows, int64_t ld, const Format& format,
                      DType code_dtype) {
  auto* codes = static_cast<uint8_t*>(buffer.mutable_data_ptr());
  Fp8Operand operand;
  operand.codes = codes;
  operand.rows = rows;
  operand.ld = ld;
  operand.dtype = code_dtype;
  operand.scale_mode = activation_scale_mode(format);
  operand.scale_inv = reinterpret_cast<const float*>(codes + rows * ld);
  return operand;
}

// The weight as an operand: its codes stay where they are, its scales are laid out for the GEMM.
struct WeightScales {
  at::Tensor buffer;
  const float* scale_inv = nullptr;
};

WeightScales weight_scales(const WeightOperand& weight, bool contract_rows) {
  const Layout& layout = weight.layout;
  const int64_t offset = layout.row_offset == Layout::kOpen ? 0 : layout.row_offset;
  const int64_t first = layout.grid_row(offset + weight.first_row);
  const float* grid = weight.grid.const_data_ptr<float>() + first * layout.grid_cols();
  const bool aligned = reinterpret_cast<uintptr_t>(grid) % 16 == 0;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  WeightScales scales;
  scales.scale_inv = grid;
  if (!is_blockwise(*layout.format)) {
    if (aligned) return scales;
    // cuBLASLt takes scales at multiples of 16 bytes only; a later matrix's scale is at one of 4.
    scales.buffer = at::empty({1}, weight.grid.options());
    scales.scale_inv = scales.buffer.const_data_ptr<float>();
    C10_CUDA_CHECK(cudaMemcpyAsync(scales.buffer.mutable_data_ptr(), grid, sizeof(float),
                                   cudaMemcpyDeviceToDevice, stream));
    return scales;
  }
  const int64_t row_blocks = ceil_div(weight.rows, layout.format->block_rows);
  const int64_t col_blocks = layout.grid_cols();
  if (!contract_rows && col_blocks % 4 == 0 && aligned) return scales;
  const int64_t numel =
      contract_rows ? col_blocks * round_up(row_blocks, 4) : row_blocks * round_up(col_blocks, 4);
  scales.buffer = at::empty({numel}, weight.grid.options());
  scales.scale_inv = scales.buffer.const_data_ptr<float>();
  C10_CUDA_CHECK(launch_gemm_block_scales(grid, row_blocks, col_blocks, contract_rows,
                                          scales.buffer.mutable_data_ptr<float>(), stream));
  return scales;
}

Fp8Operand weight_rows(const WeightOperand& weight, const WeightScales& scales) {
  const Layout& layout = weight.layout;
  Fp8Operand operand;
  operand.codes = static_cast<const uint8_t*>(weight.image.const_data_ptr()) +
                  weight.first_row * layout.row_bytes();
  operand.rows = weight.rows;
  operand.ld = layout.row_bytes();
  operand.dtype = layout.format->code_dtype;
  operand.scale_mode = is_blockwise(*layout.format) ? ScaleMode::kBlock128x128 : ScaleMode::kTensor;
  operand.scale_inv = scales.scale_inv;
  return operand;
}

// out (rows, cols) = a @ b^T, of the operands' first rows; undefined if there is no kernel. Types
// and epilogues that cuBLASLt lacks are made up for: fp32 output, then bias and conversion.
at::Tensor gemm(const Fp8Operand& a, const Fp8Operand& b, int64_t k, int64_t rows, int64_t cols,
                const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                bool fast_accumulate) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const bool fuse_bias = bias && bias->scalar_type() == dtype && dtype != at::kFloat &&
                         bias->is_contiguous() &&
                         reinterpret_cast<uintptr_t>(bias->const_data_ptr()) % 16 == 0;
  const auto run = [&](at::ScalarType out_dtype, bool with_bias) {
    at::Tensor out = at::empty({a.rows, b.rows}, options.dtype(out_dtype));
    Fp8Gemm gemm;
    gemm.a = a;
    gemm.b = b;
    gemm.k = k;
    gemm.out = out.mutable_data_ptr();
    gemm.out_dtype = value_dtype(out_dtype);
    gemm.bias = with_bias ? bias->const_data_ptr() : nullptr;
    gemm.fast_accumulate = fast_accumulate;
    return fp8_gemm(gemm) ? out : at::Tensor();
  };
  bool has_bias = fuse_bias;
  at::Tensor out = fuse_bias ? run(dtype, true) : at::Tensor();
  if (!out.defined()) {
    has_bias = false;
    if (is_value_dtype(dtype)) out = run(dtype, false);
  }
  if (!out.defined() && dtype != at::kFloat) out = run(at::kFloat, false);
  if (!out.defined()) return out;
  if (a.rows != rows || b.rows != cols) {
    out = out.narrow(0, 0, rows).narrow(1, 0, cols).clone(at::MemoryFormat::Contiguous);
  }
  if (bias && !has_bias) out.add_(*bias);
  return out.to(dtype);
}

}  // namespace

bool has_fp8_gemm(at::Device device) {
  if (!device.is_cuda() || c10::cuda::device_count() == 0) return false;
  const auto index = device.has_index() ? device.index() : c10::cuda::current_device();
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(index);
  return properties->major == 9 && properties->minor == 0;
}

Fp8Activation quantize_activation(const at::Tensor& x, const Format& format, DType code_dtype,
                                  bool rows, bool columns, const DelayedAmax& delayed) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor values = x.contiguous();
  const int64_t m = x.size(0);
  const int64_t k = x.size(1);
  Fp8Activation out;
  ActivationTask task;
  task.values = values.const_data_ptr();
  task.m = m;
  task.k = k;
  task.k_padded = round_up(k, 16);
  task.m_padded_t = round_up(m, 128);
  task.power_of_two = format.power_of_two_scales;
  if (rows) {
    // cuBLASLt takes any number of tokens with one scale; 1x128 scales come in aligned columns.
    task.m_padded = is_blockwise(format) ? round_up(m, 16) : m;
    const int64_t scales = is_blockwise(format) ? ceil_div(k, 128) * task.m_padded : 1;
    out.buffer = empty_bytes(task.m_padded * task.k_padded + 4 * scales, x.device());
    out.rows = operand_in(out.buffer, task.m_padded, task.k_padded, format, code_dtype);
    task.codes = static_cast<uint8_t*>(out.buffer.mutable_data_ptr());
    task.scale_inv = const_cast<float*>(out.rows.scale_inv);
  }
  if (columns) {
    out.saved = empty_bytes(saved_input_bytes(m, k), x.device());
    out.columns = operand_in(out.saved, task.k_padded, task.m_padded_t, format, code_dtype);
    task.codes_t = static_cast<uint8_t*>(out.saved.mutable_data_ptr());
    task.scale_inv_t = const_cast<float*>(out.columns.scale_inv);
  }
  const DType dtype = value_dtype(x.scalar_type());
  if (is_blockwise(format)) {
    C10_CUDA_CHECK(launch_quantize_activation_1x128(task, dtype, stream));
    return out;
  }
  const at::Tensor amax = activation_amax(values, delayed);
  C10_CUDA_CHECK(launch_quantize_activation_tensorwise(task, amax.const_data_ptr<float>(), dtype,
                                                       code_dtype, stream));
  return out;
}

Fp8Operand saved_operand(const at::Tensor& saved, const Format& format, int64_t m, int64_t k) {
  return operand_in(saved, round_up(k, 16), round_up(m, 128), format, DType::kFloat8E4M3);
}

at::Tensor dequantize_saved(const at::Tensor& saved, const Format& format, int64_t m, int64_t k,
                            at::ScalarType dtype) {
  const int64_t rows = round_up(k, 16);
  const int64_t cols = round_up(m, 128);
  at::Tensor values =
      saved.narrow(0, 0, rows * cols).view({rows, cols}).view(at::kFloat8_e4m3fn).to(at::kFloat);
  at::Tensor scales = saved.narrow(0, rows * cols, saved.numel() - rows * cols).view(at::kFloat);
  if (is_blockwise(format)) {
    values = values.view({rows, cols / 128, 128});
    scales = scales.view({cols / 128, rows}).t().unsqueeze(2);
  } else {
    scales = scales.narrow(0, 0, 1);
  }
  return values.mul(scales).view({rows, cols}).narrow(0, 0, k).narrow(1, 0, m).t().to(dtype);
}

at::Tensor fp8_forward(const Fp8Operand& x, int64_t m, const WeightOperand& weight,
                       const std::optional<at::Tensor>& bias, const at::TensorOptions& options) {
  const WeightScales scales = weight_scales(weight, /*contract_rows=*/false);
  const int64_t k = round_up(weight.layout.cols, 16);
  // As other FP8 recipes do: the sum is rounded to 16 bits anyway. An fp32 output would show it.
  const bool fast_accumulate = !is_blockwise(*weight.layout.format) &&
                               c10::typeMetaToScalarType(options.dtype()) != at::kFloat;
  return gemm(x, weight_rows(weight, scales), k, m, weight.rows, bias, options, fast_accumulate);
}

at::Tensor fp8_grad_input(const Fp8Operand& grad, int64_t m, const WeightOperand& weight,
                          const at::TensorOptions& options) {
  const WeightScales scales = weight_scales(weight, /*contract_rows=*/true);
  Fp8Operand operand = weight_rows(weight, scales);
  const int64_t n = weight.rows;
  const int64_t k = round_up(weight.layout.cols, 16);
  const at::Tensor transposed = empty_bytes(k * n, weight.image.device());
  C10_CUDA_CHECK(launch_transpose_codes(
      static_cast<const uint8_t*>(operand.codes), n, k, operand.ld,
      static_cast<uint8_t*>(transposed.mutable_data_ptr()), n, c10::cuda::getCurrentCUDAStream()));
  operand.codes = transposed.const_data_ptr();
  operand.rows = k;
  operand.ld = n;
  return gemm(grad, operand, n, m, weight.layout.cols, std::nullopt, options, false);
}

at::Tensor fp8_grad_weight(const Fp8Operand& grad_t, const Fp8Operand& x_t, int64_t n, int64_t k,
                           const at::TensorOptions& options) {
  return gemm(grad_t, x_t, x_t.ld, n, k, std::nullopt, options, false);
}

}  // namespace qshard::cuda
