// `tenon bench`: kernels as shares of the fastest data movement with the same reads and writes.
#include "cli/bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "backend/cuda/kernels.h"
#include "backend/cuda/makers.h"
#include "cli/bench_ceiling.h"
#include "cli/bench_cubin.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

constexpr Shape kCudaShape{16384, 14336};
constexpr Shape kCpuShape{2048, 4096};
// Six tensors of f32 still fit between the addresses that cases are planned with.
constexpr int64_t kMostElements = int64_t{1} << 36;

Shape shape_named(const std::string& text) {
  Shape s;
  char rest = 0;
  long long rows = 0;
  long long cols = 0;
  const int found = std::sscanf(text.c_str(), "%lldx%lld%c", &rows, &cols, &rest);
  s = {rows, cols};
  require(found == 2 && s.rows > 0 && s.cols > 0, "bench: --shape ", text,
          " is no shape; give rows and columns as in 8192x4096");
  return s;
}

std::vector<Shape> shapes_of(const BenchArgs& args) {
  std::vector<Shape> shapes;
  for (const std::string& s : args.shapes) shapes.push_back(shape_named(s));
  Shape one = args.device == "cuda" ? kCudaShape : kCpuShape;
  require(args.rows >= 0 && args.cols >= 0, "bench: --rows is ", args.rows, " and --cols ",
          args.cols, "; both must be positive");
  require(shapes.empty() || (args.rows == 0 && args.cols == 0),
          "bench: --shape and --rows or --cols are both given; leave one of them out");
  if (args.rows) one.rows = args.rows;
  if (args.cols) one.cols = args.cols;
  if (shapes.empty()) shapes.push_back(one);
  for (const Shape& s : shapes)
    require(s.rows <= kMostElements / s.cols, "bench: a shape of ", s.rows, " x ", s.cols,
            "; at most ", kMostElements, " elements are timed, give smaller --rows or --cols");
  return shapes;
}

int list(const BenchArgs& args, const std::vector<Shape>& shapes) {
  size_t count = 0;
  for (const Shape& shape : shapes) {
    fmt::print("{:<52} {:<12} {:>10}  {}\n", str(shape.rows, "x", shape.cols), "mix", "MB",
               "maker");
    for (const BenchEntry& e : bench_entries(args, shape)) {
      fmt::print("{:<52} {:<12} {:>10.1f}  {}\n", e.c.name(), e.mix_names(),
                 static_cast<double>(e.bytes()) * 1e-6, e.makers());
      ++count;
    }
  }
  fmt::print("{} cases\n", count);
  return ok;
}

// Every text of the cases and of their ceilings; needs no GPU.
int compile_only(const BenchArgs& args, const std::vector<Shape>& shapes) {
  std::map<std::string, std::string> texts;  // to the name of one case that has it
  std::vector<std::pair<std::string, std::vector<std::string>>> rows;
  for (const Shape& shape : shapes)
    for (const BenchEntry& e : bench_entries(args, shape)) {
      rows.emplace_back(e.c.name() + "  [" + e.makers() + "]", e.texts());
      for (const std::string& t : rows.back().second) texts.try_emplace(t, e.c.name());
      for (const Mix& m : e.mixes) texts.try_emplace(ceiling_of(m).text, "ceiling " + m.name());
    }
  std::vector<const std::string*> order;
  for (const auto& [text, name] : texts) order.push_back(&text);
  std::map<const std::string*, std::map<std::string, KernelUse>> uses;
  std::mutex lock;
  on_all_cores(order.size(), [&](size_t i) {
    auto use = kernel_uses(cuda::compile_once(*order[i], args.arch, texts.at(*order[i])).image);
    const std::lock_guard guard(lock);
    uses[order[i]] = std::move(use);
  });
  const auto print_uses = [&](const std::string& text) {
    for (const auto& [kernel, use] : uses.at(&texts.find(text)->first))
      fmt::print("  {}: {} registers, {} local bytes{}\n", kernel, use.registers, use.local_bytes,
                 use.local_bytes ? "  <- local" : "");
  };
  for (const auto& [name, own] : rows) {
    fmt::print("{}\n", name);
    for (const std::string& t : own) print_uses(t);
  }
  fmt::print("{} texts compiled for {}\n", texts.size(), args.arch);
  return ok;
}

}  // namespace

int64_t BenchEntry::bytes() const {
  int64_t total = 0;
  for (const BenchCall& c : calls) total += c.step.bytes(c.rows);
  return total;
}

