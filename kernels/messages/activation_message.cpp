#include "kernels/messages/activation_message.h"

#include <algorithm>

#include "kernels/messages/activation_message_cpu.h"
#include "kernels/messages/activation_message_cuda.h"

namespace qshard {
ActivationMessage::ActivationMessage(const Format& format, OperandRole role, int64_t rows,
                                     int64_t cols)
    : code_dtype(packed_code_dtype(format, role)),
      has_one_scale(packed_scale_mode(format) == ScaleMode::kTensor),
      block_cols(has_scale_per_row(format) ? std::max<int64_t>(cols, 1) : kTokenBlock),
      power_of_two_scales(format.activations.power_of_two_scales),
      rows(rows),
      cols(cols) {}

void encode_activation(const EncodeActivationTask& task, Stream stream) {
  if (!stream.is_cuda) return cpu::encode_activation(task);
  cuda::encode_activation(task, stream.handle);
}

void decode_activations(const DecodeActivationsTask& task, Stream stream) {
  if (!stream.is_cuda) return cpu::decode_activations(task);
  cuda::decode_activations(task, stream.handle);
}

}  // namespace qshard
