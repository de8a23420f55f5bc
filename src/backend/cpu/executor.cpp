// Items in parallel, then the sums that they left behind.
#include "backend/cpu/executor.h"

#include "backend/cpu/finish.h"
#include "backend/cpu/grid.h"
#include "backend/cpu/item.h"
#include "backend/cpu/pool.h"

namespace tenon::cpu {

namespace {

class Executor final : public Kernel {
 public:
  explicit Executor(const Step& step)
      : step_(step), loops_(loops()), program_(compile(step, loops_)) {}

  [[nodiscard]] size_t workspace(int64_t rows) const override {
    return leftover_floats(step_, make_grid(step_, rows)) * sizeof(float);
  }

  void run(const RunArgs& args) const override {
    const Grid g = make_grid(step_, args.rows);
    Leftovers left = no_leftovers(step_, g, static_cast<float*>(args.workspace));
    parallel_for(g.items(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) Item(step_, program_, loops_, args, g, i, left).run();
    });
    finish(step_, loops_, args, g, left);
  }

 private:
  Step step_;
  const Loops& loops_;
  Program program_;
};

}  // namespace

Attempt make_executor(const Step& step) {
  if (step.gemm()) return Refusal{"the executor runs bodies; a product needs the gemm maker"};
  return std::make_shared<const Executor>(step);
}

}  // namespace tenon::cpu
