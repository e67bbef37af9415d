// Grouped GEMM of FP8 codes, for Hopper's tensor cores: with scales in blocks or of whole groups.
//
// One block per multiprocessor walks over tiles of D. One warp copies tiles of the operands into a
// ring in shared memory; two warpgroups multiply them. Each sums 128 contracted codes on the tensor
// cores and adds the sums, scaled, to fp32 registers, because the cores' own sums keep about 14
// bits. Every element is summed in the same order whatever the tile and whatever other groups there
// are.
//
// The tensor cores contract FP8 codes that lie side by side. Where those of B lie below each other,
// three more warps transpose every tile of it in place, between its copy and its products.
#pragma once

#include <algorithm>

#include "kernels/format/layout.h"
#include "kernels/gemm/sm90/stages.cuh"
#include "kernels/gemm/sm90/store.cuh"
#include "kernels/gemm/sm90/tiles.cuh"
#include "kernels/gemm/sm90/transpose.cuh"

namespace qshard::cuda {

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
      sm90::store_shared_words(to, make_int4(work.a_row, work.matrix, work.d_row, work.column));
      sm90::store_shared_words(to + 16,
                               make_int4(work.rows, work.k_block, work.k_blocks, work.scale));
      Shape::work_full(shared, slot.index).arrive();
    }
    if (work.k_blocks < 0) return;
    if (leads) {
      for (int k = work.k_block; k < work.k_block + work.k_blocks; ++k, stage.advance()) {
        const int i = stage.index;
        const sm90::Barrier copied = Shape::copied(shared, i);
        Shape::empty(shared, i).wait(stage.parity ^ 1);
        copied.arrive_and_expect(Shape::kCopiedBytes);
        sm90::copy_tile(shared + i * Shape::kABytes, arguments.a, k * kDepth, work.a_row, copied);
        const uint32_t b = shared + Shape::kBAt + i * Shape::kBBytes;
        if constexpr (Shape::kTransposesB) {
#pragma unroll
          for (int square = 0; square < Shape::kColumns / 128; ++square) {
            sm90::copy_tile(b + square * 128 * kDepth, arguments.b, work.column + square * 128,
                            k * kDepth, work.matrix, copied);
          }
        } else {
          sm90::copy_tile(b, arguments.b, k * kDepth, work.column, work.matrix, copied);
        }
        if constexpr (Shape::kCopiesAScales) {
          sm90::copy_tile(shared + Shape::kAScalesAt + i * Shape::kAScaleBytes, arguments.a_scales,
                          work.a_row / kScaleMargin * (kScaleMargin / 2), k, copied);
        }
        if constexpr (Shape::kRowScales) {
          sm90::copy_tile(shared + Shape::kBScalesAt + i * Shape::kBScaleBytes, arguments.b_scales,
                          work.column, k, copied);
        }
      }
    }
    __syncwarp();
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
    } else if constexpr (kScales == ColumnScales::kVector) {
      if (k_blocks > 0) multiply_by_vectors(total, work, column);
    }
    const int64_t first = static_cast<int64_t>(work.d_row + first_row_) * arguments_.n + column;
    if (arguments_.n % 8 == 0) {
      store<true>(total, first, work.rows - first_row_, columns, waves);
    } else {
      store<false>(total, first, work.rows - first_row_, columns, waves);
    }
  }

  /// By scales of rows and columns of D, or of the whole group.
  __device__ void multiply_by_vectors(float (&total)[kWaves][sm90::kSums], const TileWork& work,
                                      int column) const {
    const float* of_rows = arguments_.a_row_vector;
    const float* of_columns = arguments_.b_row_vector;
    const float of_a = of_rows == nullptr ? arguments_.a_group_scales[work.scale] : 1.f;
    const float of_b = of_columns == nullptr ? arguments_.b_group_scales[work.scale] : 1.f;
    const int own_row = first_row_ + static_cast<int>(threadIdx.x) % kWarpgroup / 32 * 16;
    const int own_column = column + 2 * (lane_ % 4);
    float rows[kWaves][2];
#pragma unroll
    for (int i = 0; i < 2 * kWaves; ++i) {
      const int row = own_row + lane_ / 4 + i / 2 * kWaveRows + i % 2 * 8;
      const bool is_one = of_rows != nullptr && row < work.rows;
      rows[i / 2][i % 2] = is_one ? __ldg(of_rows + work.d_row + row) : of_a;
    }
    if (of_columns != nullptr) of_columns += static_cast<int64_t>(work.scale) * arguments_.n;
#pragma unroll
    for (int i = 0; i < sm90::kSums / 2; ++i) {
      const int at = own_column + i / 2 * 8 + i % 2;
      const bool is_one = of_columns != nullptr && at < arguments_.n;
      const float by = is_one ? __ldg(of_columns + at) : of_b;
#pragma unroll
      for (int wave = 0; wave < kWaves; ++wave) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          total[wave][i / 2 * 4 + half * 2 + i % 2] *= rows[wave][half] * by;
        }
      }
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

