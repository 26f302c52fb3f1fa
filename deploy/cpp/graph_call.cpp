#include "graph_call.h"

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace {
// TorchScript's executor profiles, compiles and settles in its first runs, and libraries make their handles
// and workspaces, which must not happen in a capture.
constexpr int warm_ups = 5;
}  // namespace

struct GraphCall::State {
  at::cuda::CUDAGraph graph;
  Tensors inputs, outputs;
};

GraphCall::GraphCall(Program& program, const Tensors& inputs) : state_(std::make_unique<State>()) {
  for (const torch::Tensor& input : inputs) state_->inputs.push_back(input.to(program.device).clone());
  torch::cuda::synchronize();  // the side stream reads what the current one has written
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStreamGuard guard(side);
  for (int i = 0; i < warm_ups; ++i) program(state_->inputs);
  torch::cuda::synchronize();
  state_->graph.capture_begin({0, 0}, cudaStreamCaptureModeThreadLocal);
  state_->outputs = program(state_->inputs);
  state_->graph.capture_end();
}

GraphCall::~GraphCall() = default;

const Tensors& GraphCall::operator()(const Tensors& inputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i)
    state_->inputs[i].copy_(inputs[i], /*non_blocking=*/true);
  state_->graph.replay();
  return state_->outputs;
}
