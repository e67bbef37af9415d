// CPU kernels behind kernels/messages/gradient_message.h; threaded over tiles.
#pragma once

#include "kernels/messages/gradient_message.h"

namespace qshard::cpu {

void encode_messages(const EncodeMessagesTask& task);
void sum_messages(const SumMessagesTask& task);

}  // namespace qshard::cpu
