#include "kernels/linear/shared_activation.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

#include "kernels/tensors/kept_with_tensor.h"

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

struct SharedActivation final : c10::intrusive_ptr_target {
  SharedActivation(Circumstances circumstances, const SharedInput& input,
                   QuantizedMatrix activation)
      : circumstances(circumstances), contents(input), activation(std::move(activation)) {}

  Circumstances circumstances;
  Contents contents;
  QuantizedMatrix activation;
};

unsigned long long capture_id(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

}  // namespace

QuantizedMatrix quantize_shared_activation(const SharedInput& input, const at::Tensor& x,
                                           const OperandRequest& request) {
  c10::TensorImpl& owner = *input.tensor.unsafeGetTensorImpl();
  const auto quantize = [&] { return quantize_activation(x, request); };
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const auto capture = capture_id(stream);
  const bool may_be_replayed = stream != nullptr && capture == 0;
  if (may_be_replayed) return quantize();
  const Format& format = *request.format;
  const Circumstances now{packed_scale_mode(format),
                          packed_columns_scale_mode(format, request.role),
                          format.activations.power_of_two_scales, stream, capture};
  const KeptThing kept = kept_with(owner, Kept::kInputCodes);
  const auto* known = static_cast<const SharedActivation*>(kept.get());
  if (known != nullptr && known->circumstances == now && known->contents.is_of(input)) {
    const QuantizedMatrix& activation = known->activation;
    if (activation.has(request.orientations, Arrangement::kPacked)) return activation;
  }
  QuantizedMatrix activation = quantize();
  keep_with(owner, Kept::kInputCodes,
            c10::make_intrusive<SharedActivation>(now, input, activation));
  return activation;
}

}  // namespace qshard::cuda
