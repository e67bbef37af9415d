// The number by which a GradScaler tells a flush that the step was skipped.
#pragma once

#include <fmt/format.h>

#include <algorithm>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "ops/calls/ops.h"

namespace qshard {

/// `found_inf` may lie on another device than `self`, the tensors of the step, as a GradScaler's
/// does beside offloaded weights. It is read later, so that a meta tensor is one only beside
/// others.
/// @throws c10::ValueError naming `op`.
inline void check_found_inf(const char* op, const OptionalTensor& found_inf, at::TensorList self) {
  if (!is_given(found_inf)) return;
  const bool can_be_read =
      !found_inf->is_meta() ||
      std::all_of(self.begin(), self.end(), [](const Tensor& t) { return t.is_meta(); });
  TORCH_CHECK_VALUE(found_inf->numel() == 1 && !has_key(*found_inf) && can_be_read,
                    fmt::format("{}: found_inf must be one plain number{}, got {}", op,
                                can_be_read ? "" : " that can be read", describe(*found_inf)));
}

}  // namespace qshard
