// The one list of cases with two measurers, CPU and CUDA, and the report of what they found.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "bench/cases.h"

namespace tenon::bench {

// What a run of the benchmarks is told.
struct BenchArgs {
  std::string device = "cpu", dtype = "bf16", precision = "native", cases = "default";
  std::vector<std::string> filters, shapes;
  int64_t rows = 0, cols = 0;  // 0: the device's own
  int shots = 11;
  std::string file, arch = "sm_90a";
  bool list = false, compile_only = false, no_costs = false, json = false;

  [[nodiscard]] bool costs() const { return !no_costs && !json; }
};

// A case that is planned: its steps on nobody's memory, for lists and for compiling ahead.
struct BenchEntry {
  BenchCase c;
  Shape shape;
  std::vector<BenchCall> calls = {};
  std::vector<Mix> mixes = {};  // one a step
  size_t in_bytes = 0, number_bytes = 0, out_bytes = 0;

  [[nodiscard]] int64_t bytes() const;  // that must move
  // Those over what its mixes say, which leave out scales of blocks: the ceiling's time is for all.
  [[nodiscard]] double beyond_mixes() const;
  // Of each step once; "row map, plain" where a step's maker hands the call on to another.
  [[nodiscard]] std::string makers() const;
  // What the compiler gets for this call.
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
  std::vector<Mix> mixes = {};  // one a step
  std::string kernel = {};      // the name of the largest one in the text
  double microseconds = 0, ceiling_microseconds = 0;
  double terabytes = 0;               // a second, of the bytes that must move
  double share = 0;                   // of the ceiling, 0 to 1
  double share_lo = 0, share_hi = 0;  // the quartiles of the rounds
  int64_t bytes = 0;                  // that must move
  bool checked = false;               // that all of its results were written
  int registers = 0, local_bytes = 0, threads = 0, kernels = 0;  // on a GPU
  std::string error = {};
};
// From the microseconds of its rounds; where there is one time alone, it is that of all rounds.
BenchResult result_of(const BenchEntry& e, const std::vector<double>& times,
                      const std::vector<double>& ceiling);

struct BenchNumber {
  std::string what;
  double value = 0;
  std::string unit;
};

struct BenchReport {
  std::string device;
  bool on_gpu = false;  // has registers, local memory and blocks of threads; moves TB/s
  std::vector<BenchResult> results;
  std::vector<BenchNumber> ceilings, costs;
};

// A line a case as soon as it is timed, and at the end a summary; for --json an object a line
// instead.
void print_head(const BenchArgs& args, const BenchReport& report);
void print_case(const BenchArgs& args, const BenchReport& report, const BenchResult& r);
void print_summary(const BenchArgs& args, const BenchReport& report);
// Everything, for a file.
std::string report_json(const BenchArgs& args, const BenchReport& report);

// Runs `work` for 0 to count − 1 on all cores; the first exception is thrown again at the end.
void on_all_cores(size_t count, const std::function<void(size_t)>& work);

// The two measurers.
void bench_cpu(const BenchArgs& args, const std::vector<Shape>& shapes, BenchReport& report);
void bench_cuda(const BenchArgs& args, const std::vector<Shape>& shapes, BenchReport& report);

// Host time of launches; times to compile, to find on disk and to load.
std::vector<BenchNumber> bench_compile_costs(const std::string& arch);
std::vector<BenchNumber> bench_launch_costs();

}  // namespace tenon::bench
