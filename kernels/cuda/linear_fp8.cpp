#include "kernels/cuda/linear_fp8.h"

#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/activation_kernels.h"
#include "kernels/cuda/check_launch.h"
#include "kernels/cuda/quantize_cuda.h"
#include "kernels/cuda/scaled_mm.h"
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

/// 90 for 9.0; 0 for what is no CUDA device.
int compute_capability(at::Device device) {
  if (!device.is_cuda() || c10::cuda::device_count() == 0) return 0;
  const auto index = device.has_index() ? device.index() : c10::cuda::current_device();
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(index);
  return 10 * properties->major + properties->minor;
}

// Codes of `rows` rows of `ld` bytes at the start of a buffer, their scales after them.
ScaledOperand operand_in(const at::Tensor& buffer, int64_t rows, int64_t ld, const Format& format,
                         DType code_dtype) {
  auto* codes = static_cast<uint8_t*>(buffer.mutable_data_ptr());
  ScaledOperand operand;
  operand.codes = codes;
  operand.rows = rows;
  operand.ld = ld;
  operand.dtype = code_dtype;
  operand.scale_mode = activation_scale_mode(format);
  operand.scale_inv = codes + rows * ld;
  return operand;
}

// cuBLASLt takes any number of tokens with one scale; 1x128 scales come in aligned columns.
int64_t rows_of_operand(const Format& format, int64_t m) {
  return is_blockwise(format) ? round_up(m, 16) : m;
}

float* scales_of(const ScaledOperand& operand) {
  return static_cast<float*>(const_cast<void*>(operand.scale_inv));
}

// The weight as an operand: its codes stay where they are, its scales are laid out for the GEMM.
struct WeightScales {
  at::Tensor buffer;
  const float* scale_inv = nullptr;
};

WeightScales weight_scales(const WeightOperand& weight, bool contract_rows) {
  const Layout& layout = weight.layout;
  const int64_t offset = layout.first_logical_row();
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
  check_launch(launch_gemm_block_scales(grid, row_blocks, col_blocks, contract_rows,
                                        scales.buffer.mutable_data_ptr<float>(), stream));
  return scales;
}

ScaledOperand weight_rows(const WeightOperand& weight, const WeightScales& scales) {
  const Layout& layout = weight.layout;
  ScaledOperand operand;
  operand.codes = static_cast<const uint8_t*>(weight.image.const_data_ptr()) +
                  weight.first_row * layout.row_bytes();
  operand.rows = weight.rows;
  operand.ld = layout.row_bytes();
  operand.dtype = layout.format->code_dtype;
  operand.scale_mode = is_blockwise(*layout.format) ? ScaleMode::kBlock128x128 : ScaleMode::kTensor;
  operand.scale_inv = scales.scale_inv;
  return operand;
}

}  // namespace

bool has_fp8_gemm(at::Device device, const Format& format) {
  const int capability = compute_capability(device);
  return is_blockwise(format) ? capability == 90 : capability >= 89;
}

bool has_every_fp8_gemm(at::Device device) { return compute_capability(device) == 90; }

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
    task.m_padded = rows_of_operand(format, m);
    out.buffer = empty_bytes(input_rows_bytes(m, k), x.device());
    out.rows = operand_in(out.buffer, task.m_padded, task.k_padded, format, code_dtype);
    task.codes = static_cast<uint8_t*>(out.buffer.mutable_data_ptr());
    task.scale_inv = scales_of(out.rows);
  }
  if (columns) {
    out.saved = empty_bytes(saved_input_bytes(m, k), x.device());
    out.columns = operand_in(out.saved, task.k_padded, task.m_padded_t, format, code_dtype);
    task.codes_t = static_cast<uint8_t*>(out.saved.mutable_data_ptr());
    task.scale_inv_t = scales_of(out.columns);
  }
  const DType dtype = value_dtype(x.scalar_type());
  if (is_blockwise(format)) {
    check_launch(launch_quantize_activation_1x128(task, dtype, stream));
    return out;
  }
  const at::Tensor amax = activation_amax(values, delayed);
  check_launch(launch_quantize_activation_tensorwise(task, amax.const_data_ptr<float>(), dtype,
                                                     code_dtype, stream));
  return out;
}

ScaledOperand rows_operand(const at::Tensor& buffer, const Format& format, int64_t m, int64_t k) {
  return operand_in(buffer, rows_of_operand(format, m), round_up(k, 16), format,
                    DType::kFloat8E4M3);
}

ScaledOperand saved_operand(const at::Tensor& saved, const Format& format, int64_t m, int64_t k) {
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

at::Tensor fp8_forward(const ScaledOperand& x, int64_t m, const WeightOperand& weight,
                       const std::optional<at::Tensor>& bias, const at::TensorOptions& options) {
  const WeightScales scales = weight_scales(weight, /*contract_rows=*/false);
  const int64_t k = round_up(weight.layout.cols, 16);
  // As other FP8 recipes do: the sum is rounded to 16 bits anyway. An fp32 output would show it.
  const bool fast_accumulate = !is_blockwise(*weight.layout.format) &&
                               c10::typeMetaToScalarType(options.dtype()) != at::kFloat;
  ScaledGemm gemm{x, weight_rows(weight, scales), k};
  gemm.fast_accumulate = fast_accumulate;
  return scaled_mm(gemm, m, weight.rows, bias, options);
}

at::Tensor fp8_grad_input(const ScaledOperand& grad, int64_t m, const WeightOperand& weight,
                          const at::TensorOptions& options) {
  const WeightScales scales = weight_scales(weight, /*contract_rows=*/true);
  ScaledOperand operand = weight_rows(weight, scales);
  const int64_t n = weight.rows;
  const int64_t k = round_up(weight.layout.cols, 16);
  const at::Tensor transposed = empty_bytes(k * n, weight.image.device());
  check_launch(launch_transpose_codes(static_cast<const uint8_t*>(operand.codes), n, k, operand.ld,
                                      static_cast<uint8_t*>(transposed.mutable_data_ptr()), n,
                                      c10::cuda::getCurrentCUDAStream()));
  operand.codes = transposed.const_data_ptr();
  operand.rows = k;
  operand.ld = n;
  return scaled_mm({grad, operand, n}, m, weight.layout.cols, std::nullopt, options);
}

at::Tensor fp8_grad_weight(const ScaledOperand& grad_t, const ScaledOperand& x_t, int64_t n,
                           int64_t k, const at::TensorOptions& options) {
  return scaled_mm({grad_t, x_t, x_t.ld}, n, k, std::nullopt, options);
}

bool fp8_add_grad_weight(const ScaledOperand& grad_t, const ScaledOperand& x_t,
                         const at::Tensor& sum) {
  return scaled_addmm({grad_t, x_t, x_t.ld}, sum);
}

}  // namespace qshard::cuda
