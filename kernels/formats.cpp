#include "kernels/formats.h"

#include <fmt/format.h>

#include <array>
#include <stdexcept>

namespace qshard {
namespace {

constexpr auto kE4M3 = DType::kFloat8E4M3;
constexpr auto kE5M2 = DType::kFloat8E5M2;

// name, code_dtype, code_bits, code_max, block_rows, block_cols, row_scale_cols, pow2, grad_dtype
constexpr std::array<Format, 4> kFormats = {{
    {"float8_tensorwise", kE4M3, 8, 448.f, 0, 0, 0, true, kE5M2},
    {"float8_tensorwise_fp32_scale", kE4M3, 8, 448.f, 0, 0, 0, false, kE5M2},
    {"float8_blockwise", kE4M3, 8, 448.f, 128, 128, 0, true, kE4M3},
    {"float8_blockwise_fp32_scale", kE4M3, 8, 448.f, 128, 128, 0, false, kE4M3},
}};

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
