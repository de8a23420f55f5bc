// Measures the cases on the CPU.
#include "bench/cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "backend/cpu/pool.h"
#include "support/progress.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tenon::bench {

namespace {

constexpr int64_t kPiece = 1 << 16;

using CopyPiece = void (*)(char* to, const char* from, int64_t bytes);

void copy_plainly(char* to, const char* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

#if defined(__x86_64__)
// Copies with non-temporal stores, `pages` pages at a time. Prefetches the next pages.
template <int pages>
[[gnu::target("avx512f")]] void copy_streaming(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kStep = pages == 1 ? 64 : 4096;
  constexpr int64_t kBlock = pages == 1 ? 64 : pages * 4096;
  constexpr int64_t kAhead = pages == 1 ? 4096 : kBlock;
  const int64_t whole = bytes / kBlock * kBlock;
  for (int64_t block = 0; block < whole; block += kBlock)
    for (int64_t line = 0; line < kStep; line += 64) {
      __m512i v[pages];
      for (int k = 0; k < pages; ++k) {
        const int64_t at = block + line + k * 4096;
        __builtin_prefetch(from + at + kAhead);
        v[k] = _mm512_loadu_si512(from + at);
      }
      for (int k = 0; k < pages; ++k)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + block + line + k * 4096), v[k]);
    }
  _mm_sfence();
  copy_plainly(to + whole, from + whole, bytes - whole);
}

// The streams of a kernel, one after the other. Each has `wide` lines of 64 bytes per step.
template <class Byte>
struct Streams {
  Byte* base;
  int64_t wide, steps;

  // Line `n` of all lines of a step.
  [[nodiscard]] Byte* at(int n, int64_t step) const {
    return base + 64 * ((n / wide * steps + step) * wide + n % wide);
  }
};
using Inputs = Streams<const char>;
using Outputs = Streams<char>;

// The steps `begin` to `end` of a kernel that reads `reads` lines and writes `writes` lines per
// step, as `pages` steps that are a page apart. All loads come before the first store: a load after
// a store to the same offset of another page waits for it.
template <int reads, int writes, int pages>
[[gnu::target("avx512f")]] void move_lines(const Outputs& to, const Inputs& from, int64_t begin,
                                           int64_t end) {
  constexpr int64_t kSpan = pages == 1 ? 1 : 64;  // steps of a page
  constexpr int64_t kAhead = pages == 1 ? 128 / std::max(2, reads) : pages * kSpan;
  __m512i unused = _mm512_setzero_si512();
  const int64_t whole = begin + (end - begin) / (kSpan * pages) * (kSpan * pages);
  for (int64_t block = begin; block < whole; block += kSpan * pages)
    for (int64_t step = block; step < block + kSpan; ++step) {
      __m512i v[reads][pages];
      for (int r = 0; r < reads; ++r)
        for (int k = 0; k < pages; ++k) {
          __builtin_prefetch(from.at(r, step + k * kSpan + kAhead));
          v[r][k] = _mm512_loadu_si512(from.at(r, step + k * kSpan));
          if (r >= writes) unused = _mm512_xor_si512(unused, v[r][k]);
        }
      for (int w = 0; w < writes; ++w)
        for (int k = 0; k < pages; ++k)
          _mm512_stream_si512(reinterpret_cast<__m512i*>(to.at(w, step + k * kSpan)),
                              v[w % reads][k]);
    }
  // Makes the compiler keep the reads.
  if (_mm512_cmpeq_epi64_mask(unused, _mm512_set1_epi64(0x9e3779b97f4a7c15)) == 0xff) *to.base = 1;
  if constexpr (pages > 1)
    move_lines<reads, writes, 1>(to, from, whole, end);
  else
    _mm_sfence();
}

struct StreamMoves {
  int64_t reads, writes;
  void (*moves[2])(const Outputs& to, const Inputs& from, int64_t begin, int64_t end);
};
template <int reads, int writes>
constexpr StreamMoves kMoves{
    reads, writes, {move_lines<reads, writes, 1>, move_lines<reads, writes, reads <= 4 ? 4 : 2>}};
constexpr StreamMoves kStreamMoves[] = {kMoves<1, 0>, kMoves<1, 1>, kMoves<1, 2>, kMoves<1, 4>,
                                        kMoves<2, 1>, kMoves<3, 1>, kMoves<3, 2>, kMoves<4, 1>,
                                        kMoves<6, 1>, kMoves<8, 1>};
#endif

std::vector<CopyPiece> ways_to_copy() {
  std::vector<CopyPiece> ways{copy_plainly};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f"))
    ways.insert(ways.end(), {copy_streaming<1>, copy_streaming<4>});
#endif
  return ways;
}

