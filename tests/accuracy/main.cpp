// The accuracy program: tests every formula function, activation and derivative against float64,
// against a scalar reference and, with --device cuda, the GPU against the CPU. See
// docs/accuracy.md.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "modes.h"
#include "parallel.h"
#include "tenon/error.h"

namespace tenon::accuracy {

std::vector<std::unique_ptr<Report>> measure_all(const std::vector<Function>& list,
                                                 const Amounts& amounts) {
  struct Job {
    size_t function;
    Chunk chunk;
    bool check_oracle;
  };
  std::vector<std::vector<Job>> by_function(list.size());
  std::vector<std::unique_ptr<Report>> reports;
  for (const Function& f : list) reports.push_back(std::make_unique<Report>(f.roots()));
  parallel(list.size(), [&](size_t i) {
    reports[i]->merge(measure_infinities(list[i]));
    for (const DType d : {DType::f32, DType::bf16, DType::f16}) {
      size_t at = 0;
      for (Chunk& chunk : chunks(list[i], d, amounts))
        by_function[i].push_back({i, std::move(chunk), at++ % 32 == 0});
    }
  });
  std::vector<Job> jobs;
  for (auto& some : by_function)
    for (Job& job : some) jobs.push_back(std::move(job));
  parallel(jobs.size(), [&](size_t i) {
    const Job& job = jobs[i];
    reports[job.function]->merge(measure(list[job.function], job.chunk(), job.check_oracle));
  });
  return reports;
}

namespace {

struct Asked {
  Amounts amounts = {};
  bool cuda = false;
  size_t every = 1;  // measure every n-th function
  std::string table;
  std::vector<std::string> exhaustive;
};

int check_all(const Asked& asked) {
  std::vector<Function> all = all_functions(), list;
  for (size_t i = 0; i < all.size(); i += asked.every) list.push_back(std::move(all[i]));
  if (asked.cuda) return run_cuda(list, asked.amounts);
  const auto start = std::chrono::steady_clock::now();
  const auto reports = measure_all(list, asked.amounts);
  size_t passed = 0;
  size_t failed = 0;
  for (size_t i = 0; i < list.size(); ++i)
    for (size_t r = 0; r < list[i].roots(); ++r)
      for (size_t c = 0; c < kChecks.size(); ++c) {
        const RootReport& root = reports[i]->roots()[r];
        ++(root.failures[c] == 0 ? passed : failed);
        if (root.failures[c] == 0) continue;
        std::printf("FAILED %s, %.*s: %zu times, first %s\n", list[i].root_name(r).c_str(),
                    static_cast<int>(kChecks[c].size()), kChecks[c].data(), root.failures[c],
                    root.first[c].c_str());
      }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::fprintf(stderr, "%.0f s\n", seconds.count());
  if (!asked.table.empty() && !write_table(asked.table, list, reports)) {
    std::printf("FAILED to write %s\n", asked.table.c_str());
    ++failed;
  }
  std::printf("%zu passed, %zu failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

int usage() {
  std::fputs(
      "accuracy [--quick|--usual] [--table FILE]   everything on the CPU, on fewer fp32 numbers\n"
      "accuracy [--quick|--usual] --every N        each n-th function\n"
      "accuracy [--quick|--usual] --device cuda    CUDA against the CPU, strict, bit by bit\n"
      "accuracy [--device cuda] --exhaustive NAME...   all fp32 inputs of unary activations\n",
      stderr);
  return 2;
}

int run(int argc, char** argv) {
  Asked asked;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--quick") {
      asked.amounts = kQuick;
    } else if (arg == "--usual") {
      asked.amounts = kUsual;
    } else if (arg == "--every" && i + 1 < argc && std::atol(argv[i + 1]) > 0) {
      asked.every = static_cast<size_t>(std::atol(argv[++i]));
    } else if (arg == "--table" && i + 1 < argc) {
      asked.table = argv[++i];
    } else if (arg == "--device" && i + 1 < argc && !std::strcmp(argv[i + 1], "cuda")) {
      asked.cuda = true;
      ++i;
    } else if (arg == "--exhaustive" && i + 1 < argc) {
      asked.exhaustive.assign(argv + i + 1, argv + argc);
      break;
    } else {
      return usage();
    }
  }
  set_threads(1);  // the threads of this program use all cores
  if (asked.exhaustive.empty()) return check_all(asked);
  return asked.cuda ? run_cuda_exhaustive(asked.exhaustive) : run_exhaustive(asked.exhaustive);
}

}  // namespace

}  // namespace tenon::accuracy

int main(int argc, char** argv) {
  try {
    return tenon::accuracy::run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "accuracy: %s\n", e.what());
    return 1;
  }
}
