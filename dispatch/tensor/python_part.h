// C++ code calls need_python_part() where it depends on the Python that loading installs
// (qshard/_runtime): FSDP2's hooks and the patches.
#pragma once

#include <atomic>

namespace qshard {

/// Installs the Python part, or throws if it cannot. Null in a program without Python, and once the
/// part is installed.
///
/// Loading the library cannot run it (loader/after_loading.h). Python usually runs it right after
/// loading. A call that needs it earlier, perhaps on another thread, runs it first.
inline std::atomic<void (*)()> finish_python_part = nullptr;

/// Call it before the first quantized tensor exists, because PyTorch finds FSDP2's hooks as Python
/// attributes. The calling thread may hold the GIL or not, and must hold no lock of ours.
/// @throws c10::Error if the Python part failed.
inline void need_python_part() {
  if (auto* finish = finish_python_part.load(std::memory_order_acquire)) finish();
}

}  // namespace qshard
