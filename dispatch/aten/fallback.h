// The boxed kernel of every operator that has no native quantized kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <map>
#include <string>

namespace qshard {

/// Runs `op` on plain tensors in place of the quantized ones:
///   read arguments     the value, dense, in the nominal dtype; a gathered weight gives its
///                      dequantized codes (matmul.h)
///   written arguments  the window of the master (or pending) plane with the same strides, so the
///                      stock kernel updates full-precision values at full speed
///   out= arguments     a plain tensor, copied in afterwards if its shape still fits
/// Results are plain; a result that is a written argument is that argument.
/// @throws c10::Error naming the op for view ops and ops that change metadata.
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// Says whether this thread is within an optimizer's step, where sums are meant to be rounded to
/// codes.
void set_in_step(bool in_step);
bool is_in_step();

/// Counting of operators that took the fallback, from the last time that it was enabled.
/// @param reads_only  those that had a value made to read, for qshard.trace_fallbacks(): what only
///                    writes, as optimizers' kernels do, runs on the master or the pending plane
void set_fallback_tracing(bool enabled);
std::map<std::string, int64_t> traced_fallbacks(bool reads_only);

}  // namespace qshard
