// The matrices of experts.
#pragma once

#include <cstdint>

#include "kernels/linear/linear_weight.h"

namespace qshard {

/// The matrices of experts, rows of one row image that lie one after the other.
struct ExpertWeights {
  LinearWeight stack;       // all their rows, of the image's width
  int64_t count = 0;        // experts
  int64_t rows = 0;         // image rows of each expert's matrix
  int64_t step = 0;         // image rows from one matrix to the next; 0: all experts share one
  bool transposed = false;  // they lie as (in, out): forward multiplies as dgrad of others does

  int64_t out_features() const { return transposed ? stack.codes.cols : rows; }
  int64_t in_features() const { return transposed ? rows : stack.codes.cols; }
  /// The matrix of one expert, as it lies.
  LinearWeight matrix(int64_t expert) const;
};

}  // namespace qshard
