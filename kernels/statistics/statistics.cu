// Statistics of a matrix and its codes: 3 bytes per bf16 element with codes of a byte, read once.
//
// A thread takes eight columns of a row at a time, which share their scales. A CUDA block adds what
// its threads have seen by a few atomics.
#include "kernels/device/amax.cuh"
#include "kernels/statistics/kernels.h"

namespace qshard::cuda {
namespace {

constexpr int kStatisticsThreads = 256;
constexpr int kColumns = 8;  // of a thread's step
constexpr int kMostStatisticsBlocks = 1024;

/// Values of eight columns, the first `count` of which are there.
template <typename Value>
struct Columns {
  float value[kColumns];

  __device__ static Columns load(const void* values, int64_t index, int count, bool vectorized) {
    const auto* from = static_cast<const typename Value::Raw*>(values) + index;
    constexpr int kVectors = kColumns / Vector<Value>::kSize;
    constexpr int kSize = Vector<Value>::kSize;
    Columns columns;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Vector<Value> part = vectorized ? load_vector<Value>(from + i * kSize)
                                            : load_some<Value>(from + i * kSize, count - i * kSize);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        columns.value[i * kSize + k] = Value::load(part.word_of(k), k % Value::kPerWord);
      }
    }
    return columns;
  }
};

/// Codes of one byte or of half of one: eight of them, in rows that are padded to 16 bytes.
struct CodesE4M3 {
  static constexpr int kBits = 8;
  __device__ static float value(uint32_t code) { return decode_e4m3_scaled(code, 1.f); }
};
struct CodesE5M2 {
  static constexpr int kBits = 8;
  __device__ static float value(uint32_t code) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(code << 8)));
  }
};
struct CodesE2M1 {
  static constexpr int kBits = 4;
  __device__ static float value(uint32_t code) { return decode_e2m1(static_cast<uint8_t>(code)); }
};

template <typename Codes>
__device__ __forceinline__ uint64_t load_codes(const uint8_t* row, int col) {
  if constexpr (Codes::kBits == 4) {
    return __ldg(reinterpret_cast<const uint32_t*>(row + col / 2));
  } else {
    return __ldg(reinterpret_cast<const unsigned long long*>(row + col));
  }
}

template <typename T, typename Combine>
__device__ __forceinline__ T of_warp(T x, const Combine& combine) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    x = combine(x, __shfl_xor_sync(kWholeWarp, x, lanes));
  }
  return x;
}

__device__ __forceinline__ void raise_word(int64_t* word, uint32_t bits) {
  atomicMax(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(bits));
}
__device__ __forceinline__ void add_to_word(int64_t* word, uint64_t count) {
  atomicAdd(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(count));
}

/// Adds a CUDA block's tallies. All of its threads take part.
__device__ void add_block(const Tally& mine, int64_t* tally) {
  constexpr int kWarps = kStatisticsThreads / 32;
  __shared__ double sums[kWarps][2];
  __shared__ uint32_t counts[kWarps][3];
  __shared__ uint32_t maxima[kWarps][3];
  const auto plus = [](auto a, auto b) { return a + b; };
  const auto larger = [](uint32_t a, uint32_t b) { return a > b ? a : b; };
  const double squares = of_warp(mine.squares, plus);
  const double error_squares = of_warp(mine.error_squares, plus);
  const uint32_t underflows = of_warp(mine.underflows, plus);
  const uint32_t saturated = of_warp(mine.saturated, plus);
  const uint32_t nonfinite = of_warp(mine.nonfinite, plus);
  const uint32_t amax = of_warp(mine.amax, larger);
  const uint32_t largest_scale = of_warp(mine.largest_scale, larger);
  const uint32_t smallest_scale = of_warp(mine.smallest_scale, larger);
  const int warp = static_cast<int>(threadIdx.x / 32);
  if (threadIdx.x % 32 == 0) {
    sums[warp][0] = squares;
    sums[warp][1] = error_squares;
    counts[warp][0] = underflows;
    counts[warp][1] = saturated;
    counts[warp][2] = nonfinite;
    maxima[warp][0] = amax;
    maxima[warp][1] = largest_scale;
    maxima[warp][2] = smallest_scale;
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i < 2) {
    double sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sums[w][i];
    atomicAdd(reinterpret_cast<double*>(tally + kSquares + i), sum);
  } else if (i < 5) {
    uint64_t count = 0;
    for (int w = 0; w < kWarps; ++w) count += counts[w][i - 2];
    if (count > 0) add_to_word(tally + kUnderflows + i - 2, count);
  } else if (i < 8) {
    uint32_t largest = 0;
    for (int w = 0; w < kWarps; ++w) largest = larger(largest, maxima[w][i - 5]);
    raise_word(tally + kAmax + i - 5, largest);
  }
}

