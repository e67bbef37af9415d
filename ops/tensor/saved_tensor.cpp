#include "ops/tensor/saved_tensor.h"

#include <c10/util/safe_numerics.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

#include "dispatch/buffer/packed_planes.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/formats.h"
#include "kernels/format/value_dtype.h"

namespace qshard {
namespace {

using at::Tensor;

constexpr size_t kMaxDims = 64;                 // of torch's own operators
constexpr size_t kMaxFormatName = 256;          // real ones are shorter than 100
constexpr int64_t kMaxSize = int64_t{1} << 40;  // of a dimension: row_bytes() stays far from 2^63
constexpr int64_t kMaxBytes = int64_t{1} << 56;

template <typename... Args>
[[noreturn]] void reject(fmt::format_string<Args...> what, Args&&... args) {
  TORCH_CHECK(false, "qshard: a saved quantized tensor ",
              fmt::format(what, std::forward<Args>(args)...));
}

/// Whether the product of sizes, none of them negative, is at most `limit`.
bool product_fits(std::initializer_list<int64_t> sizes, int64_t limit) {
  uint64_t product = 0;
  return !c10::safe_multiplies_u64(sizes, &product) && product <= static_cast<uint64_t>(limit);
}

/// Whether a tensor is strided, contiguous and has memory for all of its elements. A pickle can
/// bring any other: sparse, quantized, nested, lazily negated, expanded, another of ours.
bool is_plain(const Tensor& tensor) {
  if (has_key(tensor) || tensor.layout() != at::kStrided || tensor.is_quantized() ||
      tensor.is_nested() || tensor.is_neg() || tensor.is_conj() || tensor._is_zerotensor() ||
      !(tensor.is_cpu() || tensor.is_cuda() || tensor.is_meta()) || !tensor.has_storage() ||
      !tensor.is_contiguous()) {
    return false;
  }
  int64_t end = 0;
  return !c10::add_overflows(tensor.storage_offset(), tensor.numel(), &end) &&
         product_fits({end, static_cast<int64_t>(tensor.element_size())},
                      static_cast<int64_t>(tensor.storage().nbytes()));
}

void check_plain(const Tensor& tensor, const char* what) {
  if (!is_plain(tensor)) {
    reject("has no plain, contiguous tensor with memory of its own size as its {}", what);
  }
}

/// The format of a name, by value: names in files that turn out wrong are not remembered.
Format format_of(std::string_view name) {
  if (name.size() > kMaxFormatName) {
    reject("names a format of {} characters", name.size());
  }
  try {
    return parse_format(name);
  } catch (const std::invalid_argument& error) {
    reject("has no readable format: {}", error.what());
  }
}

bool flag_of(int64_t field, const char* what) {
  if (field != 0 && field != 1) reject("says {} where it should say whether it {}", field, what);
  return field != 0;
}

/// @throws c10::Error unless the sizes can be those of a shard of `format`.
Layout layout_of(at::IntArrayRef fields, const Format& format) {
  const Layout layout{.format = &format,
                      .rows = fields[kRows],
                      .cols = fields[kCols],
                      .logical_rows = fields[kLogicalRows],
                      .matrix_rows = fields[kMatrixRows],
                      .row_offset = fields[kRowOffset],
                      .rows_of_each = fields.size() > kRowsOfEach ? fields[kRowsOfEach] : 0};
  for (const auto size : {layout.rows, layout.cols, layout.logical_rows, layout.matrix_rows}) {
    if (size < 0 || size >= kMaxSize) {
      reject("has an impossible size: {} x {} elements, of {} rows in matrices of {}", layout.rows,
             layout.cols, layout.logical_rows, layout.matrix_rows);
    }
  }
  const bool whole_matrices = layout.matrix_rows == 0
                                  ? layout.logical_rows == 0
                                  : layout.logical_rows % layout.matrix_rows == 0;
  if (!whole_matrices || layout.row_offset < -1 || layout.row_offset > layout.logical_rows) {
    reject("has an impossible placement: row {} of {} rows in matrices of {}", layout.row_offset,
           layout.logical_rows, layout.matrix_rows);
  }
  const int64_t each = layout.rows_of_each;
  const bool can_cut = each == 0 || (lies_within(layout.row_offset, each, layout.matrix_rows) &&
                                     layout.rows == layout.matrices() * each);
  if (!can_cut) {
    reject("has {} rows of each matrix of {} from {} on, and {} in all", each, layout.matrix_rows,
           layout.row_offset, layout.rows);
  }
  const int64_t images = fields.size() > kImages ? fields[kImages] : 0;
  const Images most = format.columnwise ? Images::kColumnwise : Images::kAll;
  if (!layout.fits() || images < 0 || images > static_cast<int64_t>(most)) {
    reject("has row images that its format does not have");
  }
  // Earlier versions wrote -1 for rows without a place, which hold zeros or a value of their own.
  return layout.with_images(static_cast<Images>(images))
      .placed(std::max<int64_t>(layout.row_offset, 0));
}

/// Whether the bytes of each plane can be counted: what adds them up then does not overflow.
bool is_bounded(const Layout& layout, at::ScalarType dtype) {
  const auto value_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  return product_fits({layout.rows, layout.row_bytes()}, kMaxBytes) &&
         product_fits({layout.rows, layout.cols, value_bytes}, kMaxBytes) &&
         product_fits({layout.grid_rows(), layout.grid_cols(), sizeof(float)}, kMaxBytes);
}

/// @throws c10::Error unless a plane in shared memory is all of its storage: of the codes, image
/// and grid as bytes, or the master.
void check_plane(const Tensor& plane, const char* what, const Layout& layout, bool is_master,
                 at::ScalarType dtype) {
  check_plain(plane, what);
  const auto held = static_cast<int64_t>(plane.storage().nbytes());
  const bool fits = is_bounded(layout, dtype) && plane.storage_offset() == 0 &&
                    plane.scalar_type() == (is_master ? dtype : at::kByte) &&
                    held == (is_master ? bytes_of_master(layout, dtype) : bytes_of_codes(layout));
  if (!fits) {
    reject("of {} x {} elements of {} rows in {} {} cannot have {} bytes of {} as its {}",
           layout.rows, layout.cols, layout.logical_rows, c10::toString(dtype), layout.format->name,
           held, c10::toString(plane.scalar_type()), what);
  }
}

/// @throws c10::Error unless the planes of `layout` fill `bytes`.
void check_planes(const Layout& layout, at::ScalarType dtype, bool keeps_master,
                  const Tensor& bytes) {
  const auto held = static_cast<int64_t>(bytes.numel());
  const bool bounded = is_bounded(layout, dtype);
  const int64_t needed = bounded ? packed_bytes(layout, dtype, keeps_master) : -1;
  if (needed == held) return;
  reject("claims {} x {} elements of {} rows in {}, {} a master, which take {} bytes, but holds {}",
         layout.rows, layout.cols, layout.logical_rows, layout.format->name,
         keeps_master ? "with" : "without",
         bounded ? fmt::to_string(needed) : fmt::format("more than {}", kMaxBytes), held);
}

void check_pending(const SavedTensor& saved, const Layout& layout, bool keeps_master,
                   bool written) {
  if (!saved.pending) return;
  const Tensor& pending = *saved.pending;
  if (keeps_master || !written) reject("has a pending update where none can be");
  check_plain(pending, "pending update");
  if (pending.sizes() != at::IntArrayRef({layout.rows, layout.cols}) ||
      pending.scalar_type() != saved.dtype || pending.device() != saved.bytes.device()) {
    reject("has a pending update that does not fit it: {} {} on {} for {} {} x {} on {}",
           c10::toString(pending.scalar_type()), pending.sizes(), pending.device().str(),
           c10::toString(saved.dtype), layout.rows, layout.cols, saved.bytes.device().str());
  }
}

/// They are counted up from 0.
void check_rounding_words(const Tensor& rounding) {
  const Tensor host = rounding.cpu();
  for (const int32_t word : at::ArrayRef(host.const_data_ptr<int32_t>(), host.numel())) {
    if (word < 0 || word == std::numeric_limits<int32_t>::max()) {
      reject("has {} among its words of stochastic rounding", word);
    }
  }
}

void check_state(const SavedTensor& saved, const Layout& layout, bool is_read) {
  // Tensors on meta have shapes and no memory: a file may ask for much.
  const auto expected = ScalingState::fresh(layout, at::kMeta).tensors();
  if (expected.size() != saved.state.size()) {
    reject("has {} tensors of state, and its format {} has {}", saved.state.size(),
           layout.format->name, expected.size());
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const auto& [name, like] = expected[i];
    const Tensor& tensor = saved.state[i];
    check_plain(tensor, name);
    if (tensor.sizes() != like.sizes() || tensor.scalar_type() != like.scalar_type() ||
        tensor.is_meta() != saved.bytes.is_meta()) {
      reject("has state that does not fit its format: {} is {} {} on {} for {} {}", name,
             c10::toString(tensor.scalar_type()), tensor.sizes(), tensor.device().str(),
             c10::toString(like.scalar_type()), like.sizes());
    }
    const bool has_words = like.scalar_type() == at::kInt && !tensor.is_meta();
    if (has_words && is_read) check_rounding_words(tensor);
  }
}

}  // namespace

SavedTensor::SavedTensor(Tensor bytes, std::optional<Tensor> pending, std::vector<int64_t> layout,
                         std::string format, std::vector<int64_t> size, std::vector<int64_t> stride,
                         int64_t storage_offset, at::ScalarType dtype, std::vector<Tensor> state)
    : bytes(std::move(bytes)),
      pending(std::move(pending)),
      layout(std::move(layout)),
      format(std::move(format)),
      size(std::move(size)),
      stride(std::move(stride)),
      storage_offset(storage_offset),
      dtype(dtype),
      state(std::move(state)) {}

Layout checked_layout(const SavedTensor& saved, bool is_read) {
  const at::IntArrayRef fields = saved.layout;
  const bool has_known_fields = fields.size() == kFields || fields.size() == kRowsOfEach ||
                                fields.size() == kIsAdopted || fields.size() == kImages;
  TORCH_CHECK(has_known_fields && saved.bytes.scalar_type() == at::kByte &&
                  saved.bytes.dim() == 1 && is_value_dtype(saved.dtype),
              "qshard: this is not a saved quantized tensor");
  if (saved.size.size() != saved.stride.size() || saved.size.size() > kMaxDims) {
    reject("has {} dimensions and {} strides", saved.size.size(), saved.stride.size());
  }
  check_plain(saved.bytes, "bytes");
  const Format format = format_of(saved.format);
  const bool keeps_master = flag_of(fields[kKeepsMaster], "keeps a master");
  const bool written = flag_of(fields[kWritten], "was written");
  if (fields.size() > kIsAdopted) flag_of(fields[kIsAdopted], "is a share of more rows");
  const Layout layout = layout_of(fields, format);
  check_planes(layout, saved.dtype, keeps_master, saved.bytes);
  check_pending(saved, layout, keeps_master, written);
  check_state(saved, layout, is_read);
  return with_format(layout, find_format(saved.format));
}

Layout checked_shared_layout(const SavedTensor& saved, const std::optional<at::Tensor>& master) {
  const at::IntArrayRef fields = saved.layout;
  TORCH_CHECK(fields.size() >= kRowsOfEach && is_value_dtype(saved.dtype),
              "qshard: these are not the planes of a quantized tensor");
  const Format format = format_of(saved.format);
  const bool keeps_master = flag_of(fields[kKeepsMaster], "keeps a master");
  const bool written = flag_of(fields[kWritten], "was written");
  flag_of(fields[kIsAdopted], "is a share of more rows");
  const Layout layout = layout_of(fields, format);
  check_plane(saved.bytes, "codes", layout, /*is_master=*/false, saved.dtype);
  if (keeps_master != master.has_value()) {
    reject("{} a master, and says that it {} one", master ? "has" : "lacks",
           keeps_master ? "keeps" : "does not keep");
  }
  if (master) check_plane(*master, "master", layout, /*is_master=*/true, saved.dtype);
  if (master && master->device() != saved.bytes.device()) {
    reject("has its codes on {} and its master on {}", saved.bytes.device().str(),
           master->device().str());
  }
  check_pending(saved, layout, keeps_master, written);
  check_state(saved, layout, /*is_read=*/true);
  return with_format(layout, find_format(saved.format));
}

bool is_adopted(const SavedTensor& saved, const Layout& layout) {
  const at::IntArrayRef fields = saved.layout;
  return fields.size() > kIsAdopted ? fields[kIsAdopted] != 0 : !layout.holds_all_rows();
}

}  // namespace qshard
