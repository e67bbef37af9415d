#include "ops/wire/range_messages.h"

#include <fmt/format.h>

#include <algorithm>

#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/checked_sizes.h"
#include "ops/calls/ops.h"
#include "ops/wire/flat_ranges.h"

namespace qshard {
namespace {

using at::Tensor;

constexpr int64_t kAlignment = 16;
constexpr int64_t kMostRanks = int64_t{1} << 20;

/// Elements [begin, end) of the flat parameter in one message.
struct Piece {
  const FlatRange* weight;  // whose codes they are; null: plain
  int64_t begin, end;

  int64_t numel() const { return end - begin; }
};

/// What one rank sends: plain values, then codes.
struct Message {
  std::vector<Piece> plain, codes;
  int64_t plain_bytes = 0, codes_at = 0, nbytes = 0;
};

/// The messages of all ranks.
class Messages {
 public:
  Messages(const char* op, int64_t shard_numel, int64_t world, int64_t itemsize,
           const std::vector<std::string>& formats, at::IntArrayRef geometry)
      : op_(op), shard_numel_(shard_numel), itemsize_(itemsize) {
    const int64_t numel = checked_product(op, "the flat parameter", {shard_numel, world});
    weights_ = ranges_of(op, formats, geometry);
    int64_t last = 0;
    for (const auto& [weight, start] : weights_) {
      const int64_t weight_numel = weight.rows * weight.cols;
      TORCH_CHECK_VALUE(
          start >= last && lies_within(start, weight_numel, numel),
          fmt::format("{}: a weight of {} elements from {} on does not lie behind the one before, "
                      "within a flat parameter of {}",
                      op, weight_numel, start, numel));
      last = start + weight_numel;
    }
    for (int64_t rank = 0; rank < world; ++rank) {
      messages_.push_back(message_of(rank));
      nbytes_ = std::max(nbytes_, messages_.back().nbytes);
    }
    nbytes_ = round_up(nbytes_, kAlignment);
  }

  int64_t nbytes() const { return nbytes_; }
  const std::vector<FlatRange>& weights() const { return weights_; }
  const Message& of(int64_t rank) const { return messages_[static_cast<size_t>(rank)]; }
  int64_t first(int64_t rank) const { return rank * shard_numel_; }

  /// A range for each piece of codes, which counts in its weight, and its weight's of `tensors`.
  void add_codes(int64_t rank, at::TensorList tensors, std::vector<FlatRange>& ranges,
                 std::vector<Tensor>& of_weights) const {
    for (const Piece& piece : of(rank).codes) {
      ranges.push_back({piece.weight->weight, piece.begin - piece.weight->start});
      of_weights.push_back(tensors[static_cast<size_t>(piece.weight - weights_.data())]);
    }
  }

  /// Where the pieces of a rank lie in the bytes of its message.
  void add_places(int64_t rank, const Tensor& bytes, at::ScalarType dtype,
                  std::vector<Tensor>& plain, std::vector<Tensor>& codes) const {
    int64_t at = 0;
    for (const Piece& piece : of(rank).plain) {
      plain.push_back(bytes.narrow(0, at, piece.numel() * itemsize_).view(dtype));
      at += piece.numel() * itemsize_;
    }
    at = of(rank).codes_at;
    for (const Piece& piece : of(rank).codes) {
      codes.push_back(bytes.narrow(0, at, piece.numel()));
      at += piece.numel();
    }
  }

 private:
  const char* op_;
  int64_t shard_numel_, itemsize_, nbytes_ = 0;
  std::vector<FlatRange> weights_;
  std::vector<Message> messages_;

  static int64_t round_up(int64_t bytes, int64_t unit) { return ceil_div(bytes, unit) * unit; }
  static int64_t end_of(const FlatRange& range) {
    return range.start + range.weight.rows * range.weight.cols;
  }

