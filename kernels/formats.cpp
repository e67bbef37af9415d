#include "kernels/formats.h"

#include <fmt/format.h>

#include <array>
#include <stdexcept>

namespace qshard {
namespace {

constexpr auto kE4M3 = DType::kFloat8E4M3;
constexpr auto kE5M2 = DType::kFloat8E5M2;

constexpr auto kE2M1 = DType::kFloat4E2M1;

// name, code_dtype, code_bits, code_max, block_rows, block_cols, row_scale, pow2, grad_dtype
constexpr std::array kFormats = {
    Format{"float8_tensorwise", kE4M3, 8, 448.f, 0, 0, RowScale::kNone, true, kE5M2},
    Format{"float8_tensorwise_fp32_scale", kE4M3, 8, 448.f, 0, 0, RowScale::kNone, false, kE5M2},
    Format{"float8_blockwise", kE4M3, 8, 448.f, 128, 128, RowScale::kNone, true, kE4M3},
    Format{"float8_blockwise_fp32_scale", kE4M3, 8, 448.f, 128, 128, RowScale::kNone, false, kE4M3},
    Format{"mxfp8", kE4M3, 8, 448.f, 32, 32, RowScale::kE8M0, true, kE4M3},
    Format{"nvfp4", kE2M1, 4, 6.f, 16, 16, RowScale::kE4M3, false, kE2M1},
    Format{"nvfp4_1x16", kE2M1, 4, 6.f, 1, 16, RowScale::kE4M3, false, kE2M1},
};

}  // namespace

std::span<const Format> formats() { return kFormats; }

const Format& find_format(std::string_view name) {
  std::string known;
  for (const Format& format : kFormats) {
    if (format.name == name) return format;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", format.name);
  }
  throw std::invalid_argument(fmt::format("unknown format '{}'; known formats: {}", name, known));
}

}  // namespace qshard
