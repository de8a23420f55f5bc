// `tenon check`: runs the cases through the public calls and looks at every step from outside.
#include <fmt/core.h>

#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>

#include "backend/cuda/driver.h"
#include "backend/cuda/map.h"
#include "backend/cuda/nvrtc.h"
#include "cli/cases.h"
#include "cli/commands.h"
#include "cli/progress.h"
#include "plan/execute.h"
#include "step/verify.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

namespace {

constexpr uint8_t kPoison = 0xA5;

// A matrix between guard bytes, on the host and, for CUDA, on the device.
class Matrix {
 public:
  Matrix(DType dtype, int64_t rows, int64_t cols, const ShapeCase& shape, bool device) {
    const int64_t stride = shape.strided ? cols + 3 : cols;
    const size_t offset = shape.unaligned ? 64 + 1 : 64;
    const auto size = static_cast<size_t>(rows * stride * info(dtype).bytes);
    bytes.assign(offset + size + 64, kPoison);
    view = matrix(bytes.data() + offset, dtype, rows, cols, stride);
    if (device) buffer = std::make_unique<cuda::DeviceBuffer>(bytes.size());
  }

  void set(int64_t r, int64_t c, float value) {
    const uint32_t code = encode(view.dtype, value);
    std::memcpy(element(view, r, c), &code, static_cast<size_t>(info(view.dtype).bytes));
  }

  // The view that the call gets.
  [[nodiscard]] View placed() const {
    View v = view;
    if (buffer) v.data = static_cast<char*>(buffer->data()) + offset();
    return v;
  }
  void upload() const {
    if (buffer) buffer->from_host(bytes.data());
  }
  void download() {
    if (buffer) buffer->to_host(bytes.data());
  }

  // Whether `v` lies in this matrix; then the same place in `copy`.
  [[nodiscard]] std::optional<View> translated(const View& v, std::vector<uint8_t>& copy) const {
    const char* base = buffer ? static_cast<const char*>(buffer->data())
                              : reinterpret_cast<const char*>(bytes.data());
    const auto* data = static_cast<const char*>(v.data);
    if (data < base || data >= base + bytes.size()) return std::nullopt;
    View result = v;
    result.data = copy.data() + (data - base);
    return result;
  }

  static void* element(const View& v, int64_t r, int64_t c) {
    return static_cast<char*>(v.data) + (r * v.stride + c) * info(v.dtype).bytes;
  }
  [[nodiscard]] size_t offset() const {
    return static_cast<size_t>(static_cast<const uint8_t*>(view.data) - bytes.data());
  }

  // True if the bytes around the elements still hold what they held.
  [[nodiscard]] bool guards_hold() const {
    std::vector<uint8_t> copy = bytes;
    const View inner = [&] {
      View v = view;
      v.data = copy.data() + offset();
      return v;
    }();
    for (int64_t r = 0; r < view.rows; ++r)
      std::memset(element(inner, r, 0), kPoison,
                  static_cast<size_t>(view.cols * info(view.dtype).bytes));
    return std::ranges::all_of(copy, [](uint8_t b) { return b == kPoison; });
  }

  std::vector<uint8_t> bytes;
  View view;
  std::unique_ptr<cuda::DeviceBuffer> buffer;
};

constexpr std::array<float, 20> kSpecial{0.0F,
                                         -0.0F,
                                         1.0F,
                                         -1.0F,
                                         __builtin_inff(),
                                         -__builtin_inff(),
                                         __builtin_nanf(""),
                                         0x1p-149F,
                                         -0x1p-149F,
                                         0x1p-127F,
                                         0x1p-24F,
                                         0x1.fffffep127F,
                                         -0x1.fffffep127F,
                                         7.0F,
                                         -7.0F,
                                         3.0F,
                                         -3.0F,
                                         20.0F,
                                         -87.5F,
                                         65504.0F};

// One case: its matrices, the call, and what an observer found.
class Trial {
 public:
  Trial(const Case& c, Device device)
      : case_(c),
        device_(device),
        shape_(parse_shape(c[Column::shape])),
        random_(std::hash<std::string>{}(c.text())) {
    options_.device = device;
    options_.precision = c[Column::precision] == "strict" ? Precision::strict : Precision::native;
    options_.rounding = c[Column::rounding] == "eager" ? Rounding::eager : Rounding::once;
    input_ = *dtype_named(c[Column::input]);
    output_ = *dtype_named(c[Column::output]);
    backward_ = c[Column::direction] == "bwd";
  }

  // Nothing if the case passes.
  std::optional<std::string> run() {
    call([this](const Step& s, const RunArgs& a, const Options& o,
                const std::function<void()>& go) { observe(s, a, o, go); });
    if (!wrong_ && steps_ == 0) wrong_ = "no step was executed";
    for (const Matrix& m : matrices_)
      if (!wrong_ && !m.guards_hold()) wrong_ = "bytes outside of a view were written";
    return wrong_;
  }

