// Transposes tiles of codes in shared memory, in place.
#pragma once

#include "kernels/gemm/sm90/stages.cuh"

namespace qshard::cuda {

/// What a lane does to transpose a swizzled square of 128x128 codes, in kSteps of two blocks of
/// 16x16: block (row, row ^ distance) and the one that it changes places with.
///
/// ldmatrix transposes pairs of codes, as it is made for values of 16 bits. Its two matrices of a
/// block hold rows {0, 1, 4, 5, 10, 11, 14, 15} and the others, so that a lane gets codes of four
/// rows that follow each other, of two columns; and stmatrix writes columns {0, 2, 4, 6, 9, 11, 13,
/// 15} and the others: each eight rows lie in different banks.
class BlockExchange {
 public:
  static constexpr int kSteps = 32;  // four for each distance, in any order

  __device__ BlockExchange() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int i = lane % 8;
    const bool is_shifted = (i >= 4) != (lane / 8 % 2 == 1);  // the second of a block's matrices
    const uint32_t row = i / 2 * 4 + i % 2 + (is_shifted ? 2 : 0);
    const uint32_t column = 2 * i + (is_shifted ? 1 : 0);
    load_at_ = place(row);
    store_at_ = place(column);
    is_other_ = lane >= 16 ? ~0u : 0u;
    const bool ends_first = lane % 4 >= 2;  // the second matrix holds the first two of four rows
    const uint32_t even = ends_first ? 0x2064 : 0x6420;
    const uint32_t odd = ends_first ? 0x3175 : 0x7531;
    first_ = lane >= 16 ? odd : even;
    second_ = lane >= 16 ? even : odd;
  }

  /// Keeps the compiler from computing all addresses beforehand, for which registers lack.
  __device__ void forget() { asm volatile("" : "+r"(load_at_), "+r"(store_at_), "+r"(is_other_)); }

  using Words = uint32_t[4];

  __device__ __forceinline__ void load(Words& words, uint32_t square, int step) const {
    const uint32_t at = load_at_ ^ of_other(step) ^ row(step) * kBlock ^ step / 4 * 16;
    sm90::load_transposed(words, square + at);
  }
  __device__ __forceinline__ void store(Words& words, uint32_t square, int step) const {
    transpose(words);
    const uint32_t at = store_at_ ^ of_other(step) ^ row(step) * kBlock ^ step / 4 * 2048;
    sm90::store_matrices(square + at, words);
  }

 private:
  /// Where the first 16 codes of a block's row lie in the square's first block.
  __device__ static uint32_t place(uint32_t row) { return row * 128 | row % 8 * 16; }
  static constexpr uint32_t kBlock = 2048 + 16;  // from a block to the next row's and column's

  /// The row of a step's first block: the rows without the distance's highest bit, in order.
  __device__ static constexpr uint32_t row(int step) {
    const int top = step >= 16 ? 4 : step >= 8 ? 2 : 1;
    return step % 4 / top * top * 2 + step % 4 % top;
  }
  /// What leads to the second block. Those of the diagonal stay in place, two at a time.
  __device__ uint32_t of_other(int step) const {
    return is_other_ & (step < 4 ? 1 : step / 4) * kBlock;
  }

  __device__ __forceinline__ void transpose(Words& words) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t above = words[i];
      const uint32_t below = words[i + 1];
      words[i] = __byte_perm(above, below, first_);
      words[i + 1] = __byte_perm(above, below, second_);
    }
  }

  uint32_t load_at_;
  uint32_t store_at_;
  uint32_t is_other_;  // all bits: this lane gives addresses in the second of two blocks
  uint32_t first_;
  uint32_t second_;
};

/// Transposes a part of a tile. Blocks are read kAhead steps before they are written.
template <int kFirst, int kLast>
__device__ __forceinline__ void transpose_steps(const BlockExchange& exchange, uint32_t tile) {
  constexpr int kAhead = 4;
  constexpr int kSteps = BlockExchange::kSteps;
  BlockExchange::Words words[kAhead];
#pragma unroll
  for (int step = kFirst; step < kLast + kAhead; ++step) {
    if (step - kAhead >= kFirst) {
      const int to_store = step - kAhead;
      exchange.store(words[to_store % kAhead], tile + to_store / kSteps * 128 * kDepth,
                     to_store % kSteps);
    }
    if (step < kLast) {
      exchange.load(words[step % kAhead], tile + step / kSteps * 128 * kDepth, step % kSteps);
    }
  }
}

/// Transposes what was copied of B: a part of it, by one of kTransposers warps.
template <typename Shape, int kWarp>
__device__ void transpose_operands(uint32_t shared) {
  constexpr int kSteps = Shape::kColumns / 128 * BlockExchange::kSteps;
  BlockExchange exchange;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  RingPlace<Shape::kStages> stage;
  RingPlace<kWorkSlots> slot;
  for (;; slot.advance()) {
    Shape::work_full(shared, slot.index).wait(slot.parity);
    const int k_blocks = sm90::load_shared_words(Shape::work(shared, slot.index) + 16).z;
    __syncwarp();
    if (lane == 0) Shape::work_empty(shared, slot.index).arrive();
    if (k_blocks < 0) return;
    for (int k = 0; k < k_blocks; ++k, stage.advance()) {
      exchange.forget();
      Shape::copied(shared, stage.index).wait(stage.parity);
      transpose_steps<kWarp * kSteps / kTransposers, (kWarp + 1) * kSteps / kTransposers>(
          exchange, shared + Shape::kBAt + stage.index * Shape::kBBytes);
      sm90::publish_stores();
      __syncwarp();
      if (lane == 0) Shape::full(shared, stage.index).arrive();
    }
  }
}

template <typename Shape, int kWarp = 0>
__device__ void transpose_operands(uint32_t shared, int warp) {
  if constexpr (kWarp < kTransposers) {
    if (warp == kWarp) {
      transpose_operands<Shape, kWarp>(shared);
    } else {
      transpose_operands<Shape, kWarp + 1>(shared, warp);
    }
  }
}

}  // namespace qshard::cuda
