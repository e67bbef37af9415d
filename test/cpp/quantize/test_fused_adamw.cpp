// Steps that quantize what they write, on every device there is, against torch's step followed by
// the library's own passes.
#include "kernels/adamw/adamw.h"
#include "test/cpp/cases/kernel_cases.h"

namespace qshard::testing {
namespace {

/// Everything one step reads and writes, on one device.
struct Parameter {
  Layout layout = {};
  BoundaryBlocks boundary = {};
  at::Tensor values = {}, grad = {}, exp_avg = {}, exp_avg_sq = {}, step = {};
  Quantized out = {};
  at::Tensor speculative_scale_inv = {};

  int64_t live() const { return layout.live_rows(); }
};

/// The same numbers in memory of their own, whose first element is `shift` elements past an aligned
/// address.
at::Tensor shifted_copy(const at::Tensor& x, int64_t shift) {
  at::Tensor memory = at::empty({x.numel() + shift}, x.options());
  return memory.narrow(0, shift, x.numel()).view(x.sizes()).copy_(x);
}

/// A parameter after some steps; its gradient's memory is `shift` elements off alignment.
Parameter make_parameter(const Layout& layout, const BoundaryBlocks& boundary, at::ScalarType dtype,
                         at::Device device, int64_t shift = 0) {
  Parameter p{layout, boundary};
  const int64_t live = layout.live_rows();
  p.values = random_values(layout.rows, layout.cols, dtype).to(device);
  p.grad = shifted_copy(random_values(live, layout.cols, dtype).to(device), shift);
  p.exp_avg = (at::randn({live, layout.cols}) * 0.1).to(dtype).to(device);
  p.exp_avg_sq = (at::rand({live, layout.cols}) * 0.01).to(dtype).to(device);
  p.step = at::full({}, 3.f).to(device);
  p.out = outputs_for(p.values, layout, boundary);
  // The scale of codes is that of the values before.
  if (layout.grid_numel() == 1) p.out.grid.copy_(quantized(p.values, layout).grid);
  return p;
}

Parameter copy_of(const Parameter& p) {
  return {p.layout,          p.boundary,
          p.values.clone(),  p.grad.clone(),
          p.exp_avg.clone(), p.exp_avg_sq.clone(),
          p.step.clone(),    {p.out.amax.clone(), p.out.grid.clone(), p.out.image.clone()}};
}

struct Options {
  double weight_decay = 0.1;
  bool maximize = false;
  std::optional<float> grad_scale = {};
  std::optional<float> found_inf = {};
  std::optional<float> tensor_lr = {};
};

std::optional<at::Tensor> scalar_on(std::optional<float> value, at::Device device) {
  return value ? std::optional(at::full({}, *value).to(device)) : std::nullopt;
}

const float* pointer_to(const std::optional<at::Tensor>& scalar) {
  return scalar ? scalar->const_data_ptr<float>() : nullptr;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& x) {
    return x.cpu().contiguous().view(-1).view(at::kByte);
  };
  return a.sizes() == b.sizes() && at::equal(bytes(a), bytes(b));
}

constexpr double kLr = 1e-2, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8;

/// torch's own step on the live rows.
void step_by_torch(std::vector<Parameter>& all, const Options& options, at::Device device) {
  std::vector<at::Tensor> values, grads, exp_avgs, exp_avg_sqs, steps;
  for (Parameter& p : all) {
    values.push_back(p.values.narrow(0, 0, p.live()));
    grads.push_back(p.grad);
    exp_avgs.push_back(p.exp_avg);
    exp_avg_sqs.push_back(p.exp_avg_sq);
    steps.push_back(p.step);
  }
  const auto grad_scale = scalar_on(options.grad_scale, device);
  const auto found_inf = scalar_on(options.found_inf, device);
  if (options.tensor_lr) {
    at::_fused_adamw_(values, grads, exp_avgs, exp_avg_sqs, {}, steps,
                      *scalar_on(options.tensor_lr, device), kBeta1, kBeta2, options.weight_decay,
                      kEps, false, options.maximize, grad_scale, found_inf);
  } else {
    at::_fused_adamw_(values, grads, exp_avgs, exp_avg_sqs, {}, steps, kLr, kBeta1, kBeta2,
                      options.weight_decay, kEps, false, options.maximize, grad_scale, found_inf);
  }
}

void step_by_library(std::vector<Parameter>& all, const Options& options, at::Device device) {
  std::vector<AdamWTask> tasks;
  for (Parameter& p : all) {
    p.out.amax.zero_();
    AdamWTask& task = tasks.emplace_back();
    static_cast<QuantizeTask&>(task) = task_of(p.values, p.layout, p.boundary, p.out);
    task.quantizes = step_quantizes(p.layout);
    p.speculative_scale_inv = at::zeros_like(p.out.grid);
    task.speculative_scale_inv = p.speculative_scale_inv.mutable_data_ptr<float>();
    task.parameter = p.values.mutable_data_ptr();
    task.grad = p.grad.mutable_data_ptr();
    task.exp_avg = p.exp_avg.mutable_data_ptr();
    task.exp_avg_sq = p.exp_avg_sq.mutable_data_ptr();
    task.step = p.step.const_data_ptr<float>();
  }
  const auto grad_scale = scalar_on(options.grad_scale, device);
  const auto found_inf = scalar_on(options.found_inf, device);
  const auto lr = scalar_on(options.tensor_lr, device);
  AdamWOptions adamw;
  adamw.lr = options.tensor_lr.value_or(kLr);
  adamw.device_lr = device.is_cuda() ? pointer_to(lr) : nullptr;
  adamw.beta1 = kBeta1;
  adamw.beta2 = kBeta2;
  adamw.weight_decay = options.weight_decay;
  adamw.eps = kEps;
  adamw.maximize = options.maximize;
  adamw.grad_scale = pointer_to(grad_scale);
  adamw.found_inf = pointer_to(found_inf);
  fused_adamw(tasks, adamw, stream_of(device));
}

/// Grid entries of a shard's own rows.
at::Tensor own_entries(const Parameter& p, const at::Tensor& grid) {
  const int64_t first = p.layout.grid_row(p.layout.row_offset);
  const int64_t last = p.layout.grid_row(p.layout.row_offset + p.live() - 1);
  return grid.narrow(0, first, last - first + 1);
}

/// Codes of the live rows by the scales before, and after the flush by those of the amaxes.
void check_speculative(Parameter& p, at::Device device) {
  const auto live = [&](const at::Tensor& image) { return image.narrow(0, 0, p.live()); };
  const Quantized expected = quantized(p.values, p.layout, p.out.amax, p.boundary);
  const bool are_final = same_bits(p.speculative_scale_inv, expected.grid);
  if (device.is_cpu()) {
    ASSERT_TRUE(at::all(p.out.image == 255).item<bool>());
    ASSERT_TRUE(at::all(p.speculative_scale_inv == 0).item<bool>());
  } else if (are_final) {
    ASSERT_TRUE(same_bits(live(p.out.image), live(expected.image)));
    live(p.out.image).fill_(17);
  }
  QuantizeTask task = task_of(p.values, p.layout, p.boundary, p.out);
  task.speculative_scale_inv = p.speculative_scale_inv.mutable_data_ptr<float>();
  quantize({&task, 1}, stream_of(device));
  if (device.is_cuda() && are_final) {
    ASSERT_TRUE(at::all(live(p.out.image) == 17).item<bool>());  // not made again
    live(p.out.image).copy_(live(expected.image));
  }
  ASSERT_TRUE(same_bits(p.out.image, expected.image));
  ASSERT_TRUE(same_bits(p.out.grid, expected.grid));
}

/// Steps both ways and compares every byte.
void check(std::vector<Parameter>& ours, const Options& options, at::Device device) {
  std::vector<Parameter> theirs;
  for (const Parameter& p : ours) theirs.push_back(copy_of(p));
  step_by_torch(theirs, options, device);
  step_by_library(ours, options, device);
  for (size_t i = 0; i < ours.size(); ++i) {
    Parameter& p = ours[i];
    Parameter& want = theirs[i];
    SCOPED_TRACE(::testing::Message()
                 << device << " " << i << ": " << p.layout.rows << "x" << p.layout.cols << " of "
                 << p.layout.logical_rows << " at " << p.layout.row_offset);
    ASSERT_TRUE(same_bits(p.values, want.values));
    ASSERT_TRUE(same_bits(p.grad, want.grad));
    ASSERT_TRUE(same_bits(p.exp_avg, want.exp_avg));
    ASSERT_TRUE(same_bits(p.exp_avg_sq, want.exp_avg_sq));
    ASSERT_TRUE(same_bits(p.out.amax, amax_of(want.values, p.layout, p.boundary)));
    if (step_quantizes(p.layout) == StepQuantizes::kSpeculative) {
      check_speculative(p, device);
      continue;
    }
    if (step_quantizes(p.layout) != StepQuantizes::kCodes) {
      ASSERT_TRUE(at::all(p.out.image == 255).item<bool>());  // untouched
      continue;
    }
    const Quantized expected = quantized(want.values, p.layout, p.out.amax, p.boundary);
    ASSERT_TRUE(same_bits(p.out.image, expected.image));
    if (p.layout.grid_numel() > 0) {
      ASSERT_TRUE(same_bits(own_entries(p, p.out.grid), own_entries(p, expected.grid)));
    }
  }
}

class FusedAdamW : public ::testing::TestWithParam<std::tuple<const char*, at::ScalarType>> {
 protected:
  const Format& format() const { return find_format(std::get<0>(GetParam())); }
  at::ScalarType dtype() const { return std::get<1>(GetParam()); }
  Layout layout_of(const Shape& s) const {
    return {&format(), s.rows, s.cols, s.logical_rows, s.matrix_rows, s.row_offset};
  }
  static bool is_served(const Layout& layout) {
    return layout.live_rows() > 0 && step_quantizes(layout) != StepQuantizes::kSkip;
  }
};

TEST_P(FusedAdamW, EqualsTorchAndTheLibrarysPasses) {
  at::manual_seed(0);
  for (const at::Device device : devices()) {
    for (const int64_t shift : {0, 1}) {
      for (const Shape& shape : kShapes) {
        const Layout layout = layout_of(shape);
        if (!is_served(layout)) continue;
        std::vector<Parameter> all{make_parameter(layout, {}, dtype(), device, shift)};
        check(all, {}, device);
      }
    }
  }
}

TEST_P(FusedAdamW, EveryOption) {
  at::manual_seed(1);
  const Options options[] = {{.weight_decay = 0.},  {.maximize = true},
                             {.grad_scale = 3.f},   {.grad_scale = 3.f, .found_inf = 0.f},
                             {.found_inf = 1.f},    {.grad_scale = 3.f, .found_inf = 1.f},
                             {.tensor_lr = 0.0123f}};
  for (const at::Device device : devices()) {
    for (const Options& option : options) {
      for (const int64_t cols : {64, 37}) {
        const Layout layout = layout_of({150, cols, 150, 150, 0});
        std::vector<Parameter> all{make_parameter(layout, {}, dtype(), device)};
        check(all, option, device);
      }
    }
  }
}

// Shards whose first and last blocks belong to two ranks, and those that are cut between blocks.
TEST_P(FusedAdamW, Shards) {
  at::manual_seed(2);
  for (const at::Device device : devices()) {
    for (const int64_t rows : {700, 768}) {
      for (const int64_t ranks : {2, 3, 7}) {
        const int64_t chunk = ceil_div(rows, ranks);
        std::vector<Parameter> all;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const Layout layout = layout_of({chunk, 150, rows, rows, rank * chunk});
          if (!is_served(layout)) continue;
          all.push_back(
              make_parameter(layout, find_boundary_blocks(layout, ranks), dtype(), device));
        }
        // The one matrix of a stack, which a rank holds whole.
        const Layout whole = layout_of({rows, 150, rows, rows, 0});
        if (is_served(whole)) {
          all.push_back(make_parameter(whole, find_boundary_blocks(whole, ranks), dtype(), device));
        }
        if (!all.empty()) check(all, {}, device);
      }
    }
  }
}

