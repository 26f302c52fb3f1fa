// Winograd's F(2x2, 3x3) and F(4x4, 3x3): a 3x3 convolution with stride 1 in 16 multiplications for every 36,
// or in 36 for every 144.
//
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016), section 4, on float32 in ONNX
// Runtime's blocked layout: tensors are [N][C/B][H][W][B] with B = BLOCK channels in one vector, so that every
// transform is a sum lane by lane. The output is cut into tiles of TxT; a tile needs a patch d of the input
// that is 2 wider, and both have P = (T+2)^2 "positions" once transformed:
//   V = B^T d B (input),  M[p] = V[p] x U[p] for each position p,  y = A^T M A.
// U = G g G^T is made of the weights ahead of time (ort/winograd.py), as [K/(2B)][P][C][2B]; where K/B is
// odd, the last group has B filters.
//
// With the weights themselves, a y that is not finite is computed anew, as a sum of products. All others are
// right but for rounding: a number of d that is not finite leaves no V[p] finite of which it is a term, no M[p]
// of such a V[p], and no y of such an M[p]. Each y that depends on the number is one of these: otherwise its
// coefficient of it would be 0.
#pragma once
#include <algorithm>
#include <cstring>
#include <numeric>

#include "vectors.h"

namespace winograd {

using vectors::at;
using vectors::ceil_div;
using vectors::Vec;

constexpr long kGroup = 2;         // vectors of filters in one register block
constexpr long kTiles = 6;         // tiles in one register block: 6 x 2 accumulators
constexpr long kChunk = 64 / BLOCK;  // blocks of channels summed at a time, for precision
constexpr long kCache = 96 << 10;  // floats of V and M that one part should keep in L2
constexpr long kPad = 16;          // floats that keep position strides off powers of two

struct Shape {
  long batch, channels, height, width, filters, pad_top, pad_left, out_height, out_width;
  long tile;  // T: 2 or 4
  long positions() const { return (tile + 2) * (tile + 2); }
  long rows() const { return ceil_div(out_height, tile); }
  long columns() const { return ceil_div(out_width, tile); }
  long tiles() const { return batch * rows() * columns(); }
  long groups() const { return (filters / BLOCK + kGroup - 1) / kGroup; }
};

// What computes results anew that are not finite: the image and [K/B][C/B][3][3][B][B], input before output; or
// null.
struct Direct {
  const float *x, *weights;
};

struct Epilogue {
  const float* bias;  // [K] or null
  const float* sum;   // shaped like the output, added before the activation, or null
  vectors::Activation activation;
};

// How the work is cut: every part is one range of tiles times one range of filter groups.
struct Plan {
  long tile_parts, filter_parts;
  long parts() const { return tile_parts * filter_parts; }
};

// Cuts the work into even parts for `threads` threads: by tiles where there are many,
// else by filters as well.
inline Plan plan(const Shape& s, long threads) {
  const long least = (s.tile == 2 ? 10 : 5) * kTiles;
  const long limit = std::max(kCache / s.positions() / (s.channels + kGroup * BLOCK), least);
  const long blocks = ceil_div(s.tiles(), limit);
  if (blocks >= 2 * threads || s.groups() < threads)
    return {std::min(ceil_div(blocks, threads) * threads, s.tiles()), 1};
  return {blocks, threads / std::gcd(blocks, threads)};
}

// Calls body(image, row, column, length, offset) for every run of tiles in [begin, end) that
// lie side by side; `offset` counts the tiles before the run.
template <class Body>
void each_run(const Shape& s, long begin, long end, Body body) {
  for (long tile = begin, length; tile < end; tile += length) {
    const long line = tile / s.columns(), column = tile % s.columns();
    length = std::min(s.columns() - column, end - tile);
    body(line / s.rows(), line % s.rows(), column, length, tile - begin);
  }
}

// The transforms of one dimension for tiles of T: `before` is B^T, `after` is A^T.
template <long T>
struct Transform;

// The points 0, 1, -1 and infinity.
template <>
struct Transform<2> {
  static void before(const Vec (&d)[4], Vec (&v)[4]) {
    v[0] = d[2] - d[0];
    v[1] = d[2] + d[1];
    v[2] = d[2] - d[1];
    v[3] = d[3] - d[1];
  }
  static void after(const Vec (&m)[4], Vec (&y)[2]) {
    y[0] = m[0] + m[1] + m[2];
    y[1] = m[1] - m[2] + m[3];
  }
};

// The points 0, a, -a, b, -b and infinity. These a and b give half the error of 1 and 2.
template <>
struct Transform<4> {
  static constexpr float a = 0.625f, b = 1.5f, aa = a * a, bb = b * b;
  static void before(const Vec (&d)[6], Vec (&v)[6]) {
    const Vec even_a = d[4] - bb * d[2], odd_a = a * (d[3] - bb * d[1]);
    const Vec even_b = d[4] - aa * d[2], odd_b = b * (d[3] - aa * d[1]);
    v[0] = d[4] - (aa + bb) * d[2] + (aa * bb) * d[0];
    v[1] = even_a + odd_a;
    v[2] = even_a - odd_a;
    v[3] = even_b + odd_b;
    v[4] = even_b - odd_b;
    v[5] = d[5] - (aa + bb) * d[3] + (aa * bb) * d[1];
  }
  static void after(const Vec (&m)[6], Vec (&y)[4]) {
    const Vec sum_a = m[1] + m[2], difference_a = m[1] - m[2];
    const Vec sum_b = m[3] + m[4], difference_b = m[3] - m[4];
    y[0] = m[0] + sum_a + sum_b;
    y[1] = a * difference_a + b * difference_b;
    y[2] = aa * sum_a + bb * sum_b;
    y[3] = (aa * a) * difference_a + (bb * b) * difference_b + m[5];
  }
};

// Transforms tiles [begin, end) of x [N][C/B][H][W][B] into v [P][C/B][tiles][B].
template <long T>
void input(const Shape& s, const float* x, long begin, long end, float* v, long stride) {
  constexpr long kPatch = T + 2;
  const long blocks = s.channels / BLOCK, plane = s.height * s.width * BLOCK;
  for (long c = 0; c < blocks; c++, v += (end - begin) * BLOCK)
    each_run(s, begin, end, [&](long image, long row, long column, long length, long offset) {
      const long top = T * row - s.pad_top;
      const float* in = x + (image * blocks + c) * plane + top * s.width * BLOCK;
      bool valid[kPatch];
      for (long i = 0; i < kPatch; i++) valid[i] = top + i >= 0 && top + i < s.height;
      // Column j of B^T d; zero outside the image.
      const auto down = [&](long j, Vec (&t)[kPatch]) {
        const bool inside = j >= 0 && j < s.width;
        Vec d[kPatch];
        for (long i = 0; i < kPatch; i++)
          d[i] = inside && valid[i] ? at(in + (i * s.width + j) * BLOCK) : Vec{};
        Transform<T>::before(d, t);
      };
      Vec t[kPatch][kPatch];  // columns of B^T d
      long j = T * column - s.pad_left;
      float* out = v + offset * BLOCK;
      for (long k = 0; k < 2; k++) down(j + k, t[T + k]);
      for (long n = 0; n < length; n++, j += T, out += BLOCK) {
        for (long i = 0; i < kPatch; i++)  // two columns are also those of the tile before
          for (long k = 0; k < 2; k++) t[k][i] = t[T + k][i];
        for (long k = 2; k < kPatch; k++) down(j + k, t[k]);
        for (long i = 0; i < kPatch; i++) {
          Vec line[kPatch], to[kPatch];
          for (long k = 0; k < kPatch; k++) line[k] = t[k][i];
          Transform<T>::before(line, to);
          for (long k = 0; k < kPatch; k++) at(out + (kPatch * i + k) * stride) = to[k];
        }
      }
    });
}

// Multiplies N tiles by F vectors of filters at one position, over some blocks of channels:
// v [blocks][step][B], u [blocks*B][F*B], m [N][F*B]. The N x F sums stay in registers.
template <int N, int F>
void multiply(const float* v, const float* u, float* m, long blocks, long step, bool add) {
  Vec sum[N][F];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int f = 0; f < F; f++) sum[n][f] = Vec{};
  for (long c = 0; c < blocks; c++, v += step * BLOCK, u += BLOCK * F * BLOCK)
#pragma GCC unroll 16
    for (int lane = 0; lane < BLOCK; lane++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++)
#pragma GCC unroll 8
        for (int f = 0; f < F; f++)
          sum[n][f] += at(u + (lane * F + f) * BLOCK) * v[n * BLOCK + lane];
#pragma GCC unroll 8
  for (int n = 0; n < N; n++)
#pragma GCC unroll 8
    for (int f = 0; f < F; f++) {
      Vec& to = at(m + (n * F + f) * BLOCK);
      to = add ? to + sum[n][f] : sum[n][f];
    }
}

