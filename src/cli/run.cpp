// `tenon run`: runs a chain on random or given tensors, checks it against float64 and times it.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "backend/cuda/makers.h"
#include "cli/chain_args.h"
#include "cli/output_file.h"
#include "cli/tensor_file.h"
#include "report/describe.h"
#include "runtime/execute.h"
#include "support/progress.h"
#include "support/reference.h"
#include "support/session.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

using namespace support;  // NOLINT: the command runs its cases and references

namespace {

struct ChainRunArgs : ChainArgs {
  std::string input, output;  // files
  uint64_t seed = 1;
  int repeat = 5;
  std::optional<double> tolerance;  // replaces the tolerance that follows from the formats
  bool no_check = false, json = false;
};

using Json = nlohmann::ordered_json;

constexpr Role kGiven[] = {Role::input, Role::param, Role::extra_in};
constexpr Role kMade[] = {Role::output, Role::extra_out, Role::grad};

std::vector<size_t> with(const Plan& plan, std::span<const Role> roles) {
  std::vector<size_t> list;
  for (const Role role : roles)
    for (const size_t i : plan.with(role)) list.push_back(i);
  return list;
}

// The results of a run, each once: without the scales of an encoded output.
std::vector<size_t> results_of(const Plan& plan) {
  std::vector<size_t> list = with(plan, kMade);
  std::erase_if(list, [&](size_t i) { return plan.buffers()[i].name == "y.scale_inv"; });
  return list;
}

// The numbers that the codes of the output represent. Empty if the output is plain.
std::vector<float> decoded_output(const Session& s, const Buffer& b) {
  const PlanData& d = data_of(s.plan());
  if (info(b.dtype).plain) return {};
  const auto& writes = d.forward.back().writes;
  const auto write = std::ranges::find(writes, b.name, &PlanStep::Write::name);
  const Format& f = write->operand.format;
  const int64_t rows = b.rows(s.rows());
  const Shape scales = f.scale_shape(rows, b.cols, Orientation::rowwise);
  const View codes = matrix(s.at(b.name), f.dtype, rows, b.cols);
  const View scale_inv =
      matrix(s.at(b.name + ".scale_inv"), info(f.scaling).scale, scales.rows, scales.cols);
  std::vector<float> to(static_cast<size_t>(rows * b.cols));
  dequantize(Tensor(f, {codes, scale_inv}), matrix(to.data(), DType::f32, rows, b.cols));
  return to;
}

std::string shape_text(const Buffer& b, int64_t rows) { return str(b.rows(rows), " x ", b.cols); }

class Inputs {
 public:
  explicit Inputs(const std::string& path) {
    if (path.empty()) return;
    file_ = clean(path, 200);
    tensors_ = parse_tensor_file(path, open_file(path));
    for (const std::string& note : tensors_.notes) fmt::print(stderr, "tenon: {}\n", note);
    // The array of an .npy file is used as x.
    if (tensors_.is_npy)
      for (FileTensor& t : tensors_.tensors) t.name = "x";
  }

  // Throws if the file holds a tensor of the plan in an unsupported dtype. Such a tensor would
  // otherwise be filled with random values.
  void check(const Plan& plan) const {
    for (const Buffer& b : plan.buffers())
      require(std::ranges::find(tensors_.left_out, b.name) == tensors_.left_out.end(),
              "run --input ", file_, ": '", b.name,
              "' has a dtype that is not read; save it as f32, f16 or bf16, or leave it away");
  }

  // Sets rows and columns from a given x.
  void size(ChainRunArgs& args) const {
    const FileTensor* x = find("x");
    if (!x) return;
    require(!args.rows || *args.rows == x->matrix.rows, "run --rows ", args.rows.value_or(0), ": ",
            file_, " has an x of ", x->matrix.rows, " rows; leave the option away");
    require(args.cols == 0 || args.cols == x->matrix.cols, "run --cols ", args.cols, ": ", file_,
            " has an x of ", x->matrix.cols, " columns; leave the option away");
    args.rows = x->matrix.rows;
    args.cols = x->matrix.cols;
  }

