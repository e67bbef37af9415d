#include "kernels/grouped/grouped_swiglu.h"

#include "kernels/device/check_launch.h"
#include "kernels/device/current_stream.h"
#include "kernels/format/value_dtype.h"
#include "kernels/grouped/group_image.h"
#include "kernels/linear/swiglu_task.h"

namespace qshard {
namespace {

/// The operands of a launch, whose memory lives as long as this.
struct Operands {
  at::Tensor gate, up, grad;
  cuda::SwigluTask task;
  at::Tensor tiles;
  DType dtype;
  cudaStream_t stream;

  Operands(const at::Tensor& gate, const at::Tensor& up, const at::Tensor& grad,
           const RowGroups& groups)
      : gate(cuda::with_dense_rows(gate)),
        up(cuda::with_dense_rows(up)),
        grad(grad.defined() ? grad.contiguous() : grad),
        task(cuda::swiglu_task(this->gate, this->up)),
        dtype(value_dtype(gate.scalar_type())),
        stream(static_cast<cudaStream_t>(current_stream(gate.device()).handle)) {
    if (grad.defined()) task.grad = this->grad.const_data_ptr();
    tiles = row_tiles(groups, task.m, stream);
  }
  const cuda::RowTile* row_tile() const {
    return reinterpret_cast<const cuda::RowTile*>(tiles.const_data_ptr<int32_t>());
  }
};

}  // namespace

bool has_group_swiglu(const Format& format) {
  return format.gemm.kind == GemmKind::kPacked &&
         packed_scale_mode(format) == ScaleMode::kBlock1x128 &&
         packed_code_dtype(format, OperandRole::kGradient) == DType::kFloat8E4M3;
}

GroupCodes quantize_swiglu_groups(const at::Tensor& gate, const at::Tensor& up,
                                  const Format& format, Orientations orientations,
                                  const RowGroups& groups) {
  const Operands operands(gate, up, {}, groups);
  const auto [m, k] = std::tuple(operands.task.m, operands.task.k);
  const GroupImage image(format, OperandRole::kInput, m, k, orientations, groups, gate.device());
  cuda::check_launch(cuda::launch_swiglu_quantize_groups(operands.task, image.task(),
                                                         operands.row_tile(), image.tiles(),
                                                         operands.dtype, operands.stream));
  return image.codes();
}

GroupSwigluBackward quantize_swiglu_backward_groups(const at::Tensor& grad, const at::Tensor& gate,
                                                    const at::Tensor& up,
                                                    const GroupSwigluRequest& request,
                                                    const RowGroups& groups) {
  const Operands operands(gate, up, grad, groups);
  const auto [m, k] = std::tuple(operands.task.m, operands.task.k);
  const at::Device device = gate.device();
  const auto gradient = [&](int64_t columns) {
    return GroupImage(*request.gradients, OperandRole::kGradient, m, columns, request.orientations,
                      groups, device);
  };
  cuda::SwigluGradients out;
  GroupSwigluBackward made;
  const GroupImage first = gradient(request.joined ? 2 * k : k);
  made.gate = first.codes();
  if (request.joined) {
    out.gate.task = cuda::columns_of(first.task(), 0, k, /*one_scale=*/false);
    out.up.task = cuda::columns_of(first.task(), k, k, /*one_scale=*/false);
  } else {
    const GroupImage second = gradient(k);
    made.up = second.codes();
    out.gate.task = first.task();
    out.up.task = second.task();
  }
  if (request.product != nullptr) {
    const GroupImage product(*request.product, OperandRole::kInput, m, k, {.columnwise = true},
                             groups, device);
    made.product = product.codes();
    out.input.task = product.task();
  }
  cuda::check_launch(cuda::launch_swiglu_backward_quantize_groups(
      operands.task, out, operands.row_tile(), first.tiles(), operands.dtype, operands.stream));
  return made;
}

}  // namespace qshard
