// The tensor from C++, without Python: operators, views, updates, storage.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include "dispatch/buffer/packed_planes.h"
#include "dispatch/flush/flush.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/calls/ops.h"

namespace qshard {
namespace {

// A holder of a buffer reads its planes. Only Planes that no buffer has yet can be written.
template <typename T>
concept HasWritableImage = requires(T& planes) {
  planes.write_image();
};
static_assert(HasWritableImage<Planes>);
static_assert(!HasWritableImage<decltype(std::declval<QuantizedBuffer&>().planes())>);
static_assert(
    std::is_same_v<decltype(std::declval<const Planes&>().image()), const ReadOnlyTensor&>);
static_assert(std::is_same_v<decltype(std::declval<const Grid&>().read()), const ReadOnlyTensor&>);

class TensorTest : public testing::TestWithParam<std::tuple<std::string, bool>> {
 protected:
  std::string format() const { return std::get<0>(GetParam()); }
  bool keeps_master() const { return std::get<1>(GetParam()); }

  Tensor make(at::IntArrayRef sizes) const {
    return quantize(at::randn(sizes), format(), keeps_master(), std::nullopt, 0);
  }

  static Tensor value(const Tensor& q) { return value_copy(q); }
};

INSTANTIATE_TEST_SUITE_P(Formats, TensorTest,
                         testing::Combine(testing::Values("float8_tensorwise", "float8_rowwise",
                                                          "float8_blockwise"),
                                          testing::Bool()));

TEST_P(TensorTest, IsATensorOfItsNominalDtype) {
  const Tensor q = make({130, 40});
  EXPECT_TRUE(is_quantized(q));
  EXPECT_EQ(q.scalar_type(), at::kFloat);
  EXPECT_TRUE(q.is_cpu());
  const QuantizedBuffer& buffer = buffer_of(q);
  if (keeps_master()) {
    EXPECT_EQ(q.data_ptr(), buffer.planes().master().const_data_ptr());
    EXPECT_EQ(q.storage().nbytes(), static_cast<size_t>(130 * 40 * 4));
  } else {
    EXPECT_THROW(q.data_ptr(), c10::Error);
    EXPECT_EQ(bytes_of_codes(buffer.layout()), static_cast<int64_t>(q.storage().nbytes()));
  }
}

TEST_P(TensorTest, ViewsReadTheSameElements) {
  const Tensor q = make({130, 40});
  const Tensor plain = value(q);
  EXPECT_TRUE(at::equal(value(q.slice(0, 3, 77, 2)), plain.slice(0, 3, 77, 2)));
  EXPECT_TRUE(at::equal(value(q.t().select(0, 5)), plain.t().select(0, 5)));
  EXPECT_TRUE(at::equal(value(q.view({13, 10, 40}).permute({2, 0, 1})),
                        plain.view({13, 10, 40}).permute({2, 0, 1})));
  EXPECT_TRUE(at::equal(value(q.unfold(0, 4, 3)), plain.unfold(0, 4, 3)));
  EXPECT_TRUE(at::equal(value(q.diagonal()), plain.diagonal()));
}

TEST_P(TensorTest, WritesThroughViewsChangeOnlyTheirElements) {
  const Tensor q = make({130, 40});
  const Tensor plain = value(q);
  q.slice(0, 100, 120).t().mul_(2);
  plain.slice(0, 100, 120).t().mul_(2);
  EXPECT_TRUE(at::equal(value(q), plain));
}

TEST_P(TensorTest, FlushEqualsQuantizingTheValue) {
  const Tensor q = make({130, 40});
  q.mul_(3).add_(0.25);
  const Tensor expected = quantize(value(q), format(), false, std::nullopt, 0);
  EXPECT_TRUE(at::equal(codes(q).view(at::kByte), codes(expected).view(at::kByte)));
  EXPECT_TRUE(at::equal(scale_inv(q), scale_inv(expected)));
  EXPECT_TRUE(buffer_of(q).flush_state().codes_current());
}

TEST_P(TensorTest, CloneIsIndependentAndRebuildFromStorageIsExact) {
  const Tensor q = make({37, 24});
  const Tensor copy = q.clone();
  const Tensor before = value(q);
  q.zero_();
  EXPECT_TRUE(at::equal(value(copy), before));

  Tensor rebuilt = copy.new_empty({});
  const auto& storage = copy.storage();
  const Tensor bytes = tensor_at(storage, at::kByte, 0, {static_cast<int64_t>(storage.nbytes())});
  rebuilt.set_(bytes.clone().storage(), 0, {37, 24}, {24, 1});
  EXPECT_TRUE(at::equal(value(rebuilt), before));
  EXPECT_TRUE(at::equal(codes(rebuilt).view(at::kByte), codes(copy).view(at::kByte)));
}

TEST_P(TensorTest, ShardsOfOneTensorTakeItsPlace) {
  const Tensor whole = make({130, 40});
  for (const auto& [first, count] : {std::pair{0, 44}, {44, 44}, {88, 42}}) {
    const Tensor padded = whole.new_zeros({44, 40});
    EXPECT_FALSE(is_quantized(padded));
    padded.narrow(0, 0, count).copy_(whole.narrow(0, first, count));
    EXPECT_EQ(buffer_of(padded).layout().row_offset, first);
    EXPECT_FALSE(buffer_of(padded).flush_state().is_written());
    EXPECT_TRUE(at::equal(codes(padded).narrow(0, 0, count).view(at::kByte),
                          codes(whole).narrow(0, first, count).view(at::kByte)));
  }
}

TEST_P(TensorTest, EmptyTensorsWork) {
  for (const auto& sizes : {std::vector<int64_t>{0, 16}, {16, 0}, {0, 0}, {2, 0, 8}}) {
    const Tensor q = make(sizes);
    q.mul_(2);
    EXPECT_EQ(value(q).sizes(), q.sizes());
    EXPECT_EQ(codes(q).sizes(), q.sizes());
    EXPECT_TRUE(is_quantized(q.clone()));
  }
}

TEST_P(TensorTest, ErrorsLeaveTheTensorAsItWas) {
  const Tensor q = make({12, 8});
  const Tensor bytes = pack_planes(buffer_of(q));
  EXPECT_THROW(q.add_(at::ones({5})), c10::Error);
  EXPECT_THROW(q.resize_({3, 3}), c10::Error);
  EXPECT_THROW(q.copy_(at::ones({7, 8})), c10::Error);
  EXPECT_THROW(q.view(at::kByte), c10::Error);
  Tensor out = q;
  EXPECT_THROW(at::add_out(out, at::ones({30, 8}), at::ones({30, 8})), c10::Error);
  EXPECT_FALSE(buffer_of(q).planes().pending().defined());
  EXPECT_TRUE(at::equal(pack_planes(buffer_of(q)), bytes));
}

TEST_P(TensorTest, MasterAliasMarksTheTensorWritten) {
  const Tensor q = make({12, 8});
  const auto alias = master(q);
  EXPECT_EQ(alias.has_value(), keeps_master());
  if (!alias) return;
  alias->mul_(2);
  EXPECT_FALSE(buffer_of(q).flush_state().codes_current());
  EXPECT_TRUE(at::equal(dequantize(q, std::nullopt),
                        dequantize(quantize(*alias, format(), false, std::nullopt, 0), {})));
}

TEST_P(TensorTest, WeakReferencesDoNotKeepPlanes) {
  Tensor q = make({130, 40});
  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak(
      q.getIntrusivePtr());
  const c10::weak_intrusive_ptr<QuantizedBuffer> buffer(impl_of(q).buffer());
  const auto value = q.storage().getWeakStorageImpl();
  const auto codes = buffer_of(q).planes().code_storage().getWeakStorageImpl();
  q.reset();
  EXPECT_TRUE(weak.expired());
  EXPECT_TRUE(value.expired());
  EXPECT_TRUE(codes.expired());
  EXPECT_TRUE(buffer.expired());
}

TEST(Shards, OfOneBlockNeedTheirGroup) {
  const Tensor shard = quantize(at::randn({4, 16}), "float8_blockwise", true, 8, 0);
  EXPECT_THROW(codes(shard), c10::Error);
  EXPECT_THROW(flush({impl_of(shard).buffer()}), c10::Error);
  const Tensor aligned = quantize(at::randn({128, 16}), "float8_blockwise", true, 256, 128);
  EXPECT_EQ(codes(aligned).size(0), 128);
  EXPECT_TRUE(buffer_of(aligned).flush_state().is_written());  // its scales are still to be shared
}

}  // namespace
}  // namespace qshard
