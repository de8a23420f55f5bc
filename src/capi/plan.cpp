// Plans over the C ABI.
#include "tenon/plan.h"

#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "capi/common.h"

struct tenon_plan {
  tenon::Plan plan;
  tenon_allocate allocate;  // of the options
  void* user;
};

namespace {

using tenon::require;
using namespace tenon::capi;  // NOLINT: helpers of the C ABI's files

constexpr size_t kMostOps = tenon::kMaxChainOps;

tenon::DType dtype(int32_t number, const char* function) {
  return chosen<tenon::DType>(number, tenon::kDTypes.size(), function, "dtype");
}

std::vector<tenon::GradRequest> grads(const tenon_grad_request* list, size_t count,
                                      const char* function, const char* name) {
  constexpr size_t kMost = 4 * kMostOps;
  require(count <= kMost && (list || count == 0), function, ": ", name, " has ", count, " entries",
          list ? "" : " but is NULL", "; it takes at most ", kMost);
  std::vector<tenon::GradRequest> result;
  for (size_t i = 0; i < count; ++i) {
    tenon::GradRequest& r = result.emplace_back();
    r.wanted = list[i].unwanted == 0;
    if (list[i].dtype_given) r.dtype = dtype(list[i].dtype, function);
    r.accumulate = list[i].accumulate != 0;
  }
  return result;
}

std::vector<std::optional<tenon::DType>> dtypes(const int32_t* list, size_t count,
                                                const char* function, const char* name) {
  constexpr size_t kMost = 4 * kMostOps;
  require(count <= kMost && (list || count == 0), function, ": ", name, " has ", count, " entries",
          list ? "" : " but is NULL", "; it takes at most ", kMost);
  std::vector<std::optional<tenon::DType>> result(count);
  for (size_t i = 0; i < count; ++i)
    if (list[i] != -1) result[i] = dtype(list[i], function);
  return result;
}

tenon::Format format(const tenon_format& f, const char* function) {
  tenon::Format made{.scaling = scaling(f.scaling, function)};
  if (made.scaling == tenon::Scaling::none) return made;
  made.dtype = dtype(f.dtype, function);
  made.eps = f.eps;
  require(f.eps >= 0 && f.eps <= std::numeric_limits<float>::max(), function, ": eps is ", f.eps,
          "; it must be finite and not negative");
  made.power_of_two = power_of_two(f.power_of_two, function, "a format");
  return made;
}

struct Encodings {
  bool rowwise, columnwise;
};
Encodings encodings(int32_t number, const char* function) {
  require(number >= TENON_ROWWISE && number <= TENON_BOTH, function, ": encodings is ", number,
          "; it must be TENON_ROWWISE, TENON_COLUMNWISE or TENON_BOTH");
  return {number != TENON_COLUMNWISE, number != TENON_ROWWISE};
}

std::optional<tenon::GivenEncoding> encoding(const tenon_encoding* e, const char* function) {
  if (!e) return std::nullopt;
  const auto [rowwise, columnwise] = encodings(e->encodings, function);
  tenon::GivenEncoding made{format(e->format, function), rowwise, columnwise};
  made.format.swizzled = e->swizzled != 0;
  return made;
}

std::vector<tenon::OpRequest> op_requests(const tenon_op_request* list, size_t count,
                                          const char* function) {
  require(count <= kMostOps && (list || count == 0), function, ": op_requests has ", count,
          " entries", list ? "" : " but is NULL", "; it takes at most ", kMostOps);
  std::vector<tenon::OpRequest> result(count);
  for (size_t i = 0; i < count; ++i) {
    if (list[i].recipe_given)
      result[i].recipe = {"own", format(list[i].input, function), format(list[i].weight, function),
                          format(list[i].gradient, function)};
    result[i].weight = encoding(list[i].weight_encoding, function);
    const auto [rowwise, columnwise] = encodings(list[i].output, function);
    result[i].rowwise = rowwise;
    result[i].columnwise = columnwise;
  }
  return result;
}

tenon_view back(const tenon::View& v) {
  return {v.data, v.rows, v.cols, v.stride, static_cast<int32_t>(v.dtype)};
}

// Converts the code of a callback to an error. The planner adds the op's name to the message.
template <class F>
void called(F f) {
  std::array<char, 512> why{};
  if (f(why.data(), why.size()) == 0) return;
  why.back() = '\0';
  tenon::fail(tenon::Code::runtime, why[0] ? why.data() : "its callback failed and said nothing");
}

tenon::OpaqueOp opaque(const tenon_opaque_op& o, const char* function) {
  require(o.forward != nullptr, function, ": the opaque op '", o.name,
          "' has no forward callback; give one");
  tenon::OpaqueOp op;
  op.cols = o.cols;
  op.rows_mul = o.rows_mul ? o.rows_mul : 1;
  op.rows_div = o.rows_div ? o.rows_div : 1;
  op.forward = [o](int64_t rows, const tenon::View& x, const tenon::View& y) {
    const tenon_view in = back(x), out = back(y);
    called([&](char* why, size_t n) { return o.forward(o.user, rows, &in, &out, why, n); });
  };
  if (o.backward)
    op.backward = [o](int64_t rows, const tenon::View& x, const tenon::View& dy,
                      const tenon::View& dx) {
      const tenon_view a = back(x), b = back(dy), c = back(dx);
      called([&](char* why, size_t n) { return o.backward(o.user, rows, &a, &b, &c, why, n); });
    };
  return op;
}

class Group final : public tenon::Collectives {
 public:
  Group(const tenon_collectives& c, const char* function) : c_(c) {
    require(c.ranks > 0, function, ": collectives has ", c.ranks, " ranks; it needs one");
    require(c.all_reduce && c.all_gather && c.reduce_scatter, function,
            ": collectives lacks a callback; give all_reduce, all_gather and reduce_scatter");
  }
  [[nodiscard]] int64_t ranks() const override { return c_.ranks; }
  void all_reduce(const tenon::View& in, const tenon::View& out, void* stream) override {
    run(c_.all_reduce, in, out, stream);
  }
  void all_gather(const tenon::View& in, const tenon::View& out, void* stream) override {
    run(c_.all_gather, in, out, stream);
  }
  void reduce_scatter(const tenon::View& in, const tenon::View& out, void* stream) override {
    run(c_.reduce_scatter, in, out, stream);
  }

