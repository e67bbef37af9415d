#include "dispatch/flush/rounding_keys.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "dispatch/parts/kernel_bridge.h"
#include "kernels/device/capture.h"
#include "kernels/scaling/scaling_state.h"

namespace qshard {
namespace {

constexpr int32_t kLargestWord = 0x7fffffff;

/// One key's low and high word, and the count of steps.
using Words = std::array<int32_t, kRoundingWords>;

Words words_of(const at::Tensor& rounding) {
  const at::Tensor host = rounding.cpu();
  Words words;
  std::copy_n(host.const_data_ptr<int32_t>(), words.size(), words.begin());
  return words;
}

at::Tensor rounding_of(const BufferPtr& buffer) { return buffer->scaling_state().rounding; }

bool has_yet_to_agree(const BufferPtr& buffer) { return !buffer->placement().agrees_on_rounding(); }

}  // namespace

void tell_rounding_keys_apart(const std::vector<BufferPtr>& buffers) {
  // What is never written never agrees, and is not asked for in each step.
  const bool is_first_step = std::any_of(buffers.begin(), buffers.end(), [](const BufferPtr& b) {
    return has_yet_to_agree(b) && b->flush_state().is_written() && !b->device().is_meta();
  });
  // A graph cannot ask; the eager step before its capture has.
  if (!is_first_step || is_capturing(buffers.front()->device())) return;
  PlainGuard guard;
  std::set<std::pair<int32_t, int32_t>> taken;
  std::vector<BufferPtr> to_tell;
  for (const BufferPtr& buffer : buffers) {
    if (!rounding_of(buffer).defined() || buffer->device().is_meta()) continue;
    if (has_yet_to_agree(buffer)) {
      const bool is_known = std::find(to_tell.begin(), to_tell.end(), buffer) != to_tell.end();
      if (!is_known) to_tell.push_back(buffer);
    } else {
      const Words words = words_of(rounding_of(buffer));
      taken.emplace(words[0], words[1]);
    }
  }
  for (const BufferPtr& buffer : to_tell) {
    Words words = words_of(rounding_of(buffer));
    if (taken.emplace(words[0], words[1]).second) continue;
    do {
      words[1] = words[1] == kLargestWord ? 0 : words[1] + 1;
    } while (!taken.emplace(words[0], words[1]).second);
    rounding_of(buffer).copy_(at::from_blob(words.data(), {kRoundingWords}, at::kInt));
  }
}

}  // namespace qshard
