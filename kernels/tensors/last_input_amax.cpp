#include "kernels/tensors/last_input_amax.h"

#include <utility>

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

namespace qshard {

LastInputAmax::Use LastInputAmax::use(at::Device device) {
  if (!device.is_cuda()) return {};
  std::unique_lock lock(mutex_);
  void* stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return {};
  }
  if (!words_.defined() || words_.device() != device || stream_ != stream) {
    const bool is_first = !words_.defined();
    words_ = at::zeros({2}, at::TensorOptions().dtype(at::kFloat).device(device));
    stream_ = stream;
    if (!is_first) return {};
  }
  auto* words = words_.mutable_data_ptr<float>();
  const int last = std::exchange(last_, 1 - last_);
  return {words + last, words + (1 - last), std::move(lock)};
}

}  // namespace qshard
