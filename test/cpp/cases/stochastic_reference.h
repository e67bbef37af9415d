// Stochastic rounding from its definition: a generator for every element, tables, double precision.
#pragma once

#include <ATen/core/PhiloxRNGEngine.h>
#include <c10/util/Exception.h>
#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Float8_e5m2.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/format/formats.h"
#include "test/cpp/cases/row_scale_reference.h"

namespace qshard::testing {

/// What QuantizeTask::rounding points to.
struct Rounding {
  int32_t key_low, key_high, count;
  int64_t first = 0;  // added to every element's index
};

inline uint32_t reference_word(const Rounding& rounding, int64_t element) {
  const int64_t i = rounding.first + element;
  const uint64_t key = static_cast<uint64_t>(rounding.key_high) * 0x80000000u +
                       static_cast<uint64_t>(rounding.key_low);
  at::philox_engine words(key, static_cast<uint64_t>(rounding.count), static_cast<uint64_t>(i / 4));
  uint32_t word = words();
  for (int64_t k = 0; k < i % 4; ++k) word = words();
  return word;
}

/// Values of the codes without a sign, NaN and infinity left out; the code is the index.
inline const std::vector<float>& code_values(DType dtype) {
  static const auto tables = [] {
    std::vector<std::vector<float>> out(3);
    for (int code = 0; code <= 0x7e; ++code) {
      out[0].push_back(reference_e4m3(static_cast<uint8_t>(code)));
    }
    for (int code = 0; code <= 0x7b; ++code) {
      out[1].push_back(c10::Float8_e5m2(static_cast<uint8_t>(code), c10::Float8_e5m2::from_bits()));
    }
    out[2].assign(std::begin(kE2M1Values), std::end(kE2M1Values));
    return out;
  }();
  switch (dtype) {
    case DType::kFloat8E4M3:
      return tables[0];
    case DType::kFloat8E5M2:
      return tables[1];
    case DType::kFloat4E2M1:
      return tables[2];
    default:
      TORCH_CHECK(false, "no code dtype");
  }
}

/// The largest code whose value is at most |x|.
inline size_t code_below(const std::vector<float>& values, float x) {
  const auto above = std::upper_bound(values.begin(), values.end(), std::fabs(x));
  return static_cast<size_t>(above - values.begin()) - 1;
}

inline uint8_t reference_stochastic_code(DType dtype, float x, uint32_t word) {
  const bool fp4 = dtype == DType::kFloat4E2M1;
  const uint8_t sign = std::signbit(x) ? (fp4 ? 0x8 : 0x80) : 0;
  if (std::isnan(x)) return sign | (fp4 ? 0x7 : 0x7f);
  const std::vector<float>& values = code_values(dtype);
  const size_t lower = code_below(values, x);
  if (lower + 1 == values.size()) return static_cast<uint8_t>(sign | lower);
  const double distance = (static_cast<double>(std::fabs(x)) - values[lower]) /
                          (static_cast<double>(values[lower + 1]) - values[lower]);
  const double drawn = std::ldexp(static_cast<double>(word >> 8), -24);
  return static_cast<uint8_t>(sign | (lower + (drawn < distance ? 1 : 0)));
}

}  // namespace qshard::testing
