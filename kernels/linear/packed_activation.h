// Packed codes of an activation or gradient in memory of their own, and the task that fills them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "kernels/activation/kernels.h"
#include "kernels/linear/operand_producer.h"

namespace qshard::cuda {

inline at::Tensor empty_bytes(int64_t bytes, at::Device device) {
  return at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

inline uint8_t* codes_in(const PackedCodes& packed) {
  return static_cast<uint8_t*>(packed.buffer.mutable_data_ptr());
}

inline bool has_one_scale(const Format& format) {
  return packed_scale_mode(format) == ScaleMode::kTensor;
}

/// Before the kernel that finds amaxes: raise() takes the largest.
inline at::Tensor no_amax(int64_t count, at::Device device) {
  return at::zeros({count}, at::TensorOptions().dtype(at::kFloat).device(device));
}

/// The codes of a matrix (M, K) that a request asks for, yet to be written.
inline QuantizedMatrix empty_packed(int64_t m, int64_t k, const OperandRequest& request,
                                    at::Device device) {
  return packed_matrix(request, m, k, [&](int64_t bytes) { return empty_bytes(bytes, device); });
}

/// The previous amax for the kernels of one use, which are launched while this lives.
struct HeldPreviousAmax : PreviousAmax {
  LastInputAmax::Use use = {};
};

/// What codes asked for are made by in one pass with finding their amax; none if its `amax` is
/// null. `known`: that of the values, or undefined; delayed scaling does not go by it.
inline HeldPreviousAmax previous_amax(const OperandRequest& request, const at::Tensor& known,
                                      at::Device device) {
  const DelayedAmax& delayed = request.delayed;
  if (delayed) return {{.amax = delayed.scaling + kInUse, .delayed = delayed}};
  const Format& format = *request.format;
  if (known.defined() || request.last_input == nullptr || !has_one_scale(format)) return {};
  if (!format.activations.power_of_two_scales) return {};  // in fp32 they are other ones each time
  LastInputAmax::Use use = request.last_input->use(device);
  return {{.amax = use.last, .next = use.next}, std::move(use)};
}

/// Rows that arrived, as the kernels see them.
inline CodedRows coded_rows(const RowImage& image) {
  const Layout& layout = image.layout;
  const auto* rows = static_cast<const uint8_t*>(image.image.const_data_ptr());
  return {rows + image.first_row * layout.row_bytes(), layout.row_bytes(),
          layout.row_scale_offset(), layout.format->scale.is_of_row()};
}

/// The task that writes them; its values are not set.
inline ActivationTask activation_task(const QuantizedMatrix& out) {
  ActivationTask task;
  task.m = out.rows;
  task.k = out.cols;
  task.k_padded = round_up(out.cols, 16);
  task.m_padded_t = round_up(out.rows, 128);
  task.power_of_two = out.format->activations.power_of_two_scales;
  if (const auto* rows = std::get_if<PackedCodes>(&out.rowwise)) {
    task.m_padded = rows->rows;
    task.rows_written = rows->rows;
    task.codes = codes_in(*rows);
    task.scale_inv = rows->mutable_scale_data();
  }
  if (const auto* columns = std::get_if<PackedCodes>(&out.columnwise)) {
    task.codes_t = codes_in(*columns);
    task.scale_inv_t = columns->mutable_scale_data();
    task.square_columns = columns->scale_mode == ScaleMode::kBlock128x128;
  }
  return task;
}

}  // namespace qshard::cuda
