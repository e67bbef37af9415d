// libqshard.so: looks whether the torch in this process is the one that the library was built for,
// and only then loads the library itself, libqshard_impl.so of the same folder.
//
// torch's C++ ABI changes with every minor version. A library that needs another one's symbols
// fails in the dynamic loader, with a mangled name, or runs initialisers over classes of another
// layout. So this file uses nothing of torch's but a C function. What is wrong is said once, in one
// line, as a Python warning where there is Python; then nothing is loaded, and the process goes on.
#include "loader/loader.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <string>

#include "loader/after_loading.h"

extern "C" {
QSHARD_WEAK extern PyObject* PyExc_UserWarning;
QSHARD_WEAK int PyErr_WarnEx(PyObject* category, const char* message, ssize_t stack_level);
QSHARD_WEAK void PyErr_WriteUnraisable(PyObject* object);
}

namespace {

constexpr const char* kImplementation = "libqshard_impl.so";

/// A library that the process has loaded already, or null.
void* loaded(const char* name) { return dlopen(name, RTLD_LAZY | RTLD_NOLOAD); }

std::string path_of(void* symbol) {
  Dl_info info{};
  return dladdr(symbol, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

/// "2.11"; "" without torch in the process. torch before 2.9 does not say.
std::string torch_version() {
  void* torch = loaded("libtorch_cpu.so");
  if (torch == nullptr) return "";
  using AbiVersion = uint64_t();
  auto* abi_version = reinterpret_cast<AbiVersion*>(dlsym(torch, "aoti_torch_abi_version"));
  if (abi_version == nullptr) return "2.8 or older";
  const uint64_t version = abi_version();  // a byte each: major, minor, patch
  return std::to_string(version >> 56) + "." + std::to_string(version >> 48 & 0xff);
}

/// Why the implementation beside this library cannot run in this process, or "".
std::string why_not() {
  const std::string torch = torch_version();
  if (torch.empty()) return "there is no torch in this process: import it first";
  const char* way_out =
      ". Build it for this torch: `pip install --no-build-isolation .` in a qshard checkout";
  if (torch != QSHARD_TORCH_MINOR) {
    return "it was built for torch " QSHARD_TORCH_MINOR ", and this is torch " + torch + way_out;
  }
  if (*QSHARD_CUDA_VERSION != '\0' && loaded("libtorch_cuda.so") == nullptr) {
    return "it was built for torch with CUDA " QSHARD_CUDA_VERSION ", and this torch has no CUDA" +
           std::string(way_out);
  }
  return "";
}

/// "" once the implementation runs; else one line.
std::string load() {
  const std::string path = path_of(reinterpret_cast<void*>(&qshard_load_error));
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  std::string reason = why_not();
  if (reason.empty() && dlopen((folder + kImplementation).c_str(), RTLD_NOW) == nullptr) {
    reason = dlerror();
  }
  return reason.empty() ? "" : "qshard: " + path + " is not loaded: " + reason;
}

const std::string& load_once() {
  static const std::string error = load();
  return error;
}

std::atomic<bool> is_told = false;

/// With the GIL.
void warn() {
  if (is_told.exchange(true)) return;
  const qshard::PythonGuard python;
  // Where warnings are errors this is an exception, which code that loads a library cannot pass on.
  if (PyErr_WarnEx(PyExc_UserWarning, load_once().c_str(), 1) != 0) PyErr_WriteUnraisable(nullptr);
}

/// Runs when this library is loaded.
const bool kLoaded = [] {
  if (load_once().empty()) return true;
  if (qshard::has_python()) {
    qshard::call_after_loading<&warn>();
  } else {
    std::fprintf(stderr, "%s\n", load_once().c_str());
  }
  return false;
}();

}  // namespace

extern "C" const char* qshard_load_error() {
  is_told = true;
  return load_once().c_str();
}

extern "C" const char* qshard_torch_version() { return QSHARD_TORCH_MINOR; }

extern "C" const char* qshard_cuda_version() { return QSHARD_CUDA_VERSION; }

extern "C" const char* qshard_cuda_architectures() { return QSHARD_CUDA_ARCHITECTURES; }
