// A GEMM of scaled codes as plain tensors: what the linears of every format end in.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernels/gemm/gemm.h"

namespace qshard::cuda {

/// (rows, cols) = the first rows of gemm.a @ (the first rows of gemm.b)^T + bias, of `options`'
/// dtype, + added, if that is defined; undefined if cuBLASLt has no kernel. Takes the gemm's
/// operands, k, accumulation and alpha. Types and epilogues that cuBLASLt lacks are made up for:
/// fp32 output, then bias, conversion and addition. Where it multiplies scales of rows into no fp32
/// output, they multiply one of codes alone, each rounding once. added: (rows, cols), contiguous,
/// of that dtype; where the GEMM adds it, cuBLASLt 13.1 rounds the sum alone.
at::Tensor scaled_mm(ScaledGemm gemm, int64_t rows, int64_t cols,
                     const std::optional<at::Tensor>& bias, const at::TensorOptions& options,
                     const at::Tensor& added = {});

/// out += gemm.a @ gemm.b^T, in place; out is contiguous. cuBLASLt 13.1 rounds the product to out's
/// dtype before it adds: the bits of scaled_mm and an addition. Returns false, having
/// written nothing, if out does not have the operands' rows, padding included, or cuBLASLt has no
/// kernel; also where scales of rows are multiplied into the product, of which that is not known.
bool scaled_addmm(ScaledGemm gemm, const at::Tensor& out);

}  // namespace qshard::cuda
