// Grouped GEMM of FP8 codes, for Hopper's tensor cores: with scales in blocks or of whole groups.
//
// One block per multiprocessor walks over tiles of D. One warp copies tiles of the operands into a
// ring in shared memory; two warpgroups multiply them. Each sums 128 contracted codes on the tensor
// cores and adds the sums, scaled, to fp32 registers, because the cores' own sums keep about 14
// bits. Every element is summed in the same order whatever the tile and whatever other groups there
// are.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/device/sm90.cuh"
#include "kernels/grouped/tiles.cuh"

namespace qshard::cuda {

constexpr int kDepth = 128;  // contracted codes of a stage, and of a scale
constexpr int kWarpgroup = 128;
constexpr int kWorkers = 2 * kWarpgroup;
constexpr int kGroupedThreads = kWorkers + kWarpgroup;
constexpr int kWorkSlots = 2;
constexpr int kSharedBytes = 227 * 1024;

template <int kRows, ColumnScales kScales>
struct GroupedShape {
  static constexpr int kTileRows = kRows;
  static constexpr int kColumns = columns_of_tile(kRows);
  static constexpr bool kSplitsColumns = kColumns == 256;  // between warpgroups; else rows
  static constexpr int kWaves = kRows == 256 ? 2 : 1;      // of 64 rows, of each warpgroup
  static constexpr bool kRowScales = kScales == ColumnScales::kRow;
  static constexpr bool kCopiesAScales = kScales != ColumnScales::kGroup;

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
  static constexpr int kWorkFullAt = kEmptyAt + kStages * 8;
  static constexpr int kWorkEmptyAt = kWorkFullAt + kWorkSlots * 8;
  static constexpr int kWorkAt = kWorkEmptyAt + kWorkSlots * 8;
  static_assert(kWorkAt % 16 == 0 && sizeof(TileWork) == 32);
  static_assert(kWorkAt + kWorkSlots * 32 <= kSharedBytes);

  // Where the ring's barriers and work slots lie in shared memory that begins at `shared`.
  __device__ static sm90::Barrier full(uint32_t shared, int i) {
    return {shared + kFullAt + 8 * i};
  }
  __device__ static sm90::Barrier empty(uint32_t shared, int i) {
    return {shared + kEmptyAt + 8 * i};
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

/// Copies what this block's tiles need, by one warp.
template <GroupsAlong kAlong, typename Shape>
__device__ void copy_operands(const GroupedGemmArguments& arguments, uint32_t shared) {
  const bool leads = threadIdx.x % 32 == 0;
  TileWalk<kAlong> walk(arguments, Shape::kTileRows, Shape::kColumns);
  RingPlace<Shape::kStages> stage;
  RingPlace<kWorkSlots> slot;
  for (int index = static_cast<int>(blockIdx.x);;
       index += static_cast<int>(gridDim.x), slot.advance()) {
    const TileWork work = walk.find(index);
    if (leads) {
      Shape::work_empty(shared, slot.index).wait(slot.parity ^ 1);
      const uint32_t to = Shape::work(shared, slot.index);
      sm90::store_shared_words(to, make_int4(work.a_row, work.b_row, work.d_row, work.column));
      sm90::store_shared_words(to + 16,
                               make_int4(work.rows, work.k_block, work.k_blocks, work.scale));
      Shape::work_full(shared, slot.index).arrive();
    }
    if (work.k_blocks < 0) return;
    if (leads) {
      for (int k = work.k_block; k < work.k_block + work.k_blocks; ++k, stage.advance()) {
        const int i = stage.index;
        const sm90::Barrier full = Shape::full(shared, i);
        Shape::empty(shared, i).wait(stage.parity ^ 1);
        full.arrive_and_expect(Shape::kCopiedBytes);
        sm90::copy_tile(shared + i * Shape::kABytes, arguments.a, k * kDepth, work.a_row, full);
        sm90::copy_tile(shared + Shape::kBAt + i * Shape::kBBytes, arguments.b, k * kDepth,
                        work.b_row, full);
        if constexpr (Shape::kCopiesAScales) {
          sm90::copy_tile(shared + Shape::kAScalesAt + i * Shape::kAScaleBytes, arguments.a_scales,
                          work.a_row / kScaleMargin * (kScaleMargin / 2), k, full);
        }
        if constexpr (Shape::kRowScales) {
          sm90::copy_tile(shared + Shape::kBScalesAt + i * Shape::kBScaleBytes, arguments.b_scales,
                          work.b_row, k, full);
        }
      }
    }
    __syncwarp();
  }
}

/// Two values of 16 bits in a word: bfloat16 or, where `is_half`, float16.
__device__ __forceinline__ uint32_t two_values(float low, float high, bool is_half) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  const __half2 halves = __floats2half2_rn(low, high);
  return is_half ? *reinterpret_cast<const uint32_t*>(&halves)
                 : *reinterpret_cast<const uint32_t*>(&two);
}

/// The sums of two such pairs.
__device__ __forceinline__ uint32_t add_values(uint32_t a, uint32_t b, bool is_half) {
  const auto value = [&](uint32_t word, int i) {
    const auto bits = static_cast<uint16_t>(word >> (16 * i));
    return is_half ? __half2float(__ushort_as_half(bits))
                   : __uint_as_float(static_cast<uint32_t>(bits) << 16);
  };
  return two_values(value(a, 0) + value(b, 0), value(a, 1) + value(b, 1), is_half);
}

/// How D's values of 16 bits are stored.
struct StoredWords {
  bool is_half;
  bool adds;  // to those that are there
};

/// Four lanes hold a row's columns 2q and 2q + 1 of four blocks of 8: then lane q holds block q.
__device__ __forceinline__ void gather_blocks(uint32_t (&v)[4], int q) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, q & 1 ? v[i] : v[i + 1], 1);
    (q & 1 ? v[i] : v[i + 1]) = got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t got = __shfl_xor_sync(0xffffffffu, q & 2 ? v[i] : v[i + 2], 2);
    (q & 2 ? v[i] : v[i + 2]) = got;
  }
}

