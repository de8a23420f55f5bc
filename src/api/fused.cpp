// Calls of fused functions. The shape of each argument defines its broadcast.
#include <optional>

#include "api/validate.h"
#include "core/fp_mode.h"
#include "core/memo.h"
#include "core/text.h"
#include "expr/parse.h"
#include "expr/registry.h"
#include "lower/single_fuse.h"
#include "runtime/execute.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon {

namespace {

Load::From broadcast(const std::string& op, const Named& v, int64_t rows, int64_t cols) {
  if (v.view.rows == rows && v.view.cols == cols) return Load::From::tile;
  if (v.view.rows == 1 && v.view.cols == cols) return Load::From::row;
  if (v.view.rows == rows && v.view.cols == 1) return Load::From::column;
  if (v.view.rows == 1 && v.view.cols == 1) return Load::From::scalar;
  fail(Code::invalid_argument, op, ": ", v.name, " is ", v.view.rows, "x", v.view.cols,
       " and does not broadcast to ", rows, "x", cols, "; give ", rows, "x", cols, ", 1x", cols,
       ", ", rows, "x1 or 1x1");
}

NamedList named(std::span<const View> views, const std::vector<std::string>& names) {
  NamedList list;
  for (size_t i = 0; i < views.size(); ++i) list.push_back({names[i], views[i]});
  return list;
}

std::vector<std::string> numbered(std::string_view what, size_t count) {
  std::vector<std::string> names;
  for (size_t i = 0; i < count; ++i) names.push_back(str(what, " ", i));
  return names;
}

FuseForm form_of(const std::string& op, const Fused& fused, const Fused::Body& body,
                 std::span<const View> arguments, const Named& result, const Options& options) {
  check_options(op, options);
  check_spec(op, result);
  require(arguments.size() == fused.arguments(), op, ": ", arguments.size(),
          " arguments given, the function takes ", fused.arguments());
  FuseForm form{.name = fused.name(),
                .f = body,
                .arguments = {},
                .grad = {},
                .cols = result.view.cols,
                .precision = options.precision,
                .rounding = options.rounding};
  form.parameters = fused.parameters().size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string name = str("argument ", i);
    check_spec(op, {name, arguments[i]});
    form.arguments.push_back(
        {broadcast(op, {name, arguments[i]}, result.view.rows, result.view.cols),
         arguments[i].dtype, std::nullopt});
  }
  return form;
}

Memo<Fused>& fused_texts() {
  static auto& memory = *new Memo<Fused>(1024);
  return memory;
}

std::shared_ptr<const Prepared> prepare(const FuseForm& form,
                                        const std::shared_ptr<const Fused::Body>& body,
                                        Device device) {
  return prepared(key(form), body, device, [&] { return fuse_step(form); });
}

void check_count(std::string_view op, size_t arguments) {
  require(arguments >= 1 && arguments <= 64, op, ": ", arguments,
          " arguments; a fused function takes 1 to 64");
}

}  // namespace

Fused::Fused(std::string name, size_t arguments, Body body, std::vector<float> parameters)
    : name_(std::move(name)),
      arguments_(arguments),
      body_(std::make_shared<const Body>(std::move(body))),
      parameters_(std::move(parameters)) {
  require(static_cast<bool>(*body_), "fuse '", name_, "': no function given");
  check_count(str("fuse '", name_, "'"), arguments_);
}

void Fused::forward(std::span<const View> arguments, const View& y, const Options& options) const {
  const FpMode ieee;
  const std::string op = name_ + " forward";
  const std::vector<std::string> names = numbered("argument", arguments.size());
  const NamedList in = named(arguments, names);
  for (const Named& v : in) check_view(op, v);
  check_view(op, {"y", y});
  FuseForm form = form_of(op, *this, *body_, arguments, {"y", y}, options);
  form.y = y.dtype;
  NamedList tiles;
  for (size_t i = 0; i < in.size(); ++i)
    if (form.arguments[i].from == Load::From::tile) tiles.push_back(in[i]);
  check_overlap(op, in, {{"y", y}}, tiles);
  execute(*prepare(form, body_, options.device),
          {.rows = y.rows, .in = arguments, .out = std::span(&y, 1), .parameters = parameters_},
          options);
}

