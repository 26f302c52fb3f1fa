// Chains of convolutions with stride 1, computed row by row, so that what is between them stays in the cache.
//
// Tensors are [N][C][H][W], and every convolution keeps H and W. The image is cut into tiles. In a tile each
// tensor of the chain is a ring of the few rows that are still read: once one more row of the input is there,
// every convolution computes its next one. Around a tile the tensors before the last are computed as far as
// the ones after them reach; outside the image they are zero. A vector is BLOCK pixels of one channel, so
// that no number of channels leaves lanes empty, as they are where a vector is a block of channels.
#pragma once
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "vectors.h"

namespace chain {

using vectors::at;
using vectors::ceil_div;
using vectors::Vec;

constexpr long kFilters = BLOCK / 2;  // in one register block, with
constexpr long kVectors = 3;          // vectors of pixels: 24 accumulators of 32 registers, or 12 of 16
constexpr long kCache = 96 << 10;     // floats of rings that one tile should keep in L2
constexpr long kFields = 13;          // numbers that describe a step

// One convolution. Tensors are numbered: 0 is the chain's input, i + 1 the result of step i.
struct Step {
  long source, addend;  // the tensors it reads, and adds before the activation; addend -1: none
  long channels, filters, height, width, dilation_y, dilation_x, top, left;
  vectors::Activation activation;
  const float* weights;  // for F filters at a time: biases [F], then [channels][height][width][F]

  long bottom() const { return (height - 1) * dilation_y - top; }
  long right() const { return (width - 1) * dilation_x - left; }
};

// A tensor of the chain inside a tile: how many rows are kept, how far beyond the tile it is needed, the
// floats of one row of one channel, and the place of its ring [rows][channels][stride].
struct Ring {
  long channels, rows = 1, up = 0, down = 0, left = 0, right = 0, stride = 0, place = 0;
  long size() const { return rows * channels * stride; }