// Multiplies `count` tiles at one position: v [C/B][count][B], u [C][F*B], m [count][F*B].
// Register blocks are as even as possible.
template <int F>
void multiply_all(const float* v, const float* u, float* m, long blocks, long count) {
  static constexpr decltype(&multiply<1, F>) kernels[kTiles] = {
      multiply<1, F>, multiply<2, F>, multiply<3, F>,
      multiply<4, F>, multiply<5, F>, multiply<6, F>};
  const long pieces = ceil_div(count, kTiles);
  for (long c = 0; c < blocks; c += kChunk)
    for (long i = 0; i < pieces; i++) {
      const long from = count * i / pieces, to = count * (i + 1) / pieces;
      kernels[to - from - 1](v + (c * count + from) * BLOCK, u + c * BLOCK * F * BLOCK,
                             m + from * F * BLOCK, std::min(kChunk, blocks - c), count, c > 0);
    }
}

// The sums of the convolution itself for B filters in the tile at a place of the output, without bias.
template <long T>
void direct(const Shape& s, const Direct& d, long image, long filter, long row, long column, Vec (&sum)[T * T]) {
  const long blocks = s.channels / BLOCK;
  for (Vec& each : sum) each = Vec{};
  for (long c = 0; c < blocks; c++)
    for (long tap = 0; tap < 9; tap++) {
      const float* w = d.weights + ((filter / BLOCK * blocks + c) * 9 + tap) * BLOCK * BLOCK;
      const long top = row + tap / 3 - s.pad_top, left = column + tap % 3 - s.pad_left;
      const float* x = d.x + (((image * blocks + c) * s.height + top) * s.width + left) * BLOCK;
      if (top >= 0 && top + T <= s.height && left >= 0 && left + T <= s.width) {
        const long line = s.width * BLOCK;
        Vec all[T * T];
        std::copy(sum, sum + T * T, all);
        for (long lane = 0; lane < BLOCK; lane++)
#pragma GCC unroll 16
          for (long o = 0; o < T * T; o++)
            all[o] += at(w + lane * BLOCK) * x[o / T * line + o % T * BLOCK + lane];
        std::copy(all, all + T * T, sum);
        continue;
      }
      for (long o = 0; o < T * T; o++) {
        const long i = top + o / T, j = left + o % T;
        if (i < 0 || i >= s.height || j < 0 || j >= s.width) continue;
        for (long lane = 0; lane < BLOCK; lane++)
          sum[o] += at(w + lane * BLOCK) * x[(o / T * s.width + o % T) * BLOCK + lane];
      }
    }
}

