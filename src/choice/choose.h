// Chooses the kernels of a step: tries the makers of the target's backend in order, and caches
// kernels.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "step/backend.h"

namespace tenon {

class Choice;

// One way to run a call: a kernel, or two steps with memory between them.
struct Way {
  std::string_view maker;
  std::shared_ptr<const Kernel> kernel = nullptr;
  struct Halves;
  std::shared_ptr<const Halves> halves = nullptr;  // set if there is no kernel

  // Calls that do not satisfy these conditions go to the next way.
  int64_t least_rows = 0;
  bool fits_all = true;
  [[nodiscard]] bool takes(const RunArgs& call) const {
    return call.rows >= least_rows && (fits_all || kernel->fits(call));
  }
};

struct Way::Halves {
  Split split;
  std::shared_ptr<const Choice> first, second;
  // In a call of `given` rows: the rows between the halves, the rows of a half, and the bytes
  // between the halves.
  [[nodiscard]] int64_t between(int64_t given) const { return split.first.body_rows(given); }
  [[nodiscard]] int64_t rows(const Step& half, int64_t given) const {
    return half.is_map() ? between(given) : given;
  }
  [[nodiscard]] size_t buffer_bytes(int64_t given) const;
};

// All ways that calls may need, best first. The last way accepts every call.
class Choice final : public Kernel {
 public:
  struct Refused {
    std::string_view maker;
    Refusal refusal;
  };
  Choice(Step step, const Backend& backend, std::vector<Way> ways, std::vector<Refused> refused)
      : step_(std::move(step)),
        backend_(backend),
        ways_(std::move(ways)),
        refused_(std::move(refused)) {
    const Way& first = ways_.front();
    if (first.kernel && first.fits_all && first.least_rows == 0) only_ = first.kernel.get();
  }

  // The only kernel if one takes all calls, else this choice. Small calls thus skip the search.
  [[nodiscard]] const Kernel& direct() const { return only_ ? *only_ : *this; }
  [[nodiscard]] const std::vector<Way>& ways() const { return ways_; }
  // The refusals of the makers before the first way.
  [[nodiscard]] const std::vector<Refused>& refused() const { return refused_; }
  [[nodiscard]] const Way& way(const RunArgs& call) const {
    for (const Way& w : ways_)
      if (w.takes(call)) return w;
    return ways_.back();
  }

  // Calls f(step, kernel, args) for each kernel of a call, in order.
  using Part = std::function<void(const Step&, const Kernel&, const RunArgs&)>;
  void each(const RunArgs& call, const Part& f) const;
  // Calls f(half, args) for each of two steps. Their intermediate buffer is at the start of the
  // workspace.
  using Half = std::function<void(const Choice&, const RunArgs&)>;
  void each_half(const Way::Halves& halves, const RunArgs& call, const Half& f) const;

  [[nodiscard]] size_t workspace(int64_t rows) const override;
  // Only for the way of this call. Depends on the addresses, not on the memory there.
  [[nodiscard]] size_t workspace_for(const RunArgs& call) const;
  void prepare() const override;
  void prepare_for(const RunArgs& call) const override;
  [[nodiscard]] std::vector<std::string> texts() const override;
  [[nodiscard]] std::vector<std::string> texts_for(const RunArgs& call) const override;
  void run(const RunArgs& call) const override;

 private:
  Step step_;
  const Backend& backend_;
  std::vector<Way> ways_;
  std::vector<Refused> refused_;
  const Kernel* only_ = nullptr;
};

struct Chosen {
  std::shared_ptr<const Choice> kernel;
  std::string_view maker;  // of the first way
};

// Throws with the reason of every maker if all makers refuse. Kernels are cached by the key of the
// step and the target.
Chosen kernel_for(const Step& step, const Target& target);
// For the device of this thread's calls.
Chosen kernel_for(const Step& step, Device device);

}  // namespace tenon
