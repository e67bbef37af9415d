// load_without_python PATH: a C++ program with torch and no Python loads libqshard.so at run time.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <exception>

namespace {

int run(const char* path) {
  if (dlsym(RTLD_DEFAULT, "Py_IsInitialized") != nullptr) {
    std::fprintf(stderr, "there is Python in this program\n");
    return 1;
  }
  dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL);  // a library with CUDA kernels needs it
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const auto load_error = reinterpret_cast<const char* (*)()>(dlsym(library, "qshard_load_error"));
  if (load_error == nullptr || std::strlen(load_error()) != 0) {
    std::fprintf(stderr, "%s\n", load_error ? load_error() : "no qshard_load_error");
    return 1;
  }
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto finish = dispatcher.findSchemaOrThrow("qshard::_finish_loading", "");
  finish.typed<void()>().call();
  const auto quantize = dispatcher.findSchemaOrThrow("qshard::quantize", "");
  const at::Tensor x = at::randn({32, 16});
  torch::jit::Stack stack{x, "float8_blockwise", true, c10::IValue(), 0};
  quantize.callBoxed(&stack);
  const at::Tensor quantized = stack.at(0).toTensor();
  quantized.add_(1);
  const bool is_right = at::equal(quantized.mul(1), x.add(1));
  std::printf("%s\n", is_right ? "quantized" : "other values");
  return is_right ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return argc == 2 ? run(argv[1]) : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
