// Operators of the domain "ampopt" for ONNX Runtime's CPU sessions.
//
// WinogradConv(X, U, bias?, sum?): a 3x3 convolution with stride 1 on tensors in blocks of channels, see
// winograd.h. U has the shape [filters, positions * channels], with 16 positions for tiles of 2x2 and 36 for
// tiles of 4x4. Attributes: pad_top, pad_left, pad_bottom, pad_right, activation with alpha and beta, and the
// number of threads among which to divide the work.
//
// ConvChain(X, P, W): convolutions with stride 1 one after another, see chain.h. P describes the steps, a row
// of numbers each, and W has their weights. Attribute: threads, as above.
#include <stdexcept>

#include "chain.h"
#include "onnx_abi.h"
#include "winograd.h"

namespace {

class WinogradConv {
 public:
  explicit WinogradConv(const ort::Info* info)
      : top_(ort::integer(info, "pad_top")),
        left_(ort::integer(info, "pad_left")),
        bottom_(ort::integer(info, "pad_bottom")),
        right_(ort::integer(info, "pad_right")),
        threads_(ort::integer(info, "threads")),
        activation_{static_cast<vectors::Kind>(ort::integer(info, "activation")), ort::number(info, "alpha"),
                    ort::number(info, "beta")} {}

  void compute(ort::Context* context) const {
    const ort::Tensor x = ort::input(context, 0), u = ort::input(context, 1);
    const ort::Tensor bias = ort::input(context, 2), sum = ort::input(context, 3);
    if (x.shape.size() != 4 || u.shape.size() != 2) throw std::invalid_argument("X has 4 dimensions, U 2");
    const winograd::Shape shape{x.shape[0], x.shape[1], x.shape[2], x.shape[3],
                                u.shape[0], top_, left_,
                                x.shape[2] + top_ + bottom_ - 2, x.shape[3] + left_ + right_ - 2,
                                u.shape[1] == 36 * x.shape[1] ? 4 : 2};
    const std::vector<int64_t> out{shape.batch, shape.filters, shape.out_height, shape.out_width};
    if (u.shape[1] != shape.positions() * shape.channels || shape.channels % BLOCK ||
        shape.filters % BLOCK || shape.out_height < 1 || shape.out_width < 1 ||
        (bias.data && bias.shape != std::vector<int64_t>{shape.filters}) || (sum.data && sum.shape != out))
      throw std::invalid_argument("the shapes of a WinogradConv do not fit each other");
    float* y = ort::output(context, out);
    const winograd::Epilogue epilogue{bias.data, sum.data, activation_};
    const winograd::Plan plan = winograd::plan(shape, threads_);
    ort::parallel(context, plan.parts(), [&](size_t index) {
      winograd::part(shape, plan, x.data, u.data, epilogue, y, static_cast<long>(index));
    });
  }

 private:
  long top_, left_, bottom_, right_, threads_;
  vectors::Activation activation_;
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
  static const ort::Operator<WinogradConv, 4, 2> winograd_conv("WinogradConv");
  static const ort::Operator<ConvChain, 3, 3> conv_chain("ConvChain");
  return ort::add(options, base, "ampopt", {&winograd_conv, &conv_chain});
}