/// 2^threads_shift threads of a block read one row.
template <typename Value, typename Codes>
__global__ void __launch_bounds__(kStatisticsThreads)
    tally_matrix(const __grid_constant__ CodedMatrix matrix, int threads_shift, bool vectorized,
                 int64_t* tally) {
  Tally mine;
  const double limit = saturates_above(matrix.code_dtype);
  const int thread = static_cast<int>(threadIdx.x);
  const int rows_of_block = kStatisticsThreads >> threads_shift;
  const int first_col = (thread & ((1 << threads_shift) - 1)) * kColumns;
  const int cols = static_cast<int>(matrix.cols);
  const int col_step = kColumns << threads_shift;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * rows_of_block + (thread >> threads_shift);
       row < matrix.rows; row += static_cast<int64_t>(gridDim.x) * rows_of_block) {
    const float* scales = matrix.scales_of(row);
    const uint8_t* codes_of_row = matrix.codes + row * matrix.code_pitch;
    for (int col = first_col; col < cols; col += col_step) {
      const int count = min(cols - col, kColumns);
      uint64_t codes = load_codes<Codes>(codes_of_row, col);
      const auto columns =
          Columns<Value>::load(matrix.values, row * matrix.cols + col, count, vectorized);
      const float scale = matrix.scale(scales, row, col);
      mine.add_scale(scale);
      const float largest = __double2float_rd(limit * static_cast<double>(scale));
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i >= count) break;
        float value = columns.value[i];
        if (matrix.column_factors != nullptr) {
          value = __fmul_rn(value, __ldg(matrix.column_factors + col + i));
        }
        const auto code = static_cast<uint32_t>(codes) & ((1u << Codes::kBits) - 1);
        mine.add(value, __fmul_rn(Codes::value(code), scale), largest);
        codes >>= Codes::kBits;
      }
    }
  }
  mine.amax = canonical_amax(mine.amax);
  add_block(mine, tally);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    add_to_word(tally + kCount, static_cast<uint64_t>(matrix.rows * matrix.cols));
  }
}

template <typename Codes>
cudaError_t launch(const CodedMatrix& matrix, int64_t* tally, cudaStream_t stream) {
  const bool vectorized =
      matrix.cols % kColumns == 0 && reinterpret_cast<uintptr_t>(matrix.values) % 16 == 0;
  int threads_shift = 0;
  while ((kColumns << threads_shift) < matrix.cols && (2 << threads_shift) <= kStatisticsThreads) {
    ++threads_shift;
  }
  const int64_t rows_of_block = kStatisticsThreads >> threads_shift;
  const int64_t blocks = (matrix.rows + rows_of_block - 1) / rows_of_block;
  const auto grid =
      static_cast<unsigned>(blocks < kMostStatisticsBlocks ? blocks : kMostStatisticsBlocks);
  return with_value_type(matrix.value_dtype, [&](auto value) {
    tally_matrix<decltype(value), Codes>
        <<<grid, kStatisticsThreads, 0, stream>>>(matrix, threads_shift, vectorized, tally);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_add_statistics(const CodedMatrix& matrix, int64_t* tally, cudaStream_t stream) {
  switch (matrix.code_dtype) {
    case DType::kFloat4E2M1:
      return launch<CodesE2M1>(matrix, tally, stream);
    case DType::kFloat8E5M2:
      return launch<CodesE5M2>(matrix, tally, stream);
    case DType::kFloat8E4M3:
      return launch<CodesE4M3>(matrix, tally, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace qshard::cuda
