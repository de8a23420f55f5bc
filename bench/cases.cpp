// Builds the cases from public calls and norm steps. An observer records the steps instead of
// running them.
#include "bench/cases.h"

#include <algorithm>
#include <set>
#include <sstream>

#include "api/encoding.h"
#include "lower/single_dropout.h"
#include "lower/single_norm.h"
#include "runtime/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::bench {

namespace {

constexpr uintptr_t kNowhere = uintptr_t{1} << 44;  // far from all mapped memory
constexpr uintptr_t kFar = uintptr_t{1} << 42;
constexpr size_t kAlignment = 256;

View placed(char* base, size_t& used, DType dtype, int64_t rows, int64_t cols, int64_t stride) {
  View v{base + used, dtype, rows, cols, stride};
  used += static_cast<size_t>(rup(rows * stride * info(dtype).bytes, kAlignment));
  return v;
}

// The inputs of a call.
struct Call {
  const BenchCase& c;
  Shape shape;  // of the result of a forward call
  DType dtype;
  const Options& options;
  BenchMemory& memory;

  [[nodiscard]] View in(int64_t rows, int64_t cols) const { return memory.in(dtype, rows, cols); }
  [[nodiscard]] View out(int64_t rows, int64_t cols) const {
    return memory.out(dtype, {rows, cols});
  }

  // The result in the format of the case.
  [[nodiscard]] Tensor result(int64_t rows, int64_t cols) const {
    const Format& f = c.out;
    if (f.scaling == Scaling::none) return out(rows, cols);
    constexpr int64_t kPitch = 16;  // stride of transposed rows, as matrix units need it
    const auto encoding = [&](Orientation o) {
      const Shape data = f.data_shape(rows, cols, o);
      const Shape scale = f.scale_shape(rows, cols, o);
      return Encoding{memory.out(f.dtype, data,
                                 data == Shape{rows, cols} && o == Orientation::rowwise
                                     ? data.cols
                                     : rup(data.cols, kPitch)),
                      memory.out(info(f.scaling).scale, scale)};
    };
    Tensor t(f, encoding(Orientation::rowwise));
    if (c.columnwise) t.columnwise = encoding(Orientation::columnwise);
    if (info(f.scaling).scale_given) t.scale = memory.numbers(1, 1);
    if (info(f.scaling).reads_scale) t.amax = memory.numbers(1, 1);
    return t;
  }
};

void call_activation(const Call& call) {
  const Activation f = activation(call.c.op);
  const auto [rows, cols] = call.shape;
  const int64_t wide = f.inputs * cols;
  const View x = call.in(rows, wide);
  const View bias = call.c.bias ? call.in(1, wide) : View{};
  if (!call.c.backward)
    return forward(f, {.x = x, .bias = bias, .y = call.result(rows, cols)}, call.options);
  Backward b{.grad = call.in(rows, cols), .x = x, .dx = call.result(rows, wide)};
  if (call.c.dbias) b.dbias = call.out(1, wide);
  backward(f, b, call.options);
}

void call_quantize(const Call& call) {
  const auto [rows, cols] = call.shape;
  Quantize q{.x = call.in(rows, cols), .y = call.result(rows, cols)};
  if (call.c.dbias) q.dbias = call.out(1, cols);
  quantize(q, call.options);
}

void call_dequantize(const Call& call) {
  const auto [rows, cols] = call.shape;
  const Format& f = call.c.out;
  const Orientation o = call.c.columnwise ? Orientation::columnwise : Orientation::rowwise;
  const Shape data = f.data_shape(rows, cols, o), scale = f.scale_shape(rows, cols, o);
  const Encoding codes{call.memory.in(f.dtype, data.rows, data.cols),
                       info(f.scaling).scale == DType::f32
                           ? call.memory.numbers(scale.rows, scale.cols)
                           : call.memory.in(info(f.scaling).scale, scale.rows, scale.cols)};
  Tensor x(f, {});
  (call.c.columnwise ? x.columnwise : x.rowwise) = codes;
  dequantize(x, call.out(rows, cols), call.options);
}

constexpr double kDropped = 0.1;

// Only the step: a call would also advance the state of the stream.
void call_dropout(const Call& call) {
  const auto [rows, cols] = call.shape;
  const bool whole = call.c.op == "bias_dropout_add";
  DropoutForm form;
  form.cols = cols;
  form.precision = call.options.precision;
  form.rounding = call.options.rounding;
  form.chain = form.x = call.dtype;
  form.y = call.dtype;
  if (call.c.backward ? call.c.dbias : whole) form.bias = call.dtype;
  std::vector<View> in{call.in(rows, cols)};
  std::vector<View> out{call.out(rows, cols)};
  if (call.c.backward) {
    out.push_back(form.bias ? call.out(1, cols) : View{});
    out.emplace_back();
  } else {
    if (whole) form.residual = call.dtype;
    in.push_back(whole ? call.in(1, cols) : View{});
    in.push_back(whole ? call.in(rows, cols) : View{});
  }
  const DropoutRule rule = dropout_rule(kDropped);
  const std::array parameters{rule.threshold, rule.scale};
  execute(call.c.backward ? dropout_backward_step(form) : dropout_step(form),
          {.rows = rows,
           .in = in,
           .out = out,
           .parameters = parameters,
           .random = static_cast<const uint64_t*>(call.memory.random())},
          call.options);
}

void call_norm(const Call& call) {
  using A = NormArgs;
  const auto [rows, cols] = call.shape;
  const bool layer = call.c.op == "layernorm";
  const bool l2 = call.c.op == "l2norm";
  const bool backward = call.c.backward;
  NormForm form;
  form.kind = layer ? NormKind::layer : l2 ? NormKind::l2 : NormKind::rms;
  form.cols = cols;
  form.precision = call.options.precision;
  form.rounding = call.options.rounding;
  form.x = form.grad = call.dtype;
  if (!l2) form.gamma = call.dtype;
  std::vector<View> in(A::inputs);
  std::vector<View> out(A::outputs);
  in[A::x] = call.in(rows, cols);
  if (!l2) in[A::gamma] = call.in(1, cols);
  const Tensor y = call.result(rows, cols);
  form.y = Operand(y);
  place_output(y, out.data() + A::y);
  if (y.scale.given()) in[A::y_scale] = y.scale, out[A::y_amax] = y.amax, form.y_amax = true;
  if (backward) {
    in[A::grad] = call.in(rows, cols);
    in[A::rstdev_in] = call.memory.numbers(rows, 1);
    if (!l2) {
      out[A::dgamma] = call.out(1, cols);
      form.dgamma = call.dtype;
    }
    if (layer) {
      in[A::mean_in] = call.memory.numbers(rows, 1);
      out[A::dbeta] = call.out(1, cols);
      form.dbeta = call.dtype;
    }
  } else {
    form.rstdev = true;
    out[A::rstdev] = call.memory.out(DType::f32, {rows, 1});
    if (layer) {
      form.mean = true;
      out[A::mean] = call.memory.out(DType::f32, {rows, 1});
      form.beta = call.dtype;
      in[A::beta] = call.in(1, cols);
    }
  }
  const float eps = 1e-5F;
  execute(backward ? norm_backward_step(form) : norm_step(form),
          {.rows = rows, .in = in, .out = out, .parameters = std::span(&eps, 1)}, call.options);
}

// Every op that is not in this list is an activation.
struct Op {
  std::string_view name;
  void (*call)(const Call&);
};
constexpr Op kOps[] = {{"quantize", call_quantize}, {"dequantize", call_dequantize},
                       {"dropout", call_dropout},   {"bias_dropout_add", call_dropout},
                       {"rmsnorm", call_norm},      {"layernorm", call_norm},
                       {"l2norm", call_norm}};

// Leaves out activations that are equal to another one: gated(silu) is swiglu.
std::vector<std::string> activations() {
  std::vector<std::string> names = activation_names();
  std::set<std::string> seen;
  for (const std::string& name : activation_names())
    if (activation(name).inputs == 1) names.push_back("gated(" + name + ")");
  std::erase_if(names, [&](const std::string& name) {
    return !seen.insert(formula(activation(name))).second;
  });
  return names;
}

std::vector<std::string> words(const std::string& text) {
  std::istringstream in(text);
  std::vector<std::string> all;
  for (std::string word; in >> word;) all.push_back(word);
  return all;
}
std::vector<std::string> words(const BenchCase& c) {
  std::vector<std::string> all = words(c.name());
  all.push_back(c.op);
  all.emplace_back(c.backward ? "bwd" : "fwd");
  for (std::string& word : all)
    if (word.starts_with('+')) word.erase(0, 1);
  return all;
}

}  // namespace

