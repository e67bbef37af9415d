// What of the library is written in Python (fsdp/*.py), as far as the C++ depends on it.
#pragma once

#include <atomic>

namespace qshard {

/// Finishes the Python part, or throws if it cannot; null where there is nothing to finish: a
/// program without Python, and once it is there.
///
/// Loading the library cannot run it (loader/after_loading.h). Python runs it right after, as a
/// rule; whatever comes first, from another thread perhaps, runs it instead of going on without.
inline std::atomic<void (*)()> finish_python_part = nullptr;

/// Before the first quantized tensor is there: what PyTorch finds by attribute is Python.
/// The calling thread may hold the GIL or not, and must hold no lock of ours.
/// @throws c10::Error if the Python part failed.
inline void need_python_part() {
  if (auto* finish = finish_python_part.load(std::memory_order_acquire)) finish();
}

}  // namespace qshard
