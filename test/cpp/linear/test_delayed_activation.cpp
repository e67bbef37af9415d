// Inputs and gradients that delayed scaling quantizes in one pass: codes by the amax of earlier
// steps, or by their own where there is none, and what the history notes.
#include "test/cpp/cases/gemm_cases.h"
#ifdef QSHARD_WITH_CUDA
#include "kernels/linear/linear_fp8.h"
#endif

namespace qshard::testing {
namespace {

#ifdef QSHARD_WITH_CUDA
struct Case {
  const char* format;
  OperandRole role;
  at::ScalarType dtype;
  int64_t rows, cols;
  float earlier;  // amax in use; 0: none
  float special;  // one of the values; 0: none
};

void expect_one_pass_as_two(const Case& c, at::Device device) {
  SCOPED_TRACE(::testing::Message()
               << c.format << " " << c10::toString(c.dtype) << " " << c.rows << "x" << c.cols
               << " by " << c.earlier << " with " << c.special);
  const Format& format = find_format(c.format);
  at::Tensor x = random_values(c.rows, c.cols, c.dtype);
  if (c.special != 0.f) x.view(-1)[x.numel() / 2].fill_(c.special);
  const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
  const at::Tensor history = at::full({format.amax_history.length}, 1e-3, floats);
  const at::Tensor scaling = at::full({4}, c.earlier, floats);
  const OperandRequest request{
      .format = &format,
      .role = c.role,
      .orientations = {true, true},
      .delayed = {history.mutable_data_ptr<float>(), scaling.const_data_ptr<float>(),
                  format.amax_history.margin}};
  const QuantizedMatrix got = cuda::quantize_activation(x.to(device), request);

  const float own = x.to(at::kFloat).abs().max().item<float>();
  const bool is_finite = std::isfinite(own);
  EXPECT_EQ(history[0].item<float>(), is_finite ? std::max(own, 1e-3f) : 1e-3f);
  const float margin = std::exp2(static_cast<float>(format.amax_history.margin));
  const float amax = c.earlier > 0.f ? c.earlier : is_finite ? own * margin : 0.f;
  Format scaled = format;
  const bool is_e5m2 = got.code_dtype == DType::kFloat8E5M2;
  const auto code = is_e5m2 ? at::kFloat8_e5m2 : at::kFloat8_e4m3fn;
  scaled.code_max = is_e5m2 ? kE5M2Max : kE4M3Max;
  const float scale = reference_scale(amax, scaled);
  const at::Tensor expected =
      (x.to(at::kFloat) * scale).clamp(-scaled.code_max, scaled.code_max).to(code).to(at::kFloat) *
      (1.f / scale);
  QuantizedMatrix columns = got;
  columns.rowwise = {};
  for (const QuantizedMatrix& matrix : {got, columns}) {
    const at::Tensor values = qshard::dequantized(matrix, at::kFloat);
    EXPECT_TRUE(same_values(values, expected));
  }
}

TEST(DelayedActivation, OnePassMakesTheCodesOfTwo) {
  const at::Device device = devices().back();
  if (!device.is_cuda()) GTEST_SKIP() << "no CUDA device";
  at::manual_seed(6);
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const char* format : {"float8_delayed", "float8_delayed[margin=2,history=4,e4m3]"}) {
    for (const OperandRole role : {OperandRole::kInput, OperandRole::kGradient}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
        for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1},
                                         {129, 100},
                                         {300, 520},
                                         {2049, 4112}}) {  // more tiles than finish it
          for (const float earlier : {0.f, 0.75f}) {
            for (const float special : {0.f, inf, nan}) {
              expect_one_pass_as_two({format, role, dtype, rows, cols, earlier, special}, device);
            }
          }
        }
      }
    }
  }
}
#endif

}  // namespace
}  // namespace qshard::testing
