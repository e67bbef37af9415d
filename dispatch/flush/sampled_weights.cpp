#include "dispatch/flush/sampled_weights.h"

#include <algorithm>
#include <utility>

#include "dispatch/parts/kernel_bridge.h"
#include "kernels/device/capture.h"
#include "kernels/linear/quantized_matrix.h"

namespace qshard {
namespace {

constexpr int64_t kFloatSums = 2;  // kSquares and kErrorSquares, before the counts
constexpr int64_t kMaxima = kStatistics - kSums;
constexpr int64_t kWordsOfSum = 2;
constexpr int64_t kBits = 31;  // of a word that is not negative

/// Compares the master with the codes that were made of it. A value without a master is that of its
/// codes, and has no error.
void add_weight_statistics(QuantizedBuffer& buffer, Watched& watched) {
  const Layout& layout = buffer.layout();
  const int64_t rows = layout.live_rows();
  if (buffer.device().is_meta() || !buffer.keeps_master() || !layout.has_rowwise() ||
      !buffer.flush_state().codes_current() || rows == 0 || layout.cols == 0 ||
      is_capturing(buffer.device())) {
    return;
  }
  PlainGuard guard;
  c10::OptionalDeviceGuard device_guard(buffer.device());
  buffer.check_is_allocated();
  const ReadOnlyTensor values = buffer.value();
  const Planes& planes = buffer.planes();
  for (int64_t row = 0; row < rows;) {
    const int64_t count = run_from(layout, row, rows - row);
    const auto codes =
        matrix_of({with_run(layout, row), planes.image(), planes.grid().read(), row}, count);
    const ReadOnlyTensor own = values.narrow(0, row, count);
    CodedMatrix coded = coded_matrix(codes, own);
    coded.bytes += (rows - count) * layout.row_bytes();  // one use has all rows
    watched.add(kWatchedWeight, coded, buffer.device());
    row += count;
  }
}

void begin_sample(QuantizedBuffer& buffer, Watched& watched) {
  watched.begin_sample();
  add_weight_statistics(buffer, watched);
}

/// A sum as two words that order as numbers do: its last bit goes, of fp64 below any tolerance.
at::Tensor in_two_words(const at::Tensor& sums) {
  const at::Tensor bits = sums.clone();
  bits.narrow(-1, 0, kFloatSums).__irshift__(1);
  return at::stack({bits.__rshift__(kBits), bits.bitwise_and((int64_t{1} << kBits) - 1)}, -1);
}

at::Tensor from_two_words(const at::Tensor& words) {
  const at::Tensor wide = words.to(at::kLong);
  const at::Tensor bits = wide.select(-1, 0).__lshift__(kBits).bitwise_or(wide.select(-1, 1));
  bits.narrow(-1, 0, kFloatSums).__ilshift__(1);
  return bits;
}

}  // namespace

bool is_sampled(const QuantizedBuffer& buffer) {
  const auto& watched = buffer.remembered().watched;
  return watched && watched->is_sampled();
}

void add_to_watch(QuantizedBuffer& buffer, const std::shared_ptr<Watch>& watch, int64_t number,
                  int64_t step) {
  auto& watched = buffer.remembered().watched;
  TORCH_CHECK(!watched || watched->watch()->has_ended(),
              "qshard.watch: another watch looks at this weight; end it by remove() first");
  auto made = std::make_shared<Watched>(watch, number, step);
  if (made->is_to_be_sampled()) begin_sample(buffer, *made);
  watched = std::move(made);
}

void begin_next_step(const std::vector<BufferPtr>& buffers) {
  for (const BufferPtr& buffer : buffers) {
    auto& watched = buffer->remembered().watched;
    if (!watched) continue;
    watched->end_step();
    if (watched->is_to_be_sampled()) begin_sample(*buffer, *watched);
  }
}

SampledWeights::SampledWeights(const std::vector<BufferPtr>& buffers,
                               const std::vector<RankGroupPtr>& groups) {
  std::copy_if(buffers.begin(), buffers.end(), std::back_inserter(buffers_),
               [](const BufferPtr& buffer) { return is_sampled(*buffer); });
  for (const RankGroupPtr& group : groups) {
    if (!group) continue;
    rank_ = rank_ * group->size() + group->rank();
    ranks_ *= group->size();
  }
}

int64_t SampledWeights::words() const {
  return weights() * kWatchedOperands * (ranks_ * kSums * kWordsOfSum + kMaxima);
}

at::Tensor SampledWeights::places(const at::Tensor& words) const {
  return words.narrow(0, 0, words.numel() - weights() * kWatchedOperands * kMaxima)
      .view({ranks_, weights(), kWatchedOperands, kSums, kWordsOfSum});
}

at::Tensor SampledWeights::maxima(const at::Tensor& words) const {
  const int64_t numel = weights() * kWatchedOperands * kMaxima;
  return words.narrow(0, words.numel() - numel, numel).view({weights(), kWatchedOperands, kMaxima});
}

void SampledWeights::write(at::Tensor words) const {
  if (buffers_.empty()) return;
  std::vector<at::Tensor> own;
  for (const BufferPtr& buffer : buffers_) {
    own.push_back(buffer->remembered().watched->tallies(words.device()));
  }
  const at::Tensor tallies = at::stack(own);
  record_on_current_stream(tallies);
  words.zero_();
  places(words).select(0, rank_).copy_(in_two_words(tallies.narrow(-1, 0, kSums)));
  maxima(words).copy_(tallies.narrow(-1, kSums, kMaxima));
}

void SampledWeights::leave(const at::Tensor& words) const {
  if (buffers_.empty()) return;
  const at::Tensor sums = from_two_words(places(words));
  const at::Tensor largest = maxima(words).clone();
  largest.select(-1, kSmallestScale - kSums).neg_().add_(static_cast<int64_t>(kAbsMask));
  const at::Tensor statistics =
      at::cat({sums.narrow(-1, 0, kFloatSums).view(at::kDouble).sum(0),
               sums.narrow(-1, kFloatSums, kSums - kFloatSums).sum(0).to(at::kDouble),
               largest.view(at::kFloat).to(at::kDouble)},
              -1);
  // An optimizer may hold weights of several watches, or of one that counts their steps apart.
  std::vector<bool> is_left(buffers_.size());
  for (size_t first = 0; first < buffers_.size(); ++first) {
    if (is_left[first]) continue;
    const Watched& one = *buffers_[first]->remembered().watched;
    Sample sample;
    sample.step = one.step();
    std::vector<at::Tensor> rows;
    for (size_t i = first; i < buffers_.size(); ++i) {
      Watched& watched = *buffers_[i]->remembered().watched;
      if (watched.watch() != one.watch() || watched.step() != one.step()) continue;
      is_left[i] = true;
      sample.weights.push_back(watched.number());
      const auto bytes = watched.bytes();
      sample.bytes.insert(sample.bytes.end(), bytes.begin(), bytes.end());
      rows.push_back(statistics[static_cast<int64_t>(i)]);
    }
    sample.statistics = rows.size() == buffers_.size() ? statistics : at::stack(rows);
    one.watch()->leave(std::move(sample));
  }
}

}  // namespace qshard
