// Functions of the C ABI on top of the C++ API: text to ops, exceptions to codes.
#include <algorithm>
#include <string>

#include "capi/common.h"
#include "runtime/execute.h"
#include "tenon/tenon.hpp"

namespace {

using tenon::require;
using namespace tenon::capi;  // NOLINT: helpers of the C ABI's files

thread_local size_t measured = 0;  // bytes of workspace since tenon_measure_begin

tenon::View view(const tenon_view& v) {
  require(v.dtype >= 0 && v.dtype < static_cast<int32_t>(tenon::kDTypes.size()),
          "view: the dtype number ", v.dtype, " does not exist; use TENON_F32, TENON_F16, ",
          "TENON_BF16, or a TENON_E… for encoded data");
  return {v.data, static_cast<tenon::DType>(v.dtype), v.rows, v.cols, v.stride};
}

tenon::View view(const tenon_view* v) { return v ? view(*v) : tenon::View{}; }

tenon::View needed(const tenon_view* v, const char* function, const char* name) {
  require(v != nullptr, function, ": ", name, " is NULL; it must be given");
  return view(*v);
}

std::vector<tenon::View> views(const tenon_view* v, size_t count, const char* function,
                               const char* name) {
  require(count <= 64, function, ": ", name, " has ", count, " views; at most 64 are taken");
  require(v != nullptr || count == 0, function, ": ", name, " is NULL but ", count,
          " views are announced");
  std::vector<tenon::View> result;
  for (size_t i = 0; i < count; ++i) result.push_back(view(v[i]));
  return result;
}

// Converts a plain view or an encoded tensor. If both are null, the argument is absent.
tenon::Tensor tensor(const tenon_view* plain, const tenon_tensor* encoded, const char* function,
                     const char* name) {
  require(!plain || !encoded, function, ": ", name, " and ", name,
          "_encoded are both given; leave one out");
  if (!encoded) return view(plain);
  const tenon_tensor t = sized(encoded, function, "tenon_tensor");
  tenon::Format format{
      .dtype = chosen<tenon::DType>(t.dtype, tenon::kDTypes.size(), function, "dtype"),
      .scaling = scaling(t.scaling, function),
      .eps = t.eps,
      .swizzled = t.swizzled != 0};
  format.power_of_two = power_of_two(t.power_of_two, function, std::string(name) + "_encoded");
  tenon::Tensor result(format, {view(t.data), view(t.scale_inv)},
                       {view(t.columnwise_data), view(t.columnwise_scale_inv)});
  require(t.data || t.columnwise_data, function, ": ", name, "_encoded has no data; give data, ",
          "columnwise_data or both");
  // A 0x0 tensor may have a null pointer. The address of `nothing` marks it as present.
  static char nothing;
  if (!result.given()) {
    if (t.data) result.rowwise.data.data = &nothing;
    if (t.columnwise_data) result.columnwise.data.data = &nothing;
  }
  result.scale = view(t.scale);
  result.amax = view(t.amax);
  result.amax_given = t.amax_given != 0;
  result.health = view(t.health);
  return result;
}

tenon::Tensor needed(const tenon_view* plain, const tenon_tensor* encoded, const char* function,
                     const char* name) {
  require(plain || encoded, function, ": ", name, " is NULL; it must be given, plain or encoded");
  return tensor(plain, encoded, function, name);
}

// The caller's five numbers are used in place as the library's random state.
static_assert(sizeof(tenon::Random) == 5 * sizeof(uint64_t));

tenon::Layout layout(const char* given, const char* function) {
  const std::string_view name = given ? given : "stacked";
  if (const auto found = tenon::layout_named(name)) return *found;
  tenon::fail(tenon::Code::invalid_argument, function, ": the layout '", name,
              "' is not known; use stacked, swapped or interleaved(k) with k ≥ 1");
}

// Splits a list at commas and trims the blanks around each name.
std::vector<std::string> names(std::string_view list) {
  constexpr std::string_view kBlanks = " \t\n";
  std::vector<std::string> result;
  while (true) {
    const size_t comma = std::min(list.find(','), list.size());
    const std::string_view item = list.substr(0, comma);
    const size_t first = std::min(item.find_first_not_of(kBlanks), item.size());
    const size_t last = item.find_last_not_of(kBlanks) + 1;
    result.emplace_back(item.substr(first, last - std::min(first, last)));
    if (comma == list.size()) return result;
    list.remove_prefix(comma + 1);
  }
}

tenon::Fused fused(const char* formula, const char* arguments, size_t count, const char* function) {
  const std::vector<std::string> list = names(text(arguments, function, "arguments"));
  require(list.size() == count, function, ": ", list.size(), " argument names but ", count,
          " views given");
  return tenon::fuse_text(text(formula, function, "formula"), list);
}

}  // namespace

int tenon_forward(const char* act, const tenon_forward_args* args, const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_forward";
    require(args != nullptr, kName, ": args is NULL; pass the views of the call");
    const tenon_forward_args a = sized(args, kName, "tenon_forward_args");
    const tenon::Activation f = tenon::activation(text(act, kName, "act"));
    tenon::forward(f,
                   {.x = needed(a.x, a.x_encoded, kName, "x"),
                    .b = tensor(a.b, a.b_encoded, kName, "b"),
                    .bias = view(a.bias),
                    .scale = view(a.scale),
                    .y = tensor(a.y, a.y_encoded, kName, "y"),
                    .amax = view(a.amax),
                    .layout = layout(a.layout, kName)},
                   options(given, kName));
  });
}

