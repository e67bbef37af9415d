// Indexing of stacks and of rows along their first dimension: whole matrices keep the kind, and so
// do rows that hold their scales.
//
// An expert that is picked by its number is multiplied by its codes, as one that select() shows is,
// and so is a token. Other indexing reads values, as of any plain tensor.
#include <ATen/WrapDimUtils.h>

#include <optional>
#include <vector>

#include "dispatch/aten/matmul.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/buffer/buffer_copies.h"
#include "dispatch/buffer/make_buffer.h"
#include "dispatch/flush/flush.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/whole_layout.h"

namespace qshard {
namespace {

using Indices = c10::List<std::optional<at::Tensor>>;

/// A tensor whose entries along dimension 0 are runs of whole matrices.
struct Stack {
  RowWindow rows;
  int64_t run;  // rows of an entry
};

std::optional<Stack> stack_of(const at::Tensor& self) {
  if (!is_quantized(self) || self.dim() < 3 || impl_of(self).is_export()) return std::nullopt;
  const Layout& layout = buffer_of(self).layout();
  const int64_t run = c10::multiply_integers(self.sizes().slice(1, self.dim() - 2));
  if (layout.matrix_rows == 0 || run == 0 || run % layout.matrix_rows != 0) return std::nullopt;
  if (!is_one_range(layout)) return std::nullopt;
  const auto rows = row_window(self);
  if (!rows || (layout.row_offset + rows->first) % layout.matrix_rows != 0) return std::nullopt;
  return Stack{*rows, run};
}

/// pick() of rows that hold all that they stand for.
std::optional<at::Tensor> pick_rows(const at::Tensor& self, const at::Tensor& index,
                                    const char* op) {
  const auto rows = rows_of_their_own(self);
  if (!rows) return std::nullopt;
  const BufferPtr& buffer = impl_of(self).buffer();
  const Layout& layout = buffer->layout();
  ensure_codes_current(buffer, op);
  auto sizes = self.sizes().vec();
  const int64_t run = c10::multiply_integers(self.sizes().slice(1, self.dim() - 2));
  const at::Tensor image = buffer->planes().image().narrow(0, rows->first, rows->count).operand();
  const at::Tensor picked = image.view({sizes[0], run * layout.row_bytes()}).index_select(0, index);
  sizes[0] = index.numel();
  const Layout own = whole_layout(*layout.format, sizes[0] * run, layout.cols);
  return make_tensor(make_buffer_of_codes(Placement(own), buffer->dtype(), /*keeps_master=*/false,
                                          picked.view({own.rows, own.row_bytes()}), at::Tensor()),
                     sizes);
}

/// The entries of dimension 0 that `index` (1-D, integers from 0 on) names; none where these are no
/// whole matrices or rows.
std::optional<at::Tensor> pick(const at::Tensor& self, const at::Tensor& index, const char* op) {
  if (auto rows = pick_rows(self, index, op)) return rows;
  const auto picked_of = [&](const at::Tensor& tensor) -> std::optional<at::Tensor> {
    const auto stack = stack_of(tensor);
    if (!stack) return std::nullopt;
    const BufferPtr& buffer = impl_of(tensor).buffer();
    if (buffer->placement().is_alone()) ensure_codes_current(buffer, op);
    auto sizes = tensor.sizes().vec();
    sizes[0] = index.numel();
    return make_tensor(copy_matrices(*buffer, stack->rows, stack->run, index), sizes);
  };
  if (auto picked = picked_of(self)) return picked;
  if (self.dim() < 3) return std::nullopt;
  // Experts may lie as (experts, in, out), which is the transpose of how they are quantized.
  const auto picked = picked_of(self.transpose(-1, -2));
  return picked ? std::optional(picked->transpose(-1, -2)) : std::nullopt;
}

at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  c10::OptionalDeviceGuard device_guard(self.device());
  const bool is_first = has_key(self) && self.dim() > 0 && at::maybe_wrap_dim(dim, self.dim()) == 0;
  const bool is_list = index.dim() <= 1 && at::isIntegralType(index.scalar_type(), false);
  PlainGuard guard;
  if (is_first && is_list && index.device() == self.device()) {
    if (auto picked = pick(self, index.reshape({-1}), "aten::index_select")) return *picked;
  }
  return at::index_select(value_or_itself(self), dim, index);
}

/// The one index along dimension 0, as numbers from 0 on; none where there are others, or where it
/// is a mask of another shape.
std::optional<at::Tensor> only_index(const at::Tensor& self, const Indices& indices) {
  if (indices.empty() || self.dim() == 0) return std::nullopt;
  for (size_t i = 0; i < indices.size(); ++i) {
    const std::optional<at::Tensor> index = indices.get(i);
    if ((index && index->defined()) != (i == 0)) return std::nullopt;
  }
  const at::Tensor index = *indices.get(0);
  if (has_key(index)) return std::nullopt;
  if (index.scalar_type() == at::kBool) {
    if (index.dim() != 1 || index.size(0) != self.size(0)) return std::nullopt;
    return index.nonzero().squeeze(1).to(self.device());
  }
  if (index.scalar_type() != at::kLong && index.scalar_type() != at::kInt) return std::nullopt;
  const at::Tensor numbers = index.to(self.device());
  return at::where(numbers.lt(0), numbers.add(self.size(0)), numbers);
}

at::Tensor index(const at::Tensor& self, const Indices& indices) {
  c10::OptionalDeviceGuard device_guard(self.device());
  PlainGuard guard;
  const bool may_pick = has_key(self) && (self.dim() >= 3 || rows_of_their_own(self));
  const auto only = may_pick ? only_index(self, indices) : std::nullopt;
  if (only) {
    if (const auto picked = pick(self, only->reshape({-1}), "aten::index")) {
      auto sizes = only->sizes().vec();
      const auto matrix = self.sizes().slice(1);
      sizes.insert(sizes.end(), matrix.begin(), matrix.end());
      return picked->view(sizes);
    }
  }
  Indices plain;
  plain.reserve(indices.size());
  for (std::optional<at::Tensor> given : indices) {
    plain.push_back(given && has_key(*given) ? value_of(*given) : given);
  }
  return at::index(value_or_itself(self), plain);
}

}  // namespace

void register_indexing(torch::Library& aten) {
  aten.impl("index_select", &index_select);
  aten.impl("index.Tensor", &index);
}

}  // namespace qshard