/// Writes `rows` x `columns` of the sums of 64 x 128, rows `pitch` values apart. In vectors:
/// `pitch` is a multiple of 8, and `to` of as many bytes as a vector has.
template <bool kInVectors>
__device__ __forceinline__ void store_words(const float (&sums)[sm90::kSums], uint16_t* to,
                                            int64_t pitch, int rows, int columns, StoredWords as) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int q = lane % 4;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool has_row = row + 8 * half < rows;
    uint16_t* to_row = to + (row + 8 * half) * pitch + 8 * q;
    // No branches around the exchanges, which then overlap.
    uint32_t v[4][4];
#pragma unroll
    for (int four = 0; four < 4; ++four) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 16 * four + 4 * i + 2 * half;
        v[four][i] = two_values(sums[at], sums[at + 1], as.is_half);
      }
      gather_blocks(v[four], q);
    }
#pragma unroll
    for (int four = 0; four < 4; ++four) {
      const int column = 32 * four + 8 * q;
      if (!has_row || column >= columns) continue;
      if constexpr (kInVectors) {
        auto* vector = reinterpret_cast<uint4*>(to_row + 32 * four);
        if (as.adds) {
          const uint4 there = *vector;
          v[four][0] = add_values(v[four][0], there.x, as.is_half);
          v[four][1] = add_values(v[four][1], there.y, as.is_half);
          v[four][2] = add_values(v[four][2], there.z, as.is_half);
          v[four][3] = add_values(v[four][3], there.w, as.is_half);
        }
        *vector = make_uint4(v[four][0], v[four][1], v[four][2], v[four][3]);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (column + i < columns) {
            uint16_t& value = to_row[32 * four + i];
            uint32_t word = v[four][i / 2] >> (16 * (i % 2)) & 0xffff;
            if (as.adds) word = add_values(word, value, as.is_half);
            value = static_cast<uint16_t>(word);
          }
        }
      }
    }
  }
}