  // The case's kernels compiled for CUDA and not run; the views stay on the host.
  std::optional<std::string> compile_for(const std::string& arch) {
    options_.device = Device::cuda;
    call([&](const Step& s, const RunArgs&, const Options&, const std::function<void()>&) {
      cuda::compile(cuda::map_source(s), arch);
      ++steps_;
    });
    if (!wrong_ && steps_ == 0) wrong_ = "no step was compiled";
    return wrong_;
  }

 private:
  void call(const Observer& observer) {
    set_observer(observer);
    try {
      if (case_[Column::op] == "l2normalization")
        run_l2();
      else
        run_activation();
    } catch (const Error& e) {
      wrong_ = e.what();
    }
    set_observer({});
  }

  Matrix& add(DType dtype, int64_t rows, int64_t cols) {
    return matrices_.emplace_back(dtype, rows, cols, shape_, device_ == Device::cuda);
  }

  // Ordinary numbers, with special values in some columns (or rows, for a column vector), so that
  // other sums stay finite.
  View filled(DType dtype, int64_t rows, int64_t cols) {
    Matrix& m = add(dtype, rows, cols);
    std::normal_distribution<float> normal(0, 2);
    std::uniform_real_distribution<float> exponent(-30, 4);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols; ++c) {
        const bool special = cols == 1 ? r % 11 == 7 : c % 7 == 3;
        float value = random_() % 4 ? normal(random_)
                                    : std::exp2(exponent(random_)) * (random_() % 2 ? 1.F : -1.F);
        if (special) value = kSpecial[random_() % kSpecial.size()];
        m.set(r, c, value);
      }
    m.upload();
    return m.placed();
  }

  View empty(DType dtype, int64_t rows, int64_t cols) {
    Matrix& m = add(dtype, rows, cols);
    m.upload();
    return m.placed();
  }

  void run_activation() {
    const Activation f = activation(case_[Column::op]);
    const std::string& bias_case = case_[Column::bias];
    const std::string& layout_case = case_[Column::layout];
    const bool has_bias = bias_case.starts_with("bias");
    const bool has_dbias = bias_case.find("dbias") != std::string::npos;
    const bool separate = layout_case == "separate";
    Layout layout;
    if (layout_case == "swapped") layout = Layout::swapped();
    if (layout_case.starts_with("interleaved("))
      layout = Layout::interleaved(std::atoll(layout_case.c_str() + 12));
    const int64_t rows = shape_.rows;
    const int64_t all = shape_.cols * f.inputs;
    const int64_t cols = separate ? shape_.cols : all;

    const View x = filled(input_, rows, cols);
    const View b = separate ? filled(input_, rows, cols) : View{};
    const View bias = has_bias ? filled(input_, 1, all) : View{};
    const View scale = f.scaled ? filled(input_, rows, 1) : View{};
    // An amax is a by-product that a flat map does not have.
    const bool sums = options_.device == Device::cpu;
    const View amax = sums ? single() : View{};
    if (!backward_) {
      const View y = empty(output_, rows, shape_.cols);
      return forward(f, {x, b, bias, scale, y, amax, layout}, options_);
    }
    const View grad = filled(input_, rows, shape_.cols);
    backward(f,
             {.grad = grad,
              .x = x,
              .b = b,
              .bias = bias,
              .scale = scale,
              .dx = empty(output_, rows, cols),
              .db = separate ? empty(output_, rows, cols) : View{},
              .dbias = has_dbias ? empty(output_, 1, all) : View{},
              .dscale = f.scaled && sums ? empty(input_, rows, 1) : View{},
              .amax = amax,
              .layout = layout},
             options_);
  }

  View single() {
    return matrices_.emplace_back(DType::f32, 1, 1, ShapeCase{}, device_ == Device::cuda).placed();
  }

  void run_l2() {
    const View x = filled(input_, shape_.rows, shape_.cols);
    const View y = empty(output_, shape_.rows, shape_.cols);
    const View r = empty(DType::f32, shape_.rows, 1);
    l2_normalization(x, y, r, 1e-6F, options_);
    if (!backward_) return;
    const View grad = filled(input_, shape_.rows, shape_.cols);
    l2_normalization_backward(grad, x, r, empty(output_, shape_.rows, shape_.cols), options_);
  }

  // Host views of what a step reads and writes; memory that is not ours is taken as it is.
  std::vector<View> on_host(std::span<const View> views,
                            std::vector<std::vector<uint8_t>>& copies) const {
    std::vector<View> result(views.begin(), views.end());
    for (View& v : result)
      for (size_t i = 0; i < matrices_.size(); ++i)
        if (v.data)
          if (const auto t = matrices_[i].translated(v, copies[i])) {
            v = *t;
            break;
          }
    return result;
  }

  void observe(const Step& step, const RunArgs& args, const Options& options,
               const std::function<void()>& go) {
    ++steps_;
    std::vector<std::vector<uint8_t>> before;
    for (const Matrix& m : matrices_) before.push_back(m.bytes);
    const std::vector<View> in = on_host(args.in, before);
    go();
    for (Matrix& m : matrices_) m.download();
    std::vector<std::vector<uint8_t>> after;
    for (const Matrix& m : matrices_) after.push_back(m.bytes);
    const std::vector<View> out = on_host(args.out, after);
    if (!wrong_) wrong_ = verify(step, args.rows, in, out, args.parameters);
    if (!wrong_ && options.device == Device::cuda && options.precision == Precision::strict)
      compare_with_cpu(step, args, in, out, before);
  }

