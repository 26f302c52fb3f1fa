// The command line.
#pragma once

#include <stdexcept>
#include <string>

struct Options {
  std::string program;
  std::string device;  // "cpu" or "cuda"; empty: what the program was made for
  long runs = 0;       // 0: no limit
  double seconds = 0;  // 0: no limit
  double hz = 0;       // frames a second; 0: back to back
  int threads = 0;     // 0: LibTorch's own choice
  bool json = false;
};

// A mistake of the caller's: what() says what to do.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline const char* const usage =
    "runner PROGRAM.pt [--device cpu|cuda] [--runs N] [--seconds S] [--hz F] [--threads N] [--json]";

inline double positive(const std::string& name, const std::string& text) {
  std::size_t read = 0;
  double value = 0;
  try {
    value = std::stod(text, &read);
  } catch (const std::logic_error&) {
    read = 0;
  }
  // Not `value <= 0`: that takes NaN for a number.
  if (read == 0 || read != text.size() || !(value > 0 && value < 1e9))
    throw UsageError(name + " takes a positive number, not '" + text + "'");
  return value;
}

inline long positive_whole(const std::string& name, const std::string& text) {
  const double value = positive(name, text);
  if (value != static_cast<long>(value)) throw UsageError(name + " takes a whole number, not '" + text + "'");
  return static_cast<long>(value);
}

// Throws UsageError.
inline Options parse(int count, const char* const* arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string name = arguments[i];
    const auto value = [&]() -> std::string {
      if (i + 1 == count) throw UsageError(name + " takes a value: " + usage);
      return arguments[++i];
    };
    if (name == "--json") options.json = true;
    else if (name == "--device") options.device = value();
    else if (name == "--runs") options.runs = positive_whole(name, value());
    else if (name == "--seconds") options.seconds = positive(name, value());
    else if (name == "--hz") options.hz = positive(name, value());
    else if (name == "--threads") options.threads = static_cast<int>(positive_whole(name, value()));
    else if (name.rfind("--", 0) == 0 || !options.program.empty())
      throw UsageError("unknown argument '" + name + "': " + usage);
    else options.program = name;
  }
  if (options.program.empty()) throw UsageError(std::string("no program named: ") + usage);
  if (!options.device.empty() && options.device != "cpu" && options.device != "cuda")
    throw UsageError("--device takes cpu or cuda, not '" + options.device + "'");
  if (options.runs == 0 && options.seconds == 0) options.runs = 200;
  return options;
}