std::string BenchCase::name() const {
  if (op == "dequantize")
    return str(op, " ", info(out.dtype).name, " -> ", info(in).name, " ", info(out.scaling).name,
               columnwise ? " col" : " row");
  std::string text = str(op, backward ? ".bwd " : " ", info(in).name);
  if (out.scaling != Scaling::none)
    text += str(" -> ", info(out.dtype).name, " ", info(out.scaling).name,
                columnwise ? " rowcol" : " row");
  if (bias) text += " +bias";
  if (dbias) text += " +dbias";
  if (pass) text += *pass == 0 ? " amax-pass" : " encode-pass";
  return text;
}

std::vector<BenchCase> bench_cases(DType dtype, bool all) {
  std::vector<BenchCase> list;
  const Format plain{.dtype = dtype};
  const std::vector<std::string> some =
      all ? activations() : std::vector<std::string>{"gelu", "swiglu"};
  for (const std::string& name : activations())
    for (const bool backward : {false, true}) list.push_back({name, backward, plain});
  for (const char* name : {"gelu", "swiglu"})
    list.push_back({.op = name, .out = plain, .bias = true});
  for (const std::string& name : some)
    list.push_back({.op = name, .backward = true, .out = plain, .dbias = true});
  list.push_back({"dropout", false, plain});
  list.push_back({"bias_dropout_add", false, plain});
  list.push_back({"bias_dropout_add", true, plain, false, true});
  for (const char* norm : {"rmsnorm", "layernorm", "l2norm"})
    for (const bool backward : {false, true}) list.push_back({norm, backward, plain});

  for (size_t s = 1; s < kScalings.size(); ++s)
    for (const bool columnwise : {false, true})
      list.push_back({.op = "dequantize",
                      .out = {.dtype = DType::e4m3, .scaling = static_cast<Scaling>(s)},
                      .columnwise = columnwise});
  std::vector<std::string> quantised = some;
  quantised.insert(quantised.begin(), "quantize");
  for (const bool columnwise : {false, true})
    for (size_t s = 1; s < kScalings.size(); ++s) {
      const auto scaling = static_cast<Scaling>(s);
      for (const std::string& op : quantised)
        for (const bool backward : {false, true})
          for (const bool dbias : {false, true}) {
            if (dbias && !backward) continue;
            if (op == "quantize" && backward != dbias) continue;
            // With one scale per tensor, gradients need the larger range of e5m2.
            const bool single = info(scaling).blocks[0].single();
            const DType codes = backward && single ? DType::e5m2 : DType::e4m3;
            BenchCase c{op, backward, {.dtype = codes, .scaling = scaling}, columnwise, dbias};
            list.push_back(c);
            if (!info(scaling).reads_amax() || backward) continue;
            for (const size_t pass : {0, 1}) {
              if (pass == 0 && columnwise) continue;  // the same as rowwise
              c.pass = pass;
              list.push_back(c);
            }
          }
    }
  for (const char* norm : {"rmsnorm", "layernorm"})
    for (const Scaling s : {Scaling::delayed, Scaling::mxfp8})
      for (const bool columnwise : {false, true})
        list.push_back({norm, false, {.dtype = DType::e4m3, .scaling = s}, columnwise});
  for (BenchCase& c : list) c.in = dtype;
  return list;
}

