// Times of frames, back to back or at a camera's rate.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <thread>
#include <vector>

struct Latency {
  std::vector<double> milliseconds;  // of each frame, sorted
  long missed = 0;                   // frames that were not done when the next one was due

  // The smallest time that at least `share` of the frames keep.
  double percentile(double share) const {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(milliseconds.size())));
    return milliseconds.at(std::max<std::size_t>(rank, 1) - 1);
  }
};

// Times `frame` until `runs` or `seconds` are over, whichever is first; 0 is no limit. At `hz` a frame starts
// when it is due, or, where the one before was late, at the next time that one is due: a camera does not wait.
inline Latency measure(const std::function<void()>& frame, long runs, double seconds, double hz) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> exact(hz > 0 ? 1 / hz : 0);
  const auto period = std::chrono::duration_cast<Clock::duration>(exact);
  Latency result;
  const auto start = Clock::now();
  auto due = start;
  const auto over = [&] {
    const bool enough = runs > 0 && static_cast<long>(result.milliseconds.size()) >= runs;
    return enough || (seconds > 0 && std::chrono::duration<double>(due - start).count() >= seconds);
  };
  while (!over()) {
    std::this_thread::sleep_until(due);
    const auto before = Clock::now();
    frame();
    const auto after = Clock::now();
    result.milliseconds.push_back(std::chrono::duration<double, std::milli>(after - before).count());
    if (hz == 0) {
      due = after;
      continue;
    }
    due += period;
    for (; due < after; due += period) ++result.missed;
  }
  std::sort(result.milliseconds.begin(), result.milliseconds.end());
  return result;
}
