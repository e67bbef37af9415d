#include "kernels/linear/gemm_backend.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>

#include "kernels/device/compute_capability.h"
#include "kernels/format/value_dtype.h"
#include "kernels/gemm/gemm_verdicts.h"
#include "kernels/linear/emulated_gemms.h"
#include "kernels/linear/linear_block_scaled.h"
#include "kernels/linear/linear_fp8.h"

namespace qshard {
namespace {

GemmFallback sizes_fallback(const GemmProblem& problem) {
  if (!is_value_dtype(problem.dtype)) return GemmFallback::kDtype;
  if (problem.n % 16 != 0) return GemmFallback::kOutFeatures;
  return is_too_large(problem.m, problem.n, problem.k) ? GemmFallback::kTooLarge
                                                       : GemmFallback::kNone;
}

// Why codes of a weight cannot be read in place.
GemmFallback weight_fallback(const QuantizedMatrix& weight) {
  const RowImage& rows = weight.row_image();
  const Layout& layout = rows.layout;
  const int64_t first = layout.row_offset + rows.first_row;
  const int64_t in_matrix = first % layout.matrix_rows;
  const bool one_matrix = in_matrix + weight.rows <= layout.matrix_rows;
  const ScaleLevel& scale = layout.format->scale;
  const bool usable =
      first + weight.rows <= layout.logical_rows && scale.begins_at(in_matrix) &&
      (one_matrix || (!layout.format->has_tensor_scale() && scale.begins_at(layout.matrix_rows)));
  if (!usable) return GemmFallback::kWindow;
  const bool aligned = reinterpret_cast<uintptr_t>(rows.image.const_data_ptr()) % 16 == 0;
  return aligned ? GemmFallback::kNone : GemmFallback::kAlignment;
}

// What GEMMs of codes have in common, once their device can run them.
GemmFallback codes_fallback(const GemmProblem& problem) {
  const GemmFallback sizes = sizes_fallback(problem);
  if (sizes != GemmFallback::kNone || problem.weight == nullptr) return sizes;
  const GemmFallback weight = weight_fallback(*problem.weight);
  if (weight != GemmFallback::kNone) return weight;
  const bool has_transpose =
      problem.direction != GemmDirection::kGradInput || problem.format->gemm.transposes_weight;
  return has_transpose ? GemmFallback::kNone : GemmFallback::kOneRowBlocks;
}

// What GEMMs of a device's tensor cores have in common.
GemmFallback device_fallback(const GemmProblem& problem) {
  if (problem.device.is_cpu()) return GemmFallback::kCpu;
  const int capability = cuda::compute_capability(problem.device);
  if (!problem.format->gemm.runs_on(capability)) return GemmFallback::kDevice;
  const bool is_wrong = gemm_verdicts().of(*problem.format, capability) == GemmVerdict::kWrong;
  return is_wrong ? GemmFallback::kWrong : codes_fallback(problem);
}

class Fp8Gemms final : public QuantizedGemmBackend {
 public:
  GemmFallback supports(const GemmProblem& problem) const override {
    return device_fallback(problem);
  }
  OperandLayout operand_layout() const override { return OperandLayout::kPacked; }
  at::Tensor run(const GemmTask& task) const override {
    switch (task.direction) {
      case GemmDirection::kForward:
        return cuda::fp8_forward(*task.a.codes, *task.b.codes, task.bias, task.out, task.added);
      case GemmDirection::kGradInput:
        return cuda::fp8_grad_input(*task.a.codes, *task.b.codes, task.out, task.sum);
      case GemmDirection::kGradWeight:
        return task.sum.defined() &&
                       cuda::fp8_add_grad_weight(*task.a.codes, *task.b.codes, task.sum)
                   ? task.sum
                   : cuda::fp8_grad_weight(*task.a.codes, *task.b.codes, task.out);
    }
    return {};
  }
};

class BlockScaledGemms final : public QuantizedGemmBackend {
 public:
  GemmFallback supports(const GemmProblem& problem) const override {
    return device_fallback(problem);
  }
  OperandLayout operand_layout() const override { return OperandLayout::kRowImage; }
  at::Tensor run(const GemmTask& task) const override {
    switch (task.direction) {
      case GemmDirection::kForward:
        return cuda::block_scaled_forward(*task.a.codes, *task.b.codes, task.bias, task.out,
                                          task.added);
      case GemmDirection::kGradInput:
        return cuda::block_scaled_grad_input(*task.a.codes, *task.b.codes, task.out);
      case GemmDirection::kGradWeight:
        return cuda::block_scaled_grad_weight(*task.a.codes, *task.b.codes, task.out);
    }
    return {};
  }
};

// In the place of those above where QSHARD_GEMM_CHECK says `break`.
class BrokenGemms final : public QuantizedGemmBackend {
 public:
  explicit BrokenGemms(const QuantizedGemmBackend& whole) : whole_(whole) {}

