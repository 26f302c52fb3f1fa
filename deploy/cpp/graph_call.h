// A call captured in a CUDA graph. Only this part needs CUDA's headers, and it needs none of TorchScript's,
// which take a compiler 10 seconds.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

#include "tensors.h"

class GraphCall {
 public:
  // Warms up on a side stream and captures there. Throws c10::Error where that fails.
  GraphCall(const std::function<Tensors(const Tensors&)>& call, c10::Device device, const Tensors& inputs);
  ~GraphCall();

  // Copies the inputs into the static ones, replays, and returns the static outputs, which the next call
  // overwrites; all of it in the current stream, without waiting.
  const Tensors& operator()(const Tensors& inputs);

 private:
  struct State;
  std::unique_ptr<State> state_;
};
