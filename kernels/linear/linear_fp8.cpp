#include "kernels/linear/linear_fp8.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/activation/kernels.h"
#include "kernels/device/check_launch.h"
#include "kernels/device/compute_capability.h"
#include "kernels/format/value_dtype.h"
#include "kernels/gemm/scaled_mm.h"
#include "kernels/linear/linear_amax.h"
#include "kernels/linear/packed_activation.h"
#include "kernels/quantize/quantize_cuda.h"

namespace qshard::cuda {
namespace {

ScaledOperand rows_of(const QuantizedMatrix& matrix) {
  return scaled_operand(std::get<PackedCodes>(matrix.rowwise), matrix.code_dtype);
}

ScaledOperand columns_of(const QuantizedMatrix& matrix) {
  return scaled_operand(std::get<PackedCodes>(matrix.columnwise), matrix.code_dtype);
}

// The weight as an operand: its codes stay where they are, its scales are laid out for the GEMM.
struct WeightScales {
  at::Tensor buffer;
  const float* scale_inv = nullptr;
  ScaleMode mode;
};

// `met`: the scales of the rows that the weight is multiplied with. One for each row meets as many.
WeightScales weight_scales(const QuantizedMatrix& weight, bool contract_rows, ScaleMode met) {
  const RowImage& rows = weight.row_image();
  const Layout& layout = rows.layout;
  const int64_t offset = layout.row_offset;
  const int64_t first = layout.grid_row(offset + rows.first_row);
  const float* grid = rows.grid.const_data_ptr<float>() + first * layout.grid_cols();
  const bool aligned = reinterpret_cast<uintptr_t>(grid) % 16 == 0;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  WeightScales scales;
  scales.scale_inv = grid;
  const ScaleMode mode = layout.format->gemm.scale_mode;
  scales.mode = mode;
  if (mode == ScaleMode::kTensor && met == ScaleMode::kRow) {
    scales.mode = met;
    const int64_t count = contract_rows ? round_up(layout.cols, 16) : weight.rows;
    scales.buffer = rows.grid.operand().view({-1}).narrow(0, first, 1).repeat({count});
    scales.scale_inv = scales.buffer.const_data_ptr<float>();
    return scales;
  }
  if (mode == ScaleMode::kRow && contract_rows) {
    // The gradient has been multiplied by them.
    scales.buffer = at::ones({round_up(layout.cols, 16)}, rows.grid.options());
    scales.scale_inv = scales.buffer.const_data_ptr<float>();
    return scales;
  }
  if (mode == ScaleMode::kTensor || mode == ScaleMode::kRow) {
    if (aligned) return scales;
    // cuBLASLt takes scales at multiples of 16 bytes only; a later matrix's scale is at one of 4.
    const int64_t count = mode == ScaleMode::kRow ? weight.rows : 1;
    scales.buffer = at::empty({count}, rows.grid.options());
    scales.scale_inv = scales.buffer.const_data_ptr<float>();
    C10_CUDA_CHECK(cudaMemcpyAsync(scales.buffer.mutable_data_ptr(), grid, count * sizeof(float),
                                   cudaMemcpyDeviceToDevice, stream));
    return scales;
  }
  const int64_t row_blocks = ceil_div(weight.rows, layout.format->scale.block_rows);
  const int64_t col_blocks = layout.grid_cols();
  if (!contract_rows && col_blocks % 4 == 0 && aligned) return scales;
  const int64_t numel =
      contract_rows ? col_blocks * round_up(row_blocks, 4) : row_blocks * round_up(col_blocks, 4);
  scales.buffer = at::empty({numel}, rows.grid.options());
  scales.scale_inv = scales.buffer.const_data_ptr<float>();
  check_launch(launch_gemm_block_scales(grid, row_blocks, col_blocks, contract_rows,
                                        scales.buffer.mutable_data_ptr<float>(), stream));
  return scales;
}

ScaledOperand weight_rows(const QuantizedMatrix& weight, const WeightScales& scales) {
  const RowImage& rows = weight.row_image();
  const Layout& layout = rows.layout;
  ScaledOperand operand;
  operand.codes = static_cast<const uint8_t*>(rows.image.const_data_ptr()) +
                  rows.first_row * layout.row_bytes();
  operand.rows = weight.rows;
  operand.ld = layout.row_bytes();
  operand.dtype = layout.format->code_dtype;
  operand.scale_mode = scales.mode;
  operand.scale_inv = scales.scale_inv;
  return operand;
}

}  // namespace

bool has_fp8_gemm(at::Device device, ScaleMode packed_rows) {
  const int capability = compute_capability(device);
  return packed_rows == ScaleMode::kTensor ? capability >= 89 : capability == 90;
}

bool has_every_fp8_gemm(at::Device device) { return compute_capability(device) == 90; }

QuantizedMatrix quantize_activation(const at::Tensor& x, const OperandRequest& request,
                                    at::Tensor& amax) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor values = x.contiguous();
  const QuantizedMatrix out = empty_packed(x.size(0), x.size(1), request, x.device());
  ActivationTask task = activation_task(out);
  task.values = values.const_data_ptr();
  const DType dtype = value_dtype(x.scalar_type());
  if (packed_scale_mode(*request.format) == ScaleMode::kBlock1x128) {
    check_launch(launch_quantize_activation_in_blocks(task, dtype, stream));
    return out;
  }
  if (has_scale_per_row(*request.format)) {
    if (request.column_factors.defined()) {
      task.column_factors = request.column_factors.const_data_ptr<float>();
    }
    check_launch(launch_quantize_activation_in_rows(task, dtype, stream));
    return out;
  }
  if (!request.delayed && !amax.defined() && is_quantized_at_once(task, dtype)) {
    amax = at::empty({1}, values.options().dtype(at::kFloat));
    const int blocks = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    const auto maxima = c10::cuda::CUDACachingAllocator::get()->allocate(blocks * sizeof(uint32_t));
    check_launch(launch_quantize_activation_at_once(task, amax.mutable_data_ptr<float>(),
                                                    static_cast<uint32_t*>(maxima.get()), blocks,
                                                    dtype, out.code_dtype, stream));
    return out;
  }
  if (const HeldPreviousAmax previous = previous_amax(request, amax, x.device());
      previous.amax != nullptr) {
    const at::Tensor own = at::empty({1}, values.options().dtype(at::kFloat));
    check_launch(launch_quantize_activation_by_previous(
        task, previous, own.mutable_data_ptr<float>(), dtype, out.code_dtype, stream));
    if (!request.delayed) amax = own;
    return out;
  }
  if (!amax.defined()) amax = activation_amax(values);
  check_launch(launch_quantize_activation_tensorwise(task, amax.const_data_ptr<float>(), dtype,
                                                     out.code_dtype, stream));
  return out;
}

