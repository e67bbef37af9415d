// Cross entropy on plain memory: what the kernels of CPU and CUDA are given.
#pragma once

#include <cstdint>

#include "kernels/loss/softmax.h"

namespace qshard {

struct CrossEntropyTask {
  const void* logits = nullptr;      // (m, v) contiguous
  const int64_t* targets = nullptr;  // (m,)
  int64_t m = 0;
  int64_t v = 0;
  int64_t ignored = -100;
  Smoothing smoothing = {};
  float* log_sums = nullptr;  // (m,); NaN where a loss is
  float* losses = nullptr;    // (m,); 0 of ignored targets
  float* totals = nullptr;    // the sum of losses, and how many targets are not ignored
};

}  // namespace qshard
