// Operators of the domain "ampopt" for ONNX Runtime's CPU sessions.
//
// WinogradConv(X, U, bias?, sum?, W?): a 3x3 convolution with stride 1 on tensors in blocks of channels, see
// winograd.h. U has the shape [filters, positions * channels], with 16 positions for tiles of 2x2 and 36 for
// tiles of 4x4. Attributes: pad_top, pad_left, pad_bottom, pad_right, stride (1), activation with alpha and
// beta, and the number of threads among which to divide the work. With the weights W themselves, [filters,
// channels, 3, 3] in blocks, NaN and infinities reach no further than in a convolution.
//
// NarrowConv(X, U, bias?, sum?): the same in groups of G channels with stride 1 or 2, see narrow.h. U has the
// shape [filters, 9 * G].
//
// ConvChain(X, P, W): convolutions with stride 1 one after another, see chain.h. P describes the steps, a row
// of numbers each, and W has their weights. Attribute: threads, as above.
#include <algorithm>
#include <stdexcept>

#include "chain.h"
#include "narrow.h"
#include "onnx_abi.h"
#include "winograd.h"

namespace {

// What is the same in all convolutions on blocks of channels.
class BlockedConv {
 protected:
  explicit BlockedConv(const ort::Info* info)
      : top_(ort::integer(info, "pad_top")),
        left_(ort::integer(info, "pad_left")),
        bottom_(ort::integer(info, "pad_bottom")),
        right_(ort::integer(info, "pad_right")),
        stride_(ort::integer(info, "stride")),
        threads_(ort::integer(info, "threads")),
        activation_{static_cast<vectors::Kind>(ort::integer(info, "activation")), ort::number(info, "alpha"),
                    ort::number(info, "beta")} {}

  struct Operands {
    ort::Tensor x, u, bias, sum;
    std::vector<int64_t> out;
  };

  // The operands and the shape of the output; raises if they do not fit each other.
  Operands operands(ort::Context* context) const {
    Operands o{ort::input(context, 0), ort::input(context, 1), ort::input(context, 2), ort::input(context, 3), {}};
    const auto& x = o.x.shape;
    if (x.size() != 4 || o.u.shape.size() != 2) throw std::invalid_argument("X has 4 dimensions, U 2");
    if (stride_ < 1 || std::min({top_, left_, bottom_, right_}) < 0) unfit();
    const long height = x[2] + top_ + bottom_ - 3, width = x[3] + left_ + right_ - 3;
    o.out = {x[0], o.u.shape[0], height / stride_ + 1, width / stride_ + 1};
    if (x[1] % BLOCK || o.out[1] % BLOCK || height < 0 || width < 0 ||
        (o.bias.data && o.bias.shape != std::vector<int64_t>{o.out[1]}) || (o.sum.data && o.sum.shape != o.out))
      unfit();
    return o;
  }

  [[noreturn]] static void unfit() {
    throw std::invalid_argument("the shapes of a convolution do not fit each other");
  }

  long top_, left_, bottom_, right_, stride_, threads_;
  vectors::Activation activation_;
};

class WinogradConv : BlockedConv {
 public:
  explicit WinogradConv(const ort::Info* info) : BlockedConv(info) {}

  void compute(ort::Context* context) const {
    const Operands o = operands(context);
    const winograd::Shape shape{o.x.shape[0], o.x.shape[1], o.x.shape[2], o.x.shape[3],
                                o.out[1], top_, left_, o.out[2], o.out[3],
                                o.u.shape[1] == 36 * o.x.shape[1] ? 4 : 2};
    if (o.u.shape[1] != shape.positions() * shape.channels || stride_ != 1) unfit();
    const ort::Tensor w = ort::input(context, 4);
    if (w.data && w.shape != std::vector<int64_t>{shape.filters, shape.channels, 3, 3}) unfit();
    float* y = ort::output(context, o.out);
    const winograd::Direct direct{o.x.data, w.data};
    const winograd::Epilogue epilogue{o.bias.data, o.sum.data, activation_};
    const winograd::Plan plan = winograd::plan(shape, threads_);
    ort::parallel(context, plan.parts(), [&](size_t index) {
      winograd::part(shape, plan, direct, o.u.data, epilogue, y, static_cast<long>(index));
    });
  }
};

class NarrowConv : BlockedConv {
 public:
  explicit NarrowConv(const ort::Info* info) : BlockedConv(info) {}

  void compute(ort::Context* context) const {
    const Operands o = operands(context);
    const narrow::Shape shape{o.x.shape[0], o.x.shape[1], o.x.shape[2], o.x.shape[3], o.u.shape[1] / 9,
                              stride_, top_, left_, o.out[2], o.out[3]};
    if (o.out[1] != shape.channels || o.u.shape[1] != 9 * shape.group || stride_ > 2 || left_ > shape.reach() ||
        narrow::kernel(shape, 1) == nullptr)
      unfit();
    float* y = ort::output(context, o.out);
    const narrow::Epilogue epilogue{o.bias.data, o.sum.data, activation_};
    const long bands = narrow::bands(shape, threads_);
    ort::parallel(context, shape.batch * shape.blocks() * bands, [&](size_t index) {
      narrow::part(shape, bands, o.x.data, o.u.data, epilogue, y, static_cast<long>(index));
    });
  }
};

class ConvChain {
 public:
  explicit ConvChain(const ort::Info* info) : threads_(ort::integer(info, "threads")) {}

  void compute(ort::Context* context) const {
    const ort::Tensor x = ort::input(context, 0), p = ort::input(context, 1), w = ort::input(context, 2);
    if (x.shape.size() != 4 || p.shape.size() != 2 || p.shape[0] < 1 || p.shape[1] != chain::kFields ||
        w.shape.size() != 1)
      throw std::invalid_argument("X has 4 dimensions, P has 2, W has 1");
    const long images = x.shape[0], height = x.shape[2], width = x.shape[3];
    chain::Chain chain(p.data, p.shape[0], w.data, w.shape[0], height, width);
    if (x.shape[1] != chain.channels() || height < 1 || width < 1)
      throw std::invalid_argument("the shapes of a ConvChain do not fit each other");
    float* y = ort::output(context, {images, chain.filters(), height, width});
    if (images == 0) return;
    const long tiles = chain.cut(images, threads_), area = height * width;
    ort::parallel(context, images * tiles, [&](size_t index) {
      const long image = static_cast<long>(index) / tiles;
      chain.tile(x.data + image * chain.channels() * area, y + image * chain.filters() * area,
                 static_cast<long>(index) % tiles);
    });
  }

 private:
  long threads_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  static const ort::Operator<WinogradConv, 5, 2> winograd_conv("WinogradConv");
  static const ort::Operator<NarrowConv, 4, 2> narrow_conv("NarrowConv");
  static const ort::Operator<ConvChain, 3, 3> conv_chain("ConvChain");
  return ort::add(options, base, "ampopt", {&winograd_conv, &narrow_conv, &conv_chain});
}
