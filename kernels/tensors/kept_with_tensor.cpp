#include "kernels/tensors/kept_with_tensor.h"

#include <array>
#include <mutex>
#include <utility>

namespace qshard {
namespace {

constexpr size_t kKinds = 3;

struct KeptThings final : c10::BackendMeta {
  std::array<KeptThing, kKinds> of_kind;

  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
};

std::mutex& mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

KeptThing kept_with(const c10::TensorImpl& tensor, Kept kind) {
  const std::lock_guard lock(mutex());
  const auto meta = tensor.get_backend_meta_intrusive_ptr();
  const auto* things = dynamic_cast<const KeptThings*>(meta.get());
  return things == nullptr ? KeptThing() : things->of_kind[static_cast<size_t>(kind)];
}

bool keep_with(c10::TensorImpl& tensor, Kept kind, KeptThing thing) {
  // What was there leaves by `thing`, a parameter, and so is released after the lock: Python code
  // may run then.
  const std::lock_guard lock(mutex());
  if (tensor.get_backend_meta() == nullptr) {
    tensor.set_backend_meta(c10::make_intrusive<KeptThings>());
  }
  auto* things = dynamic_cast<KeptThings*>(tensor.get_backend_meta());
  if (things == nullptr) return false;
  std::swap(things->of_kind[static_cast<size_t>(kind)], thing);
  return true;
}

}  // namespace qshard
