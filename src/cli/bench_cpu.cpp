// The same cases on the CPU, beside copies with the same reads and writes.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>

#include "backend/cpu/pool.h"
#include "cli/bench.h"
#include "cli/progress.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

namespace {

using Clock = std::chrono::steady_clock;

double microseconds(const std::function<void()>& f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Pages that start at a line.
class Memory {
 public:
  Memory(std::string_view what, size_t bytes) : bytes_(bytes), all_(allocated(what, bytes)) {}
  [[nodiscard]] char* data() const {
    const auto address = reinterpret_cast<uintptr_t>(all_.get());
    return all_.get() + (kLine - address % kLine) % kLine;
  }
  [[nodiscard]] size_t size() const { return bytes_; }

 private:
  static constexpr size_t kLine = 4096;
  static char* allocated(std::string_view what, size_t bytes) {
    try {
      return new char[bytes + kLine];
    } catch (const std::bad_alloc&) {
      fail(Code::runtime, "bench: there is no memory for the ", what, ", ", bytes,
           " bytes; give fewer --rows or --cols");
    }
  }
  size_t bytes_;
  std::unique_ptr<char[]> all_;
};

void fill_normal(const Memory& m, DType dtype) {
  const auto size = static_cast<size_t>(info(dtype).bytes);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  const size_t piece = std::min<size_t>(m.size() / size * size, ((1 << 20) + 4099) * size);
  for (size_t at = 0; at < piece; at += size) {
    const uint32_t code = encode(dtype, normal(random));
    std::memcpy(m.data() + at, &code, size);
  }
  for (size_t at = piece; at < m.size(); at += piece)
    std::memcpy(m.data() + at, m.data(), std::min(piece, m.size() - at));
}

// Copies what is written and reads the rest of what is read.
void move(const Memory& out, const Memory& in, int64_t read, int64_t write) {
  constexpr int64_t kPiece = 1 << 16;
  const int64_t copied = std::min(read, write);
  const int64_t pieces = cdiv(std::max(read, write), kPiece);
  cpu::parallel_for(pieces, [&](int64_t begin, int64_t end) {
    uint64_t folded = 0;
    for (int64_t i = begin * kPiece; i < std::min(end * kPiece, std::max(read, write));
         i += kPiece) {
      const int64_t copy = std::clamp<int64_t>(copied - i, 0, kPiece);
      const int64_t rest = std::clamp<int64_t>(read - i, 0, kPiece);
      std::memcpy(out.data() + i, in.data() + i, static_cast<size_t>(copy));
      const auto* const words = reinterpret_cast<const uint64_t*>(in.data() + i);
      for (int64_t k = copy / 8; k < rest / 8; ++k) folded ^= words[k];
    }
    if (folded == 0x9e3779b97f4a7c15U) out.data()[0] = 1;  // so that the reads are needed
  });
}

}  // namespace

void bench_cpu(const BenchArgs& args, const std::vector<Shape>& shapes, BenchReport& report) {
  report.device = str("cpu, ", threads(), " threads");
  print_head(args, report);
  const DType dtype = *dtype_named(args.dtype);
  for (const Shape& shape : shapes) {
    const std::vector<BenchEntry> entries = bench_entries(args, shape);
    size_t in = 0, numbers = 4096, out = 4096, workspace = 4096;
    for (const BenchEntry& e : entries) {
      in = std::max(in, e.in_bytes);
      out = std::max(out, e.out_bytes);
      numbers = std::max(numbers, e.number_bytes);
      for (const BenchCall& c : e.calls)
        workspace = std::max(workspace, c.kernel->workspace(c.rows));
    }
    const Memory in_memory("inputs", in), number_memory("scales", numbers),
        out_memory("results", out), work("workspace", workspace);
    fill_normal(in_memory, dtype);
    std::fill_n(reinterpret_cast<float*>(number_memory.data()), numbers / sizeof(float), 1.0F);
    std::memset(out_memory.data(), 0, out);
    Random state{.seed = 1, .columns = static_cast<uint64_t>(shape.cols)};
    Progress progress(entries.size());
    for (const BenchEntry& e : entries) {
      progress.step(e.c.name());
      BenchMemory memory({.in = in_memory.data(),
                          .numbers = number_memory.data(),
                          .out = out_memory.data(),
                          .random = &state});
      const auto calls = bench_calls(e.c, shape, dtype, bench_options(args), memory);
      const auto call = [&] {
        for (const BenchCall& c : calls) c.run(work.data(), nullptr);
      };
      const int64_t elements = shape.rows * shape.cols;
      const auto copy = [&] {
        for (const Mix& m : e.mixes)
          move(out_memory, in_memory, m.read * elements, (m.write + m.columnwise) * elements);
      };
      call();
      copy();
      std::vector<double> times, copies, shares;
      for (int i = 0; i < args.shots; ++i) {
        times.push_back(microseconds(call));
        copies.push_back(microseconds(copy) * e.beyond_mixes(shape));
        shares.push_back(copies.back() / times.back());
      }
      const double time = median(times);
      BenchResult r{.c = e.c,
                    .shape = shape,
                    .mix = e.mix_names(),
                    .makers = e.makers(),
                    .mixes = e.mixes,
                    .microseconds = time,
                    .ceiling_microseconds = median(copies),
                    .terabytes = static_cast<double>(e.bytes()) / time * 1e-6,
                    .bytes = e.bytes()};
      set_shares(r, std::move(shares));
      report.results.push_back(std::move(r));
      progress.hide();
      print_case(args, report, report.results.back());
    }
  }
}

}  // namespace tenon::cli