/// The same of D in fp32, in pairs or one by one.
template <bool kInVectors>
__device__ __forceinline__ void store_floats(const float (&sums)[sm90::kSums], float* to,
                                             int64_t pitch, int rows, int columns, bool adds) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + 8 * half >= rows) continue;
    float* to_row = to + (row + 8 * half) * pitch;
#pragma unroll
    for (int eight = 0; eight < sm90::kSums / 4; ++eight) {
      const int column = 8 * eight + 2 * (lane % 4);
      if (column >= columns) continue;
      float2 two = make_float2(sums[4 * eight + 2 * half], sums[4 * eight + 2 * half + 1]);
      if constexpr (kInVectors) {
        auto* pair = reinterpret_cast<float2*>(to_row + column);
        if (adds) two = make_float2(two.x + pair->x, two.y + pair->y);
        *pair = two;
      } else {
        const bool has_second = column + 1 < columns;
        to_row[column] = adds ? two.x + to_row[column] : two.x;
        if (has_second) to_row[column + 1] = adds ? two.y + to_row[column + 1] : two.y;
      }
    }
  }
}

/// One warpgroup, which multiplies its part of every tile.
///
/// The tensor cores idle while both warpgroups are between two waves' products, so the loop does
/// little there: scales of squares are read 32 at a time, the next stage is looked at early,
/// a whole tile is summed without branches, and addresses are in uniform registers. Making the
/// warpgroups take turns by barriers was slower.
template <ColumnScales kScales, bool kWideA, typename Shape>
class Multiplier {
 public:
  __device__ Multiplier(const GroupedGemmArguments& arguments, uint32_t shared)
      : arguments_(arguments),
        shared_(shared),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warpgroup_(__shfl_sync(kAll, static_cast<int>(threadIdx.x) / kWarpgroup, 0)),
        first_row_(Shape::kSplitsColumns ? 0 : warpgroup_ * kWaves * kWaveRows),
        first_column_(Shape::kSplitsColumns ? warpgroup_ * 128 : 0),
        a_at_((shared + first_row_ * kDepth) / 16),
        b_at_((shared + Shape::kBAt + first_column_ * kDepth) / 16) {
    const int row = first_row_ + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16 + lane_ / 4;
    a_scales_at_ = shared + Shape::kAScalesAt + row * 4;
    b_scales_at_ = shared + Shape::kBScalesAt + (first_column_ + 2 * (lane_ % 4)) * 4;
  }

  __device__ void run() {
    RingPlace<kWorkSlots> slot;
    for (;; slot.advance()) {
      Shape::work_full(shared_, slot.index).wait(slot.parity);
      const int4 place = sm90::load_shared_words(Shape::work(shared_, slot.index));
      const int4 extent = sm90::load_shared_words(Shape::work(shared_, slot.index) + 16);
      const TileWork work = {place.x,  place.y,  place.z,  place.w,
                             extent.x, extent.y, extent.z, extent.w};
      __syncwarp();
      if (lane_ == 0) Shape::work_empty(shared_, slot.index).arrive();
      const int k_blocks = __shfl_sync(kAll, work.k_blocks, 0);
      if (k_blocks < 0) return;
      multiply_tile(work, k_blocks);
    }
  }

 private:
  static constexpr unsigned kAll = 0xffffffffu;
  static constexpr int kWaves = Shape::kWaves;
  static constexpr int kWaveRows = sm90::kProductRows;
  static constexpr bool kHasSquares = kScales == ColumnScales::kSquare;
  static constexpr bool kHasRows = kScales == ColumnScales::kRow;

