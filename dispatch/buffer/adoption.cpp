#include "dispatch/buffer/adoption.h"

#include "dispatch/buffer/image_copy.h"

namespace qshard {

void adopt(QuantizedBuffer& buffer, std::string_view group) {
  buffer.placement().adopt(group);
  if (ImageCopy* copy = linked_copy(buffer)) copy->original()->placement().adopt(group);
}

void adopt(QuantizedBuffer& buffer, const Groups& groups) {
  buffer.placement().adopt(groups);
  if (ImageCopy* copy = linked_copy(buffer)) copy->original()->placement().adopt(groups);
}

void share_scale(QuantizedBuffer& buffer, const ScaleGroup& group) {
  if (buffer.placement().scale_group() == group) return;
  buffer.placement().share_scale(group);
  buffer.flush_state().mark_remote_write();
}

void set_rounding_key(QuantizedBuffer& buffer, int64_t key) {
  buffer.scaling_state().set_rounding_key(key);
  buffer.placement().forget_rounding();
}

}  // namespace qshard
