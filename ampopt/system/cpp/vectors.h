// What our convolutions share: vectors of floats, activations, scratch memory.
#pragma once
#include <cstdlib>
#include <memory>

#ifndef BLOCK
#define BLOCK 8
#endif

namespace vectors {

typedef float Vec __attribute__((vector_size(4 * BLOCK), aligned(4), may_alias));

// The vector stored at p.
inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }

// a / b, rounded up.
inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

enum Kind { kNone, kRelu, kLeakyRelu, kClip };

struct Activation {
  Kind kind;
  float alpha, beta;  // slope of LeakyRelu; bounds of Clip

  Vec operator()(Vec y) const {
    const Vec zero{}, low = zero + alpha, high = zero + beta;
    switch (kind) {
      case kRelu: return y < zero ? zero : y;  // NaN stays NaN, here and below
      case kLeakyRelu: return y < zero ? y * alpha : y;
      case kClip: y = y < low ? low : y; return y > high ? high : y;
      default: return y;
    }
  }
};

// Returns this thread's scratch buffer of at least `count` floats, on a cache line.
inline float* scratch(long count) {
  struct Free { void operator()(float* p) const { std::free(p); } };
  static thread_local std::unique_ptr<float, Free> buffer;
  static thread_local long size = 0;
  if (count > size) {
    size = ceil_div(count, 1024) * 1024;
    buffer.reset(static_cast<float*>(std::aligned_alloc(64, size * sizeof(float))));
  }
  return buffer.get();
}

}  // namespace vectors
