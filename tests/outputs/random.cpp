// Random chains with all ops. Most of them can be planned.
#include <algorithm>
#include <array>

#include "outputs/chains.h"
#include "outputs/hash.h"

namespace tenon::test {
namespace {

constexpr std::array<int64_t, 18> kWidths{1,  2,  3,  6,  8,  15, 16, 24,  32,
                                          33, 40, 48, 64, 66, 96, 97, 128, 160};
constexpr std::array<int64_t, 7> kRows{1, 2, 7, 24, 37, 64, 130};

constexpr std::array kUnary{
    "gelu",
    "gelu_erf",
    "silu",
    "qgelu",
    "relu",
    "srelu",
    "sigmoid",
    "tanh",
    "softplus",
    "mish",
    "hardswish",
    "leaky_relu(slope=0.25",
    "elu(alpha=0.5",
    "act(\"x*sigmoid(1.5*x) + 0.1*tanh(x)\"",
    "act(\"select(x > 0.5, x*x, exp(min(x, 1)) - 1)\"",
};
constexpr std::array kGated{
    "glu",
    "geglu",
    "geglu_erf",
    "swiglu",
    "reglu",
    "qgeglu",
    "sreglu",
    "clamped_swiglu(limit=2",
    "situglu(beta1=3",
    "act(\"gated(softplus)\"",
    "act(\"tanh(a)*b + 0.5*a\"",
};
constexpr std::array kScaledUnary{"act(\"scaled(gelu)\"", "act(\"scaled(relu)\"",
                                  "act(\"scaled(x*tanh(x))\""};
constexpr std::array kScaledGated{"act(\"scaled(swiglu)\"", "act(\"scaled(gated(elu))\""};

class Generator {
 public:
  explicit Generator(uint64_t seed) : draw_(seed) {}

  ChainCase make() {
    ChainCase c;
    rows_ = draw_.any(kRows);
    c.rows = {rows_};
    cols_ = c.request.cols = draw_.any(kWidths);
    const uint64_t length = 1 + draw_.below(7);
    for (uint64_t i = 0; i < length; ++i) add_op();
    if (!channel_.empty()) close_channel();
    c.chain = text_;
    c.specials = !products_;
    request(c.request);
    return c;
  }

 private:
  void add(const std::string& op) { text_ += (text_.empty() ? "" : " ") + op; }

  void add_op() {
    switch (draw_.below(20)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return linear(draw_.any(kWidths));
      case 4:
      case 5:
        return parameters(1, "bias");
      case 6:
      case 7:
      case 8:
        return cols_ % 2 == 0 ? gated() : activation(kUnary, kScaledUnary, "");
      case 9:
      case 10:
        return activation(kUnary, kScaledUnary, "");
      case 11:
        return add(draw_.any(std::array{"scale(0.5)", "scale(-1.7)", "scale(3)"}));
      case 12:
        return add(draw_.any(std::array{"dropout(0.1)", "dropout(0.5)", "dropout(0)"}));
      case 13:
        ++extras_;
        return add("add");
      case 14:
        return channel_.empty() ? open_channel() : close_channel();
      case 15:
        return add("make_extra_output");
      case 16:
      case 17:
        return norm();
      case 18:
        return add(draw_.any(std::array{"quantize", "identity", "twice", "all_reduce", "all_gather",
                                        "reduce_scatter"}));
      default:
        return reshape();
    }
  }

  void linear(int64_t out) {
    const std::string in = draw_.one_in(3) ? "out=" : std::to_string(cols_) + ",";
    cols_ = out;
    products_ = true;
    parameters(1, "linear(" + in + std::to_string(out) + ")");
  }

  void parameters(size_t count, const std::string& op) {
    parameters_ += count;
    add(op);
  }

  // The lists contain ops without their closing parenthesis, or names.
  template <class Plain, class Scaled>
  void activation(const Plain& plain, const Scaled& scaled, const std::string& layout) {
    const bool with_scale = draw_.one_in(5);
    std::string open = with_scale ? std::string(draw_.any(scaled)) : std::string(draw_.any(plain));
    extras_ += with_scale;
    std::vector<std::string> more;
    if (!layout.empty()) more.push_back("layout=" + layout);
    if (draw_.one_in(4))
      more.push_back(std::string("keep=") + draw_.any(std::array{"input", "fp8", "recompute"}));
    bool bracket = open.find('(') != std::string::npos;
    for (const std::string& m : more) {
      open += (bracket ? "," : "(") + m;
      bracket = true;
    }
    add(open + (bracket ? ")" : ""));
  }

