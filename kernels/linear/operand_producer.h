// Where the operands of a linear's GEMMs come from: a producer makes the codes of an activation or
// gradient once a linear knows which of them its GEMMs read.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <utility>

#include "kernels/linear/linear_amax.h"
#include "kernels/linear/quantized_matrix.h"
#include "kernels/tensors/graph_record.h"
#include "kernels/tensors/last_input_amax.h"

namespace qshard {

/// The codes of a matrix that a GEMM reads.
struct OperandRequest {
  const Format* format = nullptr;  // of the weight
  OperandLayout operand_layout = OperandLayout::kPacked;
  OperandRole role = OperandRole::kInput;  // packed codes depend on it, row images do not
  Orientations orientations = {};
  const int32_t* rounding = nullptr;  // of a row image, as in QuantizeTask; null: to nearest
  DelayedAmax delayed = {};           // the linear's amaxes of earlier steps, if it scales by them
  LastInputAmax* last_input = nullptr;  // of the linear, to guess the scale by; or null
  /// float32 (K,), or undefined: packed rowwise codes are of the values whose columns have been
  /// multiplied by these, in fp32. Those are the scales of a weight's rows, where dgrad meets its
  /// codes without them (GemmPairing::folds_row_scales).
  at::Tensor column_factors = {};
};

/// The packed matrix (m, k) that is asked for, in buffers that allocate(bytes) gives.
template <typename Allocate>
QuantizedMatrix packed_matrix(const OperandRequest& request, int64_t m, int64_t k,
                              const Allocate& allocate) {
  const auto [rows, columns] = request.orientations;
  return packed_matrix(*request.format, request.role, m, k,
                       rows ? allocate(packed_rowwise_bytes(m, k)) : at::Tensor(),
                       columns ? allocate(packed_columnwise_bytes(m, k)) : at::Tensor());
}

/// Whether rows that arrived have one scale each.
inline bool has_row_scale(const QuantizedMatrix& arrived) {
  return arrived.row_image().layout.format->scale.is_of_row();
}

/// The packed matrix that is asked for of rows that arrived, in buffers that allocate(bytes) gives.
/// Rows with one scale each stay where they are, and their scales are to be written beside them.
template <typename Allocate>
QuantizedMatrix arrived_matrix(const QuantizedMatrix& rows, const OperandRequest& request,
                               const Allocate& allocate) {
  OperandRequest made = request;
  if (has_row_scale(rows)) made.orientations.rowwise = false;
  QuantizedMatrix out = packed_matrix(made, rows.rows, rows.cols, allocate);
  out.code_dtype = rows.code_dtype;
  if (!has_row_scale(rows) || !request.orientations.rowwise) return out;
  const RowImage& image = rows.row_image();
  const auto scales = allocate(rows.rows * int64_t{sizeof(float)}).view(at::kFloat);
  out.rowwise = PackedCodes{image.image.operand().view({-1}), rows.rows, image.layout.row_bytes(),
                            ScaleMode::kRow, scales};
  return out;
}

/// An activation or gradient (M, K): its values, its codes, or what makes them.
class OperandProducer {
 public:
  virtual ~OperandProducer() = default;

  virtual at::IntArrayRef sizes() const = 0;  // (M, K)
  /// The device, and the dtype of the values.
  const at::TensorOptions& options() const { return options_; }
  at::Device device() const { return options_.device(); }
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(options_.dtype()); }

  /// Codes in the orientations asked for, or in more.
  /// @throws c10::Error for packed codes on a device without FP8 GEMMs, unless they are emulated.
  virtual QuantizedMatrix codes(const OperandRequest& request) const = 0;
  /// The values that a GEMM reads which reads no codes: in the dtype they have, or dequantized to
  /// `dtype`.
  virtual at::Tensor values(at::ScalarType dtype) const = 0;
  /// Whether values() are what codes are made of, not what codes that arrived stand for.
  virtual bool has_values() const { return true; }
  /// Called where no GEMM asks for codes: delayed scaling collects the amax of the values, so that
  /// training can go on where something quantizes them.
  virtual void collect_amax(const DelayedAmax& delayed) const = 0;

 protected:
  explicit OperandProducer(const at::TensorOptions& options) : options_(options) {}

 private:
  at::TensorOptions options_;
};

/// A plain tensor.
class PlainOperand : public OperandProducer {
 public:
  /// `amax`, float32 (1,): of the values, if it is known.
  explicit PlainOperand(at::Tensor values, at::Tensor amax = {})
      : OperandProducer(values.options()), values_(std::move(values)), amax_(std::move(amax)) {}

  at::IntArrayRef sizes() const override { return values_.sizes(); }
  QuantizedMatrix codes(const OperandRequest& request) const override;
  at::Tensor values(at::ScalarType) const override { return values_; }
  void collect_amax(const DelayedAmax& delayed) const override;

  /// The amax, if it was given or packed codes have been made by one.
  const at::Tensor& amax() const { return amax_; }

 protected:
  at::Tensor values_;

 private:
  mutable at::Tensor amax_;
};

/// An input of several linears whose codes they may share (kernels/linear/input_code_cache.h).
struct SharedInput {
  at::Tensor tensor = {};   // of which the input is the matrix; undefined: nothing is shared
  GraphRecord record = {};  // what made its values: another one when they are made again
};

