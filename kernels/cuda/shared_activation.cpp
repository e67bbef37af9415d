#include "kernels/cuda/shared_activation.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <utility>

namespace qshard::cuda {
namespace {

// What decides the codes of a tensor, beside its values.
struct Circumstances {
  ScaleMode scale_mode = ScaleMode::kTensor;
  ScaleMode columns_scale_mode = ScaleMode::kTensor;
  bool power_of_two = false;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;  // 0: none. What a graph replays must have been captured with it

  bool operator==(const Circumstances&) const = default;
};

// Which values the tensor had. Weak, so that an address is not another one's while this lives, and
// the codes keep neither the graph nor its memory.
class Contents {
 public:
  explicit Contents(const SharedInput& input)
      : record_(weak_record(input.record)), storage_(input.tensor.storage().getWeakStorageImpl()) {}

  bool is_of(const SharedInput& input) const {
    return record_.lock() == input.record &&
           storage_._unsafe_get_target() == input.tensor.storage().unsafeGetStorageImpl();
  }

 private:
  WeakGraphRecord record_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

struct SharedActivation final : c10::BackendMeta {
  SharedActivation(Circumstances circumstances, const SharedInput& input,
                   QuantizedMatrix activation)
      : circumstances(circumstances), contents(input), activation(std::move(activation)) {}

  Circumstances circumstances;
  Contents contents;
  QuantizedMatrix activation;

  // A shallow copy, as x.data, is anybody's.
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

QuantizedMatrix quantize_shared_activation(const SharedInput& input, const at::Tensor& x,
                                           const OperandRequest& request) {
  const at::Tensor& owner = input.tensor;
  const auto quantize = [&] { return quantize_activation(x, request); };
  const MetaOf meta(owner);
  const auto present = meta.get();
  const auto* known = dynamic_cast<const SharedActivation*>(present.get());
  const bool is_ours = known != nullptr || !present;  // another backend's tensors have its meta
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const auto capture = capture_id(stream);
  const bool may_be_replayed = stream != nullptr && capture == 0;
  if (!is_ours || may_be_replayed) return quantize();
  const Format& format = *request.format;
  const Circumstances now{packed_scale_mode(format),
                          packed_columns_scale_mode(format, request.role),
                          format.power_of_two_scales, stream, capture};
  if (known != nullptr && known->circumstances == now && known->contents.is_of(input)) {
    const QuantizedMatrix& activation = known->activation;
    if (activation.has(request.orientations, Arrangement::kPacked)) return activation;
  }
  QuantizedMatrix activation = quantize();
  meta.set(c10::make_intrusive<SharedActivation>(now, input, activation));
  return activation;
}

}  // namespace qshard::cuda
