// 3x3 convolutions in groups that are narrower than a block of channels, with stride 1 or 2.
//
// Tensors are in ONNX Runtime's blocked layout, [N][C/B][H][W][B] with B = BLOCK channels in one vector. With
// G channels to a group (as many in as out), lane l of the output needs the G channels of its own group:
//   y[l] = sum over the 9 positions and j < G of x[l / G * G + j] * u[position][j][l].
// One shuffle of a pixel's vector puts channel j of every group in front of all lanes of that group. ONNX
// Runtime can only compute such groups as if they were one, with B products for every G.
#pragma once
#include <algorithm>
#include <utility>

#include "vectors.h"

namespace narrow {

using vectors::at;
using vectors::ceil_div;
using vectors::Vec;

constexpr long kPixels = BLOCK / 2;  // in one register block, with as many shuffled ones of the input
constexpr long kTasks = 4;           // parts for every thread

struct Shape {
  long batch, channels, height, width, group, stride, pad_top, pad_left, out_height, out_width;
  long blocks() const { return channels / BLOCK; }
  // The width of the padded rows that are read.
  long reach() const { return (out_width - 1) * stride + 3; }
};

struct Epilogue {
  const float* bias;  // [C] or null
  const float* sum;   // shaped like the output, added before the activation, or null
  vectors::Activation activation;
};

// Channel J of every group of G, in front of all lanes of that group.
template <long G, long J, size_t... Lanes>
Vec spread(const Vec& x, std::index_sequence<Lanes...>) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(x, x, (Lanes / G * G + J)...);
#else
  typedef int Places __attribute__((vector_size(4 * BLOCK)));
  return __builtin_shuffle(x, Places{static_cast<int>(Lanes / G * G + J)...});
#endif
#else
  typedef int Places __attribute__((vector_size(4 * BLOCK)));
  return __builtin_shuffle(x, Places{static_cast<int>(Lanes / G * G + J)...});
#endif
}

// Adds the products of channel J of each group, in one row of the kernel, to P pixels S apart.
template <long G, long S, long P, long J>
void add_channel(const float* row, const float* u, Vec (&sum)[P]) {
  constexpr long kRead = (P - 1) * S + 3;
  Vec x[kRead];
#pragma GCC unroll 20
  for (long i = 0; i < kRead; i++)
    x[i] = spread<G, J>(at(row + i * BLOCK), std::make_index_sequence<BLOCK>());
#pragma GCC unroll 3
  for (long k = 0; k < 3; k++) {
    const Vec weight = at(u + (k * G + J) * BLOCK);
#pragma GCC unroll 8
    for (long p = 0; p < P; p++) sum[p] += x[p * S + k] * weight;
  }
}

template <long G, long S, long P, size_t... Channels>
void add_row(const float* row, const float* u, Vec (&sum)[P], std::index_sequence<Channels...>) {
  (add_channel<G, S, P, Channels>(row, u, sum), ...);
}

// Computes P pixels of one row. x: where the first reads in padded rows; u [9][G][B].
template <long G, long S, long P>
void pixels(const Shape& s, const float* x, const float* u, const Vec& bias, const float* added,
            const vectors::Activation& activation, float* y) {
  Vec sum[P];
#pragma GCC unroll 8
  for (long p = 0; p < P; p++) sum[p] = bias;
  for (long row = 0; row < 3; row++)
    add_row<G, S, P>(x + row * s.reach() * BLOCK, u + row * 3 * G * BLOCK, sum, std::make_index_sequence<G>());
#pragma GCC unroll 8
  for (long p = 0; p < P; p++)
    at(y + p * BLOCK) = activation(added ? sum[p] + at(added + p * BLOCK) : sum[p]);
}

using Kernel = decltype(&pixels<2, 1, 1>);

template <long G, long S, size_t... Counts>
Kernel of_count(long count, std::index_sequence<Counts...>) {
  static constexpr Kernel kernels[] = {pixels<G, S, Counts + 1>...};
  return kernels[count - 1];
}

template <long G>
Kernel of_stride(long stride, long count) {
  const auto counts = std::make_index_sequence<kPixels>();
  return stride == 1 ? of_count<G, 1>(count, counts) : of_count<G, 2>(count, counts);
}

// The kernel for a number of pixels, up to kPixels; null for groups of another width.
inline Kernel kernel(const Shape& s, long count) {
  if (s.group == 2) return of_stride<2>(s.stride, count);
  if (s.group == 4) return of_stride<4>(s.stride, count);
#if BLOCK > 8
  if (s.group == 8) return of_stride<8>(s.stride, count);
#endif
  return nullptr;
}

// How many bands of rows a block of an image is cut into for `threads` threads.
inline long bands(const Shape& s, long threads) {
  return std::min(ceil_div(kTasks * threads, std::max(s.batch * s.blocks(), 1L)), s.out_height);
}

// Computes part `index` of `bands` for every block of every image.
inline void part(const Shape& s, long bands, const float* x, const float* u, const Epilogue& e, float* y,
                 long index) {
  const long plane = index / bands, block = plane % s.blocks(), band = index % bands;
  const long top = s.out_height * band / bands, bottom = s.out_height * (band + 1) / bands;
  const long first = top * s.stride - s.pad_top, count = (bottom - top - 1) * s.stride + 3;
  float* padded = vectors::scratch(count * s.reach() * BLOCK);
  const long inside = std::min(s.width, s.reach() - s.pad_left);
  for (long row = 0; row < count; row++) {
    float* to = padded + row * s.reach() * BLOCK;
    float* const end = to + s.reach() * BLOCK;
    if (first + row >= 0 && first + row < s.height) {
      to = std::fill_n(to, s.pad_left * BLOCK, 0.0f);
      to = std::copy_n(x + (plane * s.height + first + row) * s.width * BLOCK, inside * BLOCK, to);
    }
    std::fill(to, end, 0.0f);
  }
  u += block * 9 * s.group * BLOCK;
  const Vec bias = e.bias ? at(e.bias + block * BLOCK) : Vec{};
  const long pieces = ceil_div(s.out_width, kPixels);
  for (long row = top; row < bottom; row++) {
    const long line = (plane * s.out_height + row) * s.out_width;
    for (long i = 0; i < pieces; i++) {
      const long from = s.out_width * i / pieces, to = s.out_width * (i + 1) / pieces;
      kernel(s, to - from)(s, padded + (row - top) * s.stride * s.reach() * BLOCK + from * s.stride * BLOCK, u, bias,
                           e.sum ? e.sum + (line + from) * BLOCK : nullptr, e.activation,
                           y + (line + from) * BLOCK);
    }
  }
}

}  // namespace narrow
