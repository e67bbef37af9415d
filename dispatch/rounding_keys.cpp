#include "dispatch/rounding_keys.h"

#include <algorithm>
#include <set>
#include <utility>

#include "dispatch/kernel_bridge.h"
#include "dispatch/streams.h"

namespace qshard {
namespace {

constexpr int32_t kLargestWord = 0x7fffffff;

bool rounds(const BufferPtr& buffer) {
  return buffer->scaling_state().rounding.defined() && !buffer->is_meta();
}

}  // namespace

void tell_rounding_keys_apart(const std::vector<BufferPtr>& buffers) {
  if (std::all_of(buffers.begin(), buffers.end(),
                  [](const BufferPtr& b) { return b->rounding_is_agreed(); })) {
    return;
  }
  PlainGuard guard;
  std::set<std::pair<int32_t, int32_t>> taken;
  std::set<const QuantizedBuffer*> seen;
  for (const BufferPtr& buffer : buffers) {
    if (!rounds(buffer) || !seen.insert(buffer.get()).second) continue;
    const at::Tensor& rounding = buffer->scaling_state().rounding;
    if (is_capturing(rounding.device()))
      return;  // a graph cannot ask; the eager step before it has
    at::Tensor host = rounding.cpu();
    auto* const words = host.mutable_data_ptr<int32_t>();
    const bool is_free = taken.emplace(words[0], words[1]).second;
    if (is_free || buffer->rounding_is_agreed()) continue;
    do {
      words[1] = words[1] == kLargestWord ? 0 : words[1] + 1;
    } while (!taken.emplace(words[0], words[1]).second);
    rounding.copy_(host);
  }
}

}  // namespace qshard
