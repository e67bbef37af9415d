#include "ops/wire/tokens.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <utility>

#include "dispatch/buffer/adoption.h"
#include "dispatch/buffer/gathered_buffer.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/parts/rank_group.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/shown_name.h"
#include "kernels/statistics/watched.h"
#include "ops/wire/activations.h"

namespace qshard {
namespace {

constexpr const char* kGather = "qshard::_gather_tokens";
constexpr const char* kScatter = "qshard::_sum_and_scatter_tokens";

const RankGroup& group_of(c10::string_view name, const char* op) {
  RankGroupPtr group;
  try {
    group = find_group({name.data(), name.size()});
  } catch (const c10::Error&) {  // its text has the whole name, however long
  }
  TORCH_CHECK_VALUE(group, fmt::format("{}: no process group has the name '{}'", op,
                                       shown_name({name.data(), name.size()})));
  return *group;  // which is known for as long as the process lives
}

bool travels_in_codes(const Format& format, bool is_gradient) {
  return format.code_bits == 8 && !(is_gradient && format.gemm.folds_row_scales);
}

/// A gather, where its arguments go together.
struct Gather {
  const Format* format = nullptr;  // null: values are gathered
  const RankGroup* group;
  c10::SymDimVector whole;

  Gather(const Tensor& self, int64_t dim, c10::string_view name, bool is_gradient,
         c10::string_view group_name) {
    if (!name.empty()) format = &checked_format(name, kGather);
    const bool in_codes = format && travels_in_codes(*format, is_gradient);
    TORCH_CHECK_VALUE(
        dim >= 0 && dim < self.dim() - (in_codes ? 1 : 0),  // blocks of codes lie within one token
        fmt::format("{}: cannot put tensors of shape {} together along dim={}{}", kGather,
                    c10::str(self.sym_sizes()), dim, in_codes ? " in codes" : ""));
    group = &group_of(group_name, kGather);
    whole = c10::SymDimVector(self.sym_sizes());
    whole[dim] = whole[dim] * group->size();
  }
};

/// One all-gather of bytes; before it an all-reduce of one amax, if one scale spans all tokens.
Tensor gather_codes(const Tensor& self, int64_t dim, c10::string_view format, bool is_gradient,
                    const RankGroup& group) {
  const Tensor amax = message_amax(self, format);
  if (amax.numel() > 0) group.all_reduce_max(amax.view(at::kInt));
  const Tensor message = encode_activation_op(self, format, is_gradient, amax);
  const Tensor whole = decode_activations_op(group.all_gather(message), format, is_gradient,
                                             self.sizes(), dim, self.scalar_type());
  if (may_be_sampling()) pass_tally(message, whole);  // in values of codes a linear finds no error
  return whole;
}

/// rows (M, K) of each rank: the values (ranks x M, K) of a tensor whose shards they are.
Tensor gather_quantized(const Tensor& rows, const Format& format, const RankGroup& group) {
  const int64_t m = rows.size(0);
  const Tensor shard = quantize(rows, {format.name.data(), format.name.size()},
                                /*keep_master=*/false, group.size() * m, group.rank() * m);
  const BufferPtr& buffer = impl_of(shard).buffer();
  adopt(*buffer, group.name());
  flush({buffer});
  const Tensor image = group.all_gather(GatheredBuffer::begin(*buffer, Images::kAll).flatten());
  auto gathered = GatheredBuffer::of(*buffer, image, rows.scalar_type());
  return value_of(make_tensor(std::move(gathered), {group.size() * m, rows.size(1)}));
}

/// Which format of rows four-bit codes travel in; null: values travel.
const Format* row_format(const Format* format, bool is_gradient) {
  if (!format || (is_gradient && format->activations.stochastic_gradients)) return nullptr;
  return format->gemm.kind == GemmKind::kRowImages ? format->activations.row_format : nullptr;
}

// As many pieces of tokens go into one reduce-scatter each, sent as one. More are copied into one
// piece.
constexpr int64_t kMostPieces = 16;

struct Scatter {
  const RankGroup* group;
  c10::SymDimVector part;

  Scatter(const Tensor& self, int64_t dim, c10::string_view group_name) {
    TORCH_CHECK_VALUE(dim >= 0 && dim < self.dim(),
                      fmt::format("{}: cannot cut a tensor of shape {} along dim={}", kScatter,
                                  c10::str(self.sym_sizes()), dim));
    group = &group_of(group_name, kScatter);
    part = c10::SymDimVector(self.sym_sizes());
    TORCH_CHECK_VALUE((part[dim] % group->size()).sym_eq(0).guard_bool(__FILE__, __LINE__),
                      fmt::format("{}: dimension {} of a tensor of shape {} is no multiple of the "
                                  "{} ranks that it is cut for; pad it",
                                  kScatter, dim, c10::str(self.sym_sizes()), group->size()));
    part[dim] = part[dim] / group->size();
  }
};

}  // namespace

Tensor gather_tokens(const Tensor& self, int64_t dim, c10::string_view format, bool is_gradient,
                     c10::string_view group_name) {
  const Gather gather(self, dim, format, is_gradient, group_name);
  const at::IntArrayRef whole = C10_AS_INTARRAYREF_SLOW(gather.whole);
  const RankGroup& group = *gather.group;
  if (self.numel() == 0) return at::empty(whole, self.options());
  PlainGuard guard;
  const c10::OptionalDeviceGuard device_guard(self.device());
  const Tensor values = value_or_itself(self).contiguous();
  if (gather.format && travels_in_codes(*gather.format, is_gradient)) {
    return gather_codes(values, dim, format, is_gradient, group);
  }
  Tensor rows = values.reshape({-1, values.size(-1)});
  const Format* in_rows = row_format(gather.format, is_gradient);
  rows = in_rows ? gather_quantized(rows, *in_rows, group) : group.all_gather(rows);
  return put_together(rows, self.sizes(), dim, whole);
}

Tensor gather_tokens_meta(const Tensor& self, int64_t dim, c10::string_view format,
                          bool is_gradient, c10::string_view group_name) {
  const Gather gather(self, dim, format, is_gradient, group_name);
  return at::empty_symint(gather.whole, self.options());
}

Tensor sum_and_scatter_tokens(const Tensor& self, int64_t dim, c10::string_view group_name) {
  const Scatter scatter(self, dim, group_name);
  const RankGroup& group = *scatter.group;
  PlainGuard guard;
  const c10::OptionalDeviceGuard device_guard(self.device());
  Tensor values = value_or_itself(self);
  const Tensor part = at::empty(C10_AS_INTARRAYREF_SLOW(scatter.part), values.options());
  if (part.numel() == 0) return part;
  const int64_t pieces = c10::multiply_integers(values.sizes().slice(0, dim));
  if (pieces > 1 && pieces <= kMostPieces) {
    group.sum_and_scatter(values.contiguous().flatten(0, dim - 1).unbind(0),
                          part.flatten(0, dim - 1).unbind(0));
    return part;
  }
  values = pieces > 1 ? at::cat(values.chunk(group.size(), dim)) : values.contiguous();
  group.sum_and_scatter({values.view({-1})}, {part.view({-1})});
  return part;
}

Tensor sum_and_scatter_tokens_meta(const Tensor& self, int64_t dim, c10::string_view group_name) {
  const Scatter scatter(self, dim, group_name);
  return at::empty_symint(scatter.part, self.options());
}

}  // namespace qshard
