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
  ProgramKernel(const std::string& name, Programs programs, int64_t least_rows)
      : least_rows_(least_rows) {
    for (std::unique_ptr<Program>& p : programs) {
      Variant& v = variants_.emplace_back();
      v.program = std::move(p);
      for (const std::string& entry : v.program->entries())
        v.sources.emplace_back(name, v.program->text(), entry);
    }
  }

  [[nodiscard]] bool fits(const RunArgs& call) const override {
    return std::ranges::any_of(variants_, [&](const Variant& v) { return v.program->fits(call); });
  }
  [[nodiscard]] bool fits_all() const override { return variants_.back().program->fits_all(); }
  [[nodiscard]] int64_t least_rows() const override { return least_rows_; }

  [[nodiscard]] size_t workspace(int64_t rows) const override {
    size_t most = 0;
    for (const Variant& v : variants_) most = std::max(most, v.program->workspace(rows));
    return most;
  }

  void prepare() const override { prepare(variants_.front()); }
  void prepare_for(const RunArgs& call) const override { prepare(of(call)); }

  [[nodiscard]] std::vector<std::string> texts() const override {
    std::vector<std::string> all;
    for (const Variant& v : variants_) all.push_back(v.program->text());
    return all;
  }
  [[nodiscard]] std::vector<std::string> texts_for(const RunArgs& call) const override {
    return {of(call).program->text()};
  }

  void run(const RunArgs& given) const override {
    const Variant& v = of(given);
    const CurrentContext context;
    const auto stream = static_cast<Stream>(given.stream);
    RunArgs args = given;
    std::optional<StreamMemory> own;
    if (!args.workspace) {
      own.emplace(v.program->workspace(args.rows), stream);
      args.workspace = own->data();
    }
    for (Launch& l : v.program->launches(args)) {
      const Source& source = v.sources[l.entry];
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
  struct Variant {
    std::unique_ptr<Program> program;
    std::deque<Source> sources;  // one an entry; they cannot move
  };

  [[nodiscard]] const Variant& of(const RunArgs& call) const {
    for (const Variant& v : variants_)
      if (&v == &variants_.back() || v.program->fits(call)) return v;
    return variants_.back();
  }
  static void prepare(const Variant& v) {
    const CurrentContext context;
    for (const Source& s : v.sources) s.load(context);
  }

  std::deque<Variant> variants_;
  int64_t least_rows_;
};

}  // namespace

std::shared_ptr<const Kernel> kernel_of(const std::string& name, Programs programs,
                                        int64_t least_rows) {
  return std::make_shared<const ProgramKernel>(name, std::move(programs), least_rows);
}

std::shared_ptr<const Kernel> kernel_of(const std::string& name, std::unique_ptr<Program> program) {
  Programs one;
  one.push_back(std::move(program));
  return kernel_of(name, std::move(one));
}

}  // namespace tenon::cuda
