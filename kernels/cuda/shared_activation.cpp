#include "kernels/cuda/shared_activation.h"

#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <utility>

namespace qshard::cuda {
namespace {

// What decides the codes of a tensor, beside its values.
struct Circumstances {
  int64_t version = 0;
  bool blockwise = false;
  bool power_of_two = false;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;  // 0: none. What a graph replays must have been captured with it

  bool operator==(const Circumstances&) const = default;
};

struct SharedActivation final : c10::BackendMeta {
  Circumstances circumstances;
  Fp8Activation activation;

  // A shallow copy, as x.data, may be written without this one's version counter.
  c10::intrusive_ptr<c10::BackendMeta> clone(
      const c10::intrusive_ptr<c10::BackendMeta>&) const override {
    return {};
  }
};

unsigned long long capture_id(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

// Two threads may read one tensor.
class MetaOf {
 public:
  explicit MetaOf(const at::Tensor& tensor) : impl_(tensor.unsafeGetTensorImpl()) {}

  c10::intrusive_ptr<c10::BackendMeta> get() const {
    std::lock_guard lock(mutex());
    return impl_->get_backend_meta_intrusive_ptr();
  }
  void set(c10::intrusive_ptr<c10::BackendMeta> meta) const {
    std::lock_guard lock(mutex());
    impl_->set_backend_meta(std::move(meta));
  }

 private:
  c10::TensorImpl* impl_;

  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
};

}  // namespace

Fp8Activation quantize_shared_activation(const at::Tensor& owner, const at::Tensor& x,
                                         const Format& format, bool rows, bool columns) {
  const auto quantize = [&] {
    return quantize_activation(x, format, DType::kFloat8E4M3, rows, columns, {});
  };
  const MetaOf meta(owner);
  const auto present = meta.get();
  const auto* known = dynamic_cast<const SharedActivation*>(present.get());
  // Inference tensors have no version counter; tensors of another backend's making have its meta.
  const bool can_own = !owner.is_inference() && (known != nullptr || !present) &&
                       !owner.unsafeGetTensorImpl()->is_python_dispatch();
  if (!can_own) return quantize();
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const Circumstances now{owner._version(), format.block_rows != 0, format.power_of_two_scales,
                          stream, capture_id(stream)};
  if (known != nullptr && known->circumstances == now) {
    const Fp8Activation& activation = known->activation;
    const bool serves =
        (!rows || activation.buffer.defined()) && (!columns || activation.saved.defined());
    if (serves) return activation;
  }
  auto shared = c10::make_intrusive<SharedActivation>();
  shared->circumstances = now;
  shared->activation = quantize();
  Fp8Activation activation = shared->activation;
  meta.set(std::move(shared));
  return activation;
}

}  // namespace qshard::cuda
