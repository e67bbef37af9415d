// Rotary position embedding of one projection's queries, keys and values, which leave it as tensors
// of their own and whose gradients come back into one.
#pragma once

#include <tuple>

#include "ops/calls/ops.h"

namespace qshard {

std::tuple<Tensor, Tensor, Tensor> split_rotary_embedding(const Tensor& input, const Tensor& cos,
                                                          const Tensor& sin, at::IntArrayRef heads,
                                                          int64_t dim, bool interleaved,
                                                          bool inverse);
std::tuple<Tensor, Tensor, Tensor> split_rotary_embedding_meta(const Tensor& input,
                                                               const Tensor& cos, const Tensor& sin,
                                                               at::IntArrayRef heads, int64_t dim,
                                                               bool interleaved, bool inverse);
std::tuple<Tensor, Tensor, Tensor> split_rotary_embedding_autograd(
    const Tensor& input, const Tensor& cos, const Tensor& sin, at::IntArrayRef heads, int64_t dim,
    bool interleaved, bool inverse);

Tensor join_rotary_embedding(const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& cos, const Tensor& sin, at::IntArrayRef heads,
                             int64_t dim, bool interleaved, bool inverse);
Tensor join_rotary_embedding_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const Tensor& cos, const Tensor& sin, at::IntArrayRef heads,
                                  int64_t dim, bool interleaved, bool inverse);
Tensor join_rotary_embedding_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cos, const Tensor& sin, at::IntArrayRef heads,
                                      int64_t dim, bool interleaved, bool inverse);

}  // namespace qshard
