// Views: new sizes, strides and offset over the same virtual dense buffer.
//
// `detach`, `alias`, `view`, `as_strided`, `slice`, `select`, `split`, `t` and `transpose` are what
// FSDP2, DTensor and optimizers call per parameter and step, so they are written out; all other
// view ops go through view_kernel.
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "dispatch/aten/native_kernels.h"
#include "dispatch/aten/registration.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"

namespace qshard {
namespace {

at::Tensor alias(const at::Tensor& self) {
  return make_view(self, self.sizes(), self.strides(), self.storage_offset());
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes,
                      c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  TORCH_CHECK(sizes.size() == strides.size(),
              "as_strided: mismatch in length of strides and shape of a quantized tensor");
  return make_view(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                   offset ? offset->expect_int() : self.storage_offset());
}

/// `sizes` with its one -1, if any, filled in.
c10::DimVector infer_shape(const at::Tensor& self, at::IntArrayRef sizes) {
  c10::DimVector shape(sizes);
  int64_t known = 1;
  std::optional<size_t> unknown;
  for (size_t i = 0; i < shape.size(); ++i) {
    TORCH_CHECK(shape[i] >= -1, "invalid shape dimension ", shape[i]);
    if (shape[i] == -1) {
      TORCH_CHECK(!unknown, "only one dimension can be inferred");
      unknown = i;
    } else {
      known *= shape[i];
    }
  }
  const int64_t numel = self.numel();
  TORCH_CHECK(!unknown || known != 0,
              fmt::format("cannot reshape tensor of 0 elements into shape {} "
                          "because the unspecified dimension size -1 can be "
                          "any value and is ambiguous",
                          sizes));
  TORCH_CHECK(unknown ? numel % known == 0 : numel == known,
              fmt::format("shape '{}' is invalid for input of size {}", sizes, numel));
  if (unknown) shape[*unknown] = numel / known;
  return shape;
}

/// torch makes up the strides of a tensor without elements. The shard of a rank without rows has
/// those that it would have with rows, so that it is the same window as elsewhere.
std::optional<c10::DimVector> strides_of_view(const at::Tensor& self, const c10::DimVector& shape) {
  if (self.numel() == 0) {
    const auto with_rows = [](at::IntArrayRef sizes) {
      c10::DimVector result(sizes);
      std::replace(result.begin(), result.end(), int64_t{0}, int64_t{1});
      return result;
    };
    const c10::DimVector from = with_rows(self.sizes()), to = with_rows(shape);
    if (c10::multiply_integers(from) == c10::multiply_integers(to)) {
      if (auto strides = at::detail::computeStride(from, self.strides(), to)) return strides;
    }
  }
  return at::detail::computeStride(self.sizes(), self.strides(), shape);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  const auto shape = infer_shape(self, C10_AS_INTARRAYREF_SLOW(sizes));
  const auto strides = strides_of_view(self, shape);
  TORCH_CHECK(strides,
              fmt::format("view: a {} with strides {} cannot be viewed as {}; use reshape()",
                          describe(self), self.strides(), shape));
  return make_view(self, shape, *strides, self.storage_offset());
}

at::Tensor slice(const at::Tensor& self, int64_t dim, std::optional<c10::SymInt> start_,
                 std::optional<c10::SymInt> end_, c10::SymInt step_) {
  TORCH_CHECK_INDEX(self.dim() > 0, "slice() cannot be applied to a 0-dim tensor");
  dim = at::maybe_wrap_dim(dim, self.dim());
  const int64_t size = self.size(dim);
  const int64_t step = step_.expect_int();
  TORCH_CHECK_VALUE(step > 0, "slice step must be positive");
  const auto clamp = [size](int64_t index) {
    return std::clamp<int64_t>(index < 0 ? index + size : index, 0, size);
  };
  const int64_t start = clamp(start_ ? start_->expect_int() : 0);
  const int64_t end = std::max(start, clamp(end_ ? end_->expect_int() : size));

  c10::DimVector sizes(self.sizes());
  c10::DimVector strides(self.strides());
  sizes[dim] = ceil_div(end - start, step);
  const int64_t offset = self.storage_offset() + start * strides[dim];
  strides[dim] *= step;
  return make_view(self, sizes, strides, offset);
}

at::Tensor select(const at::Tensor& self, int64_t dim, c10::SymInt index_) {
  TORCH_CHECK_INDEX(self.dim() > 0, "select() cannot be applied to a 0-dim tensor.");
  dim = at::maybe_wrap_dim(dim, self.dim());
  const int64_t size = self.size(dim);
  const int64_t index = index_.expect_int();
  TORCH_CHECK_INDEX(
      -size <= index && index < size,
      fmt::format("select(): index {} out of range for tensor of size {} at dimension "
                  "{}",
                  index, self.sizes(), dim));
  c10::DimVector sizes(self.sizes());
  c10::DimVector strides(self.strides());
  const int64_t offset = self.storage_offset() + (index < 0 ? index + size : index) * strides[dim];
  sizes.erase(sizes.begin() + dim);
  strides.erase(strides.begin() + dim);
  return make_view(self, sizes, strides, offset);
}

std::vector<at::Tensor> split(const at::Tensor& self, c10::SymInt split_size_, int64_t dim) {
  TORCH_CHECK(self.dim() > 0, "split expects at least a 1-dimensional tensor");
  dim = at::maybe_wrap_dim(dim, self.dim());
  const int64_t split_size = split_size_.expect_int();
  const int64_t size = self.size(dim);
  TORCH_CHECK(split_size >= 0 && (split_size > 0 || size == 0),
              "split expects split_size be non-negative, and positive unless the dimension is "
              "empty, but got split_size=",
              split_size, " for dimension size ", size);
  const int64_t count = split_size == 0 ? 1 : std::max<int64_t>(1, ceil_div(size, split_size));
  std::vector<at::Tensor> pieces;
  pieces.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t start = i * split_size;
    const int64_t length = i + 1 < count ? split_size : size - start;
    c10::DimVector sizes(self.sizes());
    sizes[dim] = length;
    pieces.push_back(
        make_view(self, sizes, self.strides(), self.storage_offset() + start * self.stride(dim)));
  }
  return pieces;
}

at::Tensor transpose_dims(const at::Tensor& self, int64_t dim0, int64_t dim1) {
  dim0 = at::maybe_wrap_dim(dim0, self.dim());
  dim1 = at::maybe_wrap_dim(dim1, self.dim());
  c10::DimVector sizes(self.sizes());
  c10::DimVector strides(self.strides());
  if (self.dim() > 0) {
    std::swap(sizes[dim0], sizes[dim1]);
    std::swap(strides[dim0], strides[dim1]);
  }
  return make_view(self, sizes, strides, self.storage_offset());
}

at::Tensor t(const at::Tensor& self) {
  TORCH_CHECK(self.dim() <= 2, "t() expects a tensor with <= 2 dimensions, but self is ",
              self.dim(), "D");
  return transpose_dims(self, 0, self.dim() < 2 ? 0 : 1);
}

at::Tensor detach(const at::Tensor& self) {
  if (!self.is_inference())
    return make_view(self, self.sizes(), self.strides(), self.storage_offset());
  return at::Tensor(self.unsafeGetTensorImpl()->shallow_copy_and_detach(
      /*version_counter=*/0, /*allow_tensor_metadata_change=*/false));
}

at::Tensor& detach_(at::Tensor& self) { return self; }

/// A meta tensor with the geometry of `self`.
at::Tensor meta_replica(const at::Tensor& self) {
  const Layout& layout = buffer_of(self).layout();
  return at::empty({layout.rows * layout.cols}, self.options().device(at::kMeta))
      .as_strided(self.sizes(), self.strides(), self.storage_offset());
}

void check_expressible(const at::Tensor& twin, const at::Tensor& self, const std::string& name) {
  TORCH_CHECK(
      twin.layout() == at::kStrided && twin.scalar_type() == self.scalar_type() &&
          !twin.is_conj() && !twin.is_neg() && twin.is_meta(),
      fmt::format("{} returns a view, and this view of a {} cannot be expressed by sizes and "
                  "strides; use qshard::dequantize(tensor) first",
                  name, describe(self)));
}

/// Replaces the quantized first argument by its meta twin and runs the op on it.
std::pair<at::Tensor, at::Tensor> run_on_meta(const c10::OperatorHandle& op,
                                              torch::jit::Stack* stack) {
  auto& first = (*stack)[stack->size() - op.schema().arguments().size()];
  TORCH_CHECK(first.isTensor() && has_key(first.toTensor()),
              fmt::format("{}: expected the quantized tensor as first argument; use "
                          "qshard::dequantize(tensor)",
                          op_name(op)));
  const at::Tensor self = first.toTensor();
  PlainGuard guard;
  const at::Tensor twin = meta_replica(self);
  first = twin;
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    // The meta kernel speaks of a meta tensor; say whose view it is.
    TORCH_CHECK(false, fmt::format("{} on a {}: {}", op_name(op), describe(self),
                                   error.what_without_backtrace()));
  }
  return {self, twin};
}

}  // namespace

