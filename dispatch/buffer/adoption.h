// Whom a buffer's state is agreed with, where more than its placement changes.
#pragma once

#include <string_view>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// The ranks of `group` hold the other rows. An image copy tells its original.
void adopt(QuantizedBuffer& buffer, std::string_view group);
/// The same with all groups.
void adopt(QuantizedBuffer& buffer, const Groups& groups);
/// One scale with others, from the next flush of all of them on; what is shown until then stands.
void share_scale(QuantizedBuffer& buffer, const ScaleGroup& group);
/// Rounds by this key, whether or not others do.
void set_rounding_key(QuantizedBuffer& buffer, int64_t key);

}  // namespace qshard
