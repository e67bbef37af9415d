// Changes of a buffer's groups and keys, where more than its placement changes.
#pragma once

#include <string_view>

#include "dispatch/buffer/quantized_buffer.h"

namespace qshard {

/// The ranks of `group` hold the other rows. An image copy tells its original.
void adopt(QuantizedBuffer& buffer, std::string_view group);
/// The same with all groups.
void adopt(QuantizedBuffer& buffer, const Groups& groups);
/// Gives it one scale with the others of `group`, from the next flush that includes all of them.
/// Its codes and scales stay until then.
void share_scale(QuantizedBuffer& buffer, const ScaleGroup& group);
/// Rounds by this key, whether or not others do.
void set_rounding_key(QuantizedBuffer& buffer, int64_t key);

}  // namespace qshard