// Whether a number of a vector is NaN.
inline bool has_nan(const Vec& v) {
  const auto is_nan = v != v;
  long long words[BLOCK / 2], any = 0;
  static_assert(sizeof words == sizeof is_nan);
  std::memcpy(words, &is_nan, sizeof words);
  for (long long word : words) any |= word;
  return any != 0;
}

// Transforms m [P][tiles][F][B] of the filters from `filter` on back into y [N][K/B][H][W][B].
template <long T, bool kExact>
void output(const Shape& s, const Epilogue& e, const Direct& d, const float* m, long stride, long begin, long end,
            long filter, long vectors, float* y) {
  constexpr long kPatch = T + 2;
  for (long f = 0; f < vectors; f++, filter += BLOCK, m += BLOCK) {
    const Vec bias = e.bias ? at(e.bias + filter) : Vec{};
    each_run(s, begin, end, [&](long image, long row, long column, long length, long offset) {
      const float* from = m + offset * vectors * BLOCK;
      const long plane = (image * s.filters + filter) * s.out_height * s.out_width;
      const long height = std::min(T, s.out_height - T * row);
      const auto store = [&](long i, long j, const Vec& r) {
        const long o = plane + ((T * row + i) * s.out_width + j) * BLOCK;
        at(y + o) = e.activation(e.sum ? r + bias + at(e.sum + o) : r + bias);
      };
      for (long j = T * column; j < T * (column + length); j += T, from += vectors * BLOCK) {
        Vec t[T][kPatch];
        for (long i = 0; i < kPatch; i++) {
          Vec line[kPatch], to[T];
          for (long k = 0; k < kPatch; k++) line[k] = at(from + (kPatch * k + i) * stride);
          Transform<T>::after(line, to);
          for (long k = 0; k < T; k++) t[k][i] = to[k];
        }
        const long width = std::min(T, s.out_width - j);
        Vec lost{};  // what is finite, less itself, is 0; the rest is NaN
        for (long i = 0; i < height; i++) {
          Vec r[T];
          Transform<T>::after(t[i], r);
          for (long w = 0; w < width; w++) {
            store(i, j + w, r[w]);
            if (kExact) lost += r[w] - r[w];
          }
        }
        if (kExact && has_nan(lost)) {
          Vec sum[T * T];
          direct<T>(s, d, image, filter, T * row, j, sum);
          for (long i = 0; i < height; i++)
            for (long w = 0; w < width; w++) store(i, j + w, sum[T * i + w]);
        }
      }
    });
  }
}