double BenchEntry::beyond_mixes(Shape shape) const {
  int64_t moved = 0;
  for (const Mix& m : mixes) moved += m.bytes() * shape.rows * shape.cols;
  return static_cast<double>(bytes()) / static_cast<double>(moved);
}

std::string BenchEntry::makers() const {
  std::vector<std::string> names;
  const auto add = [&](std::string name) {
    if (std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
  };
  for (const BenchCall& c : calls) {
    const RunArgs args{c.rows, c.in, c.out, c.parameters};
    const std::vector<std::string> own = c.kernel->texts_for(args);
    const std::vector<std::string> all = c.kernel->texts();  // the last one does what others refuse
    const bool refused = all.size() > 1 && !own.empty() && own.front() == all.back();
    add(str(c.maker, refused ? " (does not fit: plain)" : ""));
  }
  std::string all;
  for (const std::string& n : names) all += (all.empty() ? "" : ", ") + n;
  return all;
}

std::vector<std::string> BenchEntry::texts() const {
  std::vector<std::string> all;
  for (const BenchCall& c : calls)
    for (std::string& t : c.kernel->texts_for({c.rows, c.in, c.out, c.parameters}))
      all.push_back(std::move(t));
  return all;
}

std::string BenchEntry::mix_names() const {
  std::string all;
  for (const Mix& m : mixes) all += (all.empty() ? "" : ", ") + m.name();
  return all;
}

Options bench_options(const BenchArgs& args) {
  Options o;
  o.device = args.device == "cuda" ? Device::cuda : Device::cpu;
  o.precision = args.precision == "strict" ? Precision::strict : Precision::native;
  return o;
}

std::vector<BenchEntry> bench_entries(const BenchArgs& args, Shape shape) {
  const DType dtype = *dtype_named(args.dtype);
  const std::vector<BenchCase> cases =
      filtered(bench_cases(dtype, args.cases == "all"), args.filters);
  if (cases.empty())
    fail(Code::invalid_argument, "bench: no case has the words '", args.filters.front(),
         "'; tenon bench --list shows the cases");
  std::vector<BenchEntry> entries;
  for (const BenchCase& c : cases) {
    BenchMemory nowhere;
    BenchEntry e{.c = c, .shape = shape};
    e.calls = bench_calls(c, shape, dtype, bench_options(args), nowhere);
    for (const BenchCall& call : e.calls) e.mixes.push_back(mix_of(call.step));
    e.in_bytes = nowhere.in_bytes();
    e.number_bytes = nowhere.number_bytes();
    e.out_bytes = nowhere.out_bytes();
    entries.push_back(std::move(e));
  }
  return entries;
}

double median(std::vector<double> v) {
  if (v.empty()) return 0;
  std::ranges::sort(v);
  const size_t half = v.size() / 2;
  return v.size() % 2 ? v[half] : (v[half - 1] + v[half]) / 2;
}

void on_all_cores(size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::exception_ptr wrong;
  std::mutex lock;
  const auto run = [&] {
    for (size_t i = next++; i < count; i = next++) {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard guard(lock);
        if (!wrong) wrong = std::current_exception();
      }
    }
  };
  std::vector<std::thread> others;
  const size_t cores = std::max(1U, std::thread::hardware_concurrency());
  for (size_t i = 1; i < std::min(cores, count); ++i) others.emplace_back(run);
  run();
  for (std::thread& t : others) t.join();
  if (wrong) std::rethrow_exception(wrong);
}

int bench(const BenchArgs& args) {
  const std::vector<Shape> shapes = shapes_of(args);
  if (args.list) return list(args, shapes);
  if (args.compile_only) return compile_only(args, shapes);
  BenchReport report;
  if (args.device == "cuda") {
    const cuda::Status s = cuda::status();
    if (!s.gpu) {
      fmt::print(stderr,
                 "bench: cuda is not usable here: {}\n  --list shows the cases and their kernels, "
                 "--compile-only compiles them, --device cpu times the CPU's\n",
                 s.why);
      return no_device;
    }
    bench_cuda(args, shapes, report);
  } else {
    bench_cpu(args, shapes, report);
  }
  print_summary(args, report);
  const bool wrong =
      std::ranges::any_of(report.results, [](const BenchResult& r) { return !r.error.empty(); });
  return wrong ? failed : ok;
}

}  // namespace tenon::cli
