// What libqshard.so says of itself, to C and to Python's ctypes. Safe beside any torch, or none.
#pragma once

extern "C" {

/// Why the operators are not there, in one line; "" where they are.
const char* qshard_load_error();

/// The torch that the library was built for: "2.11".
const char* qshard_torch_version();

/// The CUDA version of that torch, "13.0"; "" for a library without CUDA kernels.
const char* qshard_cuda_version();

/// What the kernels were compiled for, as CMake has it: "90a-real 100 120"; "" without.
const char* qshard_cuda_architectures();
}