  // Makes it reach as far as what is computed of it, and so much further.
  void cover(const Ring& other, long above, long below, long before, long after) {
    up = std::max(up, other.up + above);
    down = std::max(down, other.down + below);
    left = std::max(left, other.left + before);
    right = std::max(right, other.right + after);
  }
};

// The filters of the register block that comes next, of those that are left.
inline long next_filters(long left) {
  long count = kFilters;
  while (count > left) count /= 2;
  return count;
}

// Computes F filters of V vectors of pixels. rows[y] is where row y of the kernel begins to read; `addend` and
// `out` are of the first filter.
template <int F, int V>
void block(const Step& s, const float* const* rows, long stride, const float* weights, const float* addend,
           long addend_stride, float* out, long out_stride) {
  Vec sum[F][V];
#pragma GCC unroll 8
  for (int f = 0; f < F; f++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sum[f][v] = Vec{} + weights[f];
  weights += F;
  for (long c = 0; c < s.channels; c++)
    for (long y = 0; y < s.height; y++) {
      const float* from = rows[y] + c * stride;
      for (long x = 0; x < s.width; x++, from += s.dilation_x, weights += F) {
        Vec pixels[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) pixels[v] = at(from + v * BLOCK);
#pragma GCC unroll 8
        for (int f = 0; f < F; f++)
#pragma GCC unroll 8
          for (int v = 0; v < V; v++) sum[f][v] += pixels[v] * weights[f];
      }
    }
#pragma GCC unroll 8
  for (int f = 0; f < F; f++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++)
      at(out + f * out_stride + v * BLOCK) =
          s.activation(addend ? sum[f][v] + at(addend + f * addend_stride + v * BLOCK) : sum[f][v]);
}

using Kernel = decltype(&block<1, 1>);

// The kernel for a number of filters, a power of two up to kFilters, and of vectors.
inline Kernel kernel(long filters, long vectors) {
  static constexpr Kernel kernels[4][kVectors] = {
      {block<1, 1>, block<1, 2>, block<1, 3>},
      {block<2, 1>, block<2, 2>, block<2, 3>},
      {block<4, 1>, block<4, 2>, block<4, 3>},
      {block<kFilters, 1>, block<kFilters, 2>, block<kFilters, 3>}};
  const long row = filters == 1 ? 0 : filters == 2 ? 1 : filters == 4 ? 2 : 3;
  return kernels[row][vectors - 1];
}

class Chain {
 public:
  // `program` [steps][kFields] and `weights` as ort/chains.py makes them.
  Chain(const float* program, long steps, const float* weights, long count, long height, long width)
      : height_(height), width_(width), rings_(steps + 1) {
    for (long i = 0; i < steps; i++) {
      std::array<long, 11> n;
      for (size_t k = 0; k < n.size(); k++) {
        const float number = program[i * kFields + k];
        if (!(number >= -1 && number <= kLargest))
          throw std::invalid_argument("a number of a ConvChain's program is too large, or none");
        n[k] = static_cast<long>(number);
      }
      const vectors::Activation activation{static_cast<vectors::Kind>(n[10]), program[i * kFields + 11],
                                           program[i * kFields + 12]};
      const Step step{n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], activation, weights};
      const long size = step.filters * (1 + step.channels * step.height * step.width);
      if (step.source < 0 || step.source > i || step.addend > i || step.channels < 1 || step.filters < 1 || step.height < 1 ||
          step.width < 1 || step.top < 0 || step.left < 0 || step.bottom() < 0 || step.right() < 0 ||
          size > count || step.height > kTallest)
        throw std::invalid_argument("a step of a ConvChain is not one of a chain");
      if (i == 0) rings_[0].channels = step.channels;
      rings_[i + 1].channels = step.filters;
      if (rings_[step.source].channels != step.channels ||
          (step.addend >= 0 && rings_[step.addend].channels != step.filters))
        throw std::invalid_argument("the channels of a ConvChain do not fit each other");
      steps_.push_back(step);
      weights += size;
      count -= size;
    }
    reach();
  }

  long channels() const { return rings_.front().channels; }
  long filters() const { return rings_.back().channels; }

  // Cuts every image into tiles for `threads` threads; returns the number of tiles of an image.
  long cut(long images, long threads) {
    const Ring& first = rings_.front();
    const long wide = ceil_div(first.left + first.right, BLOCK) * BLOCK + kVectors * BLOCK;
    columns_ = 1;
    while (size_of(ceil_div(width_, columns_)) > kCache && ceil_div(width_, columns_ + 1) >= wide) columns_++;
    const long tall = std::max(4 * (first.up + first.down), 1L);
    const long wanted = ceil_div(kTasks * threads, columns_ * images), least = ceil_div(threads, columns_ * images);
    bands_ = std::min(std::max(std::min(wanted, height_ / tall), least), height_);
    place(ceil_div(width_, columns_));
    return columns_ * bands_;
  }

  // Computes tile `index` of one image.
  void tile(const float* x, float* y, long index) const {
    const long band = index / columns_, column = index % columns_;
    const long top = height_ * band / bands_, bottom = height_ * (band + 1) / bands_;
    const long left = width_ * column / columns_, right = width_ * (column + 1) / columns_;
    float* memory = vectors::scratch(size_);
    long begin = top;
    for (const Ring& ring : rings_) begin = std::min(begin, top - ring.up - ring.down);
    for (long row = begin; row < bottom; row++) {
      for (long t = 0; t < static_cast<long>(rings_.size()); t++) {
        const long at_row = row + rings_[t].down;
        if (at_row < top - rings_[t].up) continue;
        const Span span{left - rings_[t].left, right + rings_[t].right};
        if (at_row < 0 || at_row >= height_)
          clear(memory, t, at_row);
        else if (t == 0)
          load(x, memory, at_row, span);
        else
          compute(steps_[t - 1], memory, t, at_row, span);
      }
      if (row >= top) store(memory, y, row, left, right);
    }
  }

 private:
  static constexpr long kLargest = 4096;  // number in a program
  static constexpr long kTallest = 64;    // rows of a kernel
  static constexpr long kTasks = 3;       // tiles for every thread, where they are not too low

  struct Span { long begin, end; };  // columns of the image, some of them maybe outside

  // How far each tensor is needed, from the last to the first; then how many of its rows are kept.
  void reach() {
    for (long i = static_cast<long>(steps_.size()) - 1; i >= 0; i--) {
      const Step& step = steps_[i];
      const Ring& own = rings_[i + 1];
      rings_[step.source].cover(own, step.top, step.bottom(), step.left, step.right());
      if (step.addend >= 0) rings_[step.addend].cover(own, 0, 0, 0, 0);
    }
    const auto keep = [&](long tensor, long oldest) {
      rings_[tensor].rows = std::max(rings_[tensor].rows, rings_[tensor].down - oldest + 1);
    };
    for (size_t i = 0; i < steps_.size(); i++) {
      const long down = rings_[i + 1].down;
      keep(steps_[i].source, down - steps_[i].top);
      if (steps_[i].addend >= 0) keep(steps_[i].addend, down);
    }
  }

  // Floats of one row of one channel: what is read and written beyond the end belongs to it.
  static long stride_of(const Ring& ring, long width) {
    return (ceil_div(ring.left + width + ring.right, BLOCK) + 1) * BLOCK + kMargin;
  }
  static constexpr long kMargin = 16;  // keeps rows of 2^n pixels off the same places of the cache

  long size_of(long width) const {
    long size = 0;
    for (const Ring& ring : rings_) size += ring.rows * ring.channels * stride_of(ring, width);
    return size;
  }

  void place(long width) {
    size_ = 0;
    for (Ring& ring : rings_) {
      ring.stride = stride_of(ring, width);
      ring.place = size_;
      size_ += ring.size();
    }
  }

  float* row_of(float* memory, long tensor, long row) const {
    const Ring& ring = rings_[tensor];
    const long slot = ((row % ring.rows) + ring.rows) % ring.rows;
    return memory + ring.place + slot * ring.channels * ring.stride;
  }

  void clear(float* memory, long tensor, long row) const {
    float* to = row_of(memory, tensor, row);
    std::fill_n(to, rings_[tensor].channels * rings_[tensor].stride, 0.0f);
  }

  void load(const float* x, float* memory, long row, Span span) const {
    const Ring& ring = rings_[0];
    const long begin = std::max(span.begin, 0L), end = std::min(span.end, width_);
    float* to = row_of(memory, 0, row);
    const float* from = x + row * width_ + begin;
    for (long c = 0; c < ring.channels; c++, to += ring.stride, from += height_ * width_) {
      std::copy_n(from, end - begin, to + begin - span.begin);
      outside(to, span);
    }
  }

  // Zeros for the columns outside the image.
  void outside(float* row, Span span) const {
    for (long x = span.begin; x < 0; x++) row[x - span.begin] = 0.0f;
    for (long x = width_; x < span.end; x++) row[x - span.begin] = 0.0f;
  }

  void compute(const Step& s, float* memory, long tensor, long row, Span span) const {
    const Ring &own = rings_[tensor], &source = rings_[s.source];
    std::array<const float*, kTallest> rows;
    const long shift = source.left - own.left - s.left;
    for (long y = 0; y < s.height; y++)
      rows[y] = row_of(memory, s.source, row - s.top + y * s.dilation_y) + shift;
    const Ring* added = s.addend < 0 ? nullptr : &rings_[s.addend];
    const float* addend = added ? row_of(memory, s.addend, row) + added->left - own.left : nullptr;
    float* out = row_of(memory, tensor, row);
    const long count = ceil_div(span.end - span.begin, BLOCK);
    for (long v = 0, vectors; v < count; v += vectors) {
      vectors = std::min(kVectors, count - v);
      const float* weights = s.weights;
      for (long f = 0, filters; f < s.filters; f += filters) {
        filters = next_filters(s.filters - f);
        kernel(filters, vectors)(s, rows.data(), source.stride, weights,
                                 addend ? addend + f * added->stride : nullptr, added ? added->stride : 0,
                                 out + f * own.stride, own.stride);
        weights += filters * (1 + s.channels * s.height * s.width);
      }
      for (long y = 0; y < s.height; y++) rows[y] += vectors * BLOCK;
      if (addend) addend += vectors * BLOCK;
      out += vectors * BLOCK;
    }
    if (span.begin < 0 || span.end > width_) {
      float* line = row_of(memory, tensor, row);
      for (long c = 0; c < own.channels; c++, line += own.stride) outside(line, span);
    }
  }

  void store(float* memory, float* y, long row, long left, long right) const {
    const long tensor = static_cast<long>(rings_.size()) - 1;
    const float* from = row_of(memory, tensor, row);
    float* to = y + row * width_ + left;
    for (long c = 0; c < filters(); c++, from += rings_[tensor].stride, to += height_ * width_)
      std::copy_n(from, right - left, to);
  }

  long height_, width_, columns_ = 1, bands_ = 1, size_ = 0;
  std::vector<Step> steps_;
  std::vector<Ring> rings_;
};

}  // namespace chain
