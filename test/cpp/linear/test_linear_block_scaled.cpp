// Linears with MXFP8 and NVFP4 weights. On Blackwell: block-scaled GEMMs, against the same product
// of dequantized operands. Elsewhere: dequantized GEMMs, and cuBLASLt refuses the others.
#include <iostream>

#include "kernels/linear/block_scaled_operand.h"
#include "test/cpp/cases/gemm_cases.h"
#ifdef QSHARD_WITH_CUDA
#include <ATen/cuda/CUDAContextLight.h>

#include "kernels/device/compute_capability.h"
#include "kernels/linear/linear_block_scaled.h"
#endif

namespace qshard::testing {
namespace {

bool is_block_scaled([[maybe_unused]] at::Device device) {
#ifdef QSHARD_WITH_CUDA
  return cuda::compute_capability(device) >= 100;
#else
  return false;
#endif
}

// What a GEMM sees of an operand; float, on the CPU.
at::Tensor read(const RowImage& rows) {
  return dequantized({{}, rows.grid.operand(), rows.image.operand().contiguous()}, rows.layout,
                     at::kFloat, 0, rows.layout.logical_rows)
      .cpu();
}

struct Sizes {
  int64_t m, n, k;
};
constexpr Sizes kSizes[] = {{64, 48, 32},   {128, 128, 128},  {200, 256, 384},
                            {1, 128, 256},  {7, 32, 100},     {40, 20, 64},
                            {96, 272, 208}, {129, 160, 1040}, {300, 1040, 512}};

class BlockScaledLinear : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {
};

TEST_P(BlockScaledLinear, ForwardAndBackward) {
  at::manual_seed(0);
  const auto [name, dtype] = GetParam();
  const Format& format = find_format(name);
  for (const at::Device device : devices()) {
    for (const auto& [m, n, k] : kSizes) {
      SCOPED_TRACE(::testing::Message() << device << " " << m << "x" << n << "x" << k);
      const auto values = at::TensorOptions().dtype(dtype).device(device);
      const at::Tensor x = at::randn({m, k}).mul(at::rand({m, 1}).add(0.1)).to(values);
      const at::Tensor dy = at::randn({m, n}).mul(1e-3).to(values);
      const at::Tensor bias = at::randn({n}).to(values);
      const LinearWeight weight =
          linear_weight(at::randn({n, k}).mul(0.02).to(device), whole(name, n, k));
      const bool codes = is_block_scaled(device) && n % 16 == 0;
      const bool codes_input = codes && format.scale.block_rows > 1;
      const auto seen = [&](const at::Tensor& plain, bool quantized) {
        return quantized ? read(quantized_rows(plain, format, nullptr))
                         : plain.cpu().to(at::kFloat);
      };
      const at::Tensor w = dequantized(weight);

      const at::Tensor ones = at::ones({m, 1});
      const at::Tensor w_seen = codes ? w : w.to(dtype);
      expect_product(forward_of(x, weight, bias), at::cat({seen(x, codes), ones}, 1),
                     at::cat({w_seen.t(), bias.cpu().to(w_seen.scalar_type()).unsqueeze(0)}, 0),
                     "forward");
      const LinearBackward backward = backward_of(dy, weight, x, dtype);
      ASSERT_EQ(backward.grad_input.sizes(), (at::IntArrayRef{m, k}));
      ASSERT_EQ(backward.grad_weight.sizes(), (at::IntArrayRef{n, k}));
      expect_product(backward.grad_input, seen(dy, codes_input), codes_input ? w : w.to(dtype),
                     "grad_input");
      if (codes) {
        expect_product(backward.grad_weight, read(quantized_columns(dy, format, nullptr)),
                       read(quantized_columns(x, format, nullptr)).t(), "grad_weight");
      } else {
        expect_product(backward.grad_weight, seen(dy, false).t(), seen(x, false), "grad_weight");
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, BlockScaledLinear,
                         ::testing::Combine(::testing::Values("mxfp8", "nvfp4", "nvfp4_1x16"),
                                            ::testing::Values(at::kFloat, at::kBFloat16,
                                                              at::kHalf)),
                         kernel_name);

TEST(BlockScaledReport, NamesTheReason) {
  const at::Device device = devices().back();
  const LinearWeight weight = linear_weight(at::randn({32, 32}).to(device), whole("mxfp8", 32, 32));
  forward_of(at::zeros({4, 32}, device), weight);
  const char* expected = is_block_scaled(device) ? "mxfp8 forward: cuBLASLt block-scaled"
                         : device.is_cuda() ? "GEMMs in its format need compute capability 10.0"
                                            : "mxfp8 forward: dequantized GEMM";
  EXPECT_NE(backend_report().find(expected), std::string::npos) << backend_report();
}

// All that comes before the GEMM runs on any device; below 10.0 cuBLASLt is asked and says no.
TEST(BlockScaledGemm, RunsOrIsRefused) {
#ifdef QSHARD_WITH_CUDA
  const at::Device device = devices().back();
  if (!device.is_cuda()) GTEST_SKIP() << "no CUDA device";
  const cudaDeviceProp* properties = at::cuda::getDeviceProperties(device.index());
  for (const char* name : {"mxfp8", "nvfp4"}) {
    const LinearWeight weight =
        linear_weight(at::randn({256, 512}).to(device), whole(name, 256, 512));
    const auto values = at::TensorOptions().dtype(at::kBFloat16).device(device);
    const at::Tensor x = at::randn({128, 512}, values);
    const at::Tensor dy = at::randn({128, 256}, values);
    const auto codes = [&](const at::Tensor& plain) {
      return PlainOperand(plain).codes({.format = weight.codes.format,
                                        .operand_layout = OperandLayout::kRowImage,
                                        .orientations = {true, true}});
    };
    const std::pair<const char*, at::Tensor> results[] = {
        {"forward", cuda::block_scaled_forward(codes(x), weight.codes, std::nullopt, values)},
        {"grad_input", cuda::block_scaled_grad_input(codes(dy), weight.codes, values)},
        {"grad_weight", cuda::block_scaled_grad_weight(codes(dy), codes(x), values)},
    };
    for (const auto& [direction, result] : results) {
      EXPECT_EQ(result.defined(), is_block_scaled(device)) << name << " " << direction;
      std::cout << name << " " << direction << " on compute capability " << properties->major << "."
                << properties->minor << ": "
                << (result.defined() ? "ran" : "refused, cuBLASLt has no kernel") << std::endl;
    }
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
#else
  GTEST_SKIP() << "built without CUDA";
#endif
}

}  // namespace
}  // namespace qshard::testing