  GemmFallback supports(const GemmProblem& problem) const override {
    return whole_.supports(problem);
  }
  OperandLayout operand_layout() const override { return whole_.operand_layout(); }
  at::Tensor run(const GemmTask& task) const override {
    const at::Tensor out = whole_.run(task);
    if (out.defined()) out.narrow(0, 0, 1).mul_(2);
    return out;
  }

 private:
  const QuantizedGemmBackend& whole_;
};

// On every device, for what the GEMMs above take.
class EmulatedGemms final : public QuantizedGemmBackend {
 public:
  explicit EmulatedGemms(OperandLayout operand_layout) : operand_layout_(operand_layout) {}

  GemmFallback supports(const GemmProblem& problem) const override {
    return codes_fallback(problem);
  }
  OperandLayout operand_layout() const override { return operand_layout_; }
  at::Tensor run(const GemmTask& task) const override {
    const QuantizedMatrix& a = *task.a.codes;
    const QuantizedMatrix& b = *task.b.codes;
    switch (task.direction) {
      case GemmDirection::kForward:
        return emulated_forward(a, b, task.bias, task.out, task.added);
      case GemmDirection::kGradInput:
        return emulated_grad_input(a, b, task.out);
      case GemmDirection::kGradWeight:
        return emulated_grad_weight(a, b, task.out);
    }
    return {};
  }

 private:
  OperandLayout operand_layout_;
};

// a @ b rounded once to `dtype`, where the device can.
at::Tensor mm_to(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  const bool widens = dtype == at::kFloat && a.scalar_type() != at::kFloat && a.is_cuda() &&
                      is_value_dtype(a.scalar_type());
  return widens ? at::mm(a, b, dtype) : at::mm(a, b).to(dtype);
}

class DequantizedGemms final : public GemmBackend {
 public:
  GemmFallback supports(const GemmProblem&) const override { return GemmFallback::kNone; }
  at::Tensor run(const GemmTask& task) const override {
    const at::Tensor& a = task.a.values;
    const at::ScalarType dtype = a.scalar_type();
    if (task.direction == GemmDirection::kForward) {
      const at::Tensor weight = dequantized(*task.b.codes, dtype);
      at::Tensor out =
          task.bias ? at::addmm(task.bias->to(dtype), a, weight.t()) : at::mm(a, weight.t());
      return task.added.defined() ? out.add_(task.added) : out;
    }
    // An input's gradient is no leaf's, and its sum has the bits of autograd's: the product apart.
    if (task.direction == GemmDirection::kGradInput) {
      return at::mm(a, dequantized_columnwise(*task.b.codes, dtype));
    }
    const at::Tensor input = task.b.values.to(dtype);
    // Saves the memory of a second gradient. On CPU, where that is of no matter, a product that
    // is added as it is computed has other bits than autograd's sum, by threads and columns.
    if (task.sum.defined() && task.sum.is_cuda() && task.sum.scalar_type() == dtype) {
      at::Tensor out = task.sum;
      return at::addmm_out(out, task.sum, a.t(), input);
    }
    return mm_to(a.t(), input, c10::typeMetaToScalarType(task.out.dtype()));
  }
};

}  // namespace

const QuantizedGemmBackend& quantized_backend(const Format& format) {
  static const Fp8Gemms fp8;
  static const BlockScaledGemms block_scaled;
  static const BrokenGemms broken_fp8(fp8);
  static const BrokenGemms broken_block_scaled(block_scaled);
  static const EmulatedGemms emulated_fp8(OperandLayout::kPacked);
  static const EmulatedGemms emulated_block_scaled(OperandLayout::kRowImage);
  const bool is_packed = format.gemm.kind == GemmKind::kPacked;
  if (format.emulated) return is_packed ? emulated_fp8 : emulated_block_scaled;
  if (gemm_verdicts().options().breaks) return is_packed ? broken_fp8 : broken_block_scaled;
  if (is_packed) return fp8;
  return block_scaled;
}

const GemmBackend& dequantized_gemms() {
  static const DequantizedGemms backend;
  return backend;
}

// The kernels count rows and tiles in 32 bits, and tiles of rows in 16.
bool is_too_large(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kMaxTileRows = 65535 * int64_t{128};
  return m > kMaxTileRows || n > kMaxTileRows || k > kMaxTileRows;
}

}  // namespace qshard
