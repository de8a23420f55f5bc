// Runs the items in parallel, then joins their partial sums.
#include "backend/cpu/executor.h"

#include "backend/cpu/finish.h"
#include "backend/cpu/grid.h"
#include "backend/cpu/isa.h"
#include "backend/cpu/pool.h"
#include "backend/cpu/tile_runner.h"

namespace tenon::cpu {

namespace {

class Executor final : public Kernel {
 public:
  Executor(const Step& step, const Loops& table, std::unique_ptr<const TileRunner> body)
      : step_(step), loops_(table), body_(std::move(body)) {}

  void prepare() const override { body_->prepare(); }

  [[nodiscard]] size_t workspace(int64_t rows) const override {
    return leftover_floats(step_, make_grid(step_, rows)) * sizeof(float);
  }

  void run(const RunArgs& args) const override {
    const Grid g = make_grid(step_, args.rows);
    Leftovers left = no_leftovers(step_, g, static_cast<float*>(args.workspace));
    const auto work = [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body_->run(args, g, i, left);
    };
    // One reference fits in a std::function without heap memory.
    parallel_for(g.items(), [&work](int64_t begin, int64_t end) { work(begin, end); });
    finish(step_, loops_, args, g, left);
  }

 private:
  Step step_;
  const Loops& loops_;
  std::unique_ptr<const TileRunner> body_;
};

}  // namespace

namespace {

constexpr std::string_view kNeedsGemm = "bodies are run here; a product needs the gemm maker";

}  // namespace

Attempt make_jit(const Step& step, const Target& target) {
  if (step.gemm()) return Refusal{std::string(kNeedsGemm), true};
  const Isa& isa = isa_of(target);
  if (const std::string why = jit_refusal(step, isa, target.here); !why.empty())
    return Refusal{why, !isa.jit};
  if (!target.here) return kernel_elsewhere(target);
  return std::make_shared<const Executor>(step, *isa.loops, compiled(step, isa));
}

Attempt make_executor(const Step& step, const Target& target) {
  if (step.gemm()) return Refusal{std::string(kNeedsGemm), true};
  if (!target.here) return kernel_elsewhere(target);
  const Loops& loops = *isa_of(target).loops;
  return std::make_shared<const Executor>(step, loops, interpreter(step, loops));
}

}  // namespace tenon::cpu
