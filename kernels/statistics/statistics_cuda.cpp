#include "kernels/statistics/statistics_cuda.h"

#include "kernels/device/check_launch.h"
#include "kernels/statistics/kernels.h"

namespace qshard::cuda {

void add_statistics(const CodedMatrix& matrix, int64_t* tally, void* stream) {
  check_launch(launch_add_statistics(matrix, tally, static_cast<cudaStream_t>(stream)));
}

}  // namespace qshard::cuda