// Computes part `index` of the convolution, with tiles of T: some tiles of y for some filters.
template <long T, bool kExact>
void part_of(const Shape& s, const Plan& p, const Direct& d, const float* u, const Epilogue& e, float* y,
             long index) {
  const long positions = s.positions();
  const long it = index / p.filter_parts, ik = index % p.filter_parts;
  const long begin = s.tiles() * it / p.tile_parts, end = s.tiles() * (it + 1) / p.tile_parts;
  const long count = end - begin, blocks = s.channels / BLOCK;
  const long v_stride = s.channels * count + kPad, m_stride = count * kGroup * BLOCK + kPad;
  float* v = vectors::scratch(positions * (v_stride + m_stride));
  float* m = v + positions * v_stride;
  input<T>(s, d.x, begin, end, v, v_stride);
  for (long g = s.groups() * ik / p.filter_parts; g < s.groups() * (ik + 1) / p.filter_parts; g++) {
    const long filter = g * kGroup * BLOCK;
    const long vectors = std::min(kGroup, (s.filters - filter) / BLOCK);
    const auto product = vectors == 1 ? multiply_all<1> : multiply_all<kGroup>;
    for (long q = 0; q < positions; q++)
      product(v + q * v_stride, u + (filter * positions + q * vectors * BLOCK) * s.channels, m + q * m_stride,
              blocks, count);
    output<T, kExact>(s, e, d, m, m_stride, begin, end, filter, vectors, y);
  }
}

// Computes part `index` of the convolution.
inline void part(const Shape& s, const Plan& p, const Direct& d, const float* u, const Epilogue& e, float* y,
                 long index) {
  const auto exact = s.tile == 2 ? part_of<2, true> : part_of<4, true>;
  const auto plain = s.tile == 2 ? part_of<2, false> : part_of<4, false>;
  (d.weights ? exact : plain)(s, p, d, u, e, y, index);
}

}  // namespace winograd
