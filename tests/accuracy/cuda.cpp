// Compares CUDA with the CPU: the same strict calls on the same inputs, bit by bit.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <mutex>

#include "backend/cuda/driver.h"
#include "backend/cuda/makers.h"
#include "modes.h"
#include "parallel.h"
#include "tenon/error.h"

namespace tenon::accuracy {

namespace {

void append(Elements& to, size_t at, const Elements& from) {
  std::memcpy(to.bytes() + at * to.width(), from.bytes(), from.byte_count());
}

// Joins all chunks of a dtype to one matrix, so that each kernel runs once.
Points joined(const Function& f, DType dtype, const Amounts& amounts) {
  const std::vector<Chunk> parts = chunks(f, dtype, amounts);
  Points all{{dtype, parts.size() * kChunk}, {dtype, f.gated() ? parts.size() * kChunk : 0}};
  for (size_t i = 0; i < parts.size(); ++i) {
    const Points part = parts[i]();
    append(all.a, i * kChunk, part.a);
    if (f.gated()) append(all.b, i * kChunk, part.b);
  }
  return all;
}

class OnDevice {
 public:
  explicit OnDevice(const Elements& host) : host_(host), buffer_(host.byte_count()) {
    buffer_.from_host(host.bytes());
  }
  [[nodiscard]] View view() const { return host_.view(buffer_.data()); }
  void fetch(Elements& to) const { buffer_.to_host(to.bytes()); }

 private:
  const Elements& host_;
  cuda::DeviceBuffer buffer_;
};

// Like Function::run, with all views in device memory and outputs poisoned by Elements.
std::vector<Elements> run_on_device(const Function& f, const Points& at) {
  const DType dtype = at.a.dtype();
  const size_t n = at.a.size();
  const Options options{.precision = Precision::strict, .device = Device::cuda};
  Elements ones(dtype, n);
  ones.fill(1);
  std::vector<Elements> out;
  for (size_t r = 0; r < f.roots(); ++r) out.emplace_back(dtype, n);
  const OnDevice a(at.a);
  const OnDevice grad(ones);
  const OnDevice y(out[0]);
  const OnDevice dx(out[1]);
  std::unique_ptr<OnDevice> b, db;
  if (f.gated()) {
    b = std::make_unique<OnDevice>(at.b);
    db = std::make_unique<OnDevice>(out[2]);
  }
  forward(f.activation(), {.x = a.view(), .b = b ? b->view() : View{}, .y = y.view()}, options);
  backward(f.activation(),
           {.grad = grad.view(),
            .x = a.view(),
            .b = b ? b->view() : View{},
            .dx = dx.view(),
            .db = db ? db->view() : View{}},
           options);
  y.fetch(out[0]);
  dx.fetch(out[1]);
  if (db) db->fetch(out[2]);
  return out;
}

// Empty if all bits are equal. All NaNs are equal.
std::string difference(const Points& at, const Elements& cuda, const Elements& cpu) {
  if (std::memcmp(cuda.bytes(), cpu.bytes(), cpu.byte_count()) == 0) return "";
  size_t count = 0;
  size_t first = 0;
  for (size_t i = 0; i < cpu.size(); ++i) {
    const uint32_t x = cuda.code(i);
    const uint32_t y = cpu.code(i);
    if (x == y) continue;
    if (std::isnan(decode(cpu.dtype(), x)) && std::isnan(decode(cpu.dtype(), y))) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return "";
  const bool gated = at.b.size() > 0;
  std::array<char, 160> text{};
  std::snprintf(text.data(), text.size(), "%zu differ, first at %s%s%s: cuda %08x, cpu %08x", count,
                number(decode(at.a.dtype(), at.a.code(first))).c_str(), gated ? ", " : "",
                gated ? number(decode(at.b.dtype(), at.b.code(first))).c_str() : "",
                cuda.code(first), cpu.code(first));
  return text.data();
}

bool gpu_here() {
  const cuda::Status status = cuda::status();
  if (status.gpu)
    std::printf("%s\n", status.device.c_str());
  else
    std::fprintf(stderr, "accuracy: no CUDA here: %s\n", status.why.c_str());
  return status.gpu;
}

}  // namespace

int run_cuda_exhaustive(const std::vector<std::string>& names) {
  constexpr size_t kCount = size_t{1} << 22;
  constexpr size_t kParts = (size_t{1} << 32) / kCount;
  if (!gpu_here()) return 1;
  size_t failed = 0;
  for (const std::string& name : names) {
    const Function f = for_all_patterns(name);
    std::mutex mutex;
    std::string wrong;
    parallel(kParts, [&](size_t i) {
      std::string found;
      try {
        const Points at = patterns(static_cast<uint32_t>(i * kCount), kCount);
        const auto cuda = run_on_device(f, at);
        const auto cpu = f.run(at, DType::f32, Precision::strict);
        for (size_t r = 0; r < f.roots(); ++r)
          if (found.empty()) found = difference(at, cuda[r], cpu[r]);
      } catch (const std::exception& e) {
        found = e.what();
      }
      const std::lock_guard guard(mutex);
      if (wrong.empty()) wrong = found;
    });
    std::printf("%s%s and its derivative: 4294967296 inputs%s\n", wrong.empty() ? "" : "FAILED ",
                name.c_str(), wrong.empty() ? " equal" : (", " + wrong).c_str());
    failed += wrong.empty() ? 0 : 1;
  }
  std::printf("%zu passed, %zu failed\n", names.size() - failed, failed);
  return failed == 0 ? 0 : 1;
}

int run_cuda(const std::vector<Function>& list, const Amounts& amounts) {
  if (!gpu_here()) return 1;
  struct Job {
    const Function* f;
    DType dtype;
  };
  const auto start = std::chrono::steady_clock::now();
  std::vector<Job> jobs;
  for (const Function& f : list)
    for (const DType d : {DType::f32, DType::bf16, DType::f16}) jobs.push_back({&f, d});
  std::mutex mutex;
  size_t passed = 0;
  size_t failed = 0;
  const auto say = [&](const Job& job, size_t root, size_t n, const std::string& wrong) {
    const std::lock_guard guard(mutex);
    ++(wrong.empty() ? passed : failed);
    std::printf("%s%s %s: %zu inputs%s%s\n", wrong.empty() ? "" : "FAILED ",
                job.f->root_name(root).c_str(), info(job.dtype).name.data(), n,
                wrong.empty() ? " equal" : ", ", wrong.c_str());
  };
  parallel(jobs.size(), [&](size_t i) {
    const Job& job = jobs[i];
    try {
      const Points at = joined(*job.f, job.dtype, amounts);
      const auto cuda = run_on_device(*job.f, at);
      const auto cpu = job.f->run(at, job.dtype, Precision::strict);
      for (size_t r = 0; r < job.f->roots(); ++r)
        say(job, r, at.a.size(), difference(at, cuda[r], cpu[r]));
    } catch (const std::exception& e) {
      say(job, 0, 0, e.what());
    }
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::fprintf(stderr, "%.0f s\n", seconds.count());
  std::printf("%zu passed, %zu failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

}  // namespace tenon::accuracy