 private:
  void run(tenon_exchange f, const tenon::View& in, const tenon::View& out, void* stream) const {
    const tenon_view from = back(in), to = back(out);
    called([&](char* why, size_t n) { return f(c_.user, &from, &to, stream, why, n); });
  }
  tenon_collectives c_;
};

const tenon::Plan& plan_of(const tenon_plan* plan, const char* function) {
  require(plan != nullptr, function, ": plan is NULL; build one with tenon_plan_build");
  return plan->plan;
}

tenon::Pass pass_of(int32_t pass, const char* name) {
  require(pass >= TENON_FORWARD && pass <= TENON_BACKWARD_LAST, name, ": pass is ", pass,
          "; it must be TENON_FORWARD, TENON_BACKWARD or TENON_BACKWARD_LAST");
  return pass == TENON_FORWARD ? tenon::Pass::forward : tenon::Pass::backward;
}

static_assert(tenon::kRoles.size() == TENON_ROLE_RNG + 1);

tenon_buffer described(const tenon::Buffer& b, const tenon::BufferUse& use) {
  tenon_buffer r{};
  r.name = b.name.c_str();
  r.role = static_cast<int32_t>(b.role);
  r.dtype = static_cast<int32_t>(b.dtype);
  r.rows_mul = b.rows.mul;
  r.rows_div = b.rows.div;
  r.rows_round = b.rows.round;
  r.rows_add = b.rows.add;
  r.cols = b.cols;
  r.rows_inside = b.rows_inside;
  r.random = b.random;
  r.initial_low = b.initial.low;
  r.initial_high = b.initial.high;
  r.reads_forward = use.reads[0];
  r.writes_forward = use.writes[0];
  r.reads_backward = use.reads[1];
  r.writes_backward = use.writes[1];
  r.same_as = use.same_as;
  r.first_forward = use.first[0];
  r.last_forward = use.last[0];
  r.first_backward = use.first[1];
  r.last_backward = use.last[1];
  r.in_place = use.in_place;
  return r;
}

tenon::PlanRun run_of(int32_t pass, int32_t flags, const char* name) {
  constexpr int32_t kFlags =
      TENON_RUN_WEIGHTS_UNCHANGED | TENON_RUN_NO_TUNING | TENON_RUN_ALIGNED | TENON_RUN_SEPARATE;
  require((flags & ~kFlags) == 0, name, ": flags is ", flags,
          "; it must be a sum of values of tenon_run");
  const auto set = [flags](int32_t flag) { return (flags & flag) != 0; };
  return {.weights_changed = !set(TENON_RUN_WEIGHTS_UNCHANGED),
          .tune = !set(TENON_RUN_NO_TUNING),
          .overwrite_saved = pass == TENON_BACKWARD_LAST,
          .aligned = set(TENON_RUN_ALIGNED),
          .separate = set(TENON_RUN_SEPARATE)};
}

void run_plan(const char* name, const tenon_plan* plan, int32_t pass, int64_t rows,
              void* const* memory, size_t count, void* workspace, tenon::PlanRun run) {
  const tenon::Plan& p = plan_of(plan, name);
  require(memory || count == 0, name, ": memory is NULL; give an address for each buffer");
  run.allocate = plan->allocate;
  run.user = plan->user;
  p.run(pass_of(pass, name), rows, {memory, count}, workspace, run);
}

}  // namespace