  __device__ void multiply_tile(const TileWork& work, int k_blocks) {
    const int column = work.column + first_column_;
    const int columns = arguments_.n - column;
    const int waves = __shfl_sync(
        kAll, columns <= 0 ? 0 : (work.rows - first_row_ + kWaveRows - 1) / kWaveRows, 0);
    a_scales_ = a_scales_at_ + work.a_row % kScaleMargin * 4;
    float total[kWaves][sm90::kSums] = {};
    const float* scales = nullptr;
    if constexpr (kHasSquares) {
      scales = arguments_.square_scales + work.scale +
               min(column, arguments_.n - 1) / 128 * arguments_.scale_rows;
    }
    if (waves >= kWaves) {
      sum<true>(total, scales, k_blocks, waves);
    } else {
      sum<false>(total, scales, k_blocks, waves);
    }
    if (arguments_.adds && k_blocks == 0) return;  // a sum of nothing would turn -0 into 0
    if constexpr (kScales == ColumnScales::kGroup) {
      if (k_blocks > 0) {
        const float by =
            arguments_.a_group_scales[work.scale] * arguments_.b_group_scales[work.scale];
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
          for (int i = 0; i < sm90::kSums; ++i) total[wave][i] *= by;
        }
      }
    }
    const int64_t first = static_cast<int64_t>(work.d_row + first_row_) * arguments_.n + column;
    if (arguments_.n % 8 == 0) {
      store<true>(total, first, work.rows - first_row_, columns, waves);
    } else {
      store<false>(total, first, work.rows - first_row_, columns, waves);
    }
  }

  template <bool kInVectors>
  __device__ void store(const float (&total)[kWaves][sm90::kSums], int64_t first, int rows,
                        int columns, int waves) const {
    const bool adds = arguments_.adds;
    const int64_t pitch = arguments_.n;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      if (wave >= waves) continue;
      const int64_t at = first + kWaveRows * wave * pitch;
      const int left = rows - kWaveRows * wave;
      if (arguments_.d_type == DType::kFloat32) {
        store_floats<kInVectors>(total[wave], static_cast<float*>(arguments_.d) + at, pitch, left,
                                 columns, adds);
      } else {
        store_words<kInVectors>(total[wave], static_cast<uint16_t*>(arguments_.d) + at, pitch, left,
                                columns, {arguments_.d_type == DType::kFloat16, adds});
      }
    }
  }

  /// Adds products of k_blocks stages. `waves`, or kWhole: all, of them have rows of D.
  template <bool kWhole>
  __device__ void sum(float (&total)[kWaves][sm90::kSums], const float* scales, int k_blocks,
                      int waves) {
    constexpr int kChunk = 32;  // scales of squares, one to a lane; the next ones are under way
    float next_scales = kHasSquares ? scale_of(scales, lane_, k_blocks) : 0.f;
    for (int first = 0; first < k_blocks; first += kChunk) {
      const float chunk_scales = next_scales;
      if (kHasSquares) next_scales = scale_of(scales, first + kChunk + lane_, k_blocks);
      const int count = min(k_blocks - first, kChunk);
      for (int k = 0; k < count; ++k) {
        add_stage<kWhole>(total, chunk_scales, k, waves);
      }
    }
  }

  __device__ float scale_of(const float* scales, int block, int k_blocks) const {
    return block < k_blocks ? __ldg(scales + block * arguments_.scale_block) : 0.f;
  }

  template <bool kWhole>
  __device__ __forceinline__ void add_stage(float (&total)[kWaves][sm90::kSums], float chunk_scales,
                                            int k, int waves) {
    float square = 0.f;
    const uint32_t a = a_at_ + stage_.index * (Shape::kABytes / 16);
    const uint32_t b = b_at_ + stage_.index * (Shape::kBBytes / 16);
    const uint32_t a_scales = a_scales_ + stage_.index * Shape::kAScaleBytes;
    const uint32_t b_scales = b_scales_at_ + stage_.index * Shape::kBScaleBytes;
    const sm90::Barrier empty = Shape::empty(shared_, stage_.index);
    if (!is_full_) Shape::full(shared_, stage_.index).wait(stage_.parity);
    stage_.advance();
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
      const bool is_last = wave == kWaves - 1;
      if (kWhole || wave < waves) {
        float by[2] = {};
        if constexpr (Shape::kCopiesAScales) {
          by[0] = sm90::load_shared(a_scales + 4 * kWaveRows * wave);
          by[1] = sm90::load_shared(a_scales + 4 * (kWaveRows * wave + 8));
        }
        float sums[sm90::kSums];
        sm90::begin_products();
#pragma unroll
        for (int depth = 0; depth < kDepth; depth += sm90::kProductDepth) {
          sm90::start_product<kWideA>(
              sums, sm90::swizzled_rows(a + (wave * kWaveRows * kDepth + depth) / 16),
              sm90::swizzled_rows(b + depth / 16), depth != 0);
        }
        sm90::commit_products();
        // The scale may still be under way: the products do not wait for it.
        if (kHasSquares && wave == 0) square = __shfl_sync(kAll, chunk_scales, k);
        if (is_last) look_ahead();
        // Scales of B's rows are read some columns before they are used, the first ones meanwhile.
        constexpr int kAhead = 4;
        float2 columns[kAhead];
        if constexpr (kHasRows) {
#pragma unroll
          for (int i = 0; i < kAhead; ++i) columns[i] = sm90::load_shared_pair(b_scales + 32 * i);
        }
        sm90::finish_products(sums, by);
        if constexpr (kHasSquares) {
          if (is_last) release(empty);
          by[0] *= square;
          by[1] *= square;
#pragma unroll
          for (int i = 0; i < sm90::kSums; ++i) {
            total[wave][i] = fmaf(by[i / 2 % 2], sums[i], total[wave][i]);
          }
        } else if constexpr (!kHasRows) {
          if (is_last) release(empty);
#pragma unroll
          for (int i = 0; i < sm90::kSums; ++i) total[wave][i] += sums[i];
        } else {
#pragma unroll
          for (int eight = 0; eight < sm90::kSums / 4; ++eight) {
            const float2 two = columns[eight % kAhead];
            if (eight + kAhead < sm90::kSums / 4) {
              columns[eight % kAhead] = sm90::load_shared_pair(b_scales + 32 * (eight + kAhead));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              float& sum = total[wave][4 * eight + i];
              sum = fmaf(by[i / 2] * (i % 2 ? two.y : two.x), sums[4 * eight + i], sum);
            }
          }
          if (is_last) release(empty);
        }
      } else if (is_last) {
        look_ahead();
        release(empty);
      }
    }
  }

  /// Whether the stage to come is there: asked while the tensor cores are busy.
  __device__ void look_ahead() {
    is_full_ = Shape::full(shared_, stage_.index).has_ended(stage_.parity);
  }

  /// The copies may overwrite a stage.
  __device__ void release(sm90::Barrier empty) const {
    __syncwarp();
    if (lane_ == 0) empty.arrive();
  }

  const GroupedGemmArguments& arguments_;
  uint32_t shared_;
  int lane_;
  int warpgroup_;
  int first_row_;
  int first_column_;
  // Where the parts of stage 0 lie; codes in units of 16 bytes, as products take them.
  uint32_t a_at_;
  uint32_t b_at_;
  uint32_t a_scales_at_;
  uint32_t a_scales_ = 0;  // scales of the tile's rows
  uint32_t b_scales_at_;
  RingPlace<Shape::kStages> stage_;
  bool is_full_ = false;  // the stage at stage_, as far as is known
};

template <GroupsAlong kAlong, ColumnScales kScales, int kRows, bool kWideA>
__global__ void __launch_bounds__(kGroupedThreads, 1)
    grouped_gemm(const __grid_constant__ GroupedGemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = GroupedShape<kRows, kScales>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t at = sm90::shared_address(shared);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kWorkers / 32;
    for (int i = 0; i < Shape::kStages; ++i) {
      Shape::full(at, i).init(1);
      Shape::empty(at, i).init(kWarps);
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      Shape::work_full(at, i).init(1);
      Shape::work_empty(at, i).init(kWarps);
    }
    sm90::publish_barriers();
  }
  __syncthreads();
  if (warp >= kWorkers / 32) {
    sm90::give_registers<40>();
    if (warp == kWorkers / 32) copy_operands<kAlong, Shape>(arguments, at);
  } else {
    sm90::take_registers<232>();
    Multiplier<kScales, kWideA, Shape>(arguments, at).run();
  }
#else
  __trap();
#endif
}

}  // namespace qshard::cuda
