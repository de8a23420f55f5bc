// A plan with memory of its own, and the same chain with one plan for each op.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/plan.h"

namespace tenon::support {

// The state of a random stream, as spec.md lays it out: seed, offset, row0, col0, columns.
using RandomState = std::array<uint64_t, 5>;

// Something that runs a chain on tensors with the names of its plan's buffers.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual void run(Pass pass, bool weights_changed = true) = 0;
  // A tensor's memory; null where there is none of that name.
  [[nodiscard]] virtual void* find(std::string_view name) const = 0;
  [[nodiscard]] void* at(std::string_view name) const;
  // Delayed recipes: the scales follow from what the runs since the last call have seen.
  virtual void update_scales() = 0;
};

class Session final : public Runner {
 public:
  Session(Plan plan, int64_t rows);

  void run(Pass pass, bool weights_changed = true) override;
  [[nodiscard]] void* find(std::string_view name) const override;
  void update_scales() override;
  // Another's memory in place of its own.
  void lend(std::string_view name, void* memory);

  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] const Buffer& buffer(std::string_view name) const;
  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] Device device() const;

 private:
  using Memory = std::shared_ptr<void>;
  struct Delayed {
    DType dtype = DType::e4m3;
    float* amax = nullptr;
    float* scale = nullptr;
    std::vector<float> history;
  };

  Plan plan_;
  int64_t rows_;
  std::map<std::string, size_t, std::less<>> numbers_;
  std::vector<Memory> memory_;
  std::vector<void*> addresses_;
  Memory workspace_;
  std::vector<Delayed> delayed_;
};

// Each op runs as a plan of its own; what lies between them is in memory.
class Unfused final : public Runner {
 public:
  Unfused(const Chain& chain, PlanRequest request, int64_t rows);

  void run(Pass pass, bool weights_changed = true) override;
  [[nodiscard]] void* find(std::string_view name) const override;
  void update_scales() override;

 private:
  struct One {
    std::unique_ptr<Session> session;
    std::vector<Session> sums;  // of a channel's gradients, before its backward
  };
  std::vector<One> ops_;
  std::map<std::string, void*, std::less<>> extras_;
  mutable RandomState random_{};
};

}  // namespace tenon::support
