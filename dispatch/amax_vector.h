// The words that ranks agree on in one meeting: amaxes, and what rides behind them.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <span>

namespace qshard {

/// Float32 words of all weights of a meeting in one vector, which ranks reduce by the largest bits.
/// Bits of numbers that are not negative order as the numbers do, with NaN on top.
class AmaxVector {
 public:
  AmaxVector(int64_t numel, at::Device device)
      : words_(at::empty({numel}, at::TensorOptions().dtype(at::kFloat).device(device))) {}

  /// The next `count` words.
  std::span<float> take(int64_t count) {
    const std::span<float> taken(words_.mutable_data_ptr<float>() + taken_,
                                 static_cast<size_t>(count));
    taken_ += count;
    return taken;
  }
  void zero(std::span<float> words) {
    if (!words.empty()) tensor_of(words).zero_();
  }
  const at::Tensor& words() const { return words_; }
  at::Tensor tensor_of(std::span<float> words) const {
    return words_.narrow(0, words.data() - words_.const_data_ptr<float>(),
                         static_cast<int64_t>(words.size()));
  }
  /// The words taken so far.
  at::Tensor taken() const { return words_.narrow(0, 0, taken_); }

 private:
  at::Tensor words_;
  int64_t taken_ = 0;
};

}  // namespace qshard