void view_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const at::Tensor self = run_on_meta(op, stack).first;
  const auto wrap = [&](const at::Tensor& twin) {
    check_expressible(twin, self, op_name(op));
    return make_view(self, twin.sizes(), twin.strides(), twin.storage_offset());
  };
  c10::IValue& result = stack->back();
  if (result.isTensor()) {
    result = wrap(result.toTensor());
    return;
  }
  c10::List<at::Tensor> views;
  for (const at::Tensor& twin : result.toTensorVector()) views.push_back(wrap(twin));
  result = std::move(views);
}

void inplace_view_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet,
                         torch::jit::Stack* stack) {
  const auto [self, twin] = run_on_meta(op, stack);
  check_expressible(twin, self, op_name(op));
  make_view(self, twin.sizes(), twin.strides(), twin.storage_offset());  // bounds check
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(twin.sizes(), twin.strides(), twin.storage_offset());
  stack->back() = self;
}

void register_views(torch::Library& aten) {
  aten.impl("detach", &detach);
  aten.impl("detach_", &detach_);
  aten.impl("alias", &alias);
  aten.impl("as_strided", &as_strided);
  aten.impl("view", &view);
  aten.impl("_unsafe_view", &view);
  aten.impl("slice.Tensor", &slice);
  aten.impl("select.int", &select);
  aten.impl("split.Tensor", &split);
  aten.impl("transpose.int", &transpose_dims);
  aten.impl("t", &t);
}

}  // namespace qshard
