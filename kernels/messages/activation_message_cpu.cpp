#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/cpu/row_kernels.h"
#include "kernels/messages/activation_message_cpu.h"
#include "kernels/numerics/float8.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kRowsPerThread = 16;

// run(begin, end) of each run of a row's columns that shares a scale.
template <typename Run>
void for_each_block(const ActivationMessage& message, const Run& run) {
  const int64_t step = message.has_one_scale ? message.cols : message.block_cols;
  for (int64_t begin = 0; begin < message.cols; begin += step) {
    run(begin, std::min(begin + step, message.cols));
  }
}

int64_t scale_index(const ActivationMessage& message, int64_t row, int64_t column) {
  return message.has_one_scale ? 0 : column / message.block_cols * message.rows + row;
}

template <typename Run>
void for_each_row(int64_t rows, const Run& run) {
  at::parallel_for(0, rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) run(row);
  });
}

}  // namespace

void encode_activation(const EncodeActivationTask& task) {
  const ActivationMessage& message = task.message;
  const bool is_e5m2 = message.code_dtype == DType::kFloat8E5M2;
  const float code_max = is_e5m2 ? kE5M2Max : kE4M3Max;
  const auto type = static_cast<int>(task.value_dtype);
  const auto amax = row_kernels().amax[type];
  const auto encode = is_e5m2 ? e5m2_row_kernels().encode[type] : row_kernels().encode[type];
  const auto* values = static_cast<const uint8_t*>(task.values);
  auto* scale_inv = reinterpret_cast<float*>(task.bytes + message.code_bytes());
  std::fill(task.bytes + message.used_bytes(), task.bytes + message.bytes(), uint8_t{0});
  float whole = 1.f;
  if (message.has_one_scale) {
    whole = scale_from_amax(*task.amax, code_max, message.power_of_two_scales);
    *scale_inv = inverse_scale(whole);
  }
  for_each_row(message.rows, [&](int64_t row) {
    uint8_t* codes = task.bytes + row * message.pitch();
    for_each_block(message, [&](int64_t begin, int64_t end) {
      const uint8_t* from = values + (row * message.cols + begin) * value_size(task.value_dtype);
      float scale = whole;
      if (!message.has_one_scale) {
        const float largest = bits_float(amax(from, end - begin));
        scale = scale_from_amax(largest, code_max, message.power_of_two_scales);
        scale_inv[scale_index(message, row, begin)] = inverse_scale(scale);
      }
      encode(from, end - begin, scale, codes + begin);
    });
    std::fill(codes + message.cols, codes + message.pitch(), uint8_t{0});
  });
}

void decode_activations(const DecodeActivationsTask& task) {
  const ActivationMessage& message = task.message;
  const auto type = static_cast<int>(task.value_dtype);
  const auto decode = message.code_dtype == DType::kFloat8E5M2 ? e5m2_row_kernels().decode[type]
                                                               : row_kernels().decode[type];
  auto* values = static_cast<uint8_t*>(task.values);
  for_each_row(task.ranks * message.rows, [&](int64_t whole_row) {
    const int64_t part = whole_row / task.inner;
    const int64_t row = part / task.ranks * task.inner + whole_row % task.inner;
    const uint8_t* bytes = task.messages + part % task.ranks * message.bytes();
    const auto* scale_inv = reinterpret_cast<const float*>(bytes + message.code_bytes());
    const uint8_t* codes = bytes + row * message.pitch();
    for_each_block(message, [&](int64_t begin, int64_t end) {
      decode(codes + begin, end - begin, scale_inv[scale_index(message, row, begin)],
             values + (whole_row * message.cols + begin) * value_size(task.value_dtype));
    });
  });
}

}  // namespace qshard::cpu
