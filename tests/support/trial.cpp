// Fills matrices, makes the calls of a case, and checks the steps with an observer.
#include "support/trial.h"

#include <cmath>

#include "runtime/execute.h"

namespace tenon::support {

namespace {

constexpr size_t kNonfinite = 3;  // the first special values
constexpr std::array<float, 20> kSpecial{__builtin_inff(),
                                         -__builtin_inff(),
                                         __builtin_nanf(""),
                                         0.0F,
                                         -0.0F,
                                         1.0F,
                                         -1.0F,
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

DType dtype_of(const std::string& number) {
  return *dtype_named(number.substr(0, number.find('+')));
}

// A seed from the columns that determine what a kernel reads and writes.
uint64_t form_seed(const Case& c) {
  std::string text;
  for (const Column column : {Column::direction, Column::input, Column::output, Column::mode,
                              Column::orientation, Column::bias, Column::rounding})
    text += c[column] + " ";
  return std::hash<std::string>{}(text);
}

Layout layout_of(const std::string& text) {
  if (text == "swapped") return Layout::swapped();
  if (text.starts_with("interleaved(")) return Layout::interleaved(std::atoll(text.c_str() + 12));
  return {};
}

}  // namespace

Trial::Trial(const Case& c, Device device)
    : case_(c),
      device_(device),
      shape_(parse_shape(c[Column::shape])),
      random_(std::hash<std::string>{}(c.text())),
      form_(form_seed(c)),
      backward_(c[Column::direction] == "bwd"),
      finite_(c[Column::mode] != "none" && random_() % 2 == 0) {
  options_.device = device;
  if (device == Device::cuda) options_.stream = DeviceMemory::stream().get();
  options_.precision = c[Column::precision] == "strict" ? Precision::strict : Precision::native;
  options_.rounding = c[Column::rounding] == "eager" ? Rounding::eager : Rounding::once;
}

std::optional<std::string> Trial::run(const Inspect& inspect) {
  set_observer([&](const Step& s, const RunArgs& a, const Options&, const Run& go) {
    observe(s, a, go, inspect);
  });
  call();
  if (!wrong_ && steps_ == 0) wrong_ = "no step was executed";
  for (const Matrix& m : matrices_)
    if (!wrong_ && !m.guards_hold()) wrong_ = "bytes outside of a view were written";
  return wrong_;
}

std::vector<std::string> Trial::cuda_texts() {
  options_.device = Device::cuda;
  std::vector<std::string> all;
  set_observer([&](const Step& s, const RunArgs& a, const Options&, const Run&) {
    for (std::string& text : kernel_for(s, Device::cuda).kernel->texts_for(a))
      all.push_back(std::move(text));
    // Stop here: the next operation advances the state, which is not on the device.
    if (a.random) fail(Code::runtime, "a trial of texts runs nothing");
  });
  call();
  return all;
}

void Trial::call() {
  const std::string& op = case_[Column::op];
  try {
    if (op == "l2normalization")
      run_l2();
    else if (op.find("quantize") != std::string::npos)
      run_quantize();
    else if (op.starts_with("bias_dropout_add"))
      run_dropout();
    else
      run_activation();
  } catch (const Error& e) {
    wrong_ = e.what();
  }
  set_observer({});
}

Matrix& Trial::add(DType dtype, int64_t rows, int64_t cols) {
  return matrices_.emplace_back(dtype, rows, cols, shape_, device_ == Device::cuda);
}

// Ordinary values, with special values in some columns (or rows, for a column vector). So the sums
// of other columns stay finite.
View Trial::filled(DType dtype, int64_t rows, int64_t cols) {
  Matrix& m = add(dtype, rows, cols);
  if (options_.device != device_) return m.placed();  // never read
  std::normal_distribution<float> normal(0, 2);
  std::uniform_real_distribution<float> exponent(-30, 4);
  const size_t skipped = finite_ ? kNonfinite : 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < cols; ++c) {
      const bool special = cols == 1 ? r % 11 == 7 : c % 7 == 3;
      float value = random_() % 4 ? normal(random_)
                                  : std::exp2(exponent(random_)) * (random_() % 2 ? 1.F : -1.F);
      if (special) value = kSpecial[skipped + random_() % (kSpecial.size() - skipped)];
      m.set(r, c, value);
    }
  m.upload();
  return m.placed();
}

View Trial::empty(DType dtype, int64_t rows, int64_t cols) {
  Matrix& m = add(dtype, rows, cols);
  m.upload();
  return m.placed();
}

void Trial::download() const {
  for (const Matrix& m : matrices_) m.download();
  if (device_ == Device::cuda) DeviceMemory::stream().wait();
}

View Trial::single(float value) {
  Matrix& m = matrices_.emplace_back(DType::f32, 1, 1, ShapeCase{}, device_ == Device::cuda);
  m.set(0, 0, value);
  m.upload();
  return m.placed();
}

Tensor Trial::output(int64_t rows, int64_t cols) {
  return encoded(case_[Column::output], case_[Column::mode], case_[Column::orientation], rows,
                 cols);
}

Tensor Trial::encoded(const std::string& number, const std::string& mode, const std::string& side,
                      int64_t rows, int64_t cols) {
  Format f{.dtype = dtype_of(number), .scaling = *scaling_named(mode)};
  if (number.ends_with("+swizzled")) f.swizzled = true;
  if (number.ends_with("+pow2")) f.power_of_two = true;
  if (number.ends_with("+exact")) f.power_of_two = false, f.eps = 0.01F;
  const bool wanted[2] = {side != "col", side != "row"};
  Encoding e[2];
  for (const Orientation o : kOrientations) {
    const auto i = static_cast<size_t>(o);
    if (!wanted[i]) continue;
    const Shape data = f.data_shape(rows, cols, o);
    e[i].data = empty(f.dtype, data.rows, data.cols);
    const Shape scale = f.scale_shape(rows, cols, o);
    if (f.scaling == Scaling::none) continue;
    const bool whole = f.swizzled || f.blocks(o).single();
    const ShapeCase placed{.pad = whole ? 0 : shape_.pad, .shift = shape_.shift};
    Matrix& m = matrices_.emplace_back(info(f.scaling).scale, scale.rows, scale.cols, placed,
                                       device_ == Device::cuda);
    m.upload();
    e[i].scale_inv = m.placed();
  }
  Tensor t(f, e[0], e[1]);
  constexpr std::array<float, 6> kScales{1.0F, 0.5F, 3.7F, 1e-3F, 0x1p20F, 0x1p-30F};
  if (info(f.scaling).scale_given) {
    t.scale = single(kScales[random_() % kScales.size()]);
    t.amax = single(0.25F);
  } else if (info(f.scaling).reads_amax() && options_.device == Device::cuda) {
    t.amax = single(0.25F);
  }
  const bool counts = backward_ && !case_[Column::bias].starts_with("bias");
  if (f.scaling != Scaling::none && counts) t.health = empty(DType::f32, 1, 3);
  return t;
}

// Values in a mode and orientation chosen by the case's form.
Tensor Trial::encoded_input(DType dtype, int64_t rows, int64_t cols) {
  const auto mode = static_cast<Scaling>(1 + form_() % (kScalings.size() - 1));
  const std::string side = form_() % 2 ? "row" : "col";
  Tensor t = encoded(std::string(info(dtype).name), std::string(info(mode).name), side, rows, cols);
  quantize(filled(DType::f32, rows, cols), t, options_);
  t.scale = t.amax = t.health = {};  // only for the call that writes
  return t;
}

void Trial::run_activation() {
  const Activation f = activation(case_[Column::op]);
  const std::string& bias_case = case_[Column::bias];
  const bool has_bias = bias_case.starts_with("bias");
  const bool has_dbias = bias_case.find("dbias") != std::string::npos;
  const bool separate = case_[Column::layout] == "separate";
  const Layout layout = layout_of(case_[Column::layout]);
  const DType number = dtype_of(case_[Column::input]);
  const bool encodes = !info(number).plain;
  const DType input = encodes ? DType::f32 : number;
  const auto tensor = [&](int64_t m, int64_t k) {
    return encodes ? encoded_input(number, m, k) : Tensor(filled(input, m, k));
  };
  const int64_t rows = shape_.rows;
  const int64_t all = shape_.cols * f.inputs;
  const int64_t cols = separate ? shape_.cols : all;

  const Tensor x = tensor(rows, cols);
  const Tensor b = separate ? tensor(rows, cols) : Tensor{};
  const View bias = has_bias ? filled(input, 1, all) : View{};
  const View scale = f.scaled ? filled(input, rows, 1) : View{};
  const View amax = single(0);
  if (!backward_) {
    const Tensor y = output(rows, shape_.cols);
    return forward(f, {x, b, bias, scale, y, amax, layout}, options_);
  }
  const Tensor grad = tensor(rows, shape_.cols);
  // Sums have their own dtype: that of the output if it is plain.
  const DType sum = dtype_of(case_[Column::output]);
  backward(f,
           {.grad = grad,
            .x = x,
            .b = b,
            .bias = bias,
            .scale = scale,
            .dx = output(rows, cols),
            .db = separate ? output(rows, cols) : Tensor{},
            .dbias = has_dbias ? empty(info(sum).plain ? sum : input, 1, all) : View{},
            .dscale = f.scaled ? empty(input, rows, 1) : View{},
            .amax = amax,
            .layout = layout},
           options_);
}

void Trial::run_l2() {
  const DType input = dtype_of(case_[Column::input]);
  const DType result = dtype_of(case_[Column::output]);
  const View x = filled(input, shape_.rows, shape_.cols);
  const View y = empty(result, shape_.rows, shape_.cols);
  const View r = empty(DType::f32, shape_.rows, 1);
  l2_normalization(x, y, r, 1e-6F, options_);
  if (!backward_) return;
  const View grad = filled(input, shape_.rows, shape_.cols);
  l2_normalization_backward(grad, x, r, empty(result, shape_.rows, shape_.cols), options_);
}

// quantize, dequantize and requantize(mode). The last two read the result of a first call.
void Trial::run_quantize() {
  const std::string& op = case_[Column::op];
  const auto [rows, cols, pad, shift] = shape_;
  const std::string& number = case_[Column::input];
  if (op == "quantize") {
    const View x = filled(dtype_of(number), rows, cols);
    const View dbias = backward_ ? empty(DType::f32, 1, cols) : View{};
    return quantize({.x = x, .y = output(rows, cols), .dbias = dbias, .amax = single(0)}, options_);
  }
  const bool decode_only = op == "dequantize";
  const std::string mode =
      decode_only ? case_[Column::mode] : op.substr(op.find('(') + 1, op.size() - op.find('(') - 2);
  const Tensor source = encoded(number, mode, case_[Column::orientation], rows, cols);
  quantize(filled(DType::f32, rows, cols), source, options_);
  quantize(
      source,
      decode_only ? Tensor(empty(dtype_of(case_[Column::output]), rows, cols)) : output(rows, cols),
      options_);
}

void Trial::run_dropout() {
  constexpr std::array<double, 5> kP{0.0, 0.1, 0.5, 0.9, 1.0};
  const auto [rows, cols, pad, shift] = shape_;
  const DType input = dtype_of(case_[Column::input]);
  const DType result = dtype_of(case_[Column::output]);
  const double p = kP[random_() % kP.size()];
  const bool training = !case_[Column::op].ends_with("(inference)");
  const bool with_bias = case_[Column::bias] != "-";
  Random state{.seed = random_(),
               .offset = random_() % 1000,
               .row0 = random_() % 7,
               .col0 = random_() % 7,
               .columns = static_cast<uint64_t>(cols) + 9};
  // Memory in which the device can advance the state.
  Matrix& memory = matrices_.emplace_back(DType::f32, 1, sizeof state / sizeof(float), ShapeCase{},
                                          device_ == Device::cuda);
  std::memcpy(memory.view.data, &state, sizeof state);
  memory.upload();
  auto* const random = static_cast<Random*>(memory.placed().data);
  const View g = filled(input, rows, cols);
  if (backward_)
    bias_dropout_add_backward({.grad = g,
                               .dx = empty(result, rows, cols),
                               .dbias = with_bias ? empty(result, 1, cols) : View{},
                               .dresidual = empty(result, rows, cols),
                               .p = p,
                               .training = training,
                               .random = random},
                              options_);
  else
    bias_dropout_add({.x = g,
                      .bias = with_bias ? filled(input, 1, cols) : View{},
                      .residual = filled(input, rows, cols),
                      .y = empty(result, rows, cols),
                      .p = p,
                      .training = training,
                      .random = random},
                     options_);
  download();
  state.offset += !backward_ && training ? 1 : 0;
  if (!wrong_ && std::memcmp(memory.view.data, &state, sizeof state) != 0)
    wrong_ = "the random state is not what a run leaves";
}

// Host views of the tensors of a step. Memory outside of our matrices is used directly.
std::vector<View> Trial::on_host(std::span<const View> views,
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

void Trial::observe(const Step& step, const RunArgs& args, const Run& go, const Inspect& inspect) {
  ++steps_;
  std::vector<std::vector<uint8_t>> before;
  for (const Matrix& m : matrices_) before.emplace_back(m.bytes.begin(), m.bytes.end());
  const std::vector<View> in = on_host(args.in, before);
  go();
  download();
  std::vector<std::vector<uint8_t>> after;
  for (const Matrix& m : matrices_) after.emplace_back(m.bytes.begin(), m.bytes.end());
  const std::vector<View> out = on_host(args.out, after);
  RunArgs host = args;
  host.in = in;
  host.out = out;
  if (args.random) host.random = random_state(args.random, before);
  if (!wrong_) wrong_ = inspect(step, host);
  if (!wrong_ && device_ == Device::cuda && step.strict_bits())
    compare_with_cpu(step, host, before, args);
}

// The random state in memory that the host can read.
const uint64_t* Trial::random_state(const uint64_t* state,
                                    std::vector<std::vector<uint8_t>>& copies) const {
  const View there = matrix(state, DType::f32, 1, 1);
  return static_cast<const uint64_t*>(on_host(std::span(&there, 1), copies)[0].data);
}

// Strict: the bits must equal those of the CPU. All NaNs are equal.
void Trial::compare_with_cpu(const Step& step, const RunArgs& host,
                             std::vector<std::vector<uint8_t>> copies, const RunArgs& args) {
  const std::vector<View> out = on_host(args.out, copies);
  const Chosen cpu = kernel_for(step, Device::cpu);
  constexpr size_t kAlignment = 64;
  std::vector<char> memory(cpu.kernel->workspace(args.rows) + kAlignment);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  RunArgs again = host;
  again.out = out;
  again.workspace = memory.data() + (kAlignment - address % kAlignment) % kAlignment;
  cpu.kernel->run(again);
  for (size_t i = 0; i < matrices_.size(); ++i) compare(matrices_[i], copies[i]);
}

void Trial::compare(const Matrix& m, const std::vector<uint8_t>& cpu) {
  if (wrong_ || std::ranges::equal(m.bytes, cpu)) return;
  View other = m.view;
  other.data = const_cast<uint8_t*>(cpu.data()) + m.offset();
  const auto size = static_cast<size_t>(info(other.dtype).bytes);
  for (int64_t r = 0; r < other.rows; ++r)
    for (int64_t c = 0; c < other.cols; ++c) {
      uint32_t a = 0;
      uint32_t b = 0;
      std::memcpy(&a, Matrix::element(m.view, r, c), size);
      std::memcpy(&b, Matrix::element(other, r, c), size);
      const bool nans = std::isnan(decode(other.dtype, a)) && std::isnan(decode(other.dtype, b));
      if (a == b || (nans && info(other.dtype).plain) || wrong_) continue;
      wrong_ = str(info(other.dtype).name, " (", r, ", ", c, ") of ", other.rows, "x", other.cols,
                   ": cuda code ", a, ", cpu code ", b);
    }
}

}  // namespace tenon::support
