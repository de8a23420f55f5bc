// `tenon bench`: measures kernels relative to the fastest copy with the same reads and writes.
#include "bench/bench.h"

#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "backend/cuda/kernels.h"
#include "backend/cuda/makers.h"
#include "bench/ceiling.h"
#include "bench/cubin.h"
#include "cli/command.h"
#include "cli/output_file.h"
#include "tenon/error.h"

namespace tenon::cli {

using namespace bench;  // NOLINT: the command shows what it measures

namespace {

constexpr Shape kCudaShape{16384, 14336};
constexpr Shape kCpuShape{2048, 4096};
// With this limit, six f32 tensors fit between the placeholder addresses of the planned cases.
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

// Compiles every text of the cases and of their ceilings. Needs no GPU.
int compile_only(const BenchArgs& args, const std::vector<Shape>& shapes) {
  std::map<std::string, std::string> texts;  // text to the name of one case that uses it
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

int run(BenchArgs args, const std::string& words) {
  if (!words.empty()) args.filters.push_back(words);
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
  if (!args.file.empty()) write_file("bench --save", args.file, report_json(args, report));
  print_summary(args, report);
  const bool wrong =
      std::ranges::any_of(report.results, [](const BenchResult& r) { return !r.error.empty(); });
  return wrong ? failed : ok;
}

// Joins all words to one filter.
std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : " ") + w;
  return text;
}

}  // namespace

extern const Command kBenchCommand{
    "bench", "time kernels as shares of the fastest copy with the same reads and writes",
    []() -> Bound {
      static BenchArgs args;
      static std::vector<std::string> words;
      return {{{"SUBSTRING", &words, "only cases with all of these words"},
               {"--device", &args.device, "", {"cpu", "cuda"}},
               {"--cases",
                &args.cases,
                "default, or all: every activation in every format",
                {"default", "all"}},
               {"--filter", &args.filters,
                "cases with all these words, e.g. \"gelu rowcol\"; several: any of them"},
               {"--rows", &args.rows, "16384 on cuda, 2048 on cpu"},
               {"--cols", &args.cols, "14336 on cuda, 4096 on cpu"},
               {"--shape", &args.shapes, "ROWSxCOLS in place of these; several are timed"},
               {"--dtype", &args.dtype, "of inputs and plain results", {"f32", "f16", "bf16"}},
               {"--precision", &args.precision, "", {"native", "strict"}},
               {.name = "--shots",
                .value = &args.shots,
                .about = "how often each case is timed",
                .range = {{1, 10000}}},
               {"--json", &args.json, "one JSON object a case on stdout, in place of tables"},
               {"--save", &args.file, "write everything to this file, as JSON"},
               {"--list", &args.list, "print the cases and their makers, run nothing"},
               {"--compile-only", &args.compile_only,
                "compile every kernel and print what it takes; needs no GPU"},
               {"--arch", &args.arch, "for --compile-only"},
               {"--no-costs", &args.no_costs, "leave out host and compile times"}},
              [] { return run(args, joined(words)); }};
    }};

}  // namespace tenon::cli
