// The operand of every GEMM: what its codes stand for, and linears whose gradients and inputs
// arrive quantized.
#include <c10/util/Exception.h>

#include "kernels/linear/block_scaled_operand.h"
#include "test/cpp/cases/gemm_cases.h"

namespace qshard::testing {
namespace {

struct Shape {
  int64_t rows, cols;
};
constexpr Shape kShapes[] = {{1, 1}, {16, 16}, {33, 17}, {129, 100}, {100, 130}, {300, 520}};

// Packed codes of one orientation of x, by their definition; `rows` and `ld` include the padding.
at::Tensor packed_bytes(const at::Tensor& x, int64_t rows, int64_t ld, int64_t bytes,
                        const at::Tensor& scale_inv, at::ScalarType code, ScaleMode mode) {
  const at::Tensor padded = at::constant_pad_nd(x, {0, ld - x.size(1), 0, rows - x.size(0)});
  at::Tensor scales = scale_inv.flatten();
  if (mode == ScaleMode::kBlock1x128) {  // (ceil(ld / 128), rows): blocks of 1x128, rows fastest
    scales = at::constant_pad_nd(scale_inv, {0, 0, 0, rows - x.size(0)}, 1.).t().flatten();
  } else if (mode == ScaleMode::kRow) {
    scales = at::constant_pad_nd(scales, {0, rows - x.size(0)}, 1.);
  } else if (mode == ScaleMode::kBlock128x128) {  // (ceil(rows / 128), a multiple of 4)
    const int64_t blocks = scale_inv.size(1);
    scales = at::constant_pad_nd(scale_inv, {0, round_up(blocks, 4) - blocks}).flatten();
  }
  const at::Tensor parts =
      at::cat({padded.to(code).view(at::kByte).flatten(), scales.contiguous().view(at::kByte)});
  return at::constant_pad_nd(parts, {0, bytes - parts.numel()});
}

struct Packed {
  QuantizedMatrix matrix;
  at::Tensor rowwise;     // the values that the rowwise codes stand for
  at::Tensor columnwise;  // and the columnwise ones
};

// A matrix of random codes and scales, other ones in each orientation.
Packed random_packed(const Format& format, OperandRole role, int64_t m, int64_t k) {
  const auto code =
      packed_code_dtype(format, role) == DType::kFloat8E5M2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
  const auto draw = [&](int64_t rows, int64_t cols, int64_t held, int64_t ld, int64_t bytes,
                        ScaleMode mode, at::Tensor& values) {
    const at::Tensor codes = at::randn({rows, cols}).to(code).to(at::kFloat);
    const int64_t block_rows = mode == ScaleMode::kTensor         ? rows
                               : mode == ScaleMode::kBlock128x128 ? 128
                                                                  : 1;
    const bool is_wide = mode == ScaleMode::kTensor || mode == ScaleMode::kRow;
    const int64_t block_cols = is_wide ? cols : 128;
    const at::Tensor scales =
        at::pow(2., at::randint(-9, 9, {ceil_div(rows, block_rows), ceil_div(cols, block_cols)}))
            .to(at::kFloat);
    const at::Tensor spread =
        scales.repeat_interleave(block_rows, 0).repeat_interleave(block_cols, 1);
    values = codes * spread.narrow(0, 0, rows).narrow(1, 0, cols);
    return packed_bytes(codes, held, ld, bytes, scales, code, mode);
  };
  const ScaleMode mode = packed_scale_mode(format);
  Packed out;
  at::Tensor columns;
  const int64_t held = mode == ScaleMode::kBlock1x128 ? round_up(m, 16) : m;
  const at::Tensor rows =
      draw(m, k, held, round_up(k, 16), packed_rowwise_bytes(m, k), mode, out.rowwise);
  columns = draw(k, m, round_up(k, 16), round_up(m, 128), packed_columnwise_bytes(m, k),
                 packed_columns_scale_mode(format, role), out.columnwise);
  out.columnwise = out.columnwise.t();
  out.matrix = packed_matrix(format, role, m, k, rows, columns);
  return out;
}

TEST(QuantizedMatrix, PackedCodesStandForTheirValues) {
  at::manual_seed(0);
  for (const char* name : {"float8_tensorwise", "float8_rowwise", "float8_blockwise",
                           "float8_blockwise[x_block_scaling_dim=1]"}) {
    for (const OperandRole role : {OperandRole::kInput, OperandRole::kGradient}) {
      for (const auto& [m, k] : kShapes) {
        SCOPED_TRACE(::testing::Message() << name << " " << m << "x" << k);
        const Packed packed = random_packed(find_format(name), role, m, k);
        EXPECT_TRUE(at::equal(qshard::dequantized(packed.matrix, at::kFloat), packed.rowwise));
        QuantizedMatrix columns = packed.matrix;
        columns.rowwise = {};
        EXPECT_TRUE(columns.has({.columnwise = true}, OperandLayout::kPacked));
        EXPECT_FALSE(columns.has({.rowwise = true}, OperandLayout::kPacked));
        EXPECT_FALSE(columns.has({.columnwise = true}, OperandLayout::kRowImage));
        EXPECT_TRUE(at::equal(qshard::dequantized(columns, at::kFloat), packed.columnwise));
      }
    }
  }
}

TEST(QuantizedMatrix, RowImagesStandForTheirValues) {
  at::manual_seed(1);
  for (const char* name : {"mxfp8", "nvfp4"}) {
    const Format& format = find_format(name);
    for (const auto& [m, k] : kShapes) {
      SCOPED_TRACE(::testing::Message() << name << " " << m << "x" << k);
      const at::Tensor x = at::randn({m, k});
      OperandRequest request{.format = &format, .operand_layout = OperandLayout::kRowImage};
      request.orientations = {true, true};
      const QuantizedMatrix both = PlainOperand(x).codes(request);
      const auto read = [](const RowImage& rows, int64_t count) {
        return dequantized({{}, rows.grid.operand(), rows.image.operand()}, rows.layout, at::kFloat,
                           0, count);
      };
      EXPECT_TRUE(at::equal(qshard::dequantized(both, at::kFloat), read(both.row_image(), m)));
      QuantizedMatrix columns = both;
      columns.rowwise = {};
      if (format.activations.hadamard_columns) {  // the transform mixed the tokens
        EXPECT_THROW(qshard::dequantized(columns, at::kFloat), c10::Error);
        continue;
      }
      const at::Tensor values = read(std::get<RowImage>(both.columnwise), k).narrow(1, 0, m).t();
      EXPECT_TRUE(at::equal(qshard::dequantized(columns, at::kFloat), values));
    }
  }
}

TEST(QuantizedMatrix, NoCodesHaveNoValues) {
  EXPECT_THROW(qshard::dequantized({}, at::kFloat), c10::Error);
  EXPECT_FALSE(bytes_of(CodeImage()).defined());
}

// On the CPU the values of the codes are multiplied: what a plain gradient of them gives, bit by
// bit.
void expect_as_of_values(const QuantizedMatrix& dy, const at::Tensor& dy_values,
                         const QuantizedMatrix& x, const at::Tensor& x_values, const char* name,
                         at::ScalarType dtype) {
  const int64_t n = dy.cols;
  const int64_t k = x.cols;
  const auto options = at::TensorOptions().dtype(dtype);
  const LinearWeight weight = linear_weight(at::randn({n, k}), whole(name, n, k));
  const QuantizedOperand grad(dy, options);
  const QuantizedOperand input(x, options);
  ASSERT_EQ(grad.sizes(), (at::IntArrayRef{dy.rows, n}));
  ASSERT_EQ(grad.dtype(), dtype);
  const LinearBackward got = linear_backward(
      {.grad = &grad, .needs_input = true, .input = &input, .weight_grad_dtype = dtype}, weight);
  const LinearBackward expected =
      backward_of(dy_values.to(dtype), weight, x_values.to(dtype), dtype);
  EXPECT_TRUE(at::equal(got.grad_input, expected.grad_input));
  EXPECT_TRUE(at::equal(got.grad_weight, expected.grad_weight));
  EXPECT_EQ(got.grad_input.scalar_type(), dtype);
  const at::Tensor output = linear_forward(input, weight, std::nullopt, false).output;
  EXPECT_TRUE(at::equal(output, forward_of(x_values.to(dtype), weight)));
}

TEST(QuantizedMatrix, GradientsMayArriveAsPackedCodes) {
  at::manual_seed(2);
  for (const char* name : {"float8_tensorwise", "float8_rowwise", "float8_blockwise",
                           "float8_blockwise[x_block_scaling_dim=1]"}) {
    const Format& format = find_format(name);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t m : {1, 33, 129}) {
        SCOPED_TRACE(::testing::Message() << name << " " << m << " " << dtype);
        const Packed dy = random_packed(format, OperandRole::kGradient, m, 48);
        Packed x = random_packed(format, OperandRole::kInput, m, 100);
        expect_as_of_values(dy.matrix, dy.rowwise, x.matrix, x.rowwise, name, dtype);
        x.matrix.rowwise = {};  // as linears save it
        expect_as_of_values(dy.matrix, dy.rowwise, x.matrix, x.columnwise, name, dtype);
      }
    }
  }
}