  // Fills all tensors that the plan reads. Returns the source of each tensor.
  std::map<std::string, std::string> fill(const Session& s, uint64_t seed) const {
    std::set<std::string> names;
    std::string known;
    for (const size_t i : with(s.plan(), kGiven)) {
      const std::string& name = s.plan().buffers()[i].name;
      names.insert(name);
      known += (known.empty() ? "" : ", ") + name;
    }
    for (const FileTensor& t : tensors_.tensors)
      require(names.contains(t.name), "run --input ", file_, ": the chain reads no tensor '",
              clean(t.name), "'; it reads ", known);
    std::map<std::string, std::string> from;
    for (const size_t i : with(s.plan(), kGiven)) {
      const Buffer& b = s.plan().buffers()[i];
      void* const to = s.at(b.name);
      if (const FileTensor* t = find(b.name)) {
        from[b.name] = "file";
        copy(*t, b, s.rows(), to);
      } else if (b.initial.low < b.initial.high) {
        from[b.name] = "initial";
        s.plan().initialise(i, seed, to);
      } else {
        // Random values instead of the initial ones: with a bias of 0 or a gamma of 1 the check
        // would not notice that the kernel ignores it.
        from[b.name] = "random";
        normal(b, s.rows(), seed, to);
      }
    }
    return from;
  }

 private:
  [[nodiscard]] const FileTensor* find(std::string_view name) const {
    for (const FileTensor& t : tensors_.tensors)
      if (t.name == name) return &t;
    return nullptr;
  }
  static void set(const Buffer& b, void* to, int64_t i, float value) {
    const uint32_t code = encode(b.dtype, value);
    const auto size = info(b.dtype).bytes;
    std::memcpy(static_cast<char*>(to) + i * size, &code, static_cast<size_t>(size));
  }
  void copy(const FileTensor& t, const Buffer& b, int64_t rows, void* to) const {
    require(t.matrix.rows == b.rows(rows) && t.matrix.cols == b.cols, "run --input ", file_, ": '",
            b.name, "' is ", t.matrix.rows, " x ", t.matrix.cols, "; the chain wants ",
            shape_text(b, rows));
    // Converts a few rows at a time. A whole tensor would need twice its memory.
    constexpr int64_t kElements = 1 << 20;
    const auto [all, cols] = t.matrix;
    const int64_t step = std::max<int64_t>(1, kElements / std::max<int64_t>(cols, 1));
    std::vector<float> buffer;
    for (int64_t row = 0; row < all; row += step) {
      const View v = t.tile({row, std::min(step, all - row), 0, cols}, buffer);
      const auto size = info(v.dtype).bytes;
      for (int64_t i = 0; i < v.rows * cols; ++i) {
        uint32_t code = 0;
        std::memcpy(&code, static_cast<const char*>(v.data) + i * size, static_cast<size_t>(size));
        set(b, to, row * cols + i, decode(v.dtype, code));
      }
    }
  }
  // Each name has its own random stream, so that an added tensor does not change the others.
  static void normal(const Buffer& b, int64_t rows, uint64_t seed, void* to) {
    std::seed_seq mixed(b.name.begin(), b.name.end());
    std::mt19937_64 engine(mixed);
    engine.seed(engine() ^ seed);
    // Parameters are distributed around their initial value.
    std::normal_distribution<float> draw(b.initial.low, b.role == Role::param ? 0.25F : 1.0F);
    for (int64_t i = 0; i < b.rows(rows) * b.cols; ++i) set(b, to, i, draw(engine));
  }

  std::string file_;
  TensorFile tensors_;
};

// `columns` of the state is the width of the widest tensor, so that no two elements of one dropout
// share a random number.
RandomState random_state(const Plan& plan, uint64_t seed) {
  int64_t widest = 1;
  for (const Buffer& b : plan.buffers()) widest = std::max(widest, b.cols);
  for (const PlanStep& s : data_of(plan).forward) widest = std::max(widest, s.step.cols);
  return {seed, 0, 0, 0, static_cast<uint64_t>(widest)};
}

struct Checked {
  std::string name;
  Distance error, allowed;