// Copies as many bytes as are written, and only reads the rest.
void move(CopyPiece copy_piece, char* out, const char* in, int64_t read, int64_t write) {
  const int64_t copied = std::min(read, write);
  const int64_t all = std::max(read, write);
  cpu::parallel_for(cdiv(all, kPiece), [&](int64_t begin, int64_t end) {
    uint64_t folded = 0;
    for (int64_t i = begin * kPiece; i < std::min(end * kPiece, all); i += kPiece) {
      const int64_t copy = std::clamp<int64_t>(copied - i, 0, kPiece);
      const int64_t rest = std::clamp<int64_t>(read - i, 0, kPiece);
      copy_piece(out + i, in + i, copy);
      const auto* const words = reinterpret_cast<const uint64_t*>(in + i);
      for (int64_t k = copy / 8; k < rest / 8; ++k) folded ^= words[k];
    }
    if (folded == 0x9e3779b97f4a7c15U) out[0] = 1;  // makes the compiler keep the reads
  });
}

// The same with the streams of a step side by side, in their widths.
Ways stream_copies(const Step& step, char* out, const char* in, int64_t elements) {
  Ways list;
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx512f")) return list;
  const Mix m = mix_of(step);
  const int64_t written = m.write + m.columnwise;
  const int64_t unit = std::gcd(m.read, written);
  const int64_t reads = m.read / unit, writes = written / unit;
  const int64_t inputs = std::ranges::count(step.loads, Load::From::tile, &Load::from);
  int64_t outputs = std::ranges::count(step.stores, Store::To::tile, &Store::to);
  for (const Encoder& e : step.encoders) outputs += (e.rowwise ? 1 : 0) + (e.columnwise ? 1 : 0);
  const auto wide = [](int64_t lines, int64_t streams) {
    return streams && lines % streams == 0 ? lines / streams : 1;
  };
  const int64_t steps = elements * unit / 64;
  const Inputs from{in, wide(reads, inputs), steps};
  const Outputs to{out, wide(writes, outputs), steps};
  for (const StreamMoves& s : kStreamMoves) {
    if (s.reads != reads || s.writes != writes) continue;
    for (auto* const move_piece : s.moves)
      list.emplace_back([=] {
        constexpr int64_t kSteps = kPiece / 64;
        cpu::parallel_for(cdiv(steps, kSteps), [&](int64_t begin, int64_t end) {
          move_piece(to, from, begin * kSteps, std::min(end * kSteps, steps));
        });
      });
  }
#endif
  return list;
}

void fill_normal(const Memory& m, DType dtype) {
  const auto size = static_cast<size_t>(info(dtype).bytes);
  const std::vector<char> piece = normal_piece(dtype, std::max<size_t>(m.size() / size, 1));
  for (size_t at = 0; at < m.size(); at += piece.size())
    std::memcpy(m.data() + at, piece.data(), std::min(piece.size(), m.size() - at));
}

// Null if the library does not have the function.
std::unique_ptr<Eltwise> peer_of(const BenchCase& c, const BenchCall& call) {
  const View& y = call.out.front();
  const bool plain = c.out.scaling == Scaling::none && !c.bias && !c.dbias;
  if (!plain || y.dtype == DType::f16 || !onednn()) return nullptr;
  std::vector<void*> in;  // placed one after the other: x[, grad]
  for (const View& v : call.in)
    if (v.data) in.push_back(v.data);
  std::ranges::sort(in);
  return std::unique_ptr<Eltwise>(onednn()->make({.op = c.op.c_str(),
                                                  .backward = c.backward,
                                                  .bf16 = y.dtype == DType::bf16,
                                                  .elements = y.rows * y.cols,
                                                  .x = in.front(),
                                                  .grad = in.back(),
                                                  .result = y.data}));
}

// A shape whose tensors and panels stay in the second-level cache of a core: with whole blocks of
// scales and columns of codes, or with whole rows.
Shape cached_shape(const BenchCase& c, Shape shape) {
  constexpr int64_t kElements = 1 << 15;
  if (c.columnwise || (c.out.scaling != Scaling::none && !info(c.out.scaling).blocks[0].single()))
    return {std::min<int64_t>(shape.rows, 128), std::min<int64_t>(shape.cols, 512)};
  return {std::clamp<int64_t>(kElements / shape.cols, 1, shape.rows), shape.cols};
}