QuantizedMatrix repack_activation(const QuantizedMatrix& rows, const OperandRequest& request) {
  const RowImage& image = rows.row_image();
  const at::Device device = image.image.device();
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto out =
      arrived_matrix(rows, request, [&](int64_t bytes) { return empty_bytes(bytes, device); });
  ActivationTask task = activation_task(out);
  if (!has_row_scale(rows)) {
    check_launch(launch_repack(coded_rows(image), task, stream));
    return out;
  }
  task.codes = nullptr;  // which stay where they are
  const auto* columns = std::get_if<PackedCodes>(&out.columnwise);
  const at::Tensor largest = at::empty({1}, at::TensorOptions().dtype(at::kInt).device(device));
  const bool by_row = columns != nullptr && columns->scale_mode == ScaleMode::kRow;
  check_launch(launch_repack_in_rows(
      coded_rows(image), task,
      {.largest = largest.mutable_data_ptr<int32_t>(), .scales = by_row ? columns->rows : 1},
      stream));
  return out;
}

ScaledOperand scaled_operand(const PackedCodes& packed, DType code_dtype) {
  ScaledOperand operand;
  operand.codes = codes_in(packed);
  operand.rows = packed.rows;
  operand.ld = packed.ld;
  operand.dtype = code_dtype;
  operand.scale_mode = packed.scale_mode;
  operand.scale_inv = packed.scale_data();
  return operand;
}

at::Tensor fp8_forward(const QuantizedMatrix& x, const QuantizedMatrix& weight,
                       const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                       const at::Tensor& added) {
  const ScaledOperand rows = rows_of(x);
  const auto scales = weight_scales(weight, /*contract_rows=*/false, rows.scale_mode);
  const int64_t k = round_up(weight.cols, 16);
  ScaledGemm gemm{rows, weight_rows(weight, scales), k};
  // As other FP8 recipes do: the sum is rounded to 16 bits anyway. An fp32 output would show it.
  gemm.fast_accumulate = gemm.b.scale_mode == ScaleMode::kTensor &&
                         c10::typeMetaToScalarType(options.dtype()) != at::kFloat;
  return scaled_mm(gemm, x.rows, weight.rows, bias, options, added);
}

at::Tensor fp8_grad_input(const QuantizedMatrix& grad, const QuantizedMatrix& weight,
                          const at::TensorOptions& options, const at::Tensor& sum) {
  const ScaledOperand rows = rows_of(grad);
  const auto scales = weight_scales(weight, /*contract_rows=*/true, rows.scale_mode);
  ScaledOperand operand = weight_rows(weight, scales);
  const int64_t n = weight.rows;
  const int64_t k = round_up(weight.cols, 16);
  const at::Tensor transposed = empty_bytes(k * n, weight.row_image().image.device());
  check_launch(launch_transpose_codes(static_cast<const uint8_t*>(operand.codes), n, k, operand.ld,
                                      static_cast<uint8_t*>(transposed.mutable_data_ptr()), n,
                                      c10::cuda::getCurrentCUDAStream()));
  operand.codes = transposed.const_data_ptr();
  operand.rows = k;
  operand.ld = n;
  const ScaledGemm gemm{rows, operand, n};
  if (sum.defined() && scaled_addmm(gemm, sum)) return sum;
  return scaled_mm(gemm, grad.rows, weight.cols, std::nullopt, options);
}

at::Tensor fp8_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                           const at::TensorOptions& options) {
  const ScaledOperand x_t = columns_of(x);
  return scaled_mm({columns_of(grad), x_t, x_t.ld}, grad.cols, x.cols, std::nullopt, options);
}

bool fp8_add_grad_weight(const QuantizedMatrix& grad, const QuantizedMatrix& x,
                         const at::Tensor& sum) {
  const ScaledOperand x_t = columns_of(x);
  return scaled_addmm({columns_of(grad), x_t, x_t.ld}, sum);
}

}  // namespace qshard::cuda