  [[nodiscard]] bool ok() const {
    return !error.lost && error.rms <= allowed.rms && error.worst <= allowed.worst;
  }
  [[nodiscard]] std::string wrong() const;
};

std::string number(double v) {
  return std::isfinite(v) ? fmt::format("{:.2e}", v) : std::string("no bound");
}

std::string Checked::wrong() const {
  if (error.lost) return "other numbers are not finite";
  const bool all = error.rms > allowed.rms;
  return str(all ? "error " : "worst element ", number(all ? error.rms : error.worst), ", allowed ",
             number(all ? allowed.rms : allowed.worst));
}

struct Check {
  int64_t rows = 0;  // rows that were checked
  std::vector<Checked> tensors;
  std::vector<std::string> left_out;

  [[nodiscard]] bool ok() const { return std::ranges::all_of(tensors, &Checked::ok); }
};

// The first rows of a tensor.
Matrix64 read(const Session& s, const Buffer& b, int64_t rows) {
  Matrix64 m{b.rows(rows), b.cols, {}};
  m.v.resize(static_cast<size_t>(m.rows * m.cols));
  if (const std::vector<float> numbers = decoded_output(s, b); !numbers.empty()) {
    std::copy_n(numbers.begin(), m.v.size(), m.v.begin());
    return m;
  }
  const auto size = static_cast<size_t>(info(b.dtype).bytes);
  const char* const from = static_cast<const char*>(s.at(b.name));
  for (size_t i = 0; i < m.v.size(); ++i) {
    uint32_t code = 0;
    std::memcpy(&code, from + i * size, size);
    m.v[i] = decode(b.dtype, code);
  }
  return m;
}

Check check(const Session& s, const RandomState& random, std::optional<double> tolerance) {
  constexpr double kMost = 1e10;  // operations of one float64 run, which then takes some seconds
  constexpr double kFactor = 4;   // margin for random variation of rounding errors
  constexpr double kSamples = 8;  // number of runs that sample this variation, if they are cheap
  const PlanData& d = data_of(s.plan());
  const int64_t whole = least_rows(s.plan());
  const double work = work_per_row(s.plan());
  Check c;
  c.rows = s.rows();
  if (work * static_cast<double>(s.rows()) > kMost)
    c.rows =
        std::clamp<int64_t>(static_cast<int64_t>(kMost / work) / whole * whole, whole, s.rows());

  Reference reference{.chain = d.chain, .request = d.request, .random = random, .given = {}};
  for (const size_t i : with(s.plan(), kGiven)) {
    const Buffer& b = d.buffers[i];
    reference.given[b.name] = read(s, b, c.rows);
  }
  const auto samples = static_cast<uint64_t>(
      std::clamp(kMost / (work * static_cast<double>(c.rows)), 1.0, kSamples));
  Progress progress(samples + 1);
  progress.step("float64");
  const Tensors64 exact = reference.run();
  for (const size_t i : results_of(s.plan())) {
    const Buffer& b = d.buffers[i];
    if (c.rows < s.rows() && b.rows.mul == 0) {
      c.left_out.push_back(b.name);  // it sums over all rows
      continue;
    }
    // After a final reshape the plan holds the same elements in another shape.
    const Matrix64& want = exact.at(b.name);
    Matrix64 got = read(s, b, c.rows);
    got.rows = want.rows;
    got.cols = want.cols;
    const DType dtype = info(b.dtype).plain ? b.dtype : DType::f32;
    c.tensors.push_back({b.name, distance(got, want, dtype), {}});
    if (tolerance) c.tensors.back().allowed = {.rms = *tolerance, .worst = *tolerance};
  }
  for (uint64_t sample = 1; !tolerance && sample <= samples; ++sample) {
    progress.step("what rounding costs");
    const Tensors64 moved = reference.run(sample);
    for (Checked& t : c.tensors) {
      const Distance by = distance(moved.at(t.name), exact.at(t.name), DType::f32);
      t.allowed.rms = std::hypot(t.allowed.rms, kFactor * by.rms / std::sqrt(samples));
      t.allowed.worst = std::max(t.allowed.worst, kFactor * by.worst);
    }
  }
  return c;
}

double median(std::vector<double> v) {
  std::ranges::sort(v);
  return v.empty() ? 0 : v[v.size() / 2];
}

template <class F>
double milliseconds(F f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

struct PassTime {
  std::string tag, name;
  double ms = 0;
  int64_t bytes = 0, flops = 0;

  [[nodiscard]] double gbps() const { return static_cast<double>(bytes) / ms * 1e-6; }
  [[nodiscard]] double gflops() const { return static_cast<double>(flops) / ms * 1e-6; }
};

struct Times {
  std::vector<PassTime> passes;
  double fused = 0, unfused = 0;  // without quantising the weights, which did not change
};

void both(Runner& r, const PlanRequest& request, bool weights_changed) {
  r.run(Pass::forward, weights_changed);
  if (request.backward) r.run(Pass::backward, weights_changed);
}

Times time(Session& s, const RandomState& random, int repeat) {
  const PlanData& d = data_of(s.plan());
  Unfused unfused(d.chain, d.request, s.rows());
  for (const size_t i : with(s.plan(), kGiven)) {
    const Buffer& b = d.buffers[i];
    std::memcpy(unfused.at(b.name), s.at(b.name), static_cast<size_t>(b.bytes(s.rows())));
  }
  std::memcpy(unfused.at("rng"), random.data(), sizeof random);
  both(unfused, d.request, true);

  std::map<const Step*, std::vector<double>> each;
  std::vector<double> fused, apart;
  Progress progress(static_cast<size_t>(repeat));
  for (int i = 0; i < repeat; ++i) {
    progress.step("times");
    fused.push_back(milliseconds([&] { both(s, d.request, false); }));
    apart.push_back(milliseconds([&] { both(unfused, d.request, false); }));
    set_observer([&](const Step& step, const tenon::RunArgs&, const Options&,
                     const std::function<void()>& go) { each[&step].push_back(milliseconds(go)); });
    both(s, d.request, true);
    set_observer({});
  }
  Times t{.passes = {}, .fused = median(fused), .unfused = median(apart)};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    int number = 0;
    for (const PlanStep& p : d.steps(pass)) {
      const auto it = each.find(&p.step);
      number += !p.weights;
      t.passes.push_back({.tag = str(pass == Pass::forward ? "F" : "B",
                                     p.weights ? std::string("w") : str(number)),
                          .name = str(head_name(p), " ", p.step.name),
                          .ms = it == each.end() ? 0 : median(it->second),
                          .bytes = bytes_of(d, p, s.rows()),
                          .flops = p.step.flops(p.rows(s.rows()))});
    }
  }
  return t;
}

struct Report {
  const ChainRunArgs& args;
  const Session& session;
  std::map<std::string, std::string> from;
  std::optional<Check> check = {};
  std::optional<Times> times = {};
};

void print_check(const Report& r) {
  const Check& c = *r.check;
  const int64_t rows = r.session.rows();
  const std::string which = c.rows == rows ? str(rows, rows == 1 ? " row" : " rows")
                                           : str("the first ", c.rows, " of ", rows, " rows");
  const std::string rule = r.args.tolerance
                               ? std::string("--tolerance")
                               : std::string("four times what rounding in these formats moves");
  fmt::print("check   {} against the unfused chain in float64; allowed: {}\n", which, rule);
  fmt::print("  {:<24} {:>14} {:>10} {:>10} {:>10} {:>10}\n", "tensor", "shape", "error", "allowed",
             "worst", "allowed");
  for (const Checked& t : c.tensors) {
    const Buffer& b = r.session.buffer(t.name);
    fmt::print("  {:<24} {:>14} {:>10} {:>10} {:>10} {:>10}  {}", t.name, shape_text(b, rows),
               number(t.error.rms), number(t.allowed.rms), number(t.error.worst),
               number(t.allowed.worst), t.ok() ? "ok" : "WRONG");
    if (t.error.not_finite) fmt::print(", {} not finite", t.error.not_finite);
    if (t.error.lost) fmt::print(", not the same ones as in float64");
    fmt::print("\n");
  }
  if (!c.left_out.empty()) {
    fmt::print("  left out, since they are sums over all rows: ");
    for (size_t i = 0; i < c.left_out.size(); ++i) fmt::print("{}{}", i ? ", " : "", c.left_out[i]);
    fmt::print("\n");
  }
}

void print_times(const Report& r) {
  const Times& t = *r.times;
  fmt::print("time    median of {}, {} threads\n", r.args.repeat, threads());
  for (const PassTime& p : t.passes) {
    if (p.ms == 0) continue;  // a collective: no kernel of this library
    fmt::print("  {:<3} {:<44} {:>9.3f} ms {:>7.1f} GB/s", p.tag, p.name, p.ms, p.gbps());
    if (p.flops) fmt::print(" {:>8.1f} GFLOP/s", p.gflops());
    fmt::print("\n");
  }
  fmt::print("  fused {:.3f} ms, one op at a time {:.3f} ms: {:.2f} times\n", t.fused, t.unfused,
             t.unfused / t.fused);
}

void print_text(const Report& r) {
  const PlanData& d = data_of(r.session.plan());
  fmt::print("chain   {}\n", print_chain(d.chain));
  fmt::print("input   {} x {} {}, recipe {}, {}, {}, {}, seed {}\n", r.session.rows(),
             d.request.cols, r.args.dtype, r.args.recipe, r.args.device, r.args.precision,
             r.args.rounding, r.args.seed);
  std::map<std::string, std::string> by;
  for (const size_t i : with(r.session.plan(), kGiven)) {
    const std::string& name = d.buffers[i].name;
    std::string& list = by[r.from.at(name)];
    list += (list.empty() ? "" : ", ") + name;
  }
  for (const auto& [where, names] : by) fmt::print("{:<7} {}\n", where, names);
  if (r.check) print_check(r);
  if (r.times) print_times(r);
}

// JSON has no infinity.
Json finite(double v) { return std::isfinite(v) ? Json(v) : Json(nullptr); }

void print_json(const Report& r) {
  const PlanData& d = data_of(r.session.plan());
  Json out{{"format", 1},
           {"tenon", version()},
           {"chain", print_chain(d.chain)},
           {"rows", r.session.rows()},
           {"cols", d.request.cols},
           {"dtype", r.args.dtype},
           {"recipe", r.args.recipe},
           {"device", r.args.device},
           {"seed", r.args.seed},
           {"options", {{"precision", r.args.precision}, {"rounding", r.args.rounding}}},
           {"from", r.from},
           {"check", nullptr},
           {"time", nullptr}};
  if (r.check) {
    Json list = Json::array();
    for (const Checked& t : r.check->tensors)
      list.push_back({{"name", t.name},
                      {"error", finite(t.error.rms)},
                      {"allowed", finite(t.allowed.rms)},
                      {"worst", finite(t.error.worst)},
                      {"worst_allowed", finite(t.allowed.worst)},
                      {"not_finite", t.error.not_finite},
                      {"ok", t.ok()}});
    out["check"] = {{"rows", r.check->rows},
                    {"ok", r.check->ok()},
                    {"left_out", r.check->left_out},
                    {"tensors", list}};
  }
  if (r.times) {
    Json list = Json::array();
    for (const PassTime& p : r.times->passes)
      list.push_back({{"pass", p.tag},
                      {"name", p.name},
                      {"ms", p.ms > 0 ? Json(p.ms) : Json(nullptr)},
                      {"bytes", p.bytes},
                      {"flops", p.flops}});
    out["time"] = {{"repeat", r.args.repeat},
                   {"passes", list},
                   {"fused_ms", r.times->fused},
                   {"unfused_ms", r.times->unfused}};
  }
  fmt::print("{}\n", out.dump());
}

std::string results(const Session& s) {
  std::vector<TensorToWrite> list;
  std::vector<float> decoded;  // only one result may be encoded
  for (const size_t i : results_of(s.plan())) {
    const Buffer& b = s.plan().buffers()[i];
    TensorToWrite t;
    t.name = b.name;
    if (!info(b.dtype).plain) decoded = decoded_output(s, b);
    t.type = b.dtype == DType::f32   ? Stored::f32
             : !info(b.dtype).plain  ? Stored::f32
             : b.dtype == DType::f16 ? Stored::f16
                                     : Stored::bf16;
    t.shape = {b.rows(s.rows()), b.cols};
    if (b.rows == RowCount{0, 1, 1, 1}) t.shape = {b.cols};  // a vector has one dimension
    const void* const data = info(b.dtype).plain ? s.at(b.name) : decoded.data();
    t.data = {static_cast<const std::byte*>(data),
              static_cast<size_t>(b.rows(s.rows()) * b.cols * bytes_of(t.type))};
    list.push_back(std::move(t));
  }
  return safetensors_file(list);
}

int run(const ChainRunArgs& given) {
  ChainRunArgs args = given;
  require(args.device != "null", "run --device null: it runs nothing; `tenon plan --device null` ",
          "shows what it would do");
  require(args.target.empty(), "run --target ", args.target,
          ": a plan for another machine does not run here; `tenon plan --target ", args.target,
          "` shows it");
  if (args.device == "cuda") {
    args.repeat = 0;  // timing is meaningless: the chain's tensors are in host memory
    if (const cuda::Status s = cuda::status(); !s.gpu) {
      fmt::print(stderr, "tenon: run --device cuda: {}\n", s.why);
      return no_device;
    }
  }
  require(!args.tolerance || *args.tolerance >= 0, "run --tolerance ", args.tolerance.value_or(0),
          ": it must not be negative");
  if (!args.output.empty())
    for (const std::string& input : {args.input, chain_file(args)})
      require_other_file("run --output", args.output, input);
  const Inputs inputs(args.input);
  inputs.size(args);
  const PlanRequest request = request_of(args);
  const Plan made = build(parse_chain(chain_text(args)), request);
  inputs.check(made);
  const int64_t rows = args.rows.value_or(ChainArgs::kRows);
  Session session(made, rows);
  Report report{.args = args, .session = session, .from = inputs.fill(session, args.seed)};

  const RandomState random = random_state(made, args.seed);
  const auto restart = [&] {
    if (void* const state = session.find("rng")) std::memcpy(state, random.data(), sizeof random);
  };
  const bool backward = session.find("dy") != nullptr;
  for (const bool last : {false, true}) {
    // Delayed scaling needs a history. The first run creates it.
    if (!last && args.recipe != "delayed") continue;
    restart();
    session.run(Pass::forward);
    if (backward) session.run(Pass::backward);
    if (!last) session.update_scales();
  }
  if (!args.output.empty()) write_file("run --output", args.output, results(session));
  if (!args.no_check) report.check = check(session, random, args.tolerance);
  if (args.repeat > 0) report.times = time(session, random, args.repeat);
  if (args.json)
    print_json(report);
  else
    print_text(report);
  if (!report.check || report.check->ok()) return ok;
  for (const Checked& t : report.check->tensors)
    if (!t.ok())
      fmt::print(stderr, "tenon: run: '{}' is not what float64 gives: {}\n", t.name, t.wrong());
  return failed;
}

}  // namespace

extern const Command kRunCommand{
    "run", "run a chain of ops, check it against the unfused chain in float64, and time it",
    []() -> Bound {
      static ChainRunArgs args;
      args.command = "run";
      return {
          chain_options(
              args, {{"--input", &args.input,
                      "tensors by the names that `tenon plan` shows: .safetensors, or an .npy with "
                      "x; all others are random"},
                     {"--output", &args.output,
                      "write outputs (decoded) and gradients to this .safetensors file"},
                     {"--seed", &args.seed, "of what is random"},
                     {.name = "--repeat",
                      .value = &args.repeat,
                      .about = "how often it is timed; 0: not at all; on the cpu only",
                      .range = {{0, 100000}}},
                     {"--tolerance", &args.tolerance,
                      "the relative error that is allowed, in place of what the formats allow"},
                     {"--no-check", &args.no_check, "do not compare with float64"},
                     {"--json", &args.json, "one JSON object"}}),
          [] { return run(args); }};
    }};

}  // namespace tenon::cli