TEST(QuantizedMatrix, GradientsMayArriveAsRowImages) {
  at::manual_seed(3);
  for (const char* name : {"mxfp8", "nvfp4"}) {
    const Format& format = find_format(name);
    const OperandRequest request{.format = &format,
                                 .operand_layout = OperandLayout::kRowImage,
                                 .orientations = {.rowwise = true}};
    for (const int64_t m : {1, 33, 129}) {
      SCOPED_TRACE(::testing::Message() << name << " " << m);
      const QuantizedMatrix dy = PlainOperand(at::randn({m, 48})).codes(request);
      const QuantizedMatrix x = PlainOperand(at::randn({m, 100})).codes(request);
      expect_as_of_values(dy, qshard::dequantized(dy, at::kFloat), x,
                          qshard::dequantized(x, at::kFloat), name, at::kFloat);
    }
  }
}

// A GEMM gets the codes that are there, or others of the values that they stand for.
TEST(QuantizedMatrix, CodesThatAreMissingAreMade) {
  at::manual_seed(4);
  const Format& format = find_format("mxfp8");
  OperandRequest request{.format = &format, .operand_layout = OperandLayout::kRowImage};
  request.orientations = {.rowwise = true};
  const QuantizedOperand operand(PlainOperand(at::randn({40, 60})).codes(request),
                                 at::TensorOptions().dtype(at::kFloat));
  EXPECT_TRUE(
      bytes_of(operand.codes(request).rowwise).is_same(bytes_of(operand.present().rowwise)));
  request.orientations = {.columnwise = true};
  const at::Tensor values = qshard::dequantized(operand.present(), at::kFloat);
  const QuantizedMatrix columns = operand.codes(request);
  EXPECT_TRUE(at::equal(bytes_of(columns.columnwise),
                        quantized_columns(values, format, nullptr).image.operand()));
  request.orientations = {true, true};
  const QuantizedMatrix both = operand.codes(request);
  EXPECT_TRUE(bytes_of(both.rowwise).is_same(bytes_of(operand.present().rowwise)));
  EXPECT_TRUE(at::equal(bytes_of(both.columnwise), bytes_of(columns.columnwise)));
  request.format = &find_format("nvfp4");
  request.orientations = {.rowwise = true};
  EXPECT_TRUE(at::equal(bytes_of(operand.codes(request).rowwise),
                        quantized_rows(values, *request.format, nullptr).image.operand()));
}

TEST(QuantizedMatrix, PackedCodesNeedADeviceThatReadsThem) {
  const OperandRequest request{.format = &find_format("float8_blockwise"),
                               .orientations = {.rowwise = true}};
  EXPECT_THROW(PlainOperand(at::randn({4, 32})).codes(request), c10::Error);
}

}  // namespace
}  // namespace qshard::testing
