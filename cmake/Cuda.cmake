# Decides whether the CUDA kernels are built: nvcc of torch's own major version must be there.
# Sets QSHARD_WITH_CUDA, and torch::cuda with what the kernels' host side needs.
set(QSHARD_WITH_CUDA OFF)
set(why_not "")
if(QSHARD_CUDA STREQUAL "OFF")
  set(why_not "QSHARD_CUDA=OFF")
elseif(TORCH_CUDA_VERSION STREQUAL "none")
  set(why_not "torch ${TORCH_VERSION} is a CPU build")
else()
  find_program(NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  mark_as_advanced(NVCC)
  if(NOT NVCC)
    set(why_not "nvcc not found")
  else()
    execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE nvcc_says)
    string(REGEX MATCH "release [0-9]+\\.[0-9]+" found "${nvcc_says}")
    string(REGEX MATCH "^[0-9]+" torch_major ${TORCH_CUDA_VERSION})
    if(NOT found MATCHES "release ${torch_major}\\.")
      set(why_not "torch needs nvcc ${torch_major}.x, found '${found}'")
    endif()
  endif()
endif()

if(why_not)
  if(QSHARD_CUDA STREQUAL "ON")
    message(FATAL_ERROR "QSHARD_CUDA=ON, but ${why_not}")
  endif()
  message(STATUS "CPU build: ${why_not}")
  return()
endif()

set(QSHARD_WITH_CUDA ON)
# Hopper's own instructions (wgmma, setmaxnreg) need the "a" target. Another choice, such as
# "90a-real;100-real" to run on Blackwell too, is the caller's.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 90a-real)
endif()
# torch's process already holds one shared cudart; a static one would be a second.
set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)
set(CMAKE_CUDA_COMPILER ${NVCC})
enable_language(CUDA)
set(CMAKE_CUDA_STANDARD 20)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake up to 3.25 does not know that nvcc has it
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
endif()
message(STATUS "CUDA build: nvcc ${CMAKE_CUDA_COMPILER_VERSION}, sm ${CMAKE_CUDA_ARCHITECTURES}")

find_library(CUBLASLT cublasLt HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED)
find_library(CUDART cudart HINTS ${CMAKE_CUDA_IMPLICIT_LINK_DIRECTORIES} REQUIRED)
mark_as_advanced(CUBLASLT CUDART)
add_library(torch::cuda INTERFACE IMPORTED)
target_include_directories(torch::cuda SYSTEM INTERFACE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_libraries(torch::cuda INTERFACE ${TORCH_DIR}/lib/libtorch_cuda.so
                      ${TORCH_DIR}/lib/libc10_cuda.so ${CUBLASLT} ${CUDART})