// The time that the instructions of the case take: all threads repeat a small call at the same
// time, each on tensors in its own cache. 0 if the small call has other kernels.
double seconds_in_cache(const BenchEntry& entry, const Options& options) {
  const Shape small = cached_shape(entry.c, entry.shape);
  const BenchEntry e = bench_entry(entry.c, small, options);
  if (e.makers() != entry.makers()) return 0;
  const int64_t count = threads();
  std::vector<std::unique_ptr<CpuArena>> arenas;
  std::vector<std::vector<BenchCall>> calls;
  for (int64_t t = 0; t < count; ++t) {
    arenas.push_back(std::make_unique<CpuArena>(std::vector{e}, small, e.c.in));
    calls.push_back(arenas.back()->placed(e, options));
  }
  const auto repeat = [&](int64_t times) {
    cpu::parallel_for(count, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t)
        for (int64_t i = 0; i < times; ++i)
          for (const BenchCall& c : calls[static_cast<size_t>(t)])
            c.run(arenas[static_cast<size_t>(t)]->workspace(), nullptr);
    });
  };
  repeat(2);
  // Long enough that waking the threads does not count.
  constexpr double kAtLeast = 5e-3;
  const double once = seconds([&] {
    for (const BenchCall& c : calls.front()) c.run(arenas.front()->workspace(), nullptr);
  });
  const auto times = static_cast<int64_t>(1 + kAtLeast / std::max(1e-7, once));
  std::vector<double> all;
  for (int i = 0; i < 9; ++i) all.push_back(seconds([&] { repeat(times); }));
  const auto elements = [](Shape s) { return static_cast<double>(s.rows * s.cols); };
  return median(all) / static_cast<double>(times * count) * elements(entry.shape) / elements(small);
}

}  // namespace

CpuArena::CpuArena(const std::vector<BenchEntry>& entries, Shape shape, DType dtype)
    : shape_(shape), dtype_(dtype), random_{1, 0, 0, 0, static_cast<uint64_t>(shape.cols)} {
  size_t in = 4096, numbers = 4096, out = 4096, workspace = 4096;
  for (const BenchEntry& e : entries) {
    in = std::max(in, e.in_bytes);
    out = std::max(out, e.out_bytes);
    numbers = std::max(numbers, e.number_bytes);
    for (const BenchCall& c : e.calls) workspace = std::max(workspace, c.kernel->workspace(c.rows));
  }
  in_ = std::make_unique<Memory>(in, "inputs");
  numbers_ = std::make_unique<Memory>(numbers, "scales");
  out_ = std::make_unique<Memory>(out, "results");
  workspace_ = std::make_unique<Memory>(workspace, "workspace");
  fill_normal(*in_, dtype);
  std::fill_n(reinterpret_cast<float*>(numbers_->data()), numbers / sizeof(float), 1.0F);
  std::memset(out_->data(), 0, out);
}

std::vector<BenchCall> CpuArena::placed(const BenchEntry& e, const Options& options) const {
  BenchMemory memory({.in = in_->data(),
                      .numbers = numbers_->data(),
                      .out = out_->data(),
                      .random = random_.data()});
  return bench_calls(e.c, shape_, dtype_, options, memory);
}

std::vector<Ways> CpuArena::copies(const BenchEntry& e) const {
  std::vector<Ways> list;
  const int64_t elements = shape_.rows * shape_.cols;
  for (const BenchCall& c : e.calls) {
    const Mix m = mix_of(c.step);
    Ways& ways = list.emplace_back(stream_copies(c.step, out_->data(), in_->data(), elements));
    for (const CopyPiece way : ways_to_copy())
      ways.emplace_back([this, way, elements, m] {
        move(way, out_->data(), in_->data(), m.read * elements,
             (m.write + m.columnwise) * elements);
      });
  }
  return list;
}

CpuCase::CpuCase(const CpuArena& arena, const BenchEntry& entry, const Options& options)
    : calls_(arena.placed(entry, options)),
      copies_(arena.copies(entry)),
      peer_(peer_of(entry.c, calls_.front())),
      workspace_(arena.workspace()),
      beyond_mixes_(entry.beyond_mixes()) {
  if (peer_) check_peer();
  (void)round();
}

void CpuCase::run() const {
  for (const BenchCall& c : calls_) c.run(workspace_, nullptr);
}

