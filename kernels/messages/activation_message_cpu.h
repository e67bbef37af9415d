// CPU kernels behind kernels/messages/activation_message.h; threaded over rows.
#pragma once

#include "kernels/messages/activation_message.h"

namespace qshard::cpu {

void encode_activation(const EncodeActivationTask& task);
void decode_activations(const DecodeActivationsTask& task);

}  // namespace qshard::cpu
