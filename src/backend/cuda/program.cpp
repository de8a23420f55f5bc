// Runs the launches of a program.
#include "backend/cuda/program.h"

#include <algorithm>
#include <deque>
#include <optional>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

class ProgramKernel final : public Kernel {
 public:
  ProgramKernel(const std::string& name, std::unique_ptr<Program> program)
      : program_(std::move(program)) {
    for (const std::string& entry : program_->entries())
      sources_.emplace_back(name, program_->text(), entry);
  }

  [[nodiscard]] bool fits(const RunArgs& call) const override { return program_->fits(call); }
  [[nodiscard]] bool fits_all() const override { return program_->fits_all(); }
  [[nodiscard]] int64_t least_rows() const override { return program_->least_rows(); }
  [[nodiscard]] size_t workspace(int64_t rows) const override { return program_->workspace(rows); }
  [[nodiscard]] int64_t extra_bytes(int64_t rows) const override {
    return program_->extra_bytes(rows);
  }

  [[nodiscard]] bool repeats_body() const override { return program_->repeats_body(); }

  void prepare() const override {
    const CurrentContext context;
    for (const Source& s : sources_) s.load(context);
  }

  [[nodiscard]] std::vector<std::string> texts() const override { return {program_->text()}; }

  void run(const RunArgs& given) const override {
    if (program_->idle(given)) return;
    const CurrentContext context;
    const auto stream = static_cast<Stream>(given.stream);
    RunArgs args = given;
    std::optional<StreamMemory> own;
    if (!args.workspace) {
      own.emplace(program_->workspace(args.rows), stream);
      args.workspace = own->data();
    }
    for (Launch& l : program_->launches(args)) {
      const Source& source = sources_[l.entry];
      void* values[] = {l.arguments.data()};
      const LoadedKernel kernel = source.load(context, l.shared);
      if (kernel.shared_bytes < l.least_shared)
        fail(Code::unsupported, "cuda: '", source.name(), "' needs ", l.least_shared,
             " bytes of shared memory and this device gives ", kernel.shared_bytes,
             "; write its results by separate calls, or use device cpu");
      const unsigned most =
          l.per_multiprocessor ? l.per_multiprocessor * kernel.multiprocessors : l.blocks;
      const int result = driver().launch_kernel(
          kernel.function, std::min(l.blocks, most), l.down, 1, l.threads, 1, 1,
          std::min(l.shared, kernel.shared_bytes), stream, values, nullptr);
      if (result != 0) check(result, str("launching '", source.name(), "'"));
    }
  }

 private:
  std::unique_ptr<Program> program_;
  std::deque<Source> sources_;  // one per entry; they cannot move
};

}  // namespace

std::shared_ptr<const Kernel> kernel_of(const std::string& name, std::unique_ptr<Program> program) {
  return std::make_shared<const ProgramKernel>(name, std::move(program));
}

}  // namespace tenon::cuda
