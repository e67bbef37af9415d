// Where a kernel runs.
#pragma once

namespace qshard {

/// Where a kernel runs. `stream` is a cudaStream_t; the caller holds the device guard.
struct Stream {
  bool is_cuda = false;
  void* handle = nullptr;
};

}  // namespace qshard
