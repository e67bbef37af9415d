// The noise of kernels/numerics/message_noise.h, value after value.
#pragma once

#include <ATen/core/PhiloxRNGEngine.h>

#include "kernels/numerics/message_noise.h"

namespace qshard::cpu {

class MessageNoise {
 public:
  /// Begins at value `first`, a multiple of kNoiseValues.
  MessageNoise(const int32_t* rounding, int64_t first)
      : words_(philox_key(rounding), philox_count(rounding),
               static_cast<uint64_t>(first / kNoiseValues)) {}

  uint32_t operator()() {
    if (next_ == 0) word_ = words_(kNoiseRounds);
    const uint32_t noise = noise_of_word(word_, next_);
    next_ = (next_ + 1) % 4;
    return noise;
  }

 private:
  at::philox_engine words_;
  uint32_t word_ = 0;
  int next_ = 0;
};

}  // namespace qshard::cpu
