#include "dispatch/tensor/shard_to_be.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <optional>
#include <utility>

#include "dispatch/buffer/make_buffer.h"
#include "dispatch/parts/kernel_bridge.h"
#include "dispatch/tensor/quantized_tensor_impl.h"

namespace qshard {
namespace {

/// What a marked tensor may become a shard of.
struct Template {
  Layout layout;
  bool keeps_master;
};

/// The storage of one marked tensor. Its views are torch's own, so that only what they all share
/// can carry the mark.
class MarkedStorage final : public c10::StorageImpl {
 public:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

  MarkedStorage(c10::StorageImpl& memory, Template of)
      : StorageImpl(use_byte_size_t(), memory.nbytes(), memory.set_data_ptr(c10::DataPtr()),
                    memory.allocator(), memory.resizable()),
        of_(of) {}

  const Template& of() const { return of_; }
  void set_tensor(const at::Tensor& tensor) { tensor_.emplace(tensor.getIntrusivePtr()); }
  /// The marked tensor; undefined once it is gone.
  at::Tensor tensor() const {
    auto impl = tensor_->lock();
    return impl.defined() ? at::Tensor(std::move(impl)) : at::Tensor();
  }

 private:
  Template of_;
  std::optional<WeakTensor> tensor_;
};

MarkedStorage* marked_storage(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  return typeid(*storage) == typeid(MarkedStorage) ? static_cast<MarkedStorage*>(storage) : nullptr;
}

/// Whether no operator wrote it, and only it and its view `view` have its memory.
bool is_untouched(const at::Tensor& marked, const at::Tensor& view) {
  const size_t tensors = marked.is_same(view) ? 1 : 2;
  return !marked.is_inference() && !marked.requires_grad() && marked._version() == 0 &&
         marked.storage().use_count() == tensors;
}

bool is_of(const Template& of, const QuantizedBuffer& buffer) {
  const Layout& a = of.layout;
  const Layout& b = buffer.layout();
  return a.format == b.format && a.cols == b.cols && a.logical_rows == b.logical_rows &&
         a.matrix_rows == b.matrix_rows && a.first_element == b.first_element &&
         a.full_cols == b.full_cols && a.full_matrix_rows == b.full_matrix_rows &&
         a.rows_of_each == b.rows_of_each && of.keeps_master == buffer.keeps_master() &&
         b.images == Images::kAll && !buffer.placement().is_gathered();
}

/// By what is the same on all ranks.
void check_is_whole(const Placement& placement, at::IntArrayRef sizes) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      ranks_of(placement.group()) <= 1 && placement.layout().holds_all_rows(),
      fmt::format("qshard: FSDP2 would cut a {} stack of {} rows (a shard of shape {}), which was "
                  "quantized as if FSDP2 had cut it already; after parallelize_module say so: "
                  "qshard.quantize_(model, recipe, tp_mesh=tp_mesh)",
                  placement.layout().format->name, placement.layout().logical_rows, sizes));
}

}  // namespace

void check_can_cut_matrices(const Placement& placement, at::IntArrayRef sizes) {
  const Layout& layout = placement.layout();
  check_is_whole(placement, sizes);
  // Tensor parallelism may have left ranks parts of unequal width, whose widths all of them know.
  const auto& columns = placement.groups().columns;
  const int64_t ranks = columns.empty() ? 1 : ranks_of(columns.front());
  const int64_t width = columns.empty() ? layout.cols : layout.element_pitch();
  const auto fits = [&](int64_t cols) { return with_cols(layout, cols).row_bytes() == cols; };
  const int64_t part = ceil_div(width, ranks);
  TORCH_CHECK_NOT_IMPLEMENTED(
      layout.format->scale.is_in_grid() && layout.format->code_bits == 8 && fits(part) &&
          fits(width - (ranks - 1) * part),
      fmt::format(
          "qshard: Shard(1) cuts each matrix of this {} stack (a shard of shape {}), and FSDP2 "
          "gathers one byte per element then. That takes FP8 codes, no scales in rows, and "
          "rows of a multiple of 16 elements on every rank: float8_tensorwise, "
          "float8_delayed, float8_rowwise or float8_blockwise. Return Shard(0) from "
          "shard_placement_fn, or take one of these formats",
          layout.format->name, sizes));
}

at::Tensor make_shard_to_be(const at::Tensor& self, at::IntArrayRef sizes,
                            const at::TensorOptions& options, Fill fill) {
  const at::Tensor plain =
      fill == Fill::kZeros ? at::zeros(sizes, options) : at::empty(sizes, options);
  const QuantizedBuffer& buffer = buffer_of(self);
  const Template of{buffer.layout(), buffer.keeps_master()};
  auto storage = c10::make_intrusive<MarkedStorage>(*plain.storage().unsafeGetStorageImpl(), of);
  MarkedStorage& mark = *storage;
  auto tensor = at::detail::make_tensor<QuantizedTensorImpl>(c10::Storage(std::move(storage)),
                                                             plain.unsafeGetTensorImpl()->key_set(),
                                                             plain.scalar_type(), sizes);
  mark.set_tensor(tensor);
  return tensor;
}

at::Tensor become_shard(const at::Tensor& self, const at::Tensor& src) {
  MarkedStorage* storage = marked_storage(self);
  if (!storage) return {};
  const at::Tensor marked = storage->tensor();
  if (!marked.defined() ||
      marked.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() != storage)
    return {};
  QuantizedBuffer& from = buffer_of(src);
  const auto rows = row_window(src);
  const bool fits = is_untouched(marked, self) && rows && self.storage_offset() == 0 &&
                    self.sizes() == src.sizes() && self.is_contiguous() &&
                    self.dtype() == src.dtype() && self.device() == src.device() &&
                    is_of(storage->of(), from);
  if (!fits) return {};
  const Layout& layout = from.layout();
  const int64_t place = layout.row_offset + rows->first;
  const int64_t held = layout.cols == 0 ? rows->count : marked.numel() / layout.cols;
  // FSDP2 cuts the rows into chunks of as many as are held, and pads the last. What else has room
  // for more rows than are copied is a cache, whose other rows are written next.
  const bool is_last_chunk =
      held > 0 && place % held == 0 && place + rows->count == layout.logical_rows;
  const bool is_chunk = rows->count == held || (rows->count > 0 && is_last_chunk) ||
                        (rows->count == 0 && place >= layout.row_offset + layout.live_rows());
  const bool can_be_cut = is_one_range(layout) || rows->count == layout.rows;
  if (!is_chunk || !can_be_cut) return {};
  // FSDP2 makes padded shards like this of whole ones; rows out of a window are none.
  const bool is_whole = covers_live_rows(src) && held >= layout.live_rows();
  auto buffer = make_buffer_of_rows(from, from.placement().slice(place, held, is_whole),
                                    from.dtype(), from.device(), Fill::kZeros);
  auto& impl = static_cast<QuantizedTensorImpl&>(*marked.unsafeGetTensorImpl());
  impl.become_quantized(std::move(buffer));
  return make_view(marked, self.sizes(), dense_strides(self.sizes()), 0);
}

}  // namespace qshard
