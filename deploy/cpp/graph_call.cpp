#include "graph_call.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/cuda.h>

namespace {
// TorchScript's executor profiles, compiles and settles in its first runs, and libraries make their handles
// and workspaces, which must not happen in a capture.
constexpr int warm_ups = 5;
}  // namespace

struct GraphCall::State {
  at::cuda::CUDAGraph graph;
  Tensors inputs, outputs;
};

GraphCall::GraphCall(const std::function<Tensors(const Tensors&)>& call, c10::Device device, const Tensors& inputs)
    : state_(std::make_unique<State>()) {
  for (const at::Tensor& input : inputs) state_->inputs.push_back(input.to(device).clone());
  torch::cuda::synchronize();  // the side stream reads what the current one has written
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(side);
  for (int i = 0; i < warm_ups; ++i) call(state_->inputs);
  torch::cuda::synchronize();
  state_->graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  state_->outputs = call(state_->inputs);
  state_->graph.capture_end();
}

GraphCall::~GraphCall() = default;

const Tensors& GraphCall::operator()(const Tensors& inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    state_->inputs[i].copy_(inputs[i], /*non_blocking=*/true);
  state_->graph.replay();
  return state_->outputs;
}
