// Launches what a program lists.
#include "backend/cuda/program.h"

#include <algorithm>
#include <optional>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

// Work on it may still run when it is given back, and a graph that is captured has it too.
class StreamMemory {
 public:
  StreamMemory(size_t bytes, Stream stream) : stream_(stream) {
    if (bytes > 0)
      check(driver().mem_alloc_async(&data_, bytes, stream),
            str("taking ", bytes, " bytes of device memory"));
  }
  ~StreamMemory() {
    if (data_) driver().mem_free_async(data_, stream_);
  }
  StreamMemory(const StreamMemory&) = delete;
  StreamMemory& operator=(const StreamMemory&) = delete;
  [[nodiscard]] void* data() const { return data_; }

 private:
  Stream stream_;
  DevicePointer data_ = nullptr;
};

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

  [[nodiscard]] std::vector<std::string> texts() const override {
    std::vector<std::string> all{program_->text()};
    if (other_)
      for (std::string& text : other_->texts()) all.push_back(std::move(text));
    return all;
  }

  void run(const RunArgs& given) const override {
    if (other_ && !program_->fits(given)) return other_->run(given);
    const CurrentContext context;
    const auto stream = static_cast<Stream>(given.stream);
    RunArgs args = given;
    std::optional<StreamMemory> own;
    if (!args.workspace) {
      own.emplace(program_->workspace(args.rows), stream);
      args.workspace = own->data();
    }
    for (Launch& l : program_->launches(args)) {
      const std::vector<std::string>& entries = program_->entries();
      const auto at = std::ranges::find(entries, l.entry) - entries.begin();
      const Source& source = sources_[static_cast<size_t>(at)];
      void* values[] = {l.arguments.data()};
      const int result = driver().launch_kernel(source.load(context).function, l.blocks, 1, 1,
                                                l.threads, 1, 1, 0, stream, values, nullptr);
      if (result != 0) check(result, str("launching '", source.name(), "'"));
    }
  }

 private:
  std::unique_ptr<Program> program_;
  std::vector<Source> sources_;  // one an entry
  std::shared_ptr<const Kernel> other_;
};

}  // namespace

std::shared_ptr<const Kernel> kernel_of(const std::string& name, std::unique_ptr<Program> program,
                                        std::shared_ptr<const Kernel> other) {
  return std::make_shared<const ProgramKernel>(name, std::move(program), std::move(other));
}

}  // namespace tenon::cuda
