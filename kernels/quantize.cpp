#include "kernels/quantize.h"

#include <c10/util/Exception.h>

#include "kernels/cpu/quantize_cpu.h"
#ifdef QSHARD_WITH_CUDA
#include "kernels/cuda/quantize_cuda.h"
#endif

namespace qshard {
namespace {

#ifndef QSHARD_WITH_CUDA
[[noreturn]] void no_cuda(const char* operation) {
  TORCH_CHECK(false, "qshard: cannot ", operation,
              " on a CUDA tensor: this library was built without CUDA (nvcc was not found)");
}
#endif

}  // namespace

void compute_amax(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) return cpu::compute_amax(tasks);
#ifdef QSHARD_WITH_CUDA
  cuda::compute_amax(tasks, stream.handle);
#else
  no_cuda("compute an amax");
#endif
}

void quantize(std::span<const QuantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) return cpu::quantize(tasks);
#ifdef QSHARD_WITH_CUDA
  cuda::quantize(tasks, stream.handle);
#else
  no_cuda("quantize");
#endif
}

void dequantize(std::span<const DequantizeTask> tasks, Stream stream) {
  if (tasks.empty()) return;
  if (!stream.is_cuda) return cpu::dequantize(tasks);
#ifdef QSHARD_WITH_CUDA
  cuda::dequantize(tasks, stream.handle);
#else
  no_cuda("dequantize");
#endif
}

}  // namespace qshard
