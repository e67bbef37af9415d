#include "ops/rotary/rotary_heads.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>

#include "kernels/format/checked_sizes.h"
#include "kernels/rotary/rotary.h"
#include "ops/calls/saved_state.h"
#include "ops/linear/autograd.h"
#include "ops/rotary/rotary.h"

namespace qshard {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Parts = std::tuple<Tensor, Tensor, Tensor>;

/// Heads of a group: of queries, keys and values.
struct Heads {
  std::array<int64_t, 3> of_part;

  Heads(const char* op, at::IntArrayRef heads) {
    const bool fits = heads.size() == 3 && std::ranges::all_of(heads, [](int64_t n) {
                        return n > 0 && n <= kMostElements;
                      });
    TORCH_CHECK(fits, op,
                ": heads must be how many of queries, keys and values a group has, each at least "
                "1 and none more than a tensor can have; got ",
                heads);
    std::ranges::copy(heads, of_part.begin());
  }
  int64_t all() const { return of_part[0] + of_part[1] + of_part[2]; }
};

constexpr const char* kSplit = "qshard::split_rotary_embedding";
constexpr const char* kJoin = "qshard::join_rotary_embedding";

void check_split(const Tensor& input, const Tensor& cos, const Tensor& sin, const Heads& heads,
                 int64_t dim) {
  check_rotary(kSplit, input, cos, sin, dim);
  TORCH_CHECK(dim < 2 && input.sym_size(2) % heads.all() == 0, kSplit, ": needs groups of ",
              heads.all(),
              " heads in dimension 2 of the input, and positions "
              "in 0 or 1; got an input of ",
              input.sym_sizes(), " and positions in ", dim);
}

/// Groups of heads.
c10::SymInt check_join(const Parts& parts, const Tensor& cos, const Tensor& sin, const Heads& heads,
                       int64_t dim) {
  const auto& [query, key, value] = parts;
  check_rotary(kJoin, query, cos, sin, dim);
  const c10::SymInt groups = query.sym_size(2) / heads.of_part[0];
  const auto fits = [&](const Tensor& part, int64_t of_group) {
    if (part.dim() != 4 || has_key(part) || part.sym_size(2) % of_group != 0 ||
        part.sym_size(2) / of_group != groups) {
      return false;
    }
    return part.scalar_type() == query.scalar_type() && part.device() == query.device() &&
           part.sym_size(0) == query.sym_size(0) && part.sym_size(1) == query.sym_size(1) &&
           part.sym_size(3) == query.sym_size(3);
  };
  TORCH_CHECK(dim < 2 && fits(query, heads.of_part[0]) && fits(key, heads.of_part[1]) &&
                  fits(value, heads.of_part[2]),
              kJoin,
              ": needs queries, keys and values of one dtype, on one device and alike but for "
              "their heads in dimension 2, ",
              at::IntArrayRef(heads.of_part), " a group, and positions in 0 or 1; got ",
              query.sym_sizes(), " in ", query.scalar_type(), ", ", key.sym_sizes(), " in ",
              key.scalar_type(), " and ", value.sym_sizes(), " in ", value.scalar_type(),
              ", positions in ", dim);
  return groups;
}

Tensor empty_of_heads(const Tensor& like, const c10::SymInt& heads) {
  return at::empty_symint({like.sym_size(0), like.sym_size(1), heads, like.sym_size(3)},
                          like.options());
}

Parts empty_parts(const Tensor& input, const Heads& heads) {
  const c10::SymInt groups = input.sym_size(2) / heads.all();
  const auto part = [&](int i) { return empty_of_heads(input, groups * heads.of_part[i]); };
  return {part(0), part(1), part(2)};
}

/// step(part, what of `joined` it is, its rotation) of queries, keys and values, by groups: (., .,
/// groups, heads, channels). Values turn by no angle.
template <typename Step>
void for_parts(const Tensor& joined, const Parts& parts, const Heads& heads,
               const Rotation& rotation, const Step& step) {
  const Tensor groups = joined.unflatten(2, {-1, heads.all()});
  Rotation none = rotation;
  none.cos = none.sin = rotation.cos.narrow(-1, 0, 0);
  const std::array<Tensor, 3> of = {std::get<0>(parts), std::get<1>(parts), std::get<2>(parts)};
  int64_t first = 0;
  for (int i = 0; i < 3; ++i) {
    step(of[i].unflatten(2, {-1, heads.of_part[i]}), groups.narrow(3, first, heads.of_part[i]),
         i < 2 ? rotation : none);
    first += heads.of_part[i];
  }
}

/// What both functions keep, and the arguments that come back from it.
struct Kept {
  std::vector<int64_t> heads;
  int64_t dim;
  bool interleaved, inverse;
  auto fields() { return std::tie(heads, dim, interleaved, inverse); }

