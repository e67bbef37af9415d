# torch::torch, from the torch package of Python_EXECUTABLE.
#
# Not find_package(Torch): on a CUDA wheel its Caffe2 config demands a whole CUDA toolkit, even of a
# build that compiles no CUDA.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

set(ask "import torch, sys; v = torch.version; print(torch.__path__[0], v.__version__, \
v.cuda or 'none', int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';')")
execute_process(COMMAND ${Python_EXECUTABLE} -c "${ask}" OUTPUT_VARIABLE answer
                OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
if(failed)
  message(FATAL_ERROR "qshard needs torch in ${Python_EXECUTABLE}; "
                      "choose another with -DPython_EXECUTABLE=…")
endif()
list(GET answer 0 TORCH_DIR)
list(GET answer 1 TORCH_VERSION)
list(GET answer 2 TORCH_CUDA_VERSION)  # "none" for a CPU wheel
list(GET answer 3 torch_cxx11_abi)
message(STATUS "torch ${TORCH_VERSION} (CUDA: ${TORCH_CUDA_VERSION}) in ${TORCH_DIR}")

add_library(torch::torch INTERFACE IMPORTED)
target_include_directories(torch::torch SYSTEM INTERFACE
                           ${TORCH_DIR}/include ${TORCH_DIR}/include/torch/csrc/api/include)
# fmt's headers come with torch; its compiled library does not.
target_compile_definitions(torch::torch INTERFACE FMT_HEADER_ONLY=1 USE_DISTRIBUTED=1
                           _GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
target_link_libraries(torch::torch INTERFACE ${TORCH_DIR}/lib/libtorch.so
                      ${TORCH_DIR}/lib/libtorch_cpu.so ${TORCH_DIR}/lib/libc10.so)
# at::parallel_for is a header whose threads are OpenMP's, in torch's own copy of the runtime.
target_compile_options(torch::torch INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
file(GLOB torch_gomp ${TORCH_DIR}/lib/libgomp*.so*)
target_link_libraries(torch::torch INTERFACE ${torch_gomp})
# torch's libraries find the CUDA ones through their own rpath, whichever of them the wheel brings.
target_link_options(torch::torch INTERFACE -Wl,--allow-shlib-undefined)
