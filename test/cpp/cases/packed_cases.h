// What the tests of producers share: formats with packed codes, and how codes are compared.
#pragma once

#include <iostream>

#include "kernels/linear/operand_producer.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {

inline constexpr const char* kPacked[] = {"float8_tensorwise",
                                          "float8_tensorwise_fp32_scale",
                                          "float8_rowwise",
                                          "float8_rowwise_fp32_scale",
                                          "float8_blockwise",
                                          "float8_blockwise_fp32_scale",
                                          "float8_blockwise[x_block_scaling_dim=1]"};

inline at::Device gpu() { return devices().back(); }

/// Codes and scales that differ, among those compared.
struct Differences {
  int64_t codes = 0, scales = 0, all_codes = 0, all_scales = 0;

  void add(const CodeImage& got, const CodeImage& expected) {
    const auto* a = std::get_if<PackedCodes>(&got);
    const auto* b = std::get_if<PackedCodes>(&expected);
    ASSERT_EQ(a == nullptr, b == nullptr);
    if (a == nullptr || a->code_bytes() == 0) return;
    ASSERT_EQ(a->rows, b->rows);
    ASSERT_EQ(a->ld, b->ld);
    ASSERT_EQ(a->scale_mode, b->scale_mode);
    const int64_t bytes = a->code_bytes();
    codes +=
        at::ne(a->buffer.narrow(0, 0, bytes), b->buffer.narrow(0, 0, bytes)).sum().item<int64_t>();
    all_codes += bytes;
    const int64_t blocks = ceil_div(a->ld, 128);
    const int64_t count = a->scale_mode == ScaleMode::kTensor ? 1
                          : a->scale_mode == ScaleMode::kRow  ? a->rows
                          : a->scale_mode == ScaleMode::kBlock1x128
                              ? a->rows * blocks
                              : ceil_div(a->rows, 128) * round_up(blocks, 4);
    const auto scales_of = [&](const PackedCodes& packed) {
      return packed.buffer.narrow(0, bytes, 4 * count).view(at::kInt);
    };
    scales += at::ne(scales_of(*a), scales_of(*b)).sum().item<int64_t>();
    all_scales += count;
  }
  void add(const QuantizedMatrix& got, const QuantizedMatrix& expected) {
    EXPECT_EQ(got.code_dtype, expected.code_dtype);
    EXPECT_EQ(got.rows, expected.rows);
    EXPECT_EQ(got.cols, expected.cols);
    add(got.rowwise, expected.rowwise);
    add(got.columnwise, expected.columnwise);
  }
  void expect_none(const char* what) const {
    EXPECT_GT(all_codes, 0) << what;
    EXPECT_EQ(codes, 0) << what << ", of " << all_codes;
    EXPECT_EQ(scales, 0) << what << ", of " << all_scales;
  }
  // None, but where torch was built with another expf: that moves a value across a rounding
  // boundary now and then, and a largest value with it, that scales in fp32 follow.
  void expect_few(const char* what) const {
    EXPECT_GT(all_codes, 0) << what;
    EXPECT_LE(static_cast<double>(codes), 1e-5 * static_cast<double>(all_codes)) << what;
    EXPECT_LE(static_cast<double>(scales), 1e-4 * static_cast<double>(all_scales)) << what;
    std::cout << what << ": " << codes << " of " << all_codes << " codes, " << scales << " of "
              << all_scales << " scales differ\n";
  }
};

/// Codes by the amaxes of earlier steps, and the history that this step's has gone into.
struct DelayedCodes {
  QuantizedMatrix codes;
  at::Tensor history;
};

/// `earlier`: what is scaled by.
inline DelayedCodes delayed_codes(const OperandProducer& operand, float earlier) {
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(operand.device());
  const at::Tensor scaling = at::full({4}, earlier, floats);
  const at::Tensor history = at::full({4}, 1e-3, floats);
  const OperandRequest request{
      .format = &find_format("float8_delayed[margin=1,history=4]"),
      .orientations = {true, true},
      .delayed = {history.mutable_data_ptr<float>(), scaling.const_data_ptr<float>(), 1}};
  return {operand.codes(request), history};
}

inline void expect_row_images_of(const OperandProducer& operand, const at::Tensor& values,
                                 const char* format) {
  const OperandRequest request{.format = &find_format(format),
                               .operand_layout = OperandLayout::kRowImage,
                               .orientations = {true, true}};
  const QuantizedMatrix got = operand.codes(request);
  const QuantizedMatrix expected = PlainOperand(values).codes(request);
  EXPECT_TRUE(at::equal(bytes_of(got.rowwise), bytes_of(expected.rowwise))) << format;
  EXPECT_TRUE(at::equal(bytes_of(got.columnwise), bytes_of(expected.columnwise))) << format;
}

}  // namespace qshard::testing
