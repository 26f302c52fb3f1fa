// Runs a TorchScript program that ampopt wrote: self-test, then latency as a robot sees it, from inputs in
// the host's memory to outputs in the host's memory. Exit codes: 0; 1 an error; 2 a failed self-test.
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <cmath>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>

#include "latency.h"
#include "options.h"
#include "program.h"
#ifdef WITH_CUDA_GRAPH
#include "graph_call.h"
#endif

namespace {

constexpr int warm_ups = 5;  // TorchScript's executor profiles and compiles in its first runs

// One frame: the inputs to the device, the program, the outputs back. `outputs` holds them afterwards.
struct Frame {
  std::function<void()> run;
  std::shared_ptr<Tensors> outputs = std::make_shared<Tensors>();
  bool cuda_graph = false;
};

Frame on_cpu(Program& program) {
  Frame frame;
  frame.run = [&program, outputs = frame.outputs] { *outputs = program(program.inputs); };
  return frame;
}

// The calls' own tensors, or those of a CUDA graph; pinned buffers on the host's side, as a camera driver has.
Frame on_gpu(Program& program) {
  std::function<Tensors(const Tensors&)> call = [&program](const Tensors& inputs) {
    Tensors moved;
    for (const at::Tensor& input : inputs)
      moved.push_back(input.to(program.device, /*non_blocking=*/true));
    return program(moved);
  };
  Frame frame;
#ifdef WITH_CUDA_GRAPH
  const auto graph = std::make_shared<GraphCall>(std::ref(program), program.device, program.inputs);
  call = [graph](const Tensors& inputs) { return (*graph)(inputs); };
  frame.cuda_graph = true;
#endif
  Tensors inputs;
  for (const at::Tensor& input : program.inputs) inputs.push_back(input.pin_memory());
  for (const at::Tensor& output : program.outputs) frame.outputs->push_back(output.pin_memory());
  frame.run = [call, inputs, outputs = frame.outputs] {
    const Tensors results = call(inputs);
    for (std::size_t i = 0; i < results.size(); ++i)
      outputs->at(i).copy_(results[i], /*non_blocking=*/true);
    torch::cuda::synchronize();
  };
  return frame;
}

std::string quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') out << '\\' << c;
    else if (code < 0x20) out << "\\u00" << code / 16 << "0123456789abcdef"[code % 16];
    else out << c;
  }
  out << '"';
  return out.str();
}

std::string number(double value) {  // JSON has no infinity
  std::ostringstream out;
  out << value;
  return std::isfinite(value) ? out.str() : "null";
}

struct Report {
  const Options& options;
  const Program& program;
  bool cuda_graph;
  double error;
  std::optional<Latency> latency = std::nullopt;  // only where the self-test passed

  bool passed() const { return error <= program.tolerance; }

  void print_json() const {
    std::cout << "{\"program\": " << quoted(options.program)
              << ", \"device\": " << quoted(program.device.str())
              << ", \"cuda_graph\": " << (cuda_graph ? "true" : "false")
              << ", \"threads\": " << at::get_num_threads()
              << ", \"self_test\": {\"passed\": " << (passed() ? "true" : "false")
              << ", \"error\": " << number(error) << ", \"tolerance\": " << number(program.tolerance)
              << "}, \"latency\": ";
    if (latency)
      std::cout << "{\"p50_ms\": " << latency->percentile(0.5) << ", \"p99_ms\": " << latency->percentile(0.99)
                << ", \"frames\": " << latency->milliseconds.size()
                << ", \"hz\": " << (options.hz > 0 ? number(options.hz) : "null")
                << ", \"missed\": " << latency->missed << "}}\n";
    else
      std::cout << "null}\n";
  }

  void print_text() const {
    std::cout << options.program << " on " << program.device << ", " << at::get_num_threads()
              << " threads, " << (cuda_graph ? "in a CUDA graph" : "plain calls") << "\nself-test: error "
              << error << ", tolerance " << program.tolerance << (passed() ? ": passed\n" : ": FAILED\n");
    if (!latency) return;
    std::cout << "latency: p50 " << latency->percentile(0.5) << " ms, p99 " << latency->percentile(0.99) << " ms, "
              << latency->milliseconds.size() << " frames ";
    if (options.hz > 0) std::cout << "at " << options.hz << " Hz, " << latency->missed << " missed\n";
    else std::cout << "back to back\n";
  }
};

int run(const Options& options) {
  if (options.threads > 0) at::set_num_threads(options.threads);
  const c10::InferenceMode guard;
  Program program = load(options.program, options.device);
  const Frame frame = program.device.is_cuda() ? on_gpu(program) : on_cpu(program);
  for (int i = 0; i < warm_ups; ++i) frame.run();
  Report report{options, program, frame.cuda_graph, largest_error(*frame.outputs, program.outputs)};
  if (report.passed()) report.latency = measure(frame.run, options.runs, options.seconds, options.hz);
  options.json ? report.print_json() : report.print_text();
  return report.passed() ? 0 : 2;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return run(parse(count, arguments));
  } catch (const UsageError& error) {
    std::cerr << "runner: " << error.what() << '\n';
  } catch (const ProgramError& error) {
    std::cerr << "runner: " << error.what() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "runner: the program cannot be run here: " << reason(error) << '\n';
  }
  return 1;
}
