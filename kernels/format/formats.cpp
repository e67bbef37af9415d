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
constexpr AmaxHistory kDelayed{.length = 1024};

// Not in formats(): only ever the second image of another format.
constexpr Format kMxfp8Columnwise = [] {
  Format format{"mxfp8_32x1", kE4M3, 8, 448.f, 32, 1, RowScale::kE8M0, true, kE4M3};
  format.scales_in_slices = true;
  return format;
}();

// Whether linears quantize inputs in blocks for FP8 GEMMs.
constexpr bool scales_inputs_in_blocks(const Format& format) {
  return format.scales_in_grid() && format.block_rows != 0;
}

// name, code_dtype, code_bits, code_max, block_rows, block_cols, row_scale, pow2, grad_dtype
constexpr std::array kFormats = [] {
  std::array formats = {
      Format{"float8_tensorwise", kE4M3, 8, 448.f, 0, 0, RowScale::kNone, true, kE5M2},
      Format{"float8_tensorwise_fp32_scale", kE4M3, 8, 448.f, 0, 0, RowScale::kNone, false, kE5M2},
      Format{"float8_delayed", kE4M3, 8, 448.f, 0, 0, RowScale::kNone, false, kE5M2, kDelayed},
      Format{"float8_blockwise", kE4M3, 8, 448.f, 128, 128, RowScale::kNone, true, kE4M3},
      Format{"float8_blockwise_fp32_scale", kE4M3, 8, 448.f, 128, 128, RowScale::kNone, false,
             kE4M3},
      Format{"mxfp8", kE4M3, 8, 448.f, 32, 32, RowScale::kE8M0, true, kE4M3},
      Format{"mxfp8_1x32", kE4M3, 8, 448.f, 1, 32, RowScale::kE8M0, true, kE4M3},
      Format{"nvfp4", kE2M1, 4, 6.f, 16, 16, RowScale::kE4M3, false, kE2M1},
      Format{"nvfp4_1x16", kE2M1, 4, 6.f, 1, 16, RowScale::kE4M3, false, kE2M1},
  };
  for (size_t i = 0; i < formats.size(); ++i) formats[i].index = static_cast<int>(i);
  for (Format& format : formats) {
    if (format.name == "mxfp8_1x32") format.columnwise = &kMxfp8Columnwise;
    if (scales_inputs_in_blocks(format)) format.x_block_scaling_dim = 2;
  }
  return formats;
}();

const Format& find_base(std::string_view name) {
  std::vector<std::string_view> known;
  for (const Format& format : kFormats) {
    if (format.name == name) return format;
    known.push_back(format.name);
  }
  throw std::invalid_argument(fmt::format("unknown format '{}'; known formats: {}",
                                          shown_name(name), fmt::join(known, ", ")));
}

[[noreturn]] void refuse_option(const Format& base, std::string_view option) {
  throw std::invalid_argument(fmt::format(
      "format '{}' has no option '{}'; known options: stochastic, emulate{}", base.name,
      shown_name(option),
      base.amax_history.length > 0    ? ", margin=N (N >= 0), history=N (N >= 1), most_recent, e4m3"
      : base.columnwise               ? ", phase"
      : scales_inputs_in_blocks(base) ? ", x_block_scaling_dim=N (N 1 or 2)"
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
  } else if (base.columnwise && option == "phase") {
    format.gathers_by_phase = true;
  } else if (is_delayed && option == "most_recent") {
    format.amax_history.most_recent = true;
  } else if (is_delayed && option == "e4m3") {
    format.grad_dtype = kE4M3;
  } else if (is_delayed && parse_number(option, "margin=", number) && number >= 0 &&
             number <= kMaxMargin) {
    format.amax_history.margin = static_cast<int>(number);
  } else if (is_delayed && parse_number(option, "history=", number) && number >= 1 &&
             number <= kMaxHistory) {
    format.amax_history.length = number;
  } else if (scales_inputs_in_blocks(base) &&
             parse_number(option, "x_block_scaling_dim=", number) && (number == 1 || number == 2)) {
    format.x_block_scaling_dim = static_cast<int>(number);
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
  if (format.grad_dtype != base.grad_dtype) options.emplace_back("e4m3");
  if (format.gathers_by_phase) options.emplace_back("phase");
  if (format.x_block_scaling_dim != base.x_block_scaling_dim) {
    options.push_back(fmt::format("x_block_scaling_dim={}", format.x_block_scaling_dim));
  }
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

// For activations only: a weight's transpose would have other scales.
constexpr Format kMxfp8Rows{"mxfp8_1x32", kE4M3, 8, 448.f, 1, 32, RowScale::kE8M0, true, kE4M3};

}  // namespace

std::span<const Format> formats() { return kFormats; }

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
  if (format.row_scale == RowScale::kE8M0) return kMxfp8Rows;
  static const Format& nvfp4_rows = find_format("nvfp4_1x16");
  if (format.row_scale == RowScale::kE4M3) return nvfp4_rows;
  throw std::invalid_argument(
      fmt::format("activations of format '{}' have no row-local scales", format.name));
}

}  // namespace qshard