  // Strict: the same bits as the CPU's, any NaN being any NaN.
  void compare_with_cpu(const Step& step, const RunArgs& args, const std::vector<View>& in,
                        const std::vector<View>& out, std::vector<std::vector<uint8_t>> copies) {
    const std::vector<View> host = on_host(args.out, copies);
    std::vector<char> workspace(kernel_for(step, Device::cpu).kernel->workspace(args.rows) + 64);
    kernel_for(step, Device::cpu)
        .kernel->run({.rows = args.rows,
                      .in = in,
                      .out = host,
                      .parameters = args.parameters,
                      .workspace = workspace.data()});
    for (const Store& s : step.stores)
      for (int64_t r = 0; r < args.rows; ++r)
        for (int64_t c = 0; c < step.cols; ++c) {
          uint32_t a = 0;
          uint32_t b = 0;
          const auto size = static_cast<size_t>(info(s.dtype).bytes);
          std::memcpy(&a, Matrix::element(out[s.arg], r, s.columns(c)), size);
          std::memcpy(&b, Matrix::element(host[s.arg], r, s.columns(c)), size);
          const float x = decode(s.dtype, a);
          const float y = decode(s.dtype, b);
          if (a == b || (x != x && y != y) || wrong_) continue;
          wrong_ = fmt::format("({}, {}): cuda {:08x}, cpu {:08x}", r, c, a, b);
        }
  }

  Case case_;
  Device device_;
  ShapeCase shape_;
  std::mt19937_64 random_;
  Options options_;
  DType input_, output_;
  bool backward_;
  std::deque<Matrix> matrices_;
  std::optional<std::string> wrong_;
  int steps_ = 0;
};

// Sums need kernels that CUDA does not have yet.
bool needs_sums(const Case& c) {
  const bool backward = c[Column::direction] == "bwd";
  return c[Column::bias].find("dbias") != std::string::npos ||
         (backward && c[Column::op].starts_with("scaled(")) || c[Column::op] == "l2normalization";
}

bool selected(const Case& c, const CheckArgs& args) {
  const std::string text = c.text();
  if (!args.precision.empty() && c[Column::precision] != args.precision) return false;
  return std::ranges::all_of(
      args.substrings, [&](const std::string& s) { return text.find(s) != std::string::npos; });
}

// Runs every chosen case, prints what failed, and returns how many passed.
template <class Run>
size_t run_all(const std::vector<Case>& chosen, Run run) {
  size_t passed = 0;
  Progress progress(chosen.size());
  for (const Case& c : chosen) {
    progress.step(c.text());
    const std::optional<std::string> wrong = run(c);
    if (wrong)
      fmt::print("FAILED {}: {}\n", c.text(), *wrong);
    else
      ++passed;
  }
  return passed;
}

// Without a GPU the texts are still compiled, for the architecture that is tested on.
int compile_only(const std::vector<Case>& chosen, const std::string& why) {
  constexpr const char* kArch = "sm_90a";
  if (const auto missing = cuda::why_no_nvrtc()) {
    fmt::print(stderr, "tenon check: nothing to run on: {}; nothing to compile with: {}\n", why,
               *missing);
    fmt::print("0 passed, 0 failed\n");
    return no_device;
  }
  const size_t compiled =
      run_all(chosen, [&](const Case& c) { return Trial(c, Device::cpu).compile_for(kArch); });
  fmt::print("{} compiled for {}, {} not; none was run: {}\n", compiled, kArch,
             chosen.size() - compiled, why);
  fmt::print("0 passed, {} failed\n", chosen.size() - compiled);
  return compiled == chosen.size() ? no_device : failed;
}

}  // namespace

int check(const CheckArgs& args) {
  const Device device = args.device == "cuda" ? Device::cuda : Device::cpu;
  std::vector<Case> chosen;
  size_t left_out = 0;
  for (Case& c : cases()) {
    if (!selected(c, args)) continue;
    if (device == Device::cuda && needs_sums(c))
      ++left_out;
    else
      chosen.push_back(std::move(c));
  }
  if (chosen.empty()) {
    fmt::print(stderr, "tenon check: no case contains all of the given substrings; see --list\n");
    return usage;
  }
  if (args.list) {
    for (const Case& c : chosen) fmt::print("{}\n", c.text());
    return ok;
  }
  if (left_out > 0)
    fmt::print(stderr, "{} cases with sums are left out: cuda has the flat map only\n", left_out);
  if (device == Device::cuda)
    if (const auto why = cuda::why_no_gpu()) return compile_only(chosen, *why);
  const size_t passed = run_all(chosen, [&](const Case& c) { return Trial(c, device).run(); });
  fmt::print("{} passed, {} failed\n", passed, chosen.size() - passed);
  return passed == chosen.size() ? ok : failed;
}

}  // namespace tenon::cli