// More parameters than one CUDA launch holds.
TEST_P(FusedAdamW, ManyTensorsAtOnce) {
  at::manual_seed(3);
  for (const at::Device device : devices()) {
    std::vector<Parameter> all;
    for (int64_t i = 0; i < 150; ++i) {
      const int64_t rows = 1 + i * 5 % 140;
      const Layout layout = layout_of({rows, 1 + i * 7 % 300, rows, rows, 0});
      all.push_back(make_parameter(layout, {}, dtype(), device));
    }
    check(all, {}, device);
  }
}

TEST_P(FusedAdamW, SpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const at::Device device : devices()) {
    const float large = dtype() == at::kHalf ? 65504.f : 3e38f;
    for (const float special : {inf, -inf, nan, large, 1e-45f}) {
      SCOPED_TRACE(special);
      const Layout layout = layout_of({140, 144, 140, 140, 0});
      std::vector<Parameter> all{make_parameter(layout, {}, dtype(), device)};
      all[0].values[3][5] = special;
      all[0].grad[139][143] = special;
      all[0].exp_avg_sq[70][2] = -1.f;  // its root is NaN
      check(all, {}, device);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FusedAdamW,
    ::testing::Combine(::testing::Values("float8_tensorwise", "float8_rowwise",
                                         "float8_rowwise_fp32_scale", "float8_blockwise",
                                         "float8_blockwise_fp32_scale", "mxfp8", "nvfp4",
                                         "nvfp4_1x16"),
                       ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
    kernel_name);

TEST(StepQuantizes, WhatNoOtherRankHasAPartIn) {
  const auto of = [](const char* format, int64_t rows, int64_t logical_rows, int64_t row_offset) {
    return step_quantizes({&find_format(format), rows, 64, logical_rows, logical_rows, row_offset});
  };
  EXPECT_EQ(of("float8_blockwise", 300, 300, 0), StepQuantizes::kCodes);
  EXPECT_EQ(of("float8_blockwise", 128, 300, 128), StepQuantizes::kCodes);
  EXPECT_EQ(of("float8_blockwise", 100, 300, 100), StepQuantizes::kAmax);
  EXPECT_EQ(of("float8_blockwise", 0, 300, 300), StepQuantizes::kAmax);
  EXPECT_EQ(of("float8_blockwise[stochastic]", 300, 300, 0), StepQuantizes::kAmax);
  EXPECT_EQ(of("mxfp8", 32, 300, 32), StepQuantizes::kCodes);
  EXPECT_EQ(of("mxfp8", 30, 300, 30), StepQuantizes::kSkip);
  EXPECT_EQ(of("mxfp8_1x32", 64, 64, 0), StepQuantizes::kSkip);
  EXPECT_EQ(of("float8_tensorwise", 300, 300, 0), StepQuantizes::kSpeculative);
  EXPECT_EQ(of("float8_tensorwise[stochastic]", 300, 300, 0), StepQuantizes::kAmax);
  EXPECT_EQ(of("float8_tensorwise_fp32_scale", 300, 300, 0), StepQuantizes::kAmax);
  EXPECT_EQ(of("float8_rowwise", 300, 300, 0), StepQuantizes::kSpeculative);
  EXPECT_EQ(of("float8_rowwise", 0, 300, 300), StepQuantizes::kSpeculative);
  EXPECT_EQ(of("float8_rowwise[stochastic]", 300, 300, 0), StepQuantizes::kAmax);
  EXPECT_EQ(of("float8_rowwise_fp32_scale", 100, 300, 100), StepQuantizes::kAmax);
  for (const char* format : {"float8_delayed", "nvfp4", "nvfp4_1x16"}) {
    EXPECT_EQ(of(format, 300, 300, 0), StepQuantizes::kAmax) << format;
  }
}

}  // namespace
}  // namespace qshard::testing