/// A plain tensor whose packed codes are remembered with it.
class SharedOperand final : public PlainOperand {
 public:
  SharedOperand(at::Tensor values, SharedInput input)
      : PlainOperand(std::move(values)), input_(std::move(input)) {}

  /// Delayed scaling scales the input of each linear by that linear's own history: not shared.
  QuantizedMatrix codes(const OperandRequest& request) const override;

 private:
  SharedInput input_;
};

/// One whose packed codes are made once, for several GEMMs of one linear: at the first of them in
/// all orientations `asked` for. Rowwise codes of columns that were multiplied are of one weight.
class CachedOperand final : public OperandProducer {
 public:
  CachedOperand(const OperandProducer& source, Orientations asked)
      : OperandProducer(source.options()), source_(source), asked_(asked) {}

  at::IntArrayRef sizes() const override { return source_.sizes(); }
  QuantizedMatrix codes(const OperandRequest& request) const override;
  /// Rowwise codes are not read any more.
  void release_rows() { made_.rowwise = {}; }
  at::Tensor values(at::ScalarType dtype) const override { return source_.values(dtype); }
  bool has_values() const override { return source_.has_values(); }
  void collect_amax(const DelayedAmax& delayed) const override;

 private:
  const OperandProducer& source_;
  Orientations asked_;
  mutable QuantizedMatrix made_ = {};
  mutable bool has_amax_ = false;
};

/// What was quantized before: by an operator of its own, by an earlier pass, by another rank.
/// Codes that a GEMM reads and that are not among them are made of the values. The
/// operator that quantized with delayed scaling collected the amax.
class QuantizedOperand final : public OperandProducer {
 public:
  /// `values` are what the codes were made of.
  QuantizedOperand(QuantizedMatrix codes, at::Tensor values)
      : OperandProducer(values.options()),
        codes_(std::move(codes)),
        values_(std::move(values)),
        sizes_{codes_.rows, codes_.cols} {}
  /// An operand that has nothing but codes, which stand for values of the options' dtype.
  QuantizedOperand(QuantizedMatrix codes, const at::TensorOptions& options)
      : OperandProducer(options), codes_(std::move(codes)), sizes_{codes_.rows, codes_.cols} {}

  const QuantizedMatrix& present() const { return codes_; }

  at::IntArrayRef sizes() const override {
    return values_.defined() ? values_.sizes() : at::IntArrayRef(sizes_);
  }
  QuantizedMatrix codes(const OperandRequest& request) const override;
  at::Tensor values(at::ScalarType dtype) const override;
  bool has_values() const override { return values_.defined(); }
  void collect_amax(const DelayedAmax& delayed) const override;

 private:
  QuantizedMatrix codes_;
  at::Tensor values_;
  std::array<int64_t, 2> sizes_;
};

/// Rows that arrived from another rank: codes, and the scales of each row in it. What multiplies a
/// weight whose activations have this row format reads them as they are, and along columns the
/// codes that the scales of columns leave of them. Others are given the values.
class ArrivedOperand final : public OperandProducer {
 public:
  /// `rows` of the image from its first row on, which stand for values of the options' dtype.
  ArrivedOperand(const RowImage& image, int64_t rows, const at::TensorOptions& options);

  /// Rows [first, first + count).
  ArrivedOperand narrowed(int64_t first, int64_t count) const;
  /// Whether GEMMs with a weight of `format` read these codes.
  bool meets(const Format& format) const { return format.activations.row_format == rows_.format; }
  const RowImage& image() const { return rows_.row_image(); }
  /// Whether each row has one scale: then they are multiplied where they lie.
  bool has_row_scales() const { return has_row_scale(rows_); }

  at::IntArrayRef sizes() const override { return sizes_; }
  QuantizedMatrix codes(const OperandRequest& request) const override;
  at::Tensor values(at::ScalarType dtype) const override { return dequantized(rows_, dtype); }
  bool has_values() const override { return false; }
  void collect_amax(const DelayedAmax& delayed) const override;

 private:
  QuantizedMatrix packed(const OperandRequest& request) const;

  QuantizedMatrix rows_;
  std::array<int64_t, 2> sizes_;
};

/// An input or gradient (M, K) as an operator was given it: values, or rows that arrived.
class GivenOperand {
 public:
  GivenOperand() = default;  // none
  GivenOperand(const at::Tensor& values) {
    if (values.defined()) operand_.emplace<PlainOperand>(values);
  }
  GivenOperand(ArrivedOperand rows) : operand_(std::move(rows)) {}

  bool defined() const { return operand_.index() != 0; }
  /// Null if it is values, or none.
  const ArrivedOperand* arrived() const { return std::get_if<ArrivedOperand>(&operand_); }

  // These are for one that is defined.
  const OperandProducer& operator*() const {
    if (arrived() != nullptr) return *arrived();
    return std::get<PlainOperand>(operand_);
  }
  const OperandProducer* operator->() const { return &**this; }
  int64_t rows() const { return (*this)->sizes()[0]; }
  at::Tensor values() const { return (*this)->values((*this)->dtype()); }
  /// Rows [first, first + count).
  GivenOperand narrowed(int64_t first, int64_t count) const {
    if (arrived() != nullptr) return arrived()->narrowed(first, count);
    return values().narrow(0, first, count);
  }

 private:
  std::variant<std::monostate, PlainOperand, ArrivedOperand> operand_;
};

}  // namespace qshard
