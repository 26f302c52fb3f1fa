// Operators of the domain "ampopt" for ONNX Runtime's CPU sessions.
//
// WinogradConv(X, U, bias?, sum?): a 3x3 convolution with stride 1 on tensors in blocks of channels, see
// winograd.h. U has the shape [filters, positions * channels], with 16 positions for tiles of 2x2 and 36 for
// tiles of 4x4. Attributes: pad_top, pad_left, pad_bottom, pad_right, activation with alpha and beta, and the
// number of threads among which to divide the work.
#include <stdexcept>

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
        activation_(static_cast<winograd::Activation>(ort::integer(info, "activation"))),
        alpha_(ort::number(info, "alpha")),
        beta_(ort::number(info, "beta")) {}

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
    const winograd::Epilogue epilogue{bias.data, sum.data, activation_, alpha_, beta_};
    const winograd::Plan plan = winograd::plan(shape, threads_);
    ort::parallel(context, plan.parts(), [&](size_t index) {
      winograd::part(shape, plan, x.data, u.data, epilogue, y, static_cast<long>(index));
    });
  }

 private:
  long top_, left_, bottom_, right_, threads_;
  winograd::Activation activation_;
  float alpha_, beta_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(
    ort::SessionOptions* options, const ort::ApiBase* base) {
  static const ort::Operator<WinogradConv, 4, 2> winograd_conv("WinogradConv");
  return ort::add(options, base, "ampopt", {&winograd_conv});
}
