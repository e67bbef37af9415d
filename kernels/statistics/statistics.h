// What quantizing lost of a matrix, in one pass over its values and codes (tally.h).
#pragma once

#include "kernels/device/stream.h"
#include "kernels/statistics/tally.h"

namespace qshard {

/// Adds to `tally`, int64 (kStatistics,) on the device, in the order of Statistic: fp64 sums as
/// their bits.
void add_statistics(const CodedMatrix& matrix, int64_t* tally, Stream stream);

}  // namespace qshard