  void gated() {
    cols_ /= 2;
    const int64_t k = draw_.any(std::array<int64_t, 5>{1, 2, 3, 8, 16});
    const std::string interleaved =
        "\"interleaved(" + std::to_string(cols_ % k == 0 || draw_.one_in(8) ? k : 1) + ")\"";
    const std::array<std::string, 4> layouts{"", "stacked", "swapped", interleaved};
    activation(kGated, kScaledGated, draw_.any(layouts));
  }

  void norm() {
    const std::array<const char*, 4> arguments{"", "(eps=1e-3)", "(zero_centered_gamma=true)",
                                               "(eps=1e-6,zero_centered_gamma=true)"};
    switch (draw_.below(3)) {
      case 0:
        return parameters(2, std::string("layernorm") + draw_.any(arguments));
      case 1:
        return parameters(1, std::string("rmsnorm") + draw_.any(arguments));
      default:
        return add(draw_.one_in(2) ? "l2norm" : "l2norm(eps=1e-4)");
    }
  }

  void open_channel() {
    channel_ = "r" + std::to_string(channels_++);
    channel_cols_ = cols_;
    channel_rows_ = rows_;
    add("make_extra_output>" + channel_);
  }

  void close_channel() {
    if (rows_ != channel_rows_) {
      cols_ = rows_ * cols_ / channel_rows_;
      rows_ = channel_rows_;
      add("reshape(" + std::to_string(std::max<int64_t>(cols_, 1)) + ")");
    }
    if (cols_ != channel_cols_) linear(channel_cols_);
    add("add<" + channel_);
    channel_.clear();
  }

  void reshape() {
    const int64_t wide = cols_ * 2;
    const int64_t to = cols_ % 2 == 0 && draw_.one_in(2)   ? cols_ / 2
                       : rows_ % 2 == 0 || draw_.one_in(8) ? wide
                                                           : cols_;
    rows_ = rows_ * cols_ / to;
    cols_ = to;
    add("reshape(" + std::to_string(to) + ")");
  }

  std::vector<GradRequest> grads(size_t count, DType dtype, bool accumulates) {
    std::vector<GradRequest> list(draw_.one_in(2) ? 0 : count);
    for (GradRequest& g : list) {
      g.wanted = !draw_.one_in(4);
      if (draw_.one_in(3)) g.dtype = draw_.one_in(3) ? dtype : DType::f32;
      g.accumulate = accumulates && draw_.one_in(3);
    }
    return list;
  }

  void request(PlanRequest& r) {
    constexpr std::array kPlain{DType::f32, DType::bf16, DType::f16};
    r.dtype = draw_.any(kPlain);
    if (draw_.one_in(5)) r.parameter_dtype = draw_.any(kPlain);
    r.training = !draw_.one_in(8);
    r.backward = !draw_.one_in(10);
    r.input_grad = !draw_.one_in(5);
    r.parameter_grads = grads(parameters_, r.dtype, true);
    // The gradient of the scale column of a scaled op cannot be accumulated.
    r.extra_grads = grads(extras_, r.dtype, text_.find("scaled(") == std::string::npos);
  }

  Draw draw_;
  std::string text_;
  int64_t rows_ = 0, cols_ = 0;  // of the value after the last op
  size_t parameters_ = 0, extras_ = 0;
  bool products_ = false;
  std::string channel_;  // written and not read
  int64_t channel_cols_ = 0, channel_rows_ = 0;
  int channels_ = 0;
};

}  // namespace

std::vector<ChainCase> random_chains(size_t count, uint64_t seed) {
  std::vector<ChainCase> list;
  for (size_t i = 0; i < count; ++i) {
    list.push_back(Generator(seed + i).make());
    list.back().name = std::to_string(i) + " " + list.back().chain;
  }
  return list;
}

}  // namespace tenon::test
