#include "kernels/format/format_info.h"

#include <fmt/format.h>

namespace qshard {
namespace {

std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
    case DType::kFloat4E2M1:
      return "float4_e2m1fn_x2";
    case DType::kFloat8E8M0:
      return "float8_e8m0fnu";
  }
  return "";
}

std::string_view name_of(ScalePlace place) {
  switch (place) {
    case ScalePlace::kGrid:
      return "grid";
    case ScalePlace::kRows:
      return "rows";
    case ScalePlace::kSlices:
      return "slices";
  }
  return "";
}

std::string_view name_of(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kTensor:
      return "tensor";
    case ScaleMode::kRow:
      return "row";
    case ScaleMode::kBlock1x128:
      return "1x128";
    case ScaleMode::kBlock128x128:
      return "128x128";
    case ScaleMode::kBlock1x32:
      return "1x32";
    case ScaleMode::kBlock1x16:
      return "1x16";
  }
  return "";
}

std::string_view name_of(GemmKind kind) {
  switch (kind) {
    case GemmKind::kPacked:
      return "packed";
    case GemmKind::kRowImages:
      return "row_images";
  }
  return "";
}

std::string quoted(std::string_view name) { return fmt::format("\"{}\"", name); }
template <typename Enum>
std::string quoted_name(Enum value) {
  return quoted(name_of(value));
}

std::string number_or_null(int64_t number, bool is_there) {
  return is_there ? fmt::format("{}", number) : "null";
}

std::string json(const ScaleLevel& scale) {
  return fmt::format(
      R"({{"dtype": {}, "block_rows": {}, "block_cols": {}, "place": {}, "power_of_two": {}}})",
      quoted_name(scale.dtype), number_or_null(scale.block_rows, scale.block_rows != 0),
      number_or_null(scale.block_cols, scale.block_cols != 0), quoted_name(scale.place),
      scale.power_of_two);
}

std::string json(const ActivationCodes& codes) {
  return fmt::format(R"({{"input_dtype": {}, "gradient_dtype": {}, "power_of_two_scales": {}, )"
                     R"("hadamard_columns": {}, "stochastic_gradients": {}, "row_format": {}, )"
                     R"("packed_input_dtype": {}, "packed_gradient_dtype": {}, "packed_rows": {}, )"
                     R"("packed_input_columns": {}, "packed_gradient_columns": {}}})",
                     quoted_name(codes.input_dtype), quoted_name(codes.gradient_dtype),
                     codes.power_of_two_scales, codes.hadamard_columns, codes.stochastic_gradients,
                     codes.row_format == nullptr ? "null" : quoted(codes.row_format->name),
                     quoted_name(codes.packed_input_dtype),
                     quoted_name(codes.packed_gradient_dtype), quoted_name(codes.packed_rows),
                     quoted_name(codes.packed_input_columns),
                     quoted_name(codes.packed_gradient_columns));
}

std::string json(const GemmPairing& gemm) {
  return fmt::format(
      R"({{"kind": {}, "scale_mode": {}, "transposes_weight": {}, "folds_row_scales": {}, )"
      R"("first_capability": {}, "last_capability": {}}})",
      quoted_name(gemm.kind), quoted_name(gemm.scale_mode), gemm.transposes_weight,
      gemm.folds_row_scales, gemm.first_capability,
      number_or_null(gemm.last_capability, gemm.last_capability != kAnyLaterCapability));
}

std::string json(const AmaxHistory& history) {
  if (history.length == 0) return "null";
  return fmt::format(R"({{"length": {}, "margin": {}, "most_recent": {}}})", history.length,
                     history.margin, history.most_recent);
}

}  // namespace

std::string format_info(const Format& format) {
  const std::string outer = format.outer_scale ? json(*format.outer_scale) : "null";
  return fmt::format(
      R"({{"name": {}, "base": {}, "code_dtype": {}, "code_bits": {}, "code_max": {}, )"
      R"("scale": {}, "outer_scale": {}, "activations": {}, "gemm": {}, "amax_history": {}, )"
      R"("stochastic_rounding": {}, "columnwise": {}, "gathers_by_phase": {}, "emulated": {}, )"
      R"("four_over_six": {}}})",
      quoted(format.name), quoted(base_format(format.index).name), quoted_name(format.code_dtype),
      format.code_bits, format.code_max, json(format.scale), outer, json(format.activations),
      json(format.gemm), json(format.amax_history), format.stochastic_rounding,
      format.columnwise ? json(format.columnwise->scale) : "null", format.gathers_by_phase,
      format.emulated, format.four_over_six);
}

}  // namespace qshard
