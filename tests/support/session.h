// A plan with its own memory, and the same chain with one plan per op.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/plan.h"

namespace tenon::support {

// The state of a random stream (docs/dropout.md): seed, offset, row0, col0, columns.
using RandomState = std::array<uint64_t, 5>;

// Runs a chain on tensors with the names of its plan's buffers.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual void run(Pass pass, bool weights_changed = true) = 0;
  // The memory of a tensor. Null if there is no tensor of that name.
  [[nodiscard]] virtual void* find(std::string_view name) const = 0;
  [[nodiscard]] void* at(std::string_view name) const;
  // Delayed recipes: updates the scales from the amax of the runs since the last call.
  virtual void update_scales() = 0;
};

class Session final : public Runner {
 public:
  Session(Plan plan, int64_t rows);

  void run(Pass pass, bool weights_changed = true) override;
  [[nodiscard]] void* find(std::string_view name) const override;
  void update_scales() override;
  // Uses the given memory for a buffer.
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

// Runs each op as its own plan. All intermediate tensors are in memory.
class Unfused final : public Runner {
 public:
  Unfused(const Chain& chain, PlanRequest request, int64_t rows);

  void run(Pass pass, bool weights_changed = true) override;
  [[nodiscard]] void* find(std::string_view name) const override;
  void update_scales() override;

 private:
  struct One {
    std::unique_ptr<Session> session;
    // Sum the gradients of a channel, before the backward pass of the op.
    std::vector<Session> sums;
  };
  void connect_backward(const Chain& chain, PlanRequest request,
                        const std::vector<std::string>& given,
                        const std::vector<std::string>& made);

  std::vector<One> ops_;
  std::map<std::string, void*, std::less<>> extras_;
  mutable RandomState random_{};
};

}  // namespace tenon::support
