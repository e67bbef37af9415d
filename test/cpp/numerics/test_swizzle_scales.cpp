// The swizzled order of block scales that cuBLASLt takes (kernels/gemm/swizzle_scales.h).
#include "kernels/gemm/swizzle_scales.h"
#ifdef QSHARD_WITH_CUDA
#include "kernels/gemm/swizzle_scales_kernel.h"
#endif
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

struct Shape {
  int64_t rows, scales;
};
constexpr Shape kShapes[] = {{1, 1}, {128, 4}, {127, 3}, {129, 5}, {300, 33}, {512, 64}, {0, 4}};

// As the cuBLAS documentation draws it: tiles of 128 x 4 row by row; in a tile 32 rows of 16 bytes,
// each holding the four scales of rows i, i + 32, i + 64 and i + 96.
at::Tensor swizzled(const at::Tensor& scales) {
  const int64_t rows = round_up(scales.size(0), 128);
  const int64_t cols = round_up(scales.size(1), 4);
  at::Tensor padded = at::zeros({rows, cols}, at::kByte);
  padded.narrow(0, 0, scales.size(0)).narrow(1, 0, scales.size(1)).copy_(scales);
  return padded.view({rows / 128, 4, 32, cols / 4, 4}).permute({0, 3, 2, 1, 4}).flatten();
}

TEST(ScaleLayout, IndexIsThatOfTheDocumentedOrder) {
  for (const auto& [rows, scales] : kShapes) {
    const at::Tensor in = at::randint(256, {rows, scales}, at::kByte);
    const at::Tensor expected = swizzled(in);
    ASSERT_EQ(cuda::swizzled_scale_bytes(rows, scales), expected.numel());
    at::Tensor out = at::zeros_like(expected);
    const auto* from = in.const_data_ptr<uint8_t>();
    auto* to = out.mutable_data_ptr<uint8_t>();
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < scales; ++j) {
        to[cuda::swizzled_scale_index(i, j, ceil_div(scales, 4))] = from[i * scales + j];
      }
    }
    EXPECT_TRUE(at::equal(out, expected)) << rows << "x" << scales;
  }
}

#ifdef QSHARD_WITH_CUDA
TEST(ScaleLayout, KernelSwizzlesTheScalesOfRowImages) {
  if (devices().size() < 2) GTEST_SKIP() << "no CUDA device";
  for (const auto& [rows, scales] : kShapes) {
    const int64_t row_bytes = 32 + round_up(scales, 16);  // 32 bytes of codes first
    at::Tensor image = at::randint(256, {rows, row_bytes}, at::kByte);
    image.narrow(1, 32 + scales, row_bytes - 32 - scales).zero_();
    const at::Tensor expected = swizzled(image.narrow(1, 32, scales));
    const at::Tensor there = image.to(devices().back());
    at::Tensor out = at::full_like(expected, 255, there.options());
    const auto* first = static_cast<const uint8_t*>(there.const_data_ptr()) + 32;
    const auto stream = static_cast<cudaStream_t>(stream_of(there.device()).handle);
    ASSERT_EQ(cuda::launch_swizzle_scales({first, rows, row_bytes, scales},
                                          out.mutable_data_ptr<uint8_t>(), stream),
              cudaSuccess);
    EXPECT_TRUE(at::equal(out.cpu(), expected)) << rows << "x" << scales;
  }
}
#endif

}  // namespace
}  // namespace qshard::testing
