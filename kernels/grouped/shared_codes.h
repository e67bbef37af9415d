// Codes of one input that several linears of experts read.
#pragma once

#include "kernels/grouped/grouped_codes.h"

namespace qshard {

/// While one lives, experts' linears of this thread that read one input of one format quantize it
/// once: the gate and up of an MLP. Nothing may write to the input meanwhile.
class SharedGroupCodes {
 public:
  SharedGroupCodes();
  ~SharedGroupCodes();
  SharedGroupCodes(const SharedGroupCodes&) = delete;
  SharedGroupCodes& operator=(const SharedGroupCodes&) = delete;

  /// The codes of the innermost one that lives, if they are of these operands, or new ones.
  static GroupCodes of_input(const GivenOperand& x, const Format& format, Orientations orientations,
                             const RowGroups& groups, const DelayedAmax& delayed);

 private:
  SharedGroupCodes* previous_;
  at::Tensor x_;  // or the bytes that it arrived in
  at::Tensor offs_;
  const Format* format_ = nullptr;
  Orientations orientations_ = {};
  GroupCodes codes_ = {};
};

}  // namespace qshard
