#include <ATen/Context.h>

#include "dispatch/aten/fallback.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/aten/registration.h"
#include "kernels/device/compute_capability.h"
#include "kernels/format/format_info.h"
#include "kernels/gemm/gemm_verdicts.h"
#include "kernels/linear/linear.h"
#include "ops/calls/ops.h"

namespace qshard {

std::vector<std::string> format_names() {
  std::vector<std::string> names;
  for (const Format& format : formats()) names.emplace_back(format.name);
  return names;
}

std::string format_info_op(c10::string_view name) {
  return format_info(checked_format(name, "qshard::format_info"));
}

std::string backend_report_op() { return backend_report(); }

namespace {

void check_is_there(const char* name, at::Device device) {
  const auto gpus = static_cast<int64_t>(at::getNumGPUs());
  TORCH_CHECK_VALUE(!device.is_cuda() || gpus == 0 || device.index() < gpus, name, ": there is no ",
                    device, ", of ", gpus, " GPUs");
}

}  // namespace

c10::Dict<std::string, std::string> why_dequantized_op(at::Device device) {
  check_is_there("qshard::Process.why_dequantized", device);
  c10::Dict<std::string, std::string> reasons;
  for (const Format& format : formats()) {
    reasons.insert(std::string(format.name), why_dequantized(format, device));
  }
  return reasons;
}

c10::Dict<std::string, std::string> gemm_verdicts_op(at::Device device) {
  check_is_there("qshard::Process.gemm_verdicts", device);
  c10::Dict<std::string, std::string> verdicts;
  const int capability = cuda::compute_capability(device);
  for (const Format& format : formats()) {
    if (!format.gemm.runs_on(capability)) continue;
    verdicts.insert(std::string(format.name),
                    std::string(name_of(gemm_verdicts().of(format, capability))));
  }
  return verdicts;
}

std::string foreign_owner_of_key_op() { return foreign_owner_of_key(); }

void set_fallback_tracing_op(bool enabled) { set_fallback_tracing(enabled); }

void set_in_step_op(bool in_step) { set_in_step(in_step); }

void make_shards_op(std::optional<int64_t> rank) {
  TORCH_CHECK_VALUE(!rank || *rank >= kSameRows, "qshard::Process.make_shards: there is no rank ",
                    *rank);
  make_shards(rank);
}

c10::Dict<std::string, int64_t> traced_fallbacks_op(bool reads_only) {
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [name, count] : traced_fallbacks(reads_only)) counts.insert(name, count);
  return counts;
}

}  // namespace qshard
