#include "kernels/linear/input_code_cache.h"

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

#include "kernels/tensors/kept_with_tensor.h"

namespace qshard::cuda {
namespace {

// The facts, beside the values, that decide a tensor's codes.
struct CacheKey {
  ScaleMode scale_mode = ScaleMode::kTensor;
  ScaleMode columns_scale_mode = ScaleMode::kTensor;
  bool power_of_two = false;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;  // 0: none. A graph must have captured the codes that it replays

  bool operator==(const CacheKey&) const = default;
};

// Identifies the values that were quantized. The references are weak: the codes keep neither the
// graph nor its memory, and no other object takes an address while this compares it.
class ValueIdentity {
 public:
  explicit ValueIdentity(const SharedInput& input)
      : record_(weak_record(input.record)), storage_(input.tensor.storage().getWeakStorageImpl()) {}

  bool is_of(const SharedInput& input) const {
    return record_.lock() == input.record &&
           storage_._unsafe_get_target() == input.tensor.storage().unsafeGetStorageImpl();
  }

 private:
  WeakGraphRecord record_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
};

struct InputCodeCache final : c10::intrusive_ptr_target {
  InputCodeCache(CacheKey key, const SharedInput& input, QuantizedMatrix activation)
      : key(key), contents(input), activation(std::move(activation)) {}

  CacheKey key;
  ValueIdentity contents;
  QuantizedMatrix activation;
};

unsigned long long capture_id(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

}  // namespace

QuantizedMatrix quantize_cached_activation(const SharedInput& input, const at::Tensor& x,
                                           const OperandRequest& request) {
  c10::TensorImpl& owner = *input.tensor.unsafeGetTensorImpl();
  const auto quantize = [&] { return quantize_activation(x, request); };
  const auto stream = c10::cuda::getCurrentCUDAStream().stream();
  const auto capture = capture_id(stream);
  const bool may_be_replayed = stream != nullptr && capture == 0;
  if (may_be_replayed) return quantize();
  const Format& format = *request.format;
  const CacheKey now{packed_scale_mode(format), packed_columns_scale_mode(format, request.role),
                     format.activations.power_of_two_scales, stream, capture};
  const KeptThing kept = kept_with(owner, Kept::kInputCodes);
  const auto* known = static_cast<const InputCodeCache*>(kept.get());
  if (known != nullptr && known->key == now && known->contents.is_of(input)) {
    const QuantizedMatrix& activation = known->activation;
    if (activation.has(request.orientations, OperandLayout::kPacked)) return activation;
  }
  QuantizedMatrix activation = quantize();
  keep_with(owner, Kept::kInputCodes, c10::make_intrusive<InputCodeCache>(now, input, activation));
  return activation;
}

}  // namespace qshard::cuda