extern "C" {

int tenon_plan_build(const char* chain, const tenon_plan_request* request,
                     const tenon_options* given, tenon_plan** plan) {
  return guarded([&] {
    constexpr const char* kName = "tenon_plan_build";
    require(plan != nullptr, kName, ": plan is NULL; pass where the handle goes");
    *plan = nullptr;
    const tenon_plan_request r = sized(request, kName, "tenon_plan_request");
    tenon::PlanRequest wanted;
    require(r.cols >= 0, kName, ": cols is ", r.cols, "; it must not be negative");
    wanted.cols = r.cols;
    wanted.dtype = dtype(r.dtype, kName);
    if (r.parameter_dtype_given) wanted.parameter_dtype = dtype(r.parameter_dtype, kName);
    wanted.recipe = tenon::recipe(r.recipe ? r.recipe : "none", r.recipe_e4m3 != 0);
    wanted.training = r.evaluation == 0;
    wanted.backward = r.forward_only == 0;
    wanted.input_grad = r.no_input_grad == 0;
    const std::string_view keep = r.keep ? r.keep : "input";
    const auto* found = std::find(tenon::kKeeps.begin(), tenon::kKeeps.end(), keep);
    require(found != tenon::kKeeps.end(), kName, ": keep is '", keep,
            "'; it must be input, fp8 or recompute");
    wanted.keep = static_cast<tenon::Keep>(found - tenon::kKeeps.begin());
    wanted.parameter_grads =
        grads(r.parameter_grads, r.parameter_grad_count, kName, "parameter_grads");
    wanted.extra_grads = grads(r.extra_grads, r.extra_grad_count, kName, "extra_grads");
    if (r.input_dtype_given) wanted.input_dtype = dtype(r.input_dtype, kName);
    wanted.parameter_dtypes =
        dtypes(r.parameter_dtypes, r.parameter_dtype_count, kName, "parameter_dtypes");
    wanted.extra_dtypes = dtypes(r.extra_dtypes, r.extra_dtype_count, kName, "extra_dtypes");
    wanted.op_requests = op_requests(r.op_requests, r.op_request_count, kName);
    wanted.input_encoding = encoding(r.input_encoding, kName);
    wanted.output_encoded = r.output_decoded == 0;
    require(r.opaque_op_count <= kMostOps && (r.opaque_ops || r.opaque_op_count == 0), kName,
            ": opaque_ops has ", r.opaque_op_count, " entries", r.opaque_ops ? "" : " but is NULL",
            "; it takes at most ", kMostOps);
    for (size_t i = 0; i < r.opaque_op_count; ++i) {
      const std::string name(text(r.opaque_ops[i].name, kName, "the name of an opaque op"));
      wanted.opaque.insert_or_assign(name, opaque(r.opaque_ops[i], kName));
    }
    if (r.collectives) wanted.collectives = std::make_shared<Group>(*r.collectives, kName);
    wanted.options = options(given, kName);
    if (r.target) wanted.target = r.target;
    *plan = new tenon_plan{tenon::Plan::build(text(chain, kName, "chain"), wanted),
                           wanted.options.allocate, wanted.options.user};
  });
}

void tenon_plan_free(tenon_plan* plan) { delete plan; }

int tenon_plan_buffers(const tenon_plan* plan, tenon_buffer* list, size_t capacity, size_t* count) {
  return guarded([&] {
    const tenon::Plan& p = plan_of(plan, "tenon_plan_buffers");
    const std::vector<tenon::BufferUse> uses = p.uses();
    give(uses.size(), list, capacity, count,
         [&](size_t i) { return described(p.buffers()[i], uses[i]); });
  });
}

int tenon_plan_describe(const tenon_plan* plan, int64_t rows, const char* format, char* buffer,
                        size_t capacity, size_t* size) {
  return guarded([&] {
    constexpr const char* kName = "tenon_plan_describe";
    const tenon::Plan& p = plan_of(plan, kName);
    const std::string_view as = text(format, kName, "format");
    require(as == "text" || as == "json" || as == "html", kName, ": format is '", as,
            "'; it must be text, json or html");
    give(as == "text"   ? p.describe(rows)
         : as == "json" ? p.json(rows)
                        : p.html(rows),
         buffer, capacity, size);
  });
}

int tenon_plan_fingerprint(const tenon_plan* plan, char* buffer, size_t capacity, size_t* size) {
  return guarded(
      [&] { give(plan_of(plan, "tenon_plan_fingerprint").fingerprint(), buffer, capacity, size); });
}

int tenon_plan_sizes(const tenon_plan* plan, int64_t rows, int64_t* bytes, size_t count,
                     int64_t* workspace) {
  return guarded([&] {
    constexpr const char* kName = "tenon_plan_sizes";
    const tenon::Plan& p = plan_of(plan, kName);
    p.check_rows(rows);
    require(count == p.buffers().size() && bytes, kName, ": room for ", count,
            " sizes; the plan has ", p.buffers().size(), " buffers");
    for (size_t i = 0; i < count; ++i) bytes[i] = p.buffers()[i].bytes(rows);
    if (workspace) *workspace = p.workspace_bytes(rows);
  });
}

int tenon_plan_workspace(const tenon_plan* plan, int32_t pass, int64_t rows, int32_t flags,
                         int64_t* bytes) {
  return guarded([&] {
    constexpr const char* kName = "tenon_plan_workspace";
    const tenon::Plan& p = plan_of(plan, kName);
    require(bytes, kName, ": bytes is NULL; give a place for the result");
    *bytes = p.workspace_bytes(rows, pass_of(pass, kName), run_of(pass, flags, kName));
  });
}

int tenon_plan_run(const tenon_plan* plan, int32_t pass, int64_t rows, void* const* memory,
                   size_t count, void* workspace, int32_t flags, void* stream) {
  return guarded([&] {
    constexpr const char* kName = "tenon_plan_run";
    tenon::PlanRun run = run_of(pass, flags, kName);
    run.stream = stream;
    run_plan(kName, plan, pass, rows, memory, count, workspace, run);
  });
}

int tenon_plan_prepare(const tenon_plan* plan, int64_t rows, void* memory, void* stream) {
  return guarded([&] { plan_of(plan, "tenon_plan_prepare").prepare(rows, memory, stream); });
}

int tenon_plan_prepare_bytes(const tenon_plan* plan, int64_t rows, int64_t* bytes) {
  return guarded([&] {
    constexpr const char* kName = "tenon_plan_prepare_bytes";
    const tenon::Plan& p = plan_of(plan, kName);
    require(bytes, kName, ": bytes is NULL; give a place for the result");
    *bytes = p.prepare_bytes(rows);
  });
}

int tenon_plan_run_steps(const tenon_plan* plan, int32_t pass, size_t first, size_t end,
                         int64_t rows, void* const* memory, size_t count, void* workspace,
                         int32_t flags, void* stream) {
  return guarded([&] {
    constexpr const char* kName = "tenon_plan_run_steps";
    tenon::PlanRun run = run_of(pass, flags, kName);
    run.first_step = first;
    run.end_step = end;
    run.stream = stream;
    run_plan(kName, plan, pass, rows, memory, count, workspace, run);
  });
}

}  // extern "C"