// A peer that computes something else must not be compared. It may round intermediate values.
void CpuCase::check_peer() const {
  const View& y = calls_.front().out.front();
  const double most = y.dtype == DType::f32 ? 1e-3 : 4e-2;
  const auto values = [&](const auto& compute) {
    compute();
    std::vector<double> all;
    for (int64_t i = 0; i < std::min<int64_t>(y.cols, 4096); ++i) {
      uint32_t code = 0;
      const auto size = static_cast<size_t>(info(y.dtype).bytes);
      std::memcpy(&code, static_cast<const char*>(y.data) + static_cast<size_t>(i) * size, size);
      all.push_back(decode(y.dtype, code));
    }
    return all;
  };
  const auto ours = values([&] { run(); });
  const auto theirs = values([&] { peer_->run(); });
  size_t others = 0;
  for (size_t i = 0; i < ours.size(); ++i)
    if (!(std::abs(theirs[i] - ours[i]) <= most * (1 + std::abs(ours[i])))) ++others;
  // Derivatives differ at kinks, e.g. that of hardswish at 3, which bf16 often hits.
  if (others > ours.size() / 50)
    fail(Code::runtime, "bench: ", others, " of ", ours.size(),
         " values of oneDNN differ from those of tenon");
}

CpuCase::Round CpuCase::round() const {
  // Idle threads of a library spin for a while. The pauses let them sleep.
  const auto pause = [&] {
    if (peer_) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  Round r;
  pause();
  r.seconds = seconds([&] { run(); });
  for (const Ways& ways : copies_) {
    double best = std::numeric_limits<double>::infinity();
    for (const auto& way : ways) best = std::min(best, seconds(way));
    r.copy += best * beyond_mixes_;
  }
  pause();
  if (peer_) r.peer = seconds([&] { peer_->run(); });
  return r;
}

std::vector<BenchNumber> bench_call_costs() {
  constexpr int64_t kCols = 1024;
  std::vector<uint16_t> x(kCols), dx(kCols);
  const auto row = [](std::vector<uint16_t>& v, int64_t cols) {
    return matrix(v.data(), DType::bf16, 1, cols);
  };
  std::vector<BenchNumber> costs;
  constexpr std::pair<const char*, const char*> kFormulas[] = {
      {"silu", "x*sigmoid("}, {"gelu", "x*sigmoid((1+0.0357*x*x)*"}};
  for (const auto& [name, formula] : kFormulas)
    for (const bool backwards : {false, true}) {
      std::vector<double> first;
      for (int i = 0; i < 15; ++i) {
        // A new number makes a new formula.
        static int count = 0;
        const Activation f = activation(str(formula, 1 + 1e-4 * ++count, "*x)"));
        first.push_back(
            1e3 * seconds([&] {
              if (backwards)
                backward(f, {.grad = row(x, kCols), .x = row(x, kCols), .dx = row(dx, kCols)});
              else
                forward(f, {.x = row(x, kCols), .y = row(dx, kCols)});
            }));
      }
      costs.push_back(
          {str("first call of a formula like ", name, backwards ? ".bwd" : "", ", compiled in it"),
           median(first), "ms"});
    }
  const Activation silu = activation("silu");
  for (const int64_t cols : {int64_t{1}, kCols}) {
    constexpr int kCalls = 2000;
    std::vector<double> each;
    for (int i = 0; i < 15; ++i)
      each.push_back(1e6 / kCalls * seconds([&] {
                       for (int k = 0; k < kCalls; ++k)
                         forward(silu, {.x = row(x, cols), .y = row(dx, cols)});
                     }));
    costs.push_back({str("a later call of silu, 1x", cols), median(each), "us"});
  }
  return costs;
}

void bench_cpu(const BenchArgs& args, const std::vector<Shape>& shapes, BenchReport& report) {
  report.device = str("cpu, ", threads(), " threads");
  print_head(args, report);
  for (const Shape& shape : shapes) {
    const std::vector<BenchEntry> entries = bench_entries(args, shape);
    const CpuArena arena(entries, shape, *dtype_named(args.dtype));
    support::Progress progress(entries.size());
    for (const BenchEntry& e : entries) {
      progress.step(e.c.name());
      const CpuCase c(arena, e, bench_options(args));
      std::vector<double> times, ceiling, peer, speedups;
      for (int i = 0; i < args.shots; ++i) {
        const CpuCase::Round round = c.round();
        times.push_back(1e6 * round.seconds);
        ceiling.push_back(1e6 * round.copy);
        peer.push_back(1e6 * round.peer);
        speedups.push_back(round.peer / round.seconds);
      }
      BenchResult r = result_of(e, times, ceiling);
      r.cached_microseconds = 1e6 * seconds_in_cache(e, bench_options(args));
      if (c.has_peer())
        r.peers.push_back({"onednn", onednn()->version, median(peer), estimate(speedups)});
      report.results.push_back(std::move(r));
      progress.hide();
      print_case(args, report, report.results.back());
    }
  }
  if (args.costs()) report.costs = bench_call_costs();
}

}  // namespace tenon::bench
