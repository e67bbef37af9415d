#include "kernels/format/formats.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <charconv>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels/format/shown_name.h"

namespace qshard {
namespace {

constexpr auto kE4M3 = DType::kFloat8E4M3;
constexpr auto kE5M2 = DType::kFloat8E5M2;
constexpr auto kE2M1 = DType::kFloat4E2M1;
constexpr auto kE8M0 = DType::kFloat8E8M0;

// A format of E4M3 codes; what differs is the caller's.
constexpr Format of_float8(std::string_view name, const ScaleLevel& scale,
                           const ActivationCodes& activations, const GemmPairing& gemm) {
  return {.name = name,
          .code_dtype = kE4M3,
          .code_bits = 8,
          .code_max = 448.f,
          .scale = scale,
          .outer_scale = {},
          .activations = activations,
          .gemm = gemm};
}

// One fp32 scale for a matrix.
constexpr Format of_one_scale(std::string_view name, bool power_of_two, const Format* row_format) {
  const ActivationCodes activations{.input_dtype = kE4M3,
                                    .gradient_dtype = kE5M2,
                                    .power_of_two_scales = power_of_two,
                                    .row_format = row_format,
                                    .packed_input_dtype = kE4M3,
                                    .packed_gradient_dtype = kE5M2,
                                    .packed_rows = ScaleMode::kTensor,
                                    .packed_input_columns = ScaleMode::kTensor,
                                    .packed_gradient_columns = ScaleMode::kTensor};
  const GemmPairing gemm{.kind = GemmKind::kPacked,
                         .scale_mode = ScaleMode::kTensor,
                         .transposes_weight = true,
                         .first_capability = 89,
                         .last_capability = kAnyLaterCapability,
                         .devices = "FP8 GEMMs need compute capability 8.9 (Ada) or above"};
  return of_float8(name, {.power_of_two = power_of_two}, activations, gemm);
}

// Delayed scaling: the scale follows the amaxes of earlier steps.
constexpr Format of_delayed_scale(std::string_view name) {
  Format format = of_one_scale(name, /*power_of_two=*/false, nullptr);
  format.amax_history = {.length = 1024};
  return format;
}

// Packed codes of E4M3 with a scale for 1x128 of them.
constexpr ActivationCodes in_blocks_of_1x128(bool power_of_two) {
  return {.input_dtype = kE4M3,
          .gradient_dtype = kE4M3,
          .power_of_two_scales = power_of_two,
          .packed_input_dtype = kE4M3,
          .packed_gradient_dtype = kE4M3,
          .packed_rows = ScaleMode::kBlock1x128,
          .packed_input_columns = ScaleMode::kBlock1x128,
          .packed_gradient_columns = ScaleMode::kBlock1x128};
}

// An fp32 scale for 128x128 of a weight, for 1x128 of what meets it.
constexpr Format of_blocks(std::string_view name, bool power_of_two, const Format* row_format) {
  ActivationCodes activations = in_blocks_of_1x128(power_of_two);
  activations.packed_input_columns = ScaleMode::kBlock128x128;
  activations.row_format = row_format;
  const GemmPairing gemm{
      .kind = GemmKind::kPacked,
      .scale_mode = ScaleMode::kBlock128x128,
      .transposes_weight = true,
      .first_capability = 90,
      .last_capability = 90,
      .devices = "FP8 GEMMs with 128x128 scales run on compute capability 9.0 (Hopper) only"};
  return of_float8(name, {.block_rows = 128, .block_cols = 128, .power_of_two = power_of_two},
                   activations, gemm);
}

// Packed codes of E4M3 with a scale for a token and for a feature.
constexpr ActivationCodes in_rows(bool power_of_two, const Format* row_format) {
  return {.input_dtype = kE4M3,
          .gradient_dtype = kE4M3,
          .power_of_two_scales = power_of_two,
          .row_format = row_format,
          .packed_input_dtype = kE4M3,
          .packed_gradient_dtype = kE4M3,
          .packed_rows = ScaleMode::kRow,
          .packed_input_columns = ScaleMode::kRow,
          .packed_gradient_columns = ScaleMode::kRow};
}

// An fp32 scale for a row of a weight, for a token and for a feature of what meets it.
constexpr Format of_rows(std::string_view name, bool power_of_two, const Format* row_format) {
  const GemmPairing gemm{
      .kind = GemmKind::kPacked,
      .scale_mode = ScaleMode::kRow,
      .transposes_weight = true,
      .folds_row_scales = true,
      .first_capability = 90,
      .last_capability = 90,
      .devices = "FP8 GEMMs with a scale per row run on compute capability 9.0 (Hopper) only"};
  return of_float8(name, {.block_rows = 1, .power_of_two = power_of_two},
                   in_rows(power_of_two, row_format), gemm);
}

constexpr GemmPairing of_row_images(ScaleMode scale_mode, bool transposes_weight) {
  return {.kind = GemmKind::kRowImages,
          .scale_mode = scale_mode,
          .transposes_weight = transposes_weight,
          .first_capability = 100,
          .last_capability = kAnyLaterCapability,
          .devices = "GEMMs in its format need compute capability 10.0 (Blackwell)"};
}

// OCP MX: an E8M0 scale for a block, in its rows.
constexpr Format of_mxfp8(std::string_view name, int64_t block_rows, int64_t block_cols,
                          ScalePlace place, const Format* row_format) {
  ActivationCodes activations = in_blocks_of_1x128(/*power_of_two=*/true);
  activations.row_format = row_format;
  return of_float8(name, {kE8M0, block_rows, block_cols, place, /*power_of_two=*/true}, activations,
                   of_row_images(ScaleMode::kBlock1x32, block_rows == block_cols));
}

// NVFP4: an E4M3 scale for a block, in its rows, and an fp32 scale for a matrix. Gradients are
// rounded stochastically, and transformed for wgrad (arXiv:2509.25149).
constexpr Format of_nvfp4(std::string_view name, int64_t block_rows, const Format* row_format) {
  ActivationCodes activations = in_blocks_of_1x128(/*power_of_two=*/false);
  activations.input_dtype = activations.gradient_dtype = kE2M1;
  activations.hadamard_columns = true;
  activations.stochastic_gradients = true;
  activations.row_format = row_format;
  return {.name = name,
          .code_dtype = kE2M1,
          .code_bits = 4,
          .code_max = 6.f,
          .scale = {kE4M3, block_rows, 16, ScalePlace::kRows, /*power_of_two=*/false},
          .outer_scale = ScaleLevel{},
          .activations = activations,
          .gemm = of_row_images(ScaleMode::kBlock1x16, block_rows == 16)};
}

// Rows of activations that are sent: packed codes and their scales, as E8M0, one for `block_cols`.
constexpr Format of_sent_rows(std::string_view name, int index, int64_t block_cols,
                              const ActivationCodes& activations) {
  const ScaleLevel scale{.dtype = kE8M0,
                         .block_rows = 1,
                         .block_cols = block_cols,
                         .place = ScalePlace::kRows,
                         .power_of_two = true,
                         .as_fp32 = true};
  const GemmPairing gemm{.kind = GemmKind::kRowImages,
                         .scale_mode = activations.packed_rows,
                         .transposes_weight = false,
                         .first_capability = kAnyLaterCapability,
                         .last_capability = 0,
                         .devices = "no device has GEMMs of weights in a format of activations"};
  Format format = of_float8(name, scale, activations, gemm);
  format.index = index;
  return format;
}

// Not in formats(): only ever the second image of another format.
constexpr Format kMxfp8Columnwise = of_mxfp8("mxfp8_32x1", 32, 1, ScalePlace::kSlices, nullptr);
// For activations: without the second image that a weight has for its transpose.
constexpr Format kMxfp8Rows = [] {
  Format format = of_mxfp8("mxfp8_1x32[rowwise]", 1, 32, ScalePlace::kRows, &kMxfp8Rows);
  format.index = 8;
  return format;
}();
// To meet weights in blocks of 128x128.
constexpr Format kFloat8RowsOfBlocks = [] {
  ActivationCodes activations = in_blocks_of_1x128(/*power_of_two=*/true);
  activations.row_format = &kFloat8RowsOfBlocks;
  return of_sent_rows("float8_1x128", 11, 128, activations);
}();
// To meet weights with one scale, or one for each row.
constexpr Format kFloat8Rows =
    of_sent_rows("float8_1xK", 12, 0, in_rows(/*power_of_two=*/true, &kFloat8Rows));
constexpr Format kNvfp4Rows = of_nvfp4("nvfp4_1x16", 1, nullptr);
constexpr Format kNvfp4RowsFourOverSix = [] {
  Format format = of_nvfp4("nvfp4_1x16[4over6]", 1, nullptr);
  format.four_over_six = true;
  return format;
}();

constexpr std::array kFormats = [] {
  std::array formats = {
      of_one_scale("float8_tensorwise", /*power_of_two=*/true, &kFloat8Rows),
      of_one_scale("float8_tensorwise_fp32_scale", /*power_of_two=*/false, nullptr),
      of_delayed_scale("float8_delayed"),
      of_rows("float8_rowwise", /*power_of_two=*/true, &kFloat8Rows),
      of_rows("float8_rowwise_fp32_scale", /*power_of_two=*/false, nullptr),
      of_blocks("float8_blockwise", /*power_of_two=*/true, &kFloat8RowsOfBlocks),
      of_blocks("float8_blockwise_fp32_scale", /*power_of_two=*/false, nullptr),
      of_mxfp8("mxfp8", 32, 32, ScalePlace::kRows, &kMxfp8Rows),
      of_mxfp8("mxfp8_1x32", 1, 32, ScalePlace::kRows, &kMxfp8Rows),
      of_nvfp4("nvfp4", 16, &kNvfp4Rows),
      of_nvfp4("nvfp4_1x16", 1, &kNvfp4Rows),
  };
  for (size_t i = 0; i < formats.size(); ++i) formats[i].index = static_cast<int>(i);
  for (Format& format : formats) {
    if (format.name == "mxfp8_1x32") format.columnwise = &kMxfp8Columnwise;
  }
  return formats;
}();
static_assert(kFormats[kMxfp8Rows.index].name == "mxfp8_1x32" &&
              kFormats.size() == kFloat8RowsOfBlocks.index &&
              kFloat8RowsOfBlocks.index + 1 == kFloat8Rows.index &&
              kBaseFormats == kFloat8Rows.index + 1);

// Whether inputs that wgrad reads may have blocks of 1x128 or of 128x128.
bool chooses_input_blocks(const Format& base) {
  return base.activations.packed_input_columns == ScaleMode::kBlock128x128;
}

// Whether activations are NVFP4's.
bool is_nvfp4(const Format& base) { return base.activations.row_format == &kNvfp4Rows; }

int input_block_dims(const Format& format) {
  return format.activations.packed_input_columns == ScaleMode::kBlock128x128 ? 2 : 1;
}

const Format& find_base(std::string_view name) {
  std::vector<std::string_view> known;
  for (const Format& format : kFormats) {
    if (format.name == name) return format;
    known.push_back(format.name);
  }
  for (const Format* rows : {&kFloat8RowsOfBlocks, &kFloat8Rows}) {
    if (rows->name == name) return *rows;
  }
  throw std::invalid_argument(fmt::format("unknown format '{}'; known formats: {}",
                                          shown_name(name), fmt::join(known, ", ")));
}

[[noreturn]] void refuse_option(const Format& base, std::string_view option) {
  throw std::invalid_argument(fmt::format(
      "format '{}' has no option '{}'; known options: stochastic, emulate{}", base.name,
      shown_name(option),
      base.amax_history.length > 0 ? ", margin=N (N >= 0), history=N (N >= 1), most_recent, e4m3"
      : base.columnwise            ? ", phase, rowwise"
      : chooses_input_blocks(base) ? ", x_block_scaling_dim=N (N 1 or 2)"
      : is_nvfp4(base)             ? ", no_hadamard, nearest_gradients, 4over6"
                                   : ""));
}

/// The number of an option such as `margin=3` if it is called `name`.
bool parse_number(std::string_view option, std::string_view name, int64_t& number) {
  if (!option.starts_with(name) || option.size() == name.size()) return false;
  const char* end = option.data() + option.size();
  const auto [parsed_to, error] = std::from_chars(option.data() + name.size(), end, number);
  return error == std::errc() && parsed_to == end;
}

void apply_option(Format& format, const Format& base, std::string_view option) {
  constexpr int64_t kMaxMargin = 64;        // 2^-64 of the range: nothing is left of it long before
  constexpr int64_t kMaxHistory = 1 << 20;  // per weight, 12 MB
  const bool is_delayed = base.amax_history.length > 0;
  int64_t number = 0;
  if (option == "stochastic") {
    format.stochastic_rounding = true;
  } else if (option == "emulate") {
    format.emulated = true;
  } else if (format.columnwise && option == "phase") {
    format.gathers_by_phase = true;
  } else if (base.columnwise && !format.gathers_by_phase && option == "rowwise") {
    format.columnwise = nullptr;
  } else if (is_nvfp4(base) && option == "no_hadamard") {
    format.activations.hadamard_columns = false;
  } else if (is_nvfp4(base) && option == "nearest_gradients") {
    format.activations.stochastic_gradients = false;
  } else if (is_nvfp4(base) && option == "4over6") {
    format.activations.row_format = &kNvfp4RowsFourOverSix;
    // Blocks of several rows may lie on several ranks, none of which knows the error.
    format.four_over_six = base.scale.block_rows == 1;
  } else if (is_delayed && option == "most_recent") {
    format.amax_history.most_recent = true;
  } else if (is_delayed && option == "e4m3") {
    format.activations.gradient_dtype = format.activations.packed_gradient_dtype = kE4M3;
  } else if (is_delayed && parse_number(option, "margin=", number) && number >= 0 &&
             number <= kMaxMargin) {
    format.amax_history.margin = static_cast<int>(number);
  } else if (is_delayed && parse_number(option, "history=", number) && number >= 1 &&
             number <= kMaxHistory) {
    format.amax_history.length = number;
  } else if (chooses_input_blocks(base) && parse_number(option, "x_block_scaling_dim=", number) &&
             (number == 1 || number == 2)) {
    format.activations.packed_input_columns =
        number == 2 ? ScaleMode::kBlock128x128 : ScaleMode::kBlock1x128;
  } else {
    refuse_option(base, option);
  }
}

/// The name with the options that differ from the base's, in a fixed order.
std::string canonical_name(const Format& format, const Format& base) {
  std::vector<std::string> options;
  const AmaxHistory& history = format.amax_history;
  if (history.margin != base.amax_history.margin) {
    options.push_back(fmt::format("margin={}", history.margin));
  }
  if (history.length != base.amax_history.length) {
    options.push_back(fmt::format("history={}", history.length));
  }
  if (history.most_recent) options.emplace_back("most_recent");
  if (format.activations.gradient_dtype != base.activations.gradient_dtype) {
    options.emplace_back("e4m3");
  }
  if (format.gathers_by_phase) options.emplace_back("phase");
  if (format.columnwise != base.columnwise) options.emplace_back("rowwise");
  if (input_block_dims(format) != input_block_dims(base)) {
    options.push_back(fmt::format("x_block_scaling_dim={}", input_block_dims(format)));
  }
  const ActivationCodes& codes = format.activations;
  if (codes.hadamard_columns != base.activations.hadamard_columns) {
    options.emplace_back("no_hadamard");
  }
  if (codes.stochastic_gradients != base.activations.stochastic_gradients) {
    options.emplace_back("nearest_gradients");
  }
  if (codes.row_format != base.activations.row_format) options.emplace_back("4over6");
  if (format.emulated) options.emplace_back("emulate");
  if (format.stochastic_rounding) options.emplace_back("stochastic");
  if (options.empty()) return std::string(base.name);
  return fmt::format("{}[{}]", base.name, fmt::join(options, ","));
}

/// The one object of a variant.
const Format& intern(Format format, const Format& base) {
  constexpr size_t kMaxVariants = 4096;
  static std::mutex mutex;
  static auto* variants = new std::map<std::string, Format>;  // tensors may outlive static objects
  const std::string name = canonical_name(format, base);
  if (name == base.name) return base;
  if (name == kMxfp8Rows.name) return kMxfp8Rows;
  const std::lock_guard lock(mutex);
  if (const auto known = variants->find(name); known != variants->end()) return known->second;
  if (variants->size() >= kMaxVariants) {
    throw std::invalid_argument(fmt::format(
        "format '{}' is new, and {} variants of formats are in use", name, kMaxVariants));
  }
  const auto added = variants->emplace(name, format).first;
  added->second.name = added->first;
  return added->second;
}

/// The base of a name of base and options, if there are any.
const Format& base_of(std::string_view name) { return find_base(name.substr(0, name.find('['))); }

}  // namespace

std::span<const Format> formats() { return kFormats; }

const Format& base_format(int index) {
  if (index == kFloat8Rows.index) return kFloat8Rows;
  return index == kFloat8RowsOfBlocks.index ? kFloat8RowsOfBlocks
                                            : kFormats[static_cast<size_t>(index)];
}

Format parse_format(std::string_view name) {
  const Format& base = base_of(name);
  Format format = base;
  const size_t bracket = name.find('[');
  if (bracket == std::string_view::npos) return format;
  std::string_view options = name.substr(bracket + 1);
  if (options.size() < 2 || !options.ends_with(']')) refuse_option(base, options);
  options.remove_suffix(1);
  while (true) {
    const size_t comma = options.find(',');
    apply_option(format, base, options.substr(0, comma));
    if (comma == std::string_view::npos) return format;
    options.remove_prefix(comma + 1);
  }
}

const Format& find_format(std::string_view name) {
  const Format& base = base_of(name);
  return name == base.name ? base : intern(parse_format(name), base);
}

const Format& activation_format(const Format& format) {
  if (format.activations.row_format != nullptr) return *format.activations.row_format;
  throw std::invalid_argument(
      fmt::format("activations of format '{}' have no row-local scales", format.name));
}

}  // namespace qshard