  void save(AutogradContext* ctx, const Tensor& cos, const Tensor& sin) const {
    ctx->save_for_backward({cos, sin});
    save_state(ctx, *this);
  }
};

// Backward of each is the other one's, with a graph of its own if that is asked for: both are
// linear.
Parts call_split(const Tensor& input, const Tensor& cos, const Tensor& sin, const Kept& kept,
                 bool inverse) {
  static const auto op = typed_op<decltype(split_rotary_embedding)>(kSplit);
  return op.call(input, cos, sin, kept.heads, kept.dim, kept.interleaved, inverse);
}

Tensor call_join(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& cos,
                 const Tensor& sin, const Kept& kept, bool inverse) {
  static const auto op = typed_op<decltype(join_rotary_embedding)>(kJoin);
  return op.call(query, key, value, cos, sin, kept.heads, kept.dim, kept.interleaved, inverse);
}

struct SplitFunction : Function<SplitFunction> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, const Tensor& cos,
                               const Tensor& sin, const Kept& kept) {
    at::AutoDispatchBelowAutograd guard;
    kept.save(ctx, cos, sin);
    const auto [query, key, value] = call_split(input, cos, sin, kept, kept.inverse);
    return {query, key, value};
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto kept = load_state<Kept>(ctx);
    return {call_join(grads[0], grads[1], grads[2], saved[0], saved[1], kept, !kept.inverse),
            {},
            {},
            {}};
  }
};

struct JoinFunction : Function<JoinFunction> {
  static Tensor forward(AutogradContext* ctx, const Tensor& query, const Tensor& key,
                        const Tensor& value, const Tensor& cos, const Tensor& sin,
                        const Kept& kept) {
    at::AutoDispatchBelowAutograd guard;
    kept.save(ctx, cos, sin);
    return call_join(query, key, value, cos, sin, kept, kept.inverse);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const auto kept = load_state<Kept>(ctx);
    const auto [query, key, value] = call_split(grads[0], saved[0], saved[1], kept, !kept.inverse);
    return {query, key, value, {}, {}, {}};
  }
};

void check_tables(const char* op, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(!at::GradMode::is_enabled() || (!cos.requires_grad() && !sin.requires_grad()), op,
              ": cos and sin have no gradients; detach them");
}

}  // namespace

Parts split_rotary_embedding(const Tensor& input, const Tensor& cos, const Tensor& sin,
                             at::IntArrayRef heads, int64_t dim, bool interleaved, bool inverse) {
  const Heads of(kSplit, heads);
  check_split(input, cos, sin, of, dim);
  const c10::OptionalDeviceGuard guard(input.device());
  Parts parts = empty_parts(input, of);
  if (input.numel() == 0) return parts;
  for_parts(input, parts, of, {cos, sin, dim, interleaved, inverse},
            [](const Tensor& part, const Tensor& joined, const Rotation& rotation) {
              rotate(joined, rotation, part);
            });
  return parts;
}

Parts split_rotary_embedding_meta(const Tensor& input, const Tensor& cos, const Tensor& sin,
                                  at::IntArrayRef heads, int64_t dim, bool, bool) {
  const Heads of(kSplit, heads);
  check_split(input, cos, sin, of, dim);
  return empty_parts(input, of);
}

Parts split_rotary_embedding_autograd(const Tensor& input, const Tensor& cos, const Tensor& sin,
                                      at::IntArrayRef heads, int64_t dim, bool interleaved,
                                      bool inverse) {
  check_tables(kSplit, cos, sin);
  const auto parts =
      SplitFunction::apply(input, cos, sin, Kept{heads.vec(), dim, interleaved, inverse});
  return {parts[0], parts[1], parts[2]};
}

Tensor join_rotary_embedding(const Tensor& query, const Tensor& key, const Tensor& value,
                             const Tensor& cos, const Tensor& sin, at::IntArrayRef heads,
                             int64_t dim, bool interleaved, bool inverse) {
  const Heads of(kJoin, heads);
  const Parts parts{query, key, value};
  const c10::SymInt groups = check_join(parts, cos, sin, of, dim);
  const c10::OptionalDeviceGuard guard(query.device());
  const Tensor joined = empty_of_heads(query, groups * of.all());
  if (joined.numel() == 0) return joined;
  for_parts(joined, parts, of, {cos, sin, dim, interleaved, inverse},
            [](const Tensor& part, const Tensor& joined, const Rotation& rotation) {
              rotate(part, rotation, joined);
            });
  return joined;
}

Tensor join_rotary_embedding_meta(const Tensor& query, const Tensor& key, const Tensor& value,
                                  const Tensor& cos, const Tensor& sin, at::IntArrayRef heads,
                                  int64_t dim, bool, bool) {
  const Heads of(kJoin, heads);
  const c10::SymInt groups = check_join({query, key, value}, cos, sin, of, dim);
  return empty_of_heads(query, groups * of.all());
}

Tensor join_rotary_embedding_autograd(const Tensor& query, const Tensor& key, const Tensor& value,
                                      const Tensor& cos, const Tensor& sin, at::IntArrayRef heads,
                                      int64_t dim, bool interleaved, bool inverse) {
  check_tables(kJoin, cos, sin);
  return JoinFunction::apply(query, key, value, cos, sin,
                             Kept{heads.vec(), dim, interleaved, inverse});
}

}  // namespace qshard
