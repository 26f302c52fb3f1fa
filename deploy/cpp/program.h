// A TorchScript program that ampopt wrote, with the self-test inside it.
#pragma once

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/cuda.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "tensors.h"

// What a user has to hear about a program: what() is one paragraph.
struct ProgramError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Program {
  torch::jit::Module module;
  at::Device device;
  Tensors inputs, outputs;  // the self-test, on the CPU
  double tolerance;         // largest relative error of an output

  Tensors operator()(const Tensors& tensors) {
    return module.forward({c10::List<at::Tensor>(tensors)}).toTensorVector();
  }
};

// The line of an error of LibTorch's that says what is wrong; the rest is traces.
inline std::string reason(const std::exception& error) {
  const auto* own = dynamic_cast<const c10::Error*>(&error);
  const std::string text = own ? own->what_without_backtrace() : error.what();
  const auto interpreter = text.rfind("RuntimeError: ");  // of the TorchScript interpreter, after its trace
  const auto start = interpreter == std::string::npos ? 0 : interpreter;
  return text.substr(start, text.find('\n', start) - start);
}

inline Tensors on_cpu(const torch::jit::Module& module, const char* name) {
  Tensors tensors;
  for (const at::Tensor& tensor : module.attr(name).toTensorVector()) tensors.push_back(tensor.cpu());
  return tensors;
}

// Loads a program onto `wanted` ("cpu" or "cuda"), or, where that is empty, onto what it was made for, and
// sets the precision and the algorithm search that it was measured with. Throws ProgramError.
inline Program load(const std::string& path, const std::string& wanted) {
  torch::jit::Module module;
  try {
    module = torch::jit::load(path, at::kCPU);
  } catch (const std::exception& error) {
    throw ProgramError(path + " is absent, damaged, or no TorchScript file: " + reason(error));
  }
  for (const char* name :
       {"self_test_inputs", "self_test_outputs", "tolerance", "device", "tf32", "search_algorithms"})
    if (!module.hasattr(name))
      throw ProgramError(path + " has no '" + name + "': it was not written by ampopt");
  const std::string device = wanted.empty() ? module.attr("device").toStringRef() : wanted;
  if (device == "cuda") {
    if (!torch::cuda::is_available())
      throw ProgramError(path + " is to run on a GPU, and LibTorch finds none: " +
                         (wanted.empty() ? "it was written for one; write it on the CPU" : "leave --device out"));
    module = torch::jit::load(path, at::kCUDA);
  }
  at::globalContext().setAllowTF32CuBLAS(module.attr("tf32").toBool());
  at::globalContext().setAllowTF32CuDNN(module.attr("tf32").toBool());
  at::globalContext().setBenchmarkCuDNN(module.attr("search_algorithms").toBool());
  Tensors inputs = on_cpu(module, "self_test_inputs"), outputs = on_cpu(module, "self_test_outputs");
  const double tolerance = module.attr("tolerance").toDouble();
  return {module, at::Device(device), inputs, outputs, tolerance};
}

// ‖actual - reference‖ / ‖reference‖ in float64; for integers and booleans the share that differs. Infinite
// where shapes differ, or where NaN or an infinity stands in one but not, alike, in the other. The same as
// relative_error in ampopt.ir.numerics.
inline double relative_error(const at::Tensor& actual, const at::Tensor& reference) {
  constexpr double infinite = std::numeric_limits<double>::infinity();
  if (actual.sizes() != reference.sizes()) return infinite;
  if (!reference.is_floating_point() && !reference.is_complex())
    return reference.numel() ? (actual != reference).to(at::kDouble).mean().item<double>() : 0.0;
  const auto wide = reference.is_complex() ? at::kComplexDouble : at::kDouble;
  const at::Tensor a = actual.to(at::kCPU, wide), r = reference.to(at::kCPU, wide);
  const at::Tensor finite = r.isfinite(), odd = finite.logical_not();
  const at::Tensor same = (a == r).logical_or(a.isnan().logical_and(r.isnan()));
  if (!finite.equal(a.isfinite()) || !same.masked_select(odd).all().item<bool>()) return infinite;
  const double difference = (a - r).masked_select(finite).norm().abs().item<double>();
  const double size = r.masked_select(finite).norm().abs().item<double>();
  return size > 0 ? difference / size : difference;
}

// The largest error of an output against the self-test's.
inline double largest_error(const Tensors& outputs, const Tensors& reference) {
  if (outputs.size() != reference.size()) return std::numeric_limits<double>::infinity();
  double worst = 0;
  for (std::size_t i = 0; i < outputs.size(); ++i)
    worst = std::max(worst, relative_error(outputs[i].cpu(), reference[i]));
  return worst;
}
