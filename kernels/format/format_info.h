// A format's description in words, for Python.
#pragma once

#include <string>

#include "kernels/format/formats.h"

namespace qshard {

/// All fields of `format`, as JSON: names of element types are torch's, sizes that span a matrix
/// and what a format has not are null.
std::string format_info(const Format& format);

}  // namespace qshard
