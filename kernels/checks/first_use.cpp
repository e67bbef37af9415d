#include "kernels/checks/first_use.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "kernels/checks/small_products.h"
#include "kernels/device/capture.h"
#include "kernels/device/compute_capability.h"
#include "kernels/gemm/gemm_verdicts.h"

namespace qshard {
namespace {

/// Work of our own in the midst of a user's: no autograd, no autocast, and no Python that watches
/// operators, for which another thread may wait that holds the interpreter.
struct Aside {
  c10::InferenceMode no_inference{false};
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python{c10::python_ks};
};

/// What torch makes of operators on fake tensors has no values.
bool is_traced() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Meta); }

std::optional<std::string> what_is_wrong(const Format& format, at::Device device) {
  try {
    const std::string wrong = wrong_product(quantized_backend(format), format, device);
    return wrong.empty() ? wrong_grouped_product(format, device) : wrong;
  } catch (const c10::Error&) {
    return std::nullopt;  // memory is short, say; a linear that meets more than that names it
  }
}

}  // namespace

void check_gemms_at_first_use(const Format& format, at::Device device) {
  if (!device.is_cuda() || format.emulated) return;
  const int capability = cuda::compute_capability(device);
  if (!format.gemm.runs_on(capability)) return;
  GemmVerdicts& verdicts = gemm_verdicts();
  const GemmVerdict known = verdicts.of(format, capability);
  if (known == GemmVerdict::kTrusted || known == GemmVerdict::kRight) return;
  if (known == GemmVerdict::kUnchecked && (is_traced() || is_capturing(device))) return;
  verdicts.settle(format, capability, [&] {
    const Aside aside;
    const c10::OptionalDeviceGuard guard(device);
    return what_is_wrong(format, device);
  });
}

}  // namespace qshard