int tenon_backward(const char* act, const tenon_backward_args* args, const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_backward";
    require(args != nullptr, kName, ": args is NULL; pass the views of the call");
    const tenon_backward_args a = sized(args, kName, "tenon_backward_args");
    const tenon::Activation f = tenon::activation(text(act, kName, "act"));
    tenon::backward(f,
                    {.grad = needed(a.grad, a.grad_encoded, kName, "grad"),
                     .x = needed(a.x, a.x_encoded, kName, "x"),
                     .b = tensor(a.b, a.b_encoded, kName, "b"),
                     .bias = view(a.bias),
                     .scale = view(a.scale),
                     .dx = tensor(a.dx, a.dx_encoded, kName, "dx"),
                     .db = tensor(a.db, a.db_encoded, kName, "db"),
                     .dbias = view(a.dbias),
                     .dscale = view(a.dscale),
                     .amax = view(a.amax),
                     .layout = layout(a.layout, kName)},
                    options(given, kName));
  });
}

int tenon_quantize(const tenon_quantize_args* args, const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_quantize";
    require(args != nullptr, kName, ": args is NULL; pass the views of the call");
    const tenon_quantize_args a = sized(args, kName, "tenon_quantize_args");
    tenon::quantize({.x = needed(a.x, a.x_encoded, kName, "x"),
                     .y = tensor(a.y, a.y_encoded, kName, "y"),
                     .dbias = view(a.dbias),
                     .amax = view(a.amax)},
                    options(given, kName));
  });
}

int tenon_delayed_update(const tenon_view* history, const tenon_view* scale, int32_t dtype,
                         int32_t margin, int32_t most_recent, const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_delayed_update";
    tenon::update({.history = needed(history, kName, "history"),
                   .scale = needed(scale, kName, "scale"),
                   .dtype = chosen<tenon::DType>(dtype, tenon::kDTypes.size(), kName, "dtype"),
                   .margin = margin,
                   .most_recent = most_recent != 0},
                  options(given, kName));
  });
}

int tenon_bias_dropout_add(const tenon_dropout_args* args, const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_bias_dropout_add";
    require(args != nullptr, kName, ": args is NULL; pass the views of the call");
    const tenon_dropout_args a = sized(args, kName, "tenon_dropout_args");
    tenon::bias_dropout_add({.x = needed(a.x, kName, "x"),
                             .bias = view(a.bias),
                             .residual = view(a.residual),
                             .y = needed(a.y, kName, "y"),
                             .p = a.p,
                             .training = a.training != 0,
                             .random = reinterpret_cast<tenon::Random*>(a.random)},
                            options(given, kName));
  });
}

int tenon_bias_dropout_add_backward(const tenon_dropout_backward_args* args,
                                    const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_bias_dropout_add_backward";
    require(args != nullptr, kName, ": args is NULL; pass the views of the call");
    const tenon_dropout_backward_args a = sized(args, kName, "tenon_dropout_backward_args");
    tenon::bias_dropout_add_backward({.grad = needed(a.grad, kName, "grad"),
                                      .dx = view(a.dx),
                                      .dbias = view(a.dbias),
                                      .dresidual = view(a.dresidual),
                                      .p = a.p,
                                      .training = a.training != 0,
                                      .random = reinterpret_cast<const tenon::Random*>(a.random)},
                                     options(given, kName));
  });
}

int tenon_fused_forward(const char* formula, const char* arguments, const tenon_view* in,
                        size_t in_count, const tenon_view* y, const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_fused_forward";
    const std::vector<tenon::View> list = views(in, in_count, kName, "in");
    fused(formula, arguments, in_count, kName)
        .forward(list, needed(y, kName, "y"), options(given, kName));
  });
}

int tenon_fused_backward(const char* formula, const char* arguments, const tenon_view* in,
                         size_t in_count, const tenon_view* grad, const tenon_view* gradients,
                         const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_fused_backward";
    const std::vector<tenon::View> list = views(in, in_count, kName, "in");
    const std::vector<tenon::View> out = views(gradients, in_count, kName, "gradients");
    fused(formula, arguments, in_count, kName)
        .backward(list, needed(grad, kName, "grad"), out, options(given, kName));
  });
}

int tenon_run(const char* name, const tenon_view* in, size_t in_count, const tenon_view* out,
              size_t out_count, const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_run";
    tenon::run(text(name, kName, "name"), views(in, in_count, kName, "in"),
               views(out, out_count, kName, "out"), options(given, kName));
  });
}

int tenon_l2_normalization(const tenon_view* x, const tenon_view* y, const tenon_view* r, float eps,
                           const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_l2_normalization";
    tenon::l2_normalization(needed(x, kName, "x"), needed(y, kName, "y"), view(r), eps,
                            options(given, kName));
  });
}

int tenon_l2_normalization_backward(const tenon_view* grad, const tenon_view* x,
                                    const tenon_view* r, const tenon_view* dx,
                                    const tenon_options* given) {
  return guarded([&] {
    constexpr const char* kName = "tenon_l2_normalization_backward";
    tenon::l2_normalization_backward(needed(grad, kName, "grad"), needed(x, kName, "x"),
                                     needed(r, kName, "r"), needed(dx, kName, "dx"),
                                     options(given, kName));
  });
}

int tenon_measure_begin(void) {
  return guarded([&] {
    measured = 0;
    tenon::set_observer([](const tenon::Step& step, const tenon::RunArgs& args,
                           const tenon::Options& options, const std::function<void()>& /*run*/) {
      const tenon::Chosen chosen = tenon::kernel_for(step, options.device);
      measured = std::max(measured, chosen.kernel->workspace(args.rows));
    });
  });
}

int tenon_measure_end(size_t* bytes) {
  return guarded([&] {
    tenon::set_observer({});
    if (bytes) *bytes = measured;
  });
}

int tenon_threads(void) { return tenon::threads(); }

int tenon_set_threads(int32_t count) {
  return guarded([&] { tenon::set_threads(count); });
}
