// A program captured in a CUDA graph. Only this part needs CUDA's headers.
#pragma once

#include <memory>

#include "program.h"

class GraphCall {
 public:
  // Warms up on a side stream and captures there. Throws c10::Error where that fails.
  GraphCall(Program& program, const Tensors& inputs);
  ~GraphCall();

  // Copies the inputs into the static ones, replays, and returns the static outputs, which the next call
  // overwrites; all of it in the current stream, without waiting.
  const Tensors& operator()(const Tensors& inputs);

 private:
  struct State;
  std::unique_ptr<State> state_;
};
