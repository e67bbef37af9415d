// A name that a caller gave, for an error: what is far longer than any name is cut, and bytes that
// end or break a line are replaced.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <string_view>

namespace qshard {

inline std::string shown_name(std::string_view name) {
  constexpr size_t kLongest = 64;
  std::string shown(name.substr(0, kLongest));
  std::ranges::replace_if(
      shown, [](unsigned char c) { return c < 0x20; }, '?');
  if (name.size() <= kLongest) return shown;
  return fmt::format("{}... ({} characters)", shown, name.size());
}

}  // namespace qshard
