#include "ops/linear/grouped_gemm.h"

#include <c10/core/DeviceGuard.h>
#include <fmt/format.h>

#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/grouped/grouped_gemm.h"

namespace qshard {

at::Tensor grouped_gemm_op(const at::Tensor& a, const at::Tensor& a_scale_inv, const at::Tensor& b,
                           const at::Tensor& b_scale_inv, const at::Tensor& offs,
                           std::optional<int64_t> tokens, bool contract_rows, bool square_scales,
                           int64_t tile_rows) {
  const char* op = "qshard::_grouped_gemm";
  for (const at::Tensor* tensor : {&a, &a_scale_inv, &b, &b_scale_inv, &offs}) {
    TORCH_CHECK(!has_key(*tensor),
                fmt::format("{}: needs plain tensors, got {}", op, describe(*tensor)));
  }
  TORCH_CHECK(b.dim() != 2 || tokens,
              fmt::format("{}: needs `tokens` where groups cut the columns of a and b", op));
  const c10::OptionalDeviceGuard guard(a.device());
  GroupedOperands operands{a, a_scale_inv, b, b_scale_inv, offs};
  operands.tokens = tokens ? *tokens : a.dim() == 0 ? 0 : a.size(0);
  operands.contract_rows = contract_rows;
  operands.square_scales = square_scales;
  operands.tile_rows = tile_rows;
  return grouped_gemm(op, operands);
}

}  // namespace qshard
