// The linear layer's three GEMMs on every device, against the same GEMM of dequantized operands in
// double precision. On Hopper that covers the FP8 operands, their scale layouts and cuBLASLt.
#include <c10/util/Exception.h>

#include "test/cpp/cases/gemm_cases.h"
#ifdef QSHARD_WITH_CUDA
#include "kernels/linear/linear_fp8.h"
#endif

namespace qshard::testing {
namespace {

bool is_fp8(at::Device device, const Format& format) {
  return why_dequantized(format, device).empty();
}

// What a GEMM sees of x (M, K) when it contracts along K, in blocks of 1x128, of 128x128 or of one
// row; float, on the CPU.
at::Tensor as_activation(const at::Tensor& x, const Format& format, at::ScalarType code,
                         int64_t block_rows = 1) {
  const at::Tensor values = x.cpu().to(at::kFloat).contiguous();
  at::Tensor out = at::empty_like(values);
  Format scaled = format;
  scaled.code_max = code == at::kFloat8_e5m2 ? kE5M2Max : kE4M3Max;
  const auto convert = [&](const at::Tensor& part, at::Tensor target) {
    const float scale = reference_scale(part.abs().max().item<float>(), scaled);
    const at::Tensor codes = (part * scale).clamp(-scaled.code_max, scaled.code_max).to(code);
    target.copy_(codes.to(at::kFloat) * (1.f / scale));
  };
  if (format.scale.spans_matrix()) {
    convert(values, out);
    return out;
  }
  const int64_t block_cols = format.scale.is_of_row() ? x.size(1) : 128;
  for (int64_t row = 0; row < x.size(0); row += block_rows) {
    for (int64_t col = 0; col < x.size(1); col += block_cols) {
      const int64_t height = std::min<int64_t>(block_rows, x.size(0) - row);
      const int64_t width = std::min<int64_t>(block_cols, x.size(1) - col);
      const auto block = [&](const at::Tensor& all) {
        return all.narrow(0, row, height).narrow(1, col, width);
      };
      convert(block(values), block(out));
    }
  }
  return out;
}

// What wgrad sees of an input's transpose.
at::Tensor as_input_columns(const at::Tensor& x, const Format& format) {
  return as_activation(
      x.t(), format, at::kFloat8_e4m3fn,
      format.activations.packed_input_columns == ScaleMode::kBlock128x128 ? 128 : 1);
}

at::ScalarType grad_code(const Format& format) {
  return format.activations.gradient_dtype == DType::kFloat8E5M2 ? at::kFloat8_e5m2
                                                                 : at::kFloat8_e4m3fn;
}

// What dgrad sees of a gradient (M, N): of a weight with a scale per row, whose product it was made
// of, each column divided by that again, which its codes of rows alone are not.
at::Tensor as_dgrad(const at::Tensor& dy, const LinearWeight& weight) {
  const Format& format = *weight.codes.format;
  if (!format.gemm.folds_row_scales) return as_activation(dy, format, grad_code(format));
  const at::Tensor scales = weight_row_scales(weight.codes).cpu();
  const at::Tensor folded = dy.cpu().to(at::kFloat) * scales;
  return as_activation(folded, format, grad_code(format)).to(at::kDouble) / scales;
}

struct Sizes {
  int64_t m, n, k;
};

class Linear : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {};

const Sizes kSizes[] = {
    {64, 48, 32}, {200, 256, 384}, {16, 16, 16},   {128, 128, 128}, {129, 160, 1032}, {1, 128, 256},
    {7, 32, 100}, {256, 384, 640}, {96, 272, 200}, {40, 20, 64},    {300, 1040, 520},
};

TEST_P(Linear, ForwardAndBackward) {
  at::manual_seed(0);
  const auto [name, dtype] = GetParam();
  const Format& format = find_format(name);
  for (const at::Device device : devices()) {
    for (const auto& [m, n, k] : kSizes) {
      SCOPED_TRACE(::testing::Message() << device << " " << m << "x" << n << "x" << k);
      const bool saves = can_save_quantized_input(device, m, n, k);
      const auto values = at::TensorOptions().dtype(dtype).device(device);
      const at::Tensor x = at::randn({m, k}).mul(at::rand({m, 1}).add(0.1)).to(values);
      const at::Tensor dy = at::randn({m, n}).mul(1e-3).to(values);
      const at::Tensor bias = at::randn({n}).to(values);
      const LinearWeight weight =
          linear_weight(at::randn({n, k}).mul(0.02).to(device), whole(name, n, k));
      const at::Tensor w = dequantized(weight);
      const bool fp8 = is_fp8(device, format) && n % 16 == 0;
      const at::Tensor x_seen =
          fp8 ? as_activation(x, format, at::kFloat8_e4m3fn) : x.cpu().to(at::kFloat);
      const at::Tensor w_seen = fp8 ? w : w.to(dtype);

      const LinearForward plain = linear_forward(PlainOperand(x), weight, std::nullopt, false);
      EXPECT_FALSE(bytes_of(plain.saved.columnwise).defined());
      ASSERT_EQ(plain.output.sizes(), (at::IntArrayRef{m, n}));
      ASSERT_EQ(plain.output.scalar_type(), dtype);
      EXPECT_FALSE(plain.output.is_view());
      EXPECT_EQ(plain.output.storage().nbytes(), plain.output.nbytes());
      expect_product(plain.output, x_seen, w_seen.t(), "forward");

      const LinearForward forward = linear_forward(PlainOperand(x), weight, bias, saves);
      const at::Tensor ones = at::ones({m, 1});
      expect_product(forward.output, at::cat({x_seen, ones}, 1),
                     at::cat({w_seen.t(), bias.cpu().to(w_seen.scalar_type()).unsqueeze(0)}, 0),
                     "forward with bias");

      const at::Tensor dy_seen = fp8 ? as_dgrad(dy, weight) : dy.cpu().to(at::kFloat);
      const at::Tensor dy_t_seen =
          fp8 ? as_activation(dy.t(), format, grad_code(format)) : dy.cpu().to(at::kFloat).t();
      const at::Tensor x_t_seen = fp8 ? as_input_columns(x, format) : x.cpu().to(at::kFloat).t();
      const bool quantized_inputs[] = {false, true};
      for (const bool is_quantized : quantized_inputs) {
        if (is_quantized && !saves) continue;
        for (const at::ScalarType grad_dtype : {dtype, at::kFloat}) {
          const QuantizedOperand saved(forward.saved, values);
          const LinearBackward backward = is_quantized ? backward_of(dy, weight, &saved, grad_dtype)
                                                       : backward_of(dy, weight, x, grad_dtype);
          ASSERT_EQ(backward.grad_input.sizes(), (at::IntArrayRef{m, k}));
          ASSERT_EQ(backward.grad_weight.sizes(), (at::IntArrayRef{n, k}));
          EXPECT_EQ(backward.grad_input.scalar_type(), dtype);
          EXPECT_EQ(backward.grad_weight.scalar_type(), grad_dtype);
          expect_product(backward.grad_input, dy_seen, w_seen, "grad_input");
          if (fp8 || grad_dtype == dtype) {
            expect_product(backward.grad_weight, dy_t_seen, x_t_seen.t(), "grad_weight");
          }
        }
      }
    }
  }
}

// The gradient added to what is there: by one GEMM where the shape allows it, and the same
// elsewhere.
TEST_P(Linear, GradWeightIsAdded) {
  at::manual_seed(3);
  const auto [name, dtype] = GetParam();
  const Format& format = find_format(name);
  for (const at::Device device : devices()) {
    for (const auto& [m, n, k] : {Sizes{64, 48, 32}, Sizes{7, 32, 100}, Sizes{129, 160, 272},
                                  Sizes{96, 272, 200}, Sizes{40, 20, 64}}) {
      for (const at::ScalarType sum_dtype : {dtype, at::kFloat, at::kBFloat16}) {
        SCOPED_TRACE(::testing::Message() << device << " " << m << "x" << n << "x" << k << " in "
                                          << c10::toString(sum_dtype));
        const auto values = at::TensorOptions().dtype(dtype).device(device);
        const at::Tensor x = at::randn({m, k}).to(values);
        const at::Tensor dy = at::randn({m, n}).to(values);
        const at::Tensor before = at::randn({n, k}).to(sum_dtype);
        const LinearWeight weight = linear_weight(at::randn({n, k}).to(device), whole(name, n, k));
        const at::Tensor sum = before.to(device, /*non_blocking=*/false, /*copy=*/true);
        const void* memory = sum.const_data_ptr();
        const LinearBackward backward = backward_of(dy, weight, x, sum_dtype, sum);
        EXPECT_TRUE(backward.grad_weight.is_same(sum));
        EXPECT_EQ(sum.const_data_ptr(), memory);
        EXPECT_EQ(backward.grad_input.sizes(), (at::IntArrayRef{m, k}));

        if (device.is_cpu()) {  // autograd's own sum
          const at::Tensor alone = backward_of(dy, weight, x, sum_dtype).grad_weight;
          EXPECT_TRUE(at::equal(sum, before.add(alone)));
          continue;
        }
        const bool fp8 = is_fp8(device, format) && n % 16 == 0;
        const at::Tensor dy_t =
            fp8 ? as_activation(dy.t(), format, grad_code(format)) : dy.cpu().to(at::kFloat).t();
        const at::Tensor x_t = fp8 ? as_input_columns(x, format) : x.cpu().to(at::kFloat).t();
        // Where the product is rounded on its way, the sum is only as good as that: to the sum's
        // dtype by cuBLASLt, to that of the values where it has no kernel.
        const bool once = !fp8 && dtype == sum_dtype;
        const at::Tensor product = dy_t.to(at::kDouble).mm(x_t.t().to(at::kDouble));
        const at::Tensor size = dy_t.to(at::kDouble).abs().mm(x_t.t().to(at::kDouble).abs());
        const at::Tensor exact = before.to(at::kDouble) + product;
        const double epsilon = epsilon_of(sum_dtype);
        at::Tensor allowed = exact.abs() * epsilon + size * 0x1p-11 + 1e-6;
        if (!once) allowed += product.abs() * epsilon;
        if (!once && !(fp8 && k % 16 == 0)) allowed += product.abs() * epsilon_of(dtype);
        const at::Tensor error = (sum.cpu().to(at::kDouble) - exact).abs();
        EXPECT_TRUE((error <= allowed).all().item<bool>())
            << "worst " << (error / allowed).max().item<double>() << " of what is allowed";
      }
    }
  }
}

// The same of the input's, to the bits of an addition after the GEMM: these sums are short enough
// to have one order.
TEST_P(Linear, GradInputIsAdded) {
  at::manual_seed(3);
  const auto [name, dtype] = GetParam();
  for (const at::Device device : devices()) {
    for (const auto& [m, n, k] : {Sizes{64, 48, 32}, Sizes{7, 32, 100}, Sizes{128, 112, 272},
                                  Sizes{96, 80, 200}, Sizes{40, 20, 64}, Sizes{0, 16, 32}}) {
      SCOPED_TRACE(::testing::Message() << device << " " << m << "x" << n << "x" << k);
      const auto values = at::TensorOptions().dtype(dtype).device(device);
      const PlainOperand dy(at::randn({m, n}).to(values));
      const at::Tensor before = at::randn({m, k}).to(values);
      const LinearWeight weight = linear_weight(at::randn({n, k}).to(device), whole(name, n, k));
      LinearBackwardTask task{.grad = &dy, .needs_input = true};
      const at::Tensor alone = linear_backward(task, weight).grad_input;
      task.input_sum = before.clone();
      const at::Tensor sum = linear_backward(task, weight).grad_input;
      EXPECT_TRUE(sum.is_same(task.input_sum));
      EXPECT_TRUE(at::equal(sum, before.add(alone)));
      if (m == 0) continue;
      task.input_sum = before.narrow(0, 1, m - 1);
      EXPECT_THROW(linear_backward(task, weight), c10::Error);
    }
  }
}

// Windows of one image: rows, matrices, a shard that starts inside a block.
TEST_P(Linear, WeightWindows) {
  at::manual_seed(1);
  const auto [name, dtype] = GetParam();
  const Format& format = find_format(name);
  for (const at::Device device : devices()) {
    for (const int64_t matrix_rows : {512, 256, 128}) {
      Layout layout = whole(name, 512, 144);
      layout.matrix_rows = matrix_rows;
      const LinearWeight all = linear_weight(at::randn({512, 144}).to(device), layout);
      const at::Tensor x = at::randn({48, 144}).to(device, dtype);
      const at::Tensor dy = at::randn({48, 128}).to(device, dtype);
      for (const int64_t first : {0, 128, 144, 384}) {
        SCOPED_TRACE(::testing::Message() << device << " " << matrix_rows << " first " << first);
        RowImage rows = all.codes.row_image();
        rows.first_row = first;
        const LinearWeight window{matrix_of(rows, 128)};
        const bool crosses = first % matrix_rows + 128 > matrix_rows;
        const bool fp8 = is_fp8(device, format) && (format.scale.spans_matrix() ? !crosses
                                                    : format.scale.is_of_row()  ? true
                                                                                : first % 128 == 0);
        const at::Tensor w = fp8 ? dequantized(window) : dequantized(window).to(dtype);
        const at::Tensor x_seen =
            fp8 ? as_activation(x, format, at::kFloat8_e4m3fn) : x.cpu().to(at::kFloat);
        const at::Tensor dy_seen = fp8 ? as_dgrad(dy, window) : dy.cpu().to(at::kFloat);
        expect_product(forward_of(x, window), x_seen, w.t(), "forward");
        expect_product(backward_of(dy, window, nullptr, dtype).grad_input, dy_seen, w,
                       "grad_input");
      }
    }
  }
}

TEST_P(Linear, EmptySizes) {
  const auto [name, dtype] = GetParam();
  for (const at::Device device : devices()) {
    const auto options = at::TensorOptions().dtype(dtype).device(device);
    for (const auto& [m, n, k] : {Sizes{0, 16, 16}, Sizes{4, 0, 16}, Sizes{4, 16, 0}}) {
      EXPECT_FALSE(can_save_quantized_input(device, m, n, k));
      const LinearWeight weight = linear_weight(at::randn({n, k}).to(device), whole(name, n, k));
      const at::Tensor bias = at::ones({n}, options);
      const at::Tensor output = forward_of(at::zeros({m, k}, options), weight, bias);
      EXPECT_TRUE(at::equal(output, at::ones({m, n}, options)));
      const LinearBackward backward =
          backward_of(at::ones({m, n}, options), weight, at::zeros({m, k}, options), at::kFloat);
      EXPECT_TRUE(at::equal(backward.grad_input, at::zeros({m, k}, options)));
      EXPECT_TRUE(at::equal(backward.grad_weight, at::zeros({n, k}, options.dtype(at::kFloat))));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Linear,
    ::testing::Combine(::testing::Values("float8_tensorwise", "float8_tensorwise_fp32_scale",
                                         "float8_rowwise", "float8_rowwise_fp32_scale",
                                         "float8_blockwise", "float8_blockwise_fp32_scale",
                                         "float8_blockwise[x_block_scaling_dim=1]"),
                       ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
    kernel_name);

TEST(LinearErrors, NameWhatIsWrong) {
  const LinearWeight weight =
      linear_weight(at::randn({16, 32}), whole("float8_tensorwise", 16, 32));
  const PlainOperand input(at::zeros({4, 32}));
  EXPECT_THROW(forward_of(at::zeros({4, 31}), weight), c10::Error);
  EXPECT_THROW(forward_of(at::zeros({4, 32}), weight, at::zeros({15})), c10::Error);
  EXPECT_THROW(linear_forward(input, weight, std::nullopt, true), c10::Error);
  EXPECT_THROW(forward_of(at::zeros({4, 32}, at::kLong), weight), c10::Error);
}

TEST(BackendReport, ListsThePathsTaken) {
  const LinearWeight weight =
      linear_weight(at::randn({16, 32}), whole("float8_tensorwise", 16, 32));
  forward_of(at::zeros({4, 32}), weight);
  EXPECT_NE(backend_report().find("float8_tensorwise forward: dequantized GEMM"),
            std::string::npos);
  if (is_fp8(devices().back(), find_format("float8_tensorwise"))) {
    EXPECT_EQ(backend_report().find("cuBLASLt has no kernel"), std::string::npos)
        << backend_report();
  }
}

#ifdef QSHARD_WITH_CUDA
// The GEMM itself, also of sizes whose algorithms are timed, which must not add a second time.
TEST_P(Linear, OneGemmAddsItsProduct) {
  const auto [name, dtype] = GetParam();
  const at::Device device = devices().back();
  const Format& format = find_format(name);
  if (!is_fp8(device, format)) GTEST_SKIP() << "no CUDA device with FP8 GEMMs of " << name;
  if (format.scale.is_of_row()) GTEST_SKIP() << "no GEMM of " << name << " adds";
  at::manual_seed(4);
  const auto options = at::TensorOptions().dtype(dtype).device(device);
  for (const auto& [m, n, k] : {Sizes{128, 64, 48}, Sizes{2048, 1536, 2048}}) {
    const auto operand = [&](int64_t cols, OperandRole role) {
      return cuda::quantize_activation(
          at::randn({m, cols}, options),
          {.format = &format, .role = role, .orientations = {.columnwise = true}});
    };
    const QuantizedMatrix dy = operand(n, OperandRole::kGradient);
    const QuantizedMatrix x = operand(k, OperandRole::kInput);
    const at::Tensor product = cuda::fp8_grad_weight(dy, x, options);
    at::Tensor sum = at::zeros({n, k}, options);
    for (int times = 1; times <= 3; ++times) {
      ASSERT_TRUE(cuda::fp8_add_grad_weight(dy, x, sum));
      const at::Tensor error = (sum - product * times).abs().max();
      // Algorithms sum in orders of their own; a sum too many is off by as much as there is.
      EXPECT_LE(error.item<double>(),
                (4 * epsilon_of(dtype) + 0x1p-9) * sum.abs().max().item<double>())
          << m << "x" << n << "x" << k << " added " << times << " times";
    }
    // Short sums have one order: the bits are those of a GEMM and an addition.
    if (m == 128) {
      sum = at::ones({n, k}, options);
      ASSERT_TRUE(cuda::fp8_add_grad_weight(dy, x, sum));
      EXPECT_TRUE(sum.equal(product + 1));
    }
    // The same of the input's gradient.
    const LinearWeight weight = linear_weight(at::randn({n, k}).to(device), whole(name, n, k));
    const QuantizedMatrix rows = cuda::quantize_activation(
        at::randn({m, n}, options),
        {.format = &format, .role = OperandRole::kGradient, .orientations = {.rowwise = true}});
    const at::Tensor grad_input = cuda::fp8_grad_input(rows, weight.codes, options);
    sum = at::zeros({m, k}, options);
    for (int times = 1; times <= 3; ++times) {
      ASSERT_TRUE(cuda::fp8_grad_input(rows, weight.codes, options, sum).is_same(sum));
      const at::Tensor error = (sum - grad_input * times).abs().max();
      EXPECT_LE(error.item<double>(),
                (4 * epsilon_of(dtype) + 0x1p-9) * sum.abs().max().item<double>())
          << m << "x" << n << "x" << k << " added " << times << " times";
    }
    // Other sizes are left to those who make the product first.
    const at::Tensor narrower = at::ones({n, k - 8}, options);
    EXPECT_FALSE(cuda::fp8_add_grad_weight(dy, x, narrower));
    EXPECT_TRUE(narrower.eq(1).all().item<bool>());
  }
}

// Codes and scales of both orientations, byte for byte.
TEST_P(Linear, ActivationOperands) {
  const auto [name, dtype] = GetParam();
  const at::Device device = devices().back();
  if (!device.is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(2);
  const Format& format = find_format(name);
  for (const auto& [m, n, k] : kSizes) {
    SCOPED_TRACE(::testing::Message() << m << "x" << k);
    const at::Tensor x = random_values(m, k, dtype);
    for (const OperandRole role : {OperandRole::kInput, OperandRole::kGradient}) {
      const bool is_input = role == OperandRole::kInput;
      const at::ScalarType type = is_input ? at::kFloat8_e4m3fn : grad_code(format);
      const QuantizedMatrix got = cuda::quantize_activation(
          x.to(device), {.format = &format, .role = role, .orientations = {true, true}});
      const at::Tensor expected[] = {
          as_activation(x, format, type),
          is_input ? as_input_columns(x, format) : as_activation(x.t(), format, type)};
      const PackedCodes operands[] = {std::get<PackedCodes>(got.rowwise),
                                      std::get<PackedCodes>(got.columnwise)};
      const at::Tensor buffers[] = {operands[0].buffer.cpu(), operands[1].buffer.cpu()};
      for (int i = 0; i < 2; ++i) {
        const PackedCodes& operand = operands[i];
        const int64_t bytes = operand.rows * operand.ld;
        const at::Tensor codes = buffers[i].narrow(0, 0, bytes).view({operand.rows, operand.ld});
        at::Tensor scales =
            buffers[i].narrow(0, bytes, buffers[i].numel() - bytes).view(at::kFloat);
        const int64_t blocks = ceil_div(expected[i].size(1), 128);
        if (operand.scale_mode == ScaleMode::kTensor) {
          scales = scales[0];
        } else if (operand.scale_mode == ScaleMode::kRow) {
          scales = scales.narrow(0, 0, expected[i].size(0)).unsqueeze(1);
        } else if (operand.scale_mode == ScaleMode::kBlock1x128) {
          scales = scales.view({blocks, operand.rows}).t().repeat_interleave(128, 1);
        } else {
          const int64_t pitch = round_up(blocks, 4);
          const int64_t block_rows = ceil_div(operand.rows, 128);
          scales = scales.narrow(0, 0, block_rows * pitch).view({block_rows, pitch});
          EXPECT_TRUE(scales.narrow(1, blocks, pitch - blocks).eq(0).all().item<bool>());
          scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1);
        }
        if (scales.dim() == 2 && operand.scale_mode != ScaleMode::kRow) {
          scales = scales.narrow(0, 0, expected[i].size(0)).narrow(1, 0, expected[i].size(1));
        }
        const at::Tensor inside =
            codes.narrow(0, 0, expected[i].size(0)).narrow(1, 0, expected[i].size(1));
        EXPECT_TRUE(at::equal(inside.contiguous().view(type).to(at::kFloat) * scales, expected[i]))
            << (i ? "columns" : "rows");
        EXPECT_EQ(codes.count_nonzero().item<int64_t>(), inside.count_nonzero().item<int64_t>());
      }
      EXPECT_TRUE(at::equal(qshard::dequantized(got, at::kFloat).cpu(), expected[0]));
      QuantizedMatrix columns = got;
      columns.rowwise = {};
      EXPECT_TRUE(at::equal(qshard::dequantized(columns, at::kFloat).cpu(), expected[1].t()));
    }
  }
}
#endif

}  // namespace
}  // namespace qshard::testing
