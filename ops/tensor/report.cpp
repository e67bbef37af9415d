#include "dispatch/aten/fallback.h"
#include "dispatch/aten/native_kernels.h"
#include "dispatch/aten/registration.h"
#include "dispatch/tensor/quantized_tensor_impl.h"
#include "kernels/format/format_info.h"
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

c10::Dict<std::string, std::string> why_dequantized_op(at::Device device) {
  c10::Dict<std::string, std::string> reasons;
  for (const Format& format : formats()) {
    reasons.insert(std::string(format.name), why_dequantized(format, device));
  }
  return reasons;
}

std::string foreign_owner_of_key_op() { return foreign_owner_of_key(); }

void set_fallback_tracing_op(bool enabled) { set_fallback_tracing(enabled); }

void set_in_step_op(bool in_step) { set_in_step(in_step); }

void make_shards_op(std::optional<int64_t> rank) {
  TORCH_CHECK_VALUE(!rank || *rank >= kSameRows, "qshard::_make_shards: there is no rank ", *rank);
  make_shards(rank);
}

c10::Dict<std::string, int64_t> traced_fallbacks_op(bool reads_only) {
  c10::Dict<std::string, int64_t> counts;
  for (const auto& [name, count] : traced_fallbacks(reads_only)) counts.insert(name, count);
  return counts;
}

c10::Dict<std::string, int64_t> storage_bytes(const Tensor& self) {
  const QuantizedBuffer& buffer = buffer_of(self);
  c10::Dict<std::string, int64_t> bytes;
  const Planes& planes = buffer.planes();
  const auto add = [&](const char* name, const ReadOnlyTensor& plane) {
    bytes.insert(name, plane.defined() ? plane.nbytes() : 0);
  };
  add("image", planes.image());
  add("master", planes.master());
  add("grid", planes.grid().read());
  add("pending", planes.pending());
  add("grid_snapshot", planes.grid().given());
  const Layout& layout = buffer.layout();
  bytes.insert("sent", layout.rows * (layout.format->gathers_by_phase ? layout.image_row_bytes()
                                                                      : layout.row_bytes()));
  bytes.insert("state", buffer.scaling_state().nbytes());
  const auto codes = static_cast<int64_t>(planes.code_storage().nbytes());
  bytes.insert("storage", codes + (planes.master().defined() ? planes.master().nbytes() : 0));
  return bytes;
}

bool keeps_master(const Tensor& self) { return buffer_of(self).keeps_master(); }

}  // namespace qshard