  Message message_of(int64_t rank) const {
    Message message;
    int64_t at = first(rank);
    const int64_t end = at + shard_numel_;
    int64_t plain = 0, codes = 0;
    const auto add_plain = [&](int64_t until) {
      if (at >= until) return;
      message.plain.push_back({nullptr, at, until});
      plain += until - at;
    };
    // They lie in order, so that messages of many ranks take no look at each weight for each rank.
    auto weight = std::partition_point(weights_.begin(), weights_.end(), [&](const FlatRange& w) {
      return end_of(w) <= first(rank);
    });
    for (; weight != weights_.end() && weight->start < end; ++weight) {
      const int64_t begin = std::max(weight->start, first(rank));
      const int64_t stop = std::min(end_of(*weight), end);
      if (begin >= stop) continue;
      add_plain(begin);
      message.codes.push_back({&*weight, begin, stop});
      codes += stop - begin;
      at = stop;
    }
    add_plain(end);
    message.plain_bytes = plain * itemsize_;
    message.codes_at = round_up(message.plain_bytes, kAlignment);
    message.nbytes = message.codes_at + codes;
    return message;
  }
};

void check_dtype(const char* op, at::ScalarType dtype) {
  TORCH_CHECK_TYPE(is_value_dtype(dtype),
                   fmt::format("{}: values are gathered in float32, bfloat16 or float16, got {}",
                               op, c10::toString(dtype)));
}

/// Pieces of memory that begins at element `first` of the flat parameter.
std::vector<Tensor> parts(const Tensor& memory, int64_t first, const std::vector<Piece>& pieces) {
  std::vector<Tensor> found;
  for (const Piece& piece : pieces) {
    found.push_back(memory.narrow(0, piece.begin - first, piece.numel()));
  }
  return found;
}

}  // namespace

Tensor write_message(const Tensor& shard, int64_t rank, int64_t world,
                     const std::vector<std::string>& formats, at::IntArrayRef geometry,
                     at::TensorList amax, at::ScalarType dtype) {
  PlainGuard guard;
  const char* const op = "qshard::_write_message";
  check_dtype(op, dtype);
  TORCH_CHECK_TYPE(
      !has_key(shard) && shard.dim() == 1 && shard.is_contiguous() &&
          (is_value_dtype(shard.scalar_type()) || shard.scalar_type() == at::kDouble),
      fmt::format("{}: a shard must be plain, contiguous float32, bfloat16, float16 or float64 of "
                  "one dimension, got {}",
                  op, describe(shard)));
  TORCH_CHECK_VALUE(rank >= 0 && rank < world && world <= kMostRanks,
                    fmt::format("{}: there is no rank {} of {}", op, rank, world));
  const Messages messages(op, shard.numel(), world, static_cast<int64_t>(c10::elementSize(dtype)),
                          formats, geometry);
  const Tensor sent = at::empty({messages.nbytes()}, shard.options().dtype(at::kByte));
  if (shard.is_meta()) return sent;
  check_amaxes(op, amax, messages.weights());
  const c10::OptionalDeviceGuard device_guard(shard.device());
  const Message& message = messages.of(rank);
  sent.narrow(0, message.plain_bytes, message.codes_at - message.plain_bytes).zero_();
  sent.narrow(0, message.nbytes, messages.nbytes() - message.nbytes).zero_();
  std::vector<Tensor> plain, codes, amaxes;
  messages.add_places(rank, sent, dtype, plain, codes);
  const int64_t first = messages.first(rank);
  if (!plain.empty()) at::_foreach_copy_(plain, parts(shard, first, message.plain));
  std::vector<FlatRange> ranges;
  messages.add_codes(rank, amax, ranges, amaxes);
  auto values = parts(shard, first, message.codes);
  std::transform(values.begin(), values.end(), values.begin(), &quantizable);
  quantize_ranges(op, values, ranges, amaxes, codes);
  return sent;
}

void read_messages(const Tensor& messages, const std::vector<std::string>& formats,
                   at::IntArrayRef geometry, at::TensorList amax, const Tensor& out) {
  PlainGuard guard;
  const char* const op = "qshard::_read_messages";
  check_dtype(op, out.scalar_type());
  TORCH_CHECK_VALUE(
      !has_key(messages) && !has_key(out) && messages.scalar_type() == at::kByte &&
          messages.dim() == 2 && messages.is_contiguous() && messages.size(0) > 0 &&
          messages.size(0) <= kMostRanks && out.dim() == 1 && out.is_contiguous() &&
          out.numel() % messages.size(0) == 0,
      fmt::format(
          "{}: messages are contiguous uint8 (ranks, bytes), of a contiguous flat parameter "
          "in equal shards; got {} and {}",
          op, describe(messages), describe(out)));
  const int64_t world = messages.size(0);
  const Messages expected(op, out.numel() / world, world, static_cast<int64_t>(out.element_size()),
                          formats, geometry);
  TORCH_CHECK_VALUE(expected.nbytes() == messages.size(1),
                    fmt::format("{}: a message of this flat parameter has {} bytes, got {}", op,
                                expected.nbytes(), messages.size(1)));
  check_amaxes(op, amax, expected.weights());
  const c10::OptionalDeviceGuard device_guard(out.device());
  if (out.is_meta()) return;
  const auto scale_inv = scale_inv_of_ranges(op, amax, expected.weights());
  std::vector<Tensor> plain, plain_out, codes, codes_out, scales;
  std::vector<FlatRange> ranges;
  for (int64_t rank = 0; rank < world; ++rank) {
    expected.add_places(rank, messages[rank], out.scalar_type(), plain, codes);
    for (Tensor& part : parts(out, 0, expected.of(rank).plain)) plain_out.push_back(part);
    for (Tensor& part : parts(out, 0, expected.of(rank).codes)) codes_out.push_back(part);
    expected.add_codes(rank, scale_inv, ranges, scales);
  }
  dequantize_ranges(codes, ranges, scales, codes_out);
  if (!plain.empty()) at::_foreach_copy_(plain_out, plain);
}

}  // namespace qshard
