// Plans the cases, and computes results from their rounds.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "bench/bench.h"
#include "bench/timing.h"
#include "tenon/error.h"

namespace tenon::bench {

int64_t BenchEntry::bytes() const {
  int64_t total = 0;
  for (const BenchCall& c : calls) total += c.step.bytes(c.rows);
  return total;
}

double BenchEntry::beyond_mixes() const {
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
    const std::string_view way = c.kernel->way(args).maker;
    add(str(c.maker, way == c.maker ? "" : str(" (does not fit: ", way, ")")));
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

BenchEntry bench_entry(const BenchCase& c, Shape shape, const Options& options) {
  BenchMemory nowhere;
  BenchEntry e{.c = c, .shape = shape};
  e.calls = bench_calls(c, shape, c.in, options, nowhere);
  for (const BenchCall& call : e.calls) e.mixes.push_back(mix_of(call.step));
  e.in_bytes = nowhere.in_bytes();
  e.number_bytes = nowhere.number_bytes();
  e.out_bytes = nowhere.out_bytes();
  return e;
}

std::vector<BenchEntry> bench_entries(const BenchArgs& args, Shape shape) {
  const DType dtype = *dtype_named(args.dtype);
  const std::vector<BenchCase> cases =
      filtered(bench_cases(dtype, args.cases == "all"), args.filters);
  if (cases.empty())
    fail(Code::invalid_argument, "bench: no case has the words '", args.filters.front(),
         "'; tenon bench --list shows the cases");
  std::vector<BenchEntry> entries;
  for (const BenchCase& c : cases) entries.push_back(bench_entry(c, shape, bench_options(args)));
  return entries;
}

BenchResult result_of(const BenchEntry& e, const std::vector<double>& times,
                      const std::vector<double>& ceiling) {
  BenchResult r{.c = e.c,
                .shape = e.shape,
                .mix = e.mix_names(),
                .makers = e.makers(),
                .mixes = e.mixes,
                .microseconds = median(times),
                .ceiling_microseconds = median(ceiling),
                .bytes = e.bytes()};
  r.terabytes = static_cast<double>(r.bytes) / r.microseconds * 1e-6;
  std::vector<double> shares;
  for (size_t i = 0; i < ceiling.size(); ++i)
    shares.push_back(ceiling[i] / times[std::min(i, times.size() - 1)]);
  const Estimate share = estimate(shares);
  r.share = share.median;
  r.share_lo = share.low;
  r.share_hi = share.high;
  return r;
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

}  // namespace tenon::bench
