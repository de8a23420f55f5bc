// The interface of the benchmarks: the list of cases, the CPU and CUDA measurements, the report.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/cases.h"
#include "bench/statistics.h"

namespace tenon::bench {

// The arguments of a benchmark run.
struct BenchArgs {
  std::string device = "cpu", dtype = "bf16", precision = "native", cases = "default";
  std::vector<std::string> filters, shapes;
  int64_t rows = 0, cols = 0;  // 0: the default of the device
  int shots = 11;
  std::string file, arch = "sm_90a";
  bool list = false, compile_only = false, no_costs = false, json = false;

  [[nodiscard]] bool costs() const { return !no_costs && !json; }
};

// A planned case. Its steps use placeholder addresses, for lists and for compilation ahead of time.
struct BenchEntry {
  BenchCase c;
  Shape shape;
  std::vector<BenchCall> calls = {};
  std::vector<Mix> mixes = {};  // one per step
  size_t in_bytes = 0, number_bytes = 0, out_bytes = 0;

  [[nodiscard]] int64_t bytes() const;  // minimum memory traffic
  // bytes() divided by the bytes of the mixes. Mixes leave out block scales, so this factor extends
  // the ceiling's time to all bytes.
  [[nodiscard]] double beyond_mixes() const;
  // The makers of the steps, each once. "row map, plain": the maker of a step passes this call to
  // another maker.
  [[nodiscard]] std::string makers() const;
  // The compiler inputs for this call.
  [[nodiscard]] std::vector<std::string> texts() const;
  [[nodiscard]] std::string mix_names() const;
};
BenchEntry bench_entry(const BenchCase& c, Shape shape, const Options& options);
std::vector<BenchEntry> bench_entries(const BenchArgs& args, Shape shape);
Options bench_options(const BenchArgs& args);

struct BenchResult {
  BenchCase c;
  Shape shape;
  std::string mix = {}, makers = {};
  std::vector<Mix> mixes = {};  // one per step
  std::string kernel = {};      // name of the largest kernel
  double microseconds = 0, ceiling_microseconds = 0;
  double cached_microseconds = 0;     // on the CPU: the same work on tensors in the cache
  double terabytes = 0;               // per second, of the minimum memory traffic
  double share = 0;                   // of the ceiling, 0 to 1
  double share_lo = 0, share_hi = 0;  // 95 % interval of the median over the rounds
  int64_t bytes = 0;                  // minimum memory traffic
  bool checked = false;               // all results were checked to be written
  struct Peer {
    std::string name, version;
    double microseconds = 0;
    Estimate speedup;  // over the rounds: its time over ours
  };
  std::vector<Peer> peers = {};
  int registers = 0, local_bytes = 0, threads = 0, kernels = 0;  // on a GPU
  std::string error = {};
};
// Computes the result from the microseconds of the rounds. A single time applies to all rounds.
BenchResult result_of(const BenchEntry& e, const std::vector<double>& times,
                      const std::vector<double>& ceiling);

struct BenchNumber {
  std::string what;
  double value = 0;
  std::string unit;
};

struct BenchReport {
  std::string device;
  bool on_gpu = false;  // the report shows registers, local memory, threads and TB/s
  std::vector<BenchResult> results;
  std::vector<BenchNumber> ceilings, costs;
};

// Prints one line per case as soon as it is timed, and a summary at the end. With --json, prints
// one object per line instead.
void print_head(const BenchArgs& args, const BenchReport& report);
void print_case(const BenchArgs& args, const BenchReport& report, const BenchResult& r);
void print_summary(const BenchArgs& args, const BenchReport& report);
// The whole report, for a file.
std::string report_json(const BenchArgs& args, const BenchReport& report);

// Runs `work` for 0 to count − 1 on all cores. Rethrows the first exception at the end.
void on_all_cores(size_t count, const std::function<void(size_t)>& work);

// The CPU and the CUDA measurement.
void bench_cpu(const BenchArgs& args, const std::vector<Shape>& shapes, BenchReport& report);
void bench_cuda(const BenchArgs& args, const std::vector<Shape>& shapes, BenchReport& report);

// Host time of launches. Times to compile a kernel, to find it on disk and to load it.
std::vector<BenchNumber> bench_compile_costs(const std::string& arch);
std::vector<BenchNumber> bench_launch_costs();
// On the CPU: first calls of new formulas, and small calls.
std::vector<BenchNumber> bench_call_costs();

}  // namespace tenon::bench
