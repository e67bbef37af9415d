// The ring of stages in shared memory, through which a grouped GEMM's operands pass.
#pragma once

#include <cstdint>

#include "kernels/device/sm90.cuh"
#include "kernels/gemm/sm90/store.cuh"
#include "kernels/gemm/sm90/tiles.cuh"

namespace qshard::cuda {

constexpr int kDepth = 128;  // contracted codes of a stage, and of a scale
constexpr int kWorkers = 2 * kWarpgroup;
constexpr int kGroupedThreads = kWorkers + kWarpgroup;
constexpr int kTransposers = 3;  // warps, of the warpgroup that copies
constexpr int kWorkSlots = 2;
constexpr int kSharedBytes = 227 * 1024;

template <int kRows, ColumnScales kScales, bool kTransposes>
struct GroupedShape {
  static constexpr bool kTransposesB = kTransposes;
  static constexpr int kTileRows = kRows;
  static constexpr int kColumns = columns_of_tile(kRows);
  static constexpr bool kSplitsColumns = kColumns == 256;  // between warpgroups; else rows
  static constexpr int kWaves = kRows == 256 ? 2 : 1;      // of 64 rows, of each warpgroup
  static constexpr bool kRowScales = kScales == ColumnScales::kRow;
  static constexpr bool kCopiesAScales =
      kScales == ColumnScales::kSquare || kScales == ColumnScales::kRow;

  static constexpr int kABytes = kRows * kDepth;
  static constexpr int kBBytes = kColumns * kDepth;
  static constexpr int kAScalesCopied = kCopiesAScales ? (kRows + kScaleMargin) * 4 : 0;
  static constexpr int kAScaleBytes = (kAScalesCopied + 127) / 128 * 128;  // copies are aligned so
  static constexpr int kBScaleBytes = kRowScales ? kColumns * 4 : 0;
  static constexpr int kStageBytes = kABytes + kBBytes + kAScaleBytes + kBScaleBytes;
  static constexpr int kCopiedBytes = kABytes + kBBytes + kAScalesCopied + kBScaleBytes;
  static constexpr int kOtherBytes = 1024;
  static constexpr int kStages = (kSharedBytes - kOtherBytes) / kStageBytes;
  static_assert(kStages >= 3);

  // Codes first: their rows' swizzle wants 1024 bytes.
  static constexpr int kBAt = kStages * kABytes;
  static constexpr int kAScalesAt = kBAt + kStages * kBBytes;
  static constexpr int kBScalesAt = kAScalesAt + kStages * kAScaleBytes;
  static constexpr int kControlAt = kBScalesAt + kStages * kBScaleBytes;

  static constexpr int kFullAt = kControlAt;
  static constexpr int kEmptyAt = kFullAt + kStages * 8;
  static constexpr int kCopiedAt = kEmptyAt + kStages * 8;
  static constexpr int kWorkFullAt = kCopiedAt + kStages * 8;
  static constexpr int kWorkEmptyAt = kWorkFullAt + kWorkSlots * 8;
  static constexpr int kWorkAt = (kWorkEmptyAt + kWorkSlots * 8 + 15) / 16 * 16;
  static_assert(kWorkAt % 16 == 0 && sizeof(TileWork) == 32);
  static_assert(kWorkAt + kWorkSlots * 32 <= kSharedBytes);

  // Where the ring's barriers and work slots lie in shared memory that begins at `shared`. A stage
  // is full when it is copied, and its B transposed if need be.
  __device__ static sm90::Barrier full(uint32_t shared, int i) {
    return {shared + kFullAt + 8 * i};
  }
  __device__ static sm90::Barrier empty(uint32_t shared, int i) {
    return {shared + kEmptyAt + 8 * i};
  }
  __device__ static sm90::Barrier copied(uint32_t shared, int i) {
    return kTransposes ? sm90::Barrier{shared + kCopiedAt + 8 * i} : full(shared, i);
  }
  __device__ static sm90::Barrier work_full(uint32_t shared, int i) {
    return {shared + kWorkFullAt + 8 * i};
  }
  __device__ static sm90::Barrier work_empty(uint32_t shared, int i) {
    return {shared + kWorkEmptyAt + 8 * i};
  }
  __device__ static uint32_t work(uint32_t shared, int i) { return shared + kWorkAt + 32 * i; }
};

/// A place in a ring of kCount, and the parity of its phase.
template <int kCount>
struct RingPlace {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++index == kCount) {
      index = 0;
      parity ^= 1;
    }
  }
};

}  // namespace qshard::cuda
