#include "kernels/transpose/transpose_cuda.h"

#include "kernels/device/check_launch.h"
#include "kernels/transpose/kernels.h"

namespace qshard::cuda {

void transpose_values(const TransposeTask& task, void* stream) {
  check_launch(launch_transpose_values(task, static_cast<cudaStream_t>(stream)));
}

void transpose_image(const TransposeImageTask& task, void* stream) {
  check_launch(launch_transpose_image(task, static_cast<cudaStream_t>(stream)));
}

}  // namespace qshard::cuda