std::vector<BenchCase> filtered(const std::vector<BenchCase>& cases,
                                const std::vector<std::string>& filters) {
  if (filters.empty()) return cases;
  std::set<std::string> known;
  for (const BenchCase& c : cases)
    for (std::string& w : words(c)) known.insert(std::move(w));
  std::vector<BenchCase> kept;
  for (const BenchCase& c : cases) {
    const std::string name = c.name();
    const std::vector<std::string> own = words(c);
    const auto has = [&](const std::string& word) {
      return known.contains(word) ? std::ranges::find(own, word) != own.end()
                                  : name.find(word) != std::string::npos;
    };
    if (std::ranges::any_of(
            filters, [&](const std::string& f) { return std::ranges::all_of(words(f), has); }))
      kept.push_back(c);
  }
  return kept;
}

BenchMemory::BenchMemory() {
  const auto at = [](int i) { return reinterpret_cast<char*>(kNowhere + i * kFar); };  // NOLINT
  bases_ = {at(0), at(1), at(2), at(3)};
}

View BenchMemory::in(DType dtype, int64_t rows, int64_t cols) {
  return placed(bases_.in, in_, dtype, rows, cols, cols);
}
View BenchMemory::numbers(int64_t rows, int64_t cols) {
  return placed(bases_.numbers, numbers_, DType::f32, rows, cols, cols);
}
View BenchMemory::out(DType dtype, Shape shape, int64_t stride) {
  return outputs_.emplace_back(
      placed(bases_.out, out_, dtype, shape.rows, shape.cols, stride ? stride : shape.cols));
}

std::vector<BenchCall> bench_calls(const BenchCase& c, Shape shape, DType dtype,
                                   const Options& options, BenchMemory& memory) {
  std::vector<BenchCall> calls;
  set_observer([&](const Step& s, const RunArgs& a, const Options&, const std::function<void()>&) {
    const Chosen chosen = kernel_for(s, options.device);
    calls.push_back({.step = s,
                     .kernel = chosen.kernel,
                     .maker = chosen.maker,
                     .rows = a.rows,
                     .in = {a.in.begin(), a.in.end()},
                     .out = {a.out.begin(), a.out.end()},
                     .parameters = {a.parameters.begin(), a.parameters.end()},
                     .random = a.random});
  });
  const auto* op = std::ranges::find(kOps, c.op, &Op::name);
  try {
    (op == std::end(kOps) ? call_activation : op->call)({c, shape, dtype, options, memory});
  } catch (...) {
    set_observer({});
    throw;
  }
  set_observer({});
  if (!c.pass) return calls;
  return {std::move(calls.at(*c.pass))};
}

std::string Mix::name() const {
  return columnwise ? str(read, ":", write, "+", columnwise) : str(read, ":", write);
}

Mix mix_of(const Step& step) {
  Mix mix;
  for (const Load& l : step.loads)
    if (l.from == Load::From::tile) mix.read += info(l.dtype).bytes;
  for (const Store& s : step.stores)
    if (s.to == Store::To::tile) mix.write += info(s.dtype).bytes;
  for (const Encoder& e : step.encoders) {
    const int64_t bytes = info(e.format.dtype).bytes * e.cols / step.cols;
    if (e.rowwise) mix.write += bytes;
    if (e.columnwise) mix.columnwise += bytes;
  }
  return mix;
}

}  // namespace tenon::bench
