// Launches what a program lists.
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
  ProgramKernel(const std::string& name, std::unique_ptr<Program> program,
                std::shared_ptr<const Kernel> other)
      : program_(std::move(program)), other_(std::move(other)) {
    for (const std::string& entry : program_->entries())
      sources_.emplace_back(name, program_->text(), entry);
  }

  [[nodiscard]] size_t workspace(int64_t rows) const override {
    return std::max(program_->workspace(rows), other_ ? other_->workspace(rows) : 0);
  }

  void prepare() const override {
    const CurrentContext context;
    for (const Source& s : sources_) s.load(context);
  }

  void prepare_for(const RunArgs& call) const override {
    if (other_ && !takes(call)) return other_->prepare_for(call);
    prepare();
  }

  [[nodiscard]] std::vector<std::string> texts() const override {
    std::vector<std::string> all{program_->text()};
    if (other_)
      for (std::string& text : other_->texts()) all.push_back(std::move(text));
    return all;
  }

  [[nodiscard]] std::vector<std::string> texts_for(const RunArgs& call) const override {
    if (other_ && !program_->fits(call)) return other_->texts_for(call);
    return {program_->text()};
  }

  void run(const RunArgs& given) const override {
    if (other_ && !takes(given)) return other_->run(given);
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
  [[nodiscard]] bool takes(const RunArgs& call) const {
    return program_->fits(call) && program_->runs_here();
  }

  std::unique_ptr<Program> program_;
  std::deque<Source> sources_;  // one an entry; they cannot move
  std::shared_ptr<const Kernel> other_;
};

}  // namespace

std::shared_ptr<const Kernel> kernel_of(const std::string& name, std::unique_ptr<Program> program,
                                        std::shared_ptr<const Kernel> other) {
  return std::make_shared<const ProgramKernel>(name, std::move(program), std::move(other));
}

}  // namespace tenon::cuda
