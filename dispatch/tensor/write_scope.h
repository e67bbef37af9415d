// WriteScope: one write of a quantized tensor's value, from the plane it goes to until it counts.
#pragma once

#include <ATen/core/Tensor.h>

namespace qshard {

class QuantizedBuffer;

/// Kernels write plain tensors. A scope gives out the plane where the value of `tensor` is written,
/// and then says how the write ended: commit(), or roll_back() after an error. It is made of the
/// very tensor that is written, whose version counter tells its peers.
class WriteScope {
 public:
  explicit WriteScope(const at::Tensor& tensor);

  const at::Tensor& tensor() const { return tensor_; }
  /// The elements that `tensor` is a window of: of the master, or of the pending write, which the
  /// first call makes. Nothing is made for a tensor without elements.
  at::Tensor plane() const;
  /// The same, and the plane itself where `tensor` is all of it: a window costs a dispatch. It
  /// stays below the dispatcher.
  at::Tensor whole_plane() const;
  /// Where a kernel finds the first of those elements.
  void* data() const;
  /// The value was written, below ADInplaceOrView or in a list: bumps the version. A window without
  /// elements changed nothing, and yet counts: whether ranks meet in a flush must not depend on how
  /// many rows each of them holds.
  void commit() const;
  /// The same where ADInplaceOrView bumps the version afterwards.
  void commit_before_bump() const;
  /// An error: a pending write that was made for this scope goes, so that the tensor is what it
  /// was. `may_have_written`: of one that was there before, or of a master, a part may be written,
  /// as of a plain tensor.
  void roll_back(bool may_have_written) const;

  /// The master of this buffer was, or is about to be, written through a plain alias.
  static void written_by_alias(QuantizedBuffer& buffer);

 private:
  at::Tensor tensor_;
  bool makes_pending_;
};

}  // namespace qshard