void Fused::backward(std::span<const View> arguments, const View& grad,
                     std::span<const View> gradients, const Options& options) const {
  const FpMode ieee;
  const std::string op = name_ + " backward";
  const std::vector<std::string> names = numbered("argument", arguments.size());
  const std::vector<std::string> gradient_names = numbered("gradient", gradients.size());
  NamedList in = named(arguments, names);
  for (const Named& v : in) check_view(op, v);
  check_view(op, {"grad", grad});
  require(gradients.size() == arguments_, op, ": ", gradients.size(), " gradients given for ",
          arguments_, " arguments; pass one a piece, an empty view where none is wanted");
  FuseForm form = form_of(op, *this, *body_, arguments, {"grad", grad}, options);
  form.grad = grad.dtype;
  const NamedList out = named(gradients, gradient_names);
  for (size_t i = 0; i < out.size(); ++i) {
    if (!gradients[i].given()) continue;
    check_view(op, out[i]);
    check_shape(op, out[i], arguments[i].rows, arguments[i].cols, "the shape of its argument");
    form.arguments[i].gradient = gradients[i].dtype;
  }
  in.push_back({"grad", grad});
  NamedList tiles{{"grad", grad}};
  for (size_t i = 0; i < arguments.size(); ++i)
    if (form.arguments[i].from == Load::From::tile) tiles.push_back(in[i]);
  check_overlap(op, in, out, tiles);
  std::vector<View> inputs(arguments.begin(), arguments.end());
  inputs.push_back(grad);
  execute(*prepare(form, body_, options.device),
          {.rows = grad.rows, .in = inputs, .out = gradients, .parameters = parameters_}, options);
}

void Fused::warmup(std::span<const View> arguments, const View& y, const Options& options) const {
  const FpMode ieee;
  FuseForm form = form_of(name_ + " warmup", *this, *body_, arguments, {"y", y}, options);
  form.y = y.dtype;
  RunArgs call{.rows = y.rows, .in = arguments, .out = std::span(&y, 1), .parameters = parameters_};
  prepare(form, body_, options.device)->chosen.kernel->prepare_for(call);
  form.grad = y.dtype;
  for (auto& a : form.arguments) a.gradient = a.dtype;
  // Assumes that each gradient has the layout of its argument.
  std::vector<View> inputs(arguments.begin(), arguments.end());
  inputs.push_back(y);
  call.in = inputs;
  call.out = arguments;
  try {
    prepare(form, body_, options.device)->chosen.kernel->prepare_for(call);
  } catch (const Error& e) {
    if (e.code() != Code::unsupported) throw;  // a device may support only the forward pass
  }
}

Fused fuse_text(std::string_view formula, std::span<const std::string> arguments) {
  check_count("fuse", arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    require(is_identifier(arguments[i]) && !is_reserved(arguments[i]), "fuse: '", arguments[i],
            "' cannot name an argument; use letters, digits and _, and no word's name");
    for (size_t j = 0; j < i; ++j)
      require(arguments[i] != arguments[j], "fuse: two arguments are named '", arguments[i], "'");
  }
  // Each text is parsed once. A new definition can change the meaning of its names, so
  // `definitions()` is part of the key.
  std::string text(formula);
  for (const std::string& a : arguments) text += "\n" + a;
  const uint64_t meaning = definitions();
  if (std::optional<Fused> found = fused_texts().find(text, meaning)) return *std::move(found);
  const Formula parsed = parse(formula, arguments);
  std::vector<float> parameters;
  for (const Parameter& p : parsed.parameters) parameters.push_back(p.value);
  const Fused made(
      formula_label(formula), arguments.size(),
      [parsed](std::span<const Expr> in) { return substitute(parsed, in); }, std::move(parameters));
  return fused_texts().keep(text, made, meaning);
}

}  // namespace tenon
