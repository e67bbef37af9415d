// What a pickle says of a quantized tensor. Files come from anywhere: nothing it says is used
// before it was checked against the bytes that are there.
#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

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
  kImages,      // files from before formats of two row images end before it
  kIsAdopted,   // files from before tensors of their own, before this
  kRowsOfEach,  // files of shards that Shard(1) made alone have it
  kFields
};

/// What a pickle, or a message of another process, says of a quantized tensor. Python makes it with
/// the arguments in this order: torch.classes.qshard.SavedTensor(bytes, pending, layout, …).
struct SavedTensor : torch::CustomClassHolder {
  SavedTensor(at::Tensor bytes, std::optional<at::Tensor> pending, std::vector<int64_t> layout,
              std::string format, std::vector<int64_t> size, std::vector<int64_t> stride,
              int64_t storage_offset, at::ScalarType dtype, std::vector<at::Tensor> state);

  at::Tensor bytes;                   // all planes, packed; shared ones: image and grid
  std::optional<at::Tensor> pending;  // a write that no flush has reached yet
  std::vector<int64_t> layout;        // LayoutField
  std::string format;
  std::vector<int64_t> size;
  std::vector<int64_t> stride;
  int64_t storage_offset;
  at::ScalarType dtype;
  std::vector<at::Tensor> state;
};

/// The layout of a saved tensor whose planes fill `bytes` exactly, whose view lies within them and
/// whose pending update and state have the shapes, dtypes and devices that its format asks for. No
/// size of it overflows, and nothing was allocated to find out.
/// `is_read`: whether the file's bytes are in these tensors already.
/// @throws c10::Error naming the file's fault.
Layout checked_layout(const SavedTensor& saved, bool is_read);

/// The same of planes in memory that processes share, as TensorState.shared_planes() gives them:
/// `saved.bytes` is image and grid, all of its storage, and `master` all of another.
/// @throws c10::Error naming what does not fit.
Layout checked_shared_layout(const SavedTensor& saved, const std::optional<at::Tensor>& master);

/// Whether the rows are some rank's share of more (Share::knows_groups); of a checked tensor.
bool is_adopted(const SavedTensor& saved, const Layout& layout);

// What TensorState and SavedTensor do in Python (checkpoint.cpp).

using PackedTensor = std::tuple<at::Tensor, std::optional<at::Tensor>, std::vector<int64_t>,
                                std::string, std::vector<at::Tensor>>;
using SharedPlanes = std::tuple<std::optional<at::Tensor>, at::Tensor, std::optional<at::Tensor>,
                                std::vector<int64_t>, std::string, std::vector<at::Tensor>>;

/// The exact planes of the whole buffer behind `self`, and a write that no flush has reached yet:
/// bytes, pending, layout, format and state of a SavedTensor.
PackedTensor pack(const at::Tensor& self);
/// The tensor that was saved.
/// @throws c10::Error if what the file says does not describe its bytes.
at::Tensor read_saved(const c10::intrusive_ptr<SavedTensor>& saved);
/// What read_saved() will give once the bytes are there: zeros until read_saved_into() fills it.
at::Tensor read_saved_later(const c10::intrusive_ptr<SavedTensor>& saved);
void read_saved_into(const c10::intrusive_ptr<SavedTensor>& saved, const at::Tensor& tensor);
/// The memory of `self`, for processes that share it: the master, `[image | grid]` and a pending
/// write as plain tensors, what describes them, and the state.
SharedPlanes shared_planes(const at::Tensor& self);
/// A tensor over the planes that another process gave by shared_planes().
at::Tensor over_shared_planes(const c10::intrusive_ptr<SavedTensor>& saved,
                              const std::optional<at::Tensor>& master);
/// A tensor like `self` over a copy of its whole buffer.
at::Tensor copy_buffer_op(const at::Tensor& self);
/// What _to_copy does not do for tensors that are to be values: quantized in a wider dtype, and on
/// meta, where BackendSelect leads past us. Codes, placement and state are kept.
at::Tensor copy_to(const at::Tensor& self, at::ScalarType dtype, at::Device device);
at::Tensor export_view(const at::Tensor& self);
bool is_export(const at::Tensor& self);
/// Whether the packed storage alone would lose a write: one that only a collective can flush.
bool has_pending_update(const at::Tensor& self);

}  // namespace qshard
