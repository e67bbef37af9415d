// What a pickle says of a quantized tensor. Files come from anywhere: nothing it says is used
// before it was checked against the bytes that are there.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <string_view>

#include "kernels/format/layout.h"

namespace qshard {

/// Order of the integers in a saved tensor's `layout` list. Saved files hold these: append only.
enum LayoutField {
  kRows,
  kCols,
  kLogicalRows,
  kMatrixRows,
  kRowOffset,
  kKeepsMaster,
  kWritten,
  kImages,     // files from before formats of two row images end before it
  kIsAdopted,  // files from before tensors of their own, before this
  kFields
};

/// The arguments of qshard::_unpack, in its order.
struct SavedTensor {
  const at::Tensor& bytes;  // all planes, packed
  const std::optional<at::Tensor>& pending;
  at::IntArrayRef layout;  // LayoutField
  std::string_view format;
  at::IntArrayRef size;
  at::IntArrayRef stride;
  int64_t storage_offset;
  at::ScalarType dtype;
  at::TensorList state;
  bool is_read = true;  // else the reader fills these tensors later
};

/// The layout of a saved tensor whose planes fill `bytes` exactly, whose view lies within them and
/// whose pending update and state have the shapes, dtypes and devices that its format asks for. No
/// size of it overflows, and nothing was allocated to find out.
/// @throws c10::Error naming the file's fault.
Layout checked_layout(const SavedTensor& saved);

/// The same of planes in memory that processes share, as _shared_planes gives them: `saved.bytes`
/// is image and grid, all of its storage, and `master` all of another.
/// @throws c10::Error naming what does not fit.
Layout checked_shared_layout(const SavedTensor& saved, const std::optional<at::Tensor>& master);

/// Whether the rows are some rank's share of more (Share::knows_groups); of a checked tensor.
bool is_adopted(const SavedTensor& saved, const Layout& layout);

}  // namespace qshard
