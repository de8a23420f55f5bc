// Runs cases on the CPU, with the fastest copies with the same reads and writes, and with oneDNN.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "bench/bench.h"
#include "bench/eltwise.h"
#include "bench/timing.h"

namespace tenon::bench {

using Ways = std::vector<std::function<void()>>;

// The memory that all cases of a shape share.
class CpuArena {
 public:
  CpuArena(const std::vector<BenchEntry>& entries, Shape shape, DType dtype);

  [[nodiscard]] std::vector<BenchCall> placed(const BenchEntry& e, const Options& options) const;
  // The variants of the copy of each pass of a case.
  [[nodiscard]] std::vector<Ways> copies(const BenchEntry& e) const;
  [[nodiscard]] void* workspace() const { return workspace_->data(); }

 private:
  Shape shape_;
  DType dtype_;
  std::unique_ptr<Memory> in_, numbers_, out_, workspace_;
  std::array<uint64_t, 5> random_;
};

// One case: its time, the time of the best copy and that of the peer, per round.
class CpuCase {
 public:
  CpuCase(const CpuArena& arena, const BenchEntry& entry, const Options& options);

  struct Round {
    double seconds = 0, copy = 0, peer = 0;
  };
  Round round() const;
  [[nodiscard]] bool has_peer() const { return peer_ != nullptr; }

 private:
  void run() const;
  void check_peer() const;

  std::vector<BenchCall> calls_;
  std::vector<Ways> copies_;
  std::unique_ptr<Eltwise> peer_;  // the function of oneDNN that is equal to the case, or null
  void* workspace_;
  double beyond_mixes_;
};

}  // namespace tenon::bench
