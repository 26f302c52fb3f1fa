// Winograd's F(2x2, 3x3): a 3x3 convolution with stride 1 in 16 multiplications for every 36.
//
// Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2016), section 4.1, on float32 in ONNX
// Runtime's blocked layout: tensors are [N][C/B][H][W][B] with B = BLOCK channels in one vector, so that every
// transform is a sum lane by lane. The output is cut into tiles of 2x2; a tile needs a 4x4 patch d of the
// input, and both have 16 "positions" once transformed:
//   V = B^T d B (input),  M[p] = V[p] x U[p] for each position p,  y = A^T M A.
// U = G g G^T is made of the weights ahead of time (onnx_winograd.py), as [K/(2B)][16][C][2B]; where K/B is
// odd, the last group has B filters.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>

#ifndef BLOCK
#define BLOCK 8
#endif

namespace winograd {

typedef float Vec __attribute__((vector_size(4 * BLOCK), aligned(4), may_alias));

constexpr long kPositions = 16;    // 4x4 values of a transformed tile
constexpr long kGroup = 2;         // vectors of filters in one register block
constexpr long kTiles = 6;         // tiles in one register block: 6 x 2 accumulators
constexpr long kChunk = 64 / BLOCK;  // blocks of channels summed at a time, for precision
constexpr long kCache = 96 << 10;  // floats of V and M that one part should keep in L2
constexpr long kPad = 16;          // floats that keep position strides off powers of two

enum Activation { kNone, kRelu, kLeakyRelu, kClip };

struct Shape {
  long batch, channels, height, width, filters, pad_top, pad_left, out_height, out_width;
  long rows() const { return (out_height + 1) / 2; }
  long columns() const { return (out_width + 1) / 2; }
  long tiles() const { return batch * rows() * columns(); }
  long groups() const { return (filters / BLOCK + kGroup - 1) / kGroup; }
};

struct Epilogue {
  const float* bias;  // [K] or null
  const float* sum;   // shaped like the output, added before the activation, or null
  Activation activation;
  float alpha, beta;  // slope of LeakyRelu; bounds of Clip
};

// How the work is cut: every part is one range of tiles times one range of filter groups.
struct Plan {
  long tile_parts, filter_parts;
  long parts() const { return tile_parts * filter_parts; }
};

// a / b, rounded up.
inline long ceil_div(long a, long b) { return (a + b - 1) / b; }
// The vector stored at p.
inline const Vec& at(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline Vec& at(float* p) { return *reinterpret_cast<Vec*>(p); }

// Cuts the work into even parts for `threads` threads: by tiles where there are many,
// else by filters as well.
inline Plan plan(const Shape& s, long threads) {
  const long limit = std::max(kCache / kPositions / (s.channels + kGroup * BLOCK), 10 * kTiles);
  const long blocks = ceil_div(s.tiles(), limit);
  if (blocks >= 2 * threads || s.groups() < threads)
    return {std::min(ceil_div(blocks, threads) * threads, s.tiles()), 1};
  return {blocks, threads / std::gcd(blocks, threads)};
}

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

// Transforms tiles [begin, end) of x [N][C/B][H][W][B] into v [16][C/B][tiles][B].
inline void input(const Shape& s, const float* x, long begin, long end, float* v, long stride) {
  const long blocks = s.channels / BLOCK, plane = s.height * s.width * BLOCK;
  for (long c = 0; c < blocks; c++, v += (end - begin) * BLOCK)
    each_run(s, begin, end, [&](long image, long row, long column, long length, long offset) {
      const long top = 2 * row - s.pad_top;
      const float* in = x + (image * blocks + c) * plane + top * s.width * BLOCK;
      bool valid[4];
      for (long i = 0; i < 4; i++) valid[i] = top + i >= 0 && top + i < s.height;
      // Column j of B^T d; zero outside the image.
      const auto down = [&](long j, Vec (&t)[4]) {
        const bool inside = j >= 0 && j < s.width;
        Vec d[4];
        for (long i = 0; i < 4; i++)
          d[i] = inside && valid[i] ? at(in + (i * s.width + j) * BLOCK) : Vec{};
        t[0] = d[0] - d[2];
        t[1] = d[1] + d[2];
        t[2] = d[2] - d[1];
        t[3] = d[1] - d[3];
      };
      Vec t0[4], t1[4], t2[4], t3[4];
      long j = 2 * column - s.pad_left;
      float* out = v + offset * BLOCK;
      down(j, t0);
      down(j + 1, t1);
      for (long n = 0; n < length; n++, out += BLOCK) {
        down(j += 2, t2);
        down(j + 1, t3);
        for (long i = 0; i < 4; i++) {
          at(out + (4 * i) * stride) = t0[i] - t2[i];
          at(out + (4 * i + 1) * stride) = t1[i] + t2[i];
          at(out + (4 * i + 2) * stride) = t2[i] - t1[i];
          at(out + (4 * i + 3) * stride) = t1[i] - t3[i];
          t0[i] = t2[i];
          t1[i] = t3[i];
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

// Applies the activation to one vector.
inline Vec activate(Vec y, const Epilogue& e) {
  const Vec zero{}, low = zero + e.alpha, high = zero + e.beta;
  switch (e.activation) {
    case kRelu: return y < zero ? zero : y;  // NaN stays NaN, here and below
    case kLeakyRelu: return y < zero ? y * e.alpha : y;
    case kClip: y = y < low ? low : y; return y > high ? high : y;
    default: return y;
  }
}

// Transforms m [16][tiles][F][B] of the filters from `filter` on back into y [N][K/B][H][W][B].
inline void output(const Shape& s, const Epilogue& e, const float* m, long stride, long begin, long end,
            long filter, long vectors, float* y) {
  for (long f = 0; f < vectors; f++, filter += BLOCK, m += BLOCK) {
    const Vec bias = e.bias ? at(e.bias + filter) : Vec{};
    each_run(s, begin, end, [&](long image, long row, long column, long length, long offset) {
      const float* from = m + offset * vectors * BLOCK;
      const long plane = (image * s.filters + filter) * s.out_height * s.out_width;
      const long height = std::min(2L, s.out_height - 2 * row);
      for (long j = 2 * column; j < 2 * (column + length); j += 2, from += vectors * BLOCK) {
        Vec t[2][4];
        for (long i = 0; i < 4; i++) {
          const Vec m1 = at(from + (4 + i) * stride), m2 = at(from + (8 + i) * stride);
          t[0][i] = at(from + i * stride) + m1 + m2;
          t[1][i] = m1 - m2 - at(from + (12 + i) * stride);
        }
        for (long i = 0; i < height; i++) {
          const Vec r[2] = {t[i][0] + t[i][1] + t[i][2] + bias, t[i][1] - t[i][2] - t[i][3] + bias};
          for (long w = 0; w < 2 && j + w < s.out_width; w++) {
            const long o = plane + ((2 * row + i) * s.out_width + j + w) * BLOCK;
            at(y + o) = activate(e.sum ? r[w] + at(e.sum + o) : r[w], e);
          }
        }
      }
    });
  }
}

// Computes part `index` of the convolution: some tiles of y for some filters.
inline void part(const Shape& s, const Plan& p, const float* x, const float* u, const Epilogue& e,
          float* y, long index) {
  const long it = index / p.filter_parts, ik = index % p.filter_parts;
  const long begin = s.tiles() * it / p.tile_parts, end = s.tiles() * (it + 1) / p.tile_parts;
  const long count = end - begin, blocks = s.channels / BLOCK;
  const long v_stride = s.channels * count + kPad, m_stride = count * kGroup * BLOCK + kPad;
  float* v = scratch(kPositions * (v_stride + m_stride));
  float* m = v + kPositions * v_stride;
  input(s, x, begin, end, v, v_stride);
  for (long g = s.groups() * ik / p.filter_parts; g < s.groups() * (ik + 1) / p.filter_parts; g++) {
    const long filter = g * kGroup * BLOCK;
    const long vectors = std::min(kGroup, (s.filters - filter) / BLOCK);
    const auto product = vectors == 1 ? multiply_all<1> : multiply_all<kGroup>;
    for (long q = 0; q < kPositions; q++)
      product(v + q * v_stride, u + (filter * kPositions + q * vectors * BLOCK) * s.channels,
              m + q * m_stride, blocks, count);
    output(s, e, m, m_stride, begin, end, filter, vectors, y);
  }
}

}  // namespace winograd