template <GroupsAlong kAlong, ColumnScales kScales, int kRows, bool kWideA, bool kTransposesB>
__global__ void __launch_bounds__(kGroupedThreads, 1)
    grouped_gemm(const __grid_constant__ GroupedGemmArguments arguments) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shape = GroupedShape<kRows, kScales, kTransposesB>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t at = sm90::shared_address(shared);
  const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
  if (threadIdx.x == 0) {
    constexpr int kWarps = kWorkers / 32;
    for (int i = 0; i < Shape::kStages; ++i) {
      if constexpr (kTransposesB) Shape::copied(at, i).init(1);
      Shape::full(at, i).init(kTransposesB ? kTransposers : 1);
      Shape::empty(at, i).init(kWarps);
    }
    for (int i = 0; i < kWorkSlots; ++i) {
      Shape::work_full(at, i).init(1);
      Shape::work_empty(at, i).init(kTransposesB ? kWarps + kTransposers : kWarps);
    }
    sm90::publish_barriers();
  }
  __syncthreads();
  if (warp >= kWorkers / 32) {
    sm90::give_registers<40>();
    if (warp == kWorkers / 32) {
      copy_operands<kAlong, Shape>(arguments, at);
    } else if constexpr (kTransposesB) {
      transpose_operands<Shape>(at, warp - kWorkers / 32 - 1);
    }
  } else {
    sm90::take_registers<232>();
    Multiplier<kScales, kWideA, Shape>(arguments, at).run();
  }
#else
  __trap();
#endif
}

template <GroupsAlong kAlong, ColumnScales kScales, int kRows, bool kWideA, bool kTransposesB>
cudaError_t launch(const GroupedGemmArguments& arguments, cudaStream_t stream) {
  const auto kernel = grouped_gemm<kAlong, kScales, kRows, kWideA, kTransposesB>;
  int device = 0;
  int multiprocessors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  }
  if (error != cudaSuccess) return error;
  const int64_t rows = kAlong == GroupsAlong::kRows
                           ? ceil_div(arguments.total, kRows) + arguments.groups + 1
                           : ceil_div(arguments.m, kRows) * arguments.groups;
  const int64_t most = rows * ceil_div(arguments.n, columns_of_tile(kRows));
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(multiprocessors, most));
  kernel<<<blocks, kGroupedThreads, kSharedBytes, stream>>>(arguments);
  return cudaGetLastError();
}

template <GroupsAlong kAlong, ColumnScales kScales, bool kWideA = false, bool kTransposesB = false>
cudaError_t launch_rows(const GroupedGemmArguments& arguments, int tile_rows, cudaStream_t stream) {
  switch (tile_rows) {
    case 64:
      return launch<kAlong, kScales, 64, kWideA, kTransposesB>(arguments, stream);
    case 128:
      return launch<kAlong, kScales, 128, kWideA, kTransposesB>(arguments, stream);
    case 256:
      return launch<kAlong, kScales, 256, kWideA, kTransposesB>(arguments, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace qshard::cuda
