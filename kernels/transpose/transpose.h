// Transposes on the way to GEMMs that contract along rows, on plain memory, CPU or CUDA.
#pragma once

#include "kernels/quantize/quantize.h"

namespace qshard {

/// All pointers are memory of the call's device.
struct TransposeTask {
  const void* values = nullptr;  // (rows, cols), contiguous
  int64_t rows = 0;
  int64_t cols = 0;
  DType value_dtype = DType::kFloat32;  // float32, bfloat16 or float16
  bool hadamard = false;    // each 16 rows go through random_hadamard (kernels/numerics/hadamard.h)
  void* out = nullptr;      // (cols, padded_rows) of value_dtype, 16-byte aligned
  int64_t padded_rows = 0;  // a multiple of 16, at least `rows`
};

/// out = values^T, as if `values` had rows of zeros up to padded_rows. Transformed values are
/// computed in fp32 and rounded once; others keep their bits.
void transpose_values(const TransposeTask& task, Stream stream);

/// A matrix's row image, whole, in a format whose row-local scales are those of square blocks.
struct TransposeImageTask {
  Layout layout;
  const uint8_t* image = nullptr;  // (rows, row_bytes), 16-byte aligned
  uint8_t* out = nullptr;          // that of transposed_layout(layout), 16-byte aligned
};

/// Layout of a whole matrix's transpose. Its rows are padded to a multiple of 16, as GEMMs want
/// what they write.
Layout transposed_layout(const Layout& layout);

/// Writes the image of the transposed matrix: codes and scales are those that quantizing it gives,
/// because square blocks hold the same values either way.
/// @throws c10::Error if the blocks are not square.
void transpose_image(const TransposeImageTask& task, Stream stream);

}  // namespace qshard
