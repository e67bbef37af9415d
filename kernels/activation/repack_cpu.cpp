#include "kernels/activation/repack_cpu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>

#include "kernels/format/layout.h"
#include "kernels/numerics/row_scales.h"

namespace qshard::cpu {
namespace {

constexpr int64_t kBlock = 128;
constexpr int64_t kRowsPerThread = 16;

template <typename Run>
void for_each(int64_t count, int64_t per_thread, const Run& run) {
  at::parallel_for(0, count, per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run(i);
  });
}

using Codes = std::array<uint8_t, 256>;

/// What each code becomes by a scale that is 2^i times its own.
const Codes& codes_by_larger_scale(int i) {
  static const auto tables = [] {
    std::array<Codes, kMostShift + 1> made{};
    for (int shift = 0; shift <= kMostShift; ++shift) {
      const float factor = rescaling(static_cast<uint8_t>(kE8M0One - shift), kE8M0One);
      for (int code = 0; code < 256; ++code) {
        made[shift][code] = encode_e4m3(decode_e4m3(static_cast<uint8_t>(code)) * factor);
      }
    }
    return made;
  }();
  return tables[static_cast<size_t>(i)];
}

/// 128x128 codes, less at the edges, or all.
struct Tile {
  const RepackTask& task;
  int64_t first_row, first_col;
  int64_t last_row = std::min(first_row + kBlock, task.rows);
  int64_t last_col = std::min(first_col + kBlock, task.cols);

  const uint8_t* codes(int64_t row) const { return task.image + row * task.pitch; }
  uint8_t scale(int64_t row) const {
    return codes(row)[task.scale_offset + (task.has_row_scale ? 0 : first_col / kBlock)];
  }
  bool is_zero(int64_t row) const {
    return std::all_of(codes(row) + first_col, codes(row) + last_col,
                       [](uint8_t code) { return (code & 0x7f) == 0; });
  }
  /// That of the columns' codes; 1 for zeros.
  uint8_t largest_scale() const {
    int largest = -1;
    for (int64_t row = first_row; row < last_row; ++row) {
      if (scale(row) > largest && !is_zero(row)) largest = scale(row);
    }
    return largest < 0 ? kE8M0One : static_cast<uint8_t>(largest);
  }
  void write_columns(uint8_t largest) const {
    for (int64_t row = first_row; row < last_row; ++row) {
      const Codes& by_column =
          codes_by_larger_scale(std::clamp<int>(largest - scale(row), 0, kMostShift));
      for (int64_t col = first_col; col < last_col; ++col) {
        task.codes[col * task.ld + row] = by_column[codes(row)[col]];
      }
    }
  }
};

}  // namespace

void repack_rows(const RepackTask& task) {
  for_each(task.padded_rows, kRowsPerThread, [&](int64_t row) {
    uint8_t* codes = task.codes + row * task.ld;
    const uint8_t* from = task.image + row * task.pitch;
    const bool is_there = row < task.rows;
    for (int64_t block = 0; block < ceil_div(task.cols, kBlock); ++block) {
      const uint8_t scale = is_there ? from[task.scale_offset + block] : kE8M0One;
      task.scale_inv[block * task.padded_rows + row] = e8m0_to_float(scale);
    }
    uint8_t* end = is_there ? std::copy_n(from, task.cols, codes) : codes;
    std::fill(end, codes + task.ld, uint8_t{0});
  });
}

void read_row_scales(const RepackTask& task) {
  for (int64_t row = 0; row < task.rows; ++row) {
    task.scale_inv[row] = e8m0_to_float(task.image[row * task.pitch + task.scale_offset]);
  }
}

void repack_columns(const RepackTask& task, ScaleMode mode) {
  const bool square = mode == ScaleMode::kBlock128x128;
  const int64_t row_blocks = ceil_div(task.rows, kBlock);
  const int64_t pitch = round_up(row_blocks, 4);
  uint8_t of_all = kE8M0One;
  if (task.has_row_scale) {
    of_all = Tile{task, 0, 0, task.rows, task.cols}.largest_scale();
    std::fill_n(task.scale_inv, mode == ScaleMode::kRow ? task.padded_rows : 1,
                e8m0_to_float(of_all));
  }
  for_each(ceil_div(task.padded_rows, kBlock), 1, [&](int64_t block_col) {
    const int64_t begin = block_col * kBlock;
    const int64_t end = std::min(begin + kBlock, task.padded_rows);
    std::fill(task.codes + begin * task.ld, task.codes + end * task.ld, uint8_t{0});
    for (int64_t block_row = 0; block_row < row_blocks; ++block_row) {
      const Tile tile{task, block_row * kBlock, begin};
      const uint8_t largest = task.has_row_scale ? of_all : tile.largest_scale();
      tile.write_columns(largest);
      if (task.has_row_scale) continue;
      if (square) {
        task.scale_inv[block_col * pitch + block_row] = e8m0_to_float(largest);
        continue;
      }
      float* scales = task.scale_inv + block_row * task.padded_rows;
      std::fill(scales + begin, scales + tile.last_col, e8m0_to_float(largest));
      std::fill(scales + tile.last_col, scales + end, 1.f);
    }
    if (square) {
      float* scales = task.scale_inv + block_col * pitch;
      std::fill(scales + row_blocks, scales + pitch, 0.f);
    }
  });
}

}  // namespace qshard::cpu
