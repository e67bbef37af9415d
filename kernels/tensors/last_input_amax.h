// The amax of a linear's last input: a guess at the next one's scale.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>

namespace qshard {

/// Inputs of a layer keep their power of two for many steps. So codes with one scale are made by
/// that of the last input in the pass that finds this one's amax, and made again where that gives
/// another scale. They are those of two passes either way: this is no state, nothing is saved of
/// it.
class LastInputAmax {
 public:
  /// What one use reads and writes, float32 on the device; null where it has to do without. It
  /// belongs to the thread that asked until it goes: a use launches several kernels, and those of
  /// another thread's must not come between them, even on one stream.
  struct Use {
    const float* last = nullptr;  // 0 before the first use
    float* next = nullptr;        // for the amax of this use's input
    std::unique_lock<std::mutex> lock = {};

    explicit operator bool() const { return last != nullptr; }
  };

  /// The use before this one on the current CUDA stream. There is none where the use before was on
  /// another stream, which may yet write, nor while a graph is captured, whose replays would
  /// outlive the words. Waits for the use of another thread.
  Use use(at::Device device);

 private:
  std::mutex mutex_;
  at::Tensor words_;  // of the last use, and of the one before; on its stream
  void* stream_ = nullptr;
  int last_ = 0;
};

}  // namespace qshard
