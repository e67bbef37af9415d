// Rotary position embedding: the bits of its formula, on every device and for every layout.
#include <ATen/ops/where.h>

#include "kernels/rotary/rotary.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

struct Size {
  std::array<int64_t, 4> sizes;
  int64_t rotated;
};
// Vectors of both halves, of one value, a part of the channels, none.
constexpr Size kSizes[] = {{{2, 17, 4, 128}, 128}, {{1, 300, 8, 64}, 64},  {{3, 5, 2, 96}, 48},
                           {{2, 7, 3, 36}, 36},    {{2, 5, 3, 72}, 72},    {{2, 5, 2, 72}, 20},
                           {{2, 7, 3, 18}, 10},    {{2, 3, 1, 8}, 0},      {{1, 1, 1, 2}, 2},
                           {{2, 0, 3, 16}, 16},    {{2, 9, 3, 1024}, 1024}};
constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16, at::kHalf};

/// Where the channel is that makes a pair with each of the rotated ones, and the sign of its sine.
std::pair<at::Tensor, at::Tensor> partners(int64_t rotated, bool interleaved) {
  const at::Tensor channel = at::arange(rotated, at::kLong);
  const at::Tensor is_first = interleaved ? channel.remainder(2).eq(0) : channel.lt(rotated / 2);
  const int64_t apart = interleaved ? 1 : rotated / 2;
  return {at::where(is_first, channel + apart, channel - apart),
          at::where(is_first, -1.0, 1.0).to(at::kFloat)};
}

/// On the CPU, in float32, every operation rounded.
at::Tensor formula(const at::Tensor& x, const Rotation& rotation) {
  const int64_t rotated = rotation.cos.size(1);
  std::array<int64_t, 4> shape{1, 1, 1, rotated};
  shape[rotation.dim] = x.size(rotation.dim);
  const auto [partner, sign] = partners(rotated, rotation.interleaved);
  at::Tensor cos = rotation.cos.cpu().narrow(0, 0, x.size(rotation.dim));
  at::Tensor sin = rotation.sin.cpu().narrow(0, 0, x.size(rotation.dim));
  if (rotation.inverse) sin = -sin.index_select(1, partner);
  const at::Tensor turned = x.narrow(-1, 0, rotated).to(at::kFloat);
  const at::Tensor other = turned.index_select(-1, partner) * sign;
  const at::Tensor result = turned * cos.view(shape) + other * sin.view(shape);
  return at::cat({result.to(x.scalar_type()), x.slice(-1, rotated)}, -1);
}

/// x in several memory layouts, one of which begins between vectors.
std::vector<at::Tensor> layouts(const at::Tensor& x) {
  const at::Tensor flat = at::empty({x.numel() + 1}, x.options());
  const at::Tensor shifted = flat.narrow(0, 1, x.numel()).view(x.sizes());
  shifted.copy_(x);
  return {x, x.transpose(0, 1).contiguous().transpose(0, 1),
          x.transpose(1, 2).contiguous().transpose(1, 2), at::cat({x, x}, -1).slice(-1, x.size(-1)),
          shifted};
}

void expect_formula(const at::Tensor& x, const Rotation& on_cpu, at::Device device) {
  const at::Tensor expected = formula(x, on_cpu);
  Rotation rotation = on_cpu;
  rotation.cos = rotation.cos.to(device);
  rotation.sin = rotation.sin.to(device);
  const auto given = layouts(x.to(device));
  const auto outs = layouts(at::full_like(given[0], 7));
  for (size_t i = 0; i < given.size(); ++i) {
    const at::Tensor& out = outs[(2 * i + 1) % outs.size()];
    rotate(given[i], rotation, out);
    EXPECT_TRUE(at::equal(out.cpu(), expected)) << given[i].strides() << " to " << out.strides();
  }
}

TEST(Rotary, IsTheFormula) {
  at::manual_seed(3);
  for (const at::Device device : devices()) {
    for (const Size& size : kSizes) {
      for (const at::ScalarType dtype : kDtypes) {
        for (const int64_t dim : {0, 1, 2}) {
          const at::Tensor x = at::randn(size.sizes).to(dtype);
          const at::Tensor angles = at::rand({size.sizes[dim] + 2, size.rotated}) * 40 - 20;
          for (const bool interleaved : {false, true}) {
            for (const bool inverse : {false, true}) {
              SCOPED_TRACE(::testing::Message()
                           << device << " " << x.sizes() << " " << c10::toString(dtype)
                           << " positions in " << dim << (interleaved ? " interleaved" : "")
                           << (inverse ? " inverse" : ""));
              expect_formula(x, {angles.cos(), angles.sin(), dim, interleaved, inverse}, device);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace qshard::testing
