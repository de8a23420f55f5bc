// Times kernels and the ceilings of their mix with CUDA graphs that replay them over rotating
// buffers.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <span>
#include <thread>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "bench/bench.h"
#include "bench/ceiling.h"
#include "bench/timing.h"
#include "support/progress.h"
#include "tenon/error.h"

namespace tenon::bench {

namespace {

using cuda::check;
using cuda::driver;
using cuda::OwnStream;

constexpr size_t kLeastSets = 3, kMostSets = 512;
constexpr size_t kLeastLaunches = 6;
constexpr int64_t kInPlay = 600'000'000;  // minimum bytes of all sets together
constexpr int kTrialShots = 4;            // to find the best variants for a mix
constexpr size_t kKeptWays = 2;
constexpr double kSlow = 25e3;  // microseconds; a slower run is not repeated
constexpr unsigned char kPoison = 0xcd;
constexpr int kThreadLocalCapture = 1;
constexpr int kKernelNode = 0;

class OwnEvent {
 public:
  OwnEvent() { check(driver().event_create(&event_, 0), "making an event"); }
  ~OwnEvent() { driver().event_destroy(event_); }
  OwnEvent(const OwnEvent&) = delete;
  OwnEvent& operator=(const OwnEvent&) = delete;
  [[nodiscard]] cuda::Event get() const { return event_; }
  void record(cuda::Stream s) const { check(driver().event_record(event_, s), "marking a time"); }

 private:
  cuda::Event event_ = nullptr;
};

double microseconds(const OwnEvent& start, const OwnEvent& end) {
  float milliseconds = 0;
  check(driver().event_elapsed_time(&milliseconds, start.get(), end.get()), "reading a time");
  return 1e3 * static_cast<double>(milliseconds);
}

// A graph of launches over all sets, with the times of its replays.
class Replay {
 public:
  using Launch = std::function<void(size_t set, cuda::Stream stream)>;

  Replay(const OwnStream& stream, size_t sets, const Launch& launch) {
    launches_ = (std::max(sets, kLeastLaunches) + sets - 1) / sets * sets;
    check(driver().stream_begin_capture(stream.get(), kThreadLocalCapture), "starting a capture");
    try {
      for (size_t i = 0; i < launches_; ++i) launch(i % sets, stream.get());
    } catch (...) {
      driver().stream_end_capture(stream.get(), &graph_);
      if (graph_) driver().graph_destroy(graph_);
      throw;
    }
    check(driver().stream_end_capture(stream.get(), &graph_), "ending a capture");
    check(driver().graph_instantiate(&exec_, graph_, 0), "making a graph");
  }
  ~Replay() {
    if (exec_) driver().graph_exec_destroy(exec_);
    if (graph_) driver().graph_destroy(graph_);
  }
  Replay(const Replay&) = delete;
  Replay& operator=(const Replay&) = delete;

  void launch(cuda::Stream stream) const {
    check(driver().graph_launch(exec_, stream), "replaying a graph");
  }
  [[nodiscard]] size_t launches() const { return launches_; }
  [[nodiscard]] std::vector<cuda::KernelNode> kernels() const {
    size_t count = 0;
    check(driver().graph_get_nodes(graph_, nullptr, &count), "counting a graph's nodes");
    std::vector<cuda::GraphNode> nodes(count);
    check(driver().graph_get_nodes(graph_, nodes.data(), &count), "listing a graph's nodes");
    std::vector<cuda::KernelNode> all;
    for (const cuda::GraphNode n : nodes) {
      int type = 0;
      check(driver().graph_node_get_type(n, &type), "asking for a node's type");
      if (type != kKernelNode) continue;
      check(driver().graph_kernel_node_get_params(n, &all.emplace_back()), "asking for a kernel");
    }
    return all;
  }

  std::vector<double> times;  // microseconds per launch, one value per shot

 private:
  size_t launches_ = 0;
  cuda::StreamGraph graph_ = nullptr;
  cuda::GraphExec exec_ = nullptr;
};

// Replays every graph once, in random order and in groups of up to 8 back to back. Stores the times
// unless this is a warmup. After each group the GPU pauses for as long as it ran. Without pauses
// the GPU reaches its power limit within a second and lowers its clock. The time of a case then
// depends on the cases before it.
void shoot(const OwnStream& stream, const std::vector<Replay*>& all, std::mt19937& random,
           bool warm_up) {
  constexpr size_t kSome = 8;
  std::vector<Replay*> order = all;
  std::ranges::shuffle(order, random);
  for (size_t begin = 0; begin < order.size(); begin += kSome) {
    const std::span some = std::span(order).subspan(begin, std::min(kSome, order.size() - begin));
    const std::vector<OwnEvent> marks(some.size() + 1);
    marks[0].record(stream.get());
    for (size_t i = 0; i < some.size(); ++i) {
      some[i]->launch(stream.get());
      marks[i + 1].record(stream.get());
    }
    stream.wait();
    for (size_t i = 0; i < some.size() && !warm_up; ++i)
      some[i]->times.push_back(microseconds(marks[i], marks[i + 1]) /
                               static_cast<double>(some[i]->launches()));
    const std::chrono::duration<double, std::micro> ran(microseconds(marks.front(), marks.back()));
    std::this_thread::sleep_for(ran);
  }
}

size_t sets_for(int64_t bytes, int64_t in_play) {
  const auto wanted = static_cast<size_t>(cdiv(in_play, std::max<int64_t>(bytes, 1)));
  return std::clamp(wanted, kLeastSets, kMostSets);
}

// The memory that all cases of a shape share.
struct Arena {
  std::unique_ptr<cuda::DeviceBuffer> in, numbers, out, workspace, random;
};

void fill_normal(const cuda::DeviceBuffer& buffer, DType dtype) {
  const std::vector<char> piece = normal_piece(dtype, SIZE_MAX);
  auto* const to = static_cast<char*>(buffer.data());
  for (size_t at = 0; at < buffer.size(); at += piece.size())
    check(driver().memcpy_to_device(to + at, piece.data(),
                                    std::min(piece.size(), buffer.size() - at)),
          "filling the inputs");
}

void fill_numbers(cuda::DeviceBuffer& buffer) {
  std::vector<float> values(buffer.size() / sizeof(float));
  std::mt19937 random(2);
  std::uniform_real_distribution<float> near_one(0.5F, 1.5F);
  std::ranges::generate(values, [&] { return near_one(random); });
  buffer.from_host(values.data());
}

// All cases of one shape.
class Bench {
 public:
  Bench(const BenchArgs& args, Shape shape, BenchReport& report)
      : args_(args),
        shape_(shape),
        dtype_(*dtype_named(args.dtype)),
        report_(report),
        entries_(bench_entries(args, shape)) {
    const int l2 = cuda::attribute(cuda::Attribute::l2_bytes, context_.device());
    multiprocessors_ =
        static_cast<unsigned>(cuda::attribute(cuda::Attribute::multiprocessors, context_.device()));
    in_play_ = std::max<int64_t>(kInPlay, 4 * static_cast<int64_t>(l2) + 1);
    for (const BenchEntry& e : entries_)
      for (const Mix& m : e.mixes) ceilings_.try_emplace(m, ceiling_of(m));
  }

  void run() {
    compile();
    allocate();
    std::map<std::vector<Mix>, std::vector<const BenchEntry*>> groups;
    for (const BenchEntry& e : entries_) groups[e.mixes].push_back(&e);
    support::Progress progress(groups.size());
    std::map<std::string, BenchResult> done;
    for (const auto& [mixes, members] : groups) {
      progress.step(members.front()->mix_names());
      for (BenchResult& r : run_group(mixes, members)) {
        progress.hide();
        print_case(args_, report_, r);
        done.emplace(r.c.name(), std::move(r));
      }
    }
    for (const BenchEntry& e : entries_) report_.results.push_back(done.at(e.c.name()));
  }

 private:
  struct Case {
    const BenchEntry* entry = nullptr;
    std::unique_ptr<Replay> replay;
  };
  struct Way {
    const Ceiling* ceiling = nullptr;
    const CeilingWay* way = nullptr;
    std::unique_ptr<Replay> replay;
  };

  void compile() {
    std::vector<std::function<void()>> jobs;
    for (const BenchEntry& e : entries_)
      for (const BenchCall& c : e.calls)
        jobs.emplace_back([&c] { c.kernel->prepare_for({c.rows, c.in, c.out, c.parameters}); });
    for (const auto& [mix, ceiling] : ceilings_)
      jobs.emplace_back([&c = ceiling] {
        const cuda::CurrentContext context;
        (void)source(c, c.ways.front()).load(context);
      });
    on_all_cores(jobs.size(), [&](size_t i) {
      try {
        jobs[i]();
      } catch (const Error&) {  // the error is thrown again when the kernel is used
      }
    });
  }

  static cuda::Source source(const Ceiling& c, const CeilingWay& way) {
    return {"ceiling " + c.mix.name(), c.text, way.entry};
  }

  [[nodiscard]] int64_t elements() const { return shape_.rows * shape_.cols; }
  [[nodiscard]] size_t stream_bytes(int64_t width) const {
    return static_cast<size_t>(rup(elements() * width, 256) + 256);
  }

  void allocate() {
    size_t in = 0, numbers = 4096, out = 4096, workspace = 4096;
    for (const BenchEntry& e : entries_) {
      const size_t sets = sets_for(e.bytes(), in_play_);
      in = std::max(in, sets * e.in_bytes);
      out = std::max(out, sets * e.out_bytes);
      numbers = std::max(numbers, e.number_bytes);
      for (const BenchCall& c : e.calls)
        workspace = std::max(workspace, c.kernel->workspace(c.rows));
    }
    for (const auto& [mix, c] : ceilings_) {
      const size_t sets = sets_for(mix.bytes() * elements(), in_play_);
      in = std::max(in, sets * static_cast<size_t>(c.reads) * stream_bytes(c.read_width));
      out = std::max(out, sets * static_cast<size_t>(c.writes) * stream_bytes(c.width));
    }
    arena_.in = std::make_unique<cuda::DeviceBuffer>(in);
    arena_.numbers = std::make_unique<cuda::DeviceBuffer>(numbers);
    arena_.out = std::make_unique<cuda::DeviceBuffer>(out);
    arena_.workspace = std::make_unique<cuda::DeviceBuffer>(workspace);
    arena_.random = std::make_unique<cuda::DeviceBuffer>(5 * sizeof(uint64_t));
    const uint64_t state[5] = {1, 0, 0, 0, static_cast<uint64_t>(shape_.cols)};
    arena_.random->from_host(state);
    fill_normal(*arena_.in, dtype_);
    fill_numbers(*arena_.numbers);
  }

  // The calls of a set, with addresses in the arena.
  std::vector<BenchCall> placed(const BenchEntry& e, size_t set, std::vector<View>* outputs) const {
    BenchMemory memory({.in = static_cast<char*>(arena_.in->data()) + set * e.in_bytes,
                        .numbers = static_cast<char*>(arena_.numbers->data()),
                        .out = static_cast<char*>(arena_.out->data()) + set * e.out_bytes,
                        .random = arena_.random->data()});
    std::vector<BenchCall> calls = bench_calls(e.c, shape_, dtype_, bench_options(args_), memory);
    if (outputs) *outputs = memory.outputs();
    return calls;
  }

  // Runs a case once on poisoned outputs, then records its graph. A slow case is timed by this run.
  std::unique_ptr<Replay> record(const BenchEntry& e) const {
    const size_t sets = sets_for(e.bytes(), in_play_);
    std::vector<std::vector<BenchCall>> calls;
    std::vector<View> outputs;
    for (size_t s = 0; s < sets; ++s) calls.push_back(placed(e, s, s ? nullptr : &outputs));
    check(driver().memset_bytes(arena_.out->data(), kPoison, e.out_bytes), "poisoning outputs");
    check(driver().context_synchronize(), "poisoning outputs");
    void* const workspace = arena_.workspace->data();
    const OwnEvent start, end;
    start.record(stream_.get());
    for (const BenchCall& c : calls[0]) c.run(workspace, stream_.get());
    end.record(stream_.get());
    stream_.wait();
    if (e.mixes.back().bytes() > e.mixes.back().read)
      for (const View& v : outputs) check_written(e, v);
    auto replay = std::make_unique<Replay>(stream_, sets, [&](size_t set, cuda::Stream stream) {
      for (const BenchCall& c : calls[set]) c.run(workspace, stream);
    });
    if (const double once = microseconds(start, end); once > kSlow) replay->times = {once};
    return replay;
  }

  // Checks the first and the last elements of an output.
  static void check_written(const BenchEntry& e, const View& v) {
    const int64_t size = info(v.dtype).bytes;
    const auto bytes = static_cast<size_t>(std::min<int64_t>(v.cols * size, 64));
    std::vector<uint8_t> seen(bytes);
    const bool scales = v.dtype == DType::e8m0 || v.dtype == DType::f32;
    for (const int64_t row : {int64_t{0}, v.rows - 1}) {
      if (row > 0 && scales) continue;  // padding
      check(driver().memcpy_to_host(seen.data(), static_cast<char*>(v.data) + row * v.stride * size,
                                    bytes),
            "reading a result");
      if (std::ranges::all_of(seen, [](uint8_t b) { return b == kPoison; }))
        fail(Code::runtime, "bench: ", e.c.name(), ": row ", row, " of an output of ", v.rows,
             " x ", v.cols, " was not written");
    }
  }

  Way record(const Ceiling& c, const CeilingWay& way) const {
    const size_t sets = sets_for(c.mix.bytes() * elements(), in_play_);
    const cuda::Function function = source(c, way).load(context_).function;
    const auto vectors = static_cast<unsigned long long>(elements() * c.read_width / 16);
    const unsigned long long span =
        static_cast<unsigned long long>(way.threads) * static_cast<unsigned>(way.vectors);
    auto blocks = static_cast<unsigned>((vectors + span - 1) / span);
    if (way.persistent) blocks = std::min(blocks, multiprocessors_ * (2048U / way.threads));
    auto replay = std::make_unique<Replay>(stream_, sets, [&](size_t set, cuda::Stream stream) {
      CeilingArguments a;
      a.vectors = vectors;
      a.out[0] = arena_.out->data();
      for (size_t i = 0; i < static_cast<size_t>(c.reads); ++i)
        a.in[i] = static_cast<char*>(arena_.in->data()) +
                  (set * static_cast<size_t>(c.reads) + i) * stream_bytes(c.read_width);
      for (size_t i = 0; i < static_cast<size_t>(c.writes); ++i)
        a.out[i] = static_cast<char*>(arena_.out->data()) +
                   (set * static_cast<size_t>(c.writes) + i) * stream_bytes(c.width);
      void* values[] = {&a};
      check(driver().launch_kernel(function, blocks, 1, 1, way.threads, 1, 1, 0, stream, values,
                                   nullptr),
            "launching a ceiling");
    });
    return {&c, &way, std::move(replay)};
  }

  // The fastest variants for a mix, found with a few shots.
  std::vector<Way> best_ways(const Ceiling& c) {
    std::vector<Way> all;
    for (const CeilingWay& w : c.ways) all.push_back(record(c, w));
    std::vector<Replay*> replays;
    for (const Way& w : all) replays.push_back(w.replay.get());
    for (int i = 0; i <= kTrialShots; ++i) shoot(stream_, replays, random_, i == 0);
    std::ranges::sort(all, {}, [](const Way& w) { return median(w.replay->times); });
    all.resize(std::min(all.size(), kKeptWays));
    for (Way& w : all) w.replay->times.clear();
    return all;
  }

  std::vector<BenchResult> run_group(const std::vector<Mix>& mixes,
                                     const std::vector<const BenchEntry*>& members) {
    std::vector<BenchResult> results;
    std::vector<Case> cases;
    std::map<Mix, std::vector<Way>> ways;
    for (const Mix& m : mixes)
      if (!ways.contains(m)) ways[m] = best_ways(ceilings_.at(m));
    for (const BenchEntry* e : members) {
      try {
        cases.push_back({e, record(*e)});
      } catch (const Error& error) {
        results.push_back({.c = e->c, .shape = shape_, .error = error.what()});
      }
    }
    std::vector<Replay*> replays;
    for (const Case& c : cases)
      if (c.replay->times.empty()) replays.push_back(c.replay.get());
    for (const auto& [mix, list] : ways)
      for (const Way& w : list) replays.push_back(w.replay.get());
    for (int i = 0; i <= args_.shots; ++i) shoot(stream_, replays, random_, i == 0);

    // The ceiling of a shot is the sum over the passes. Each pass uses the variant with the best
    // median.
    std::vector<double> ceiling(static_cast<size_t>(args_.shots));
    for (const Mix& m : mixes) {
      const Way& best = *std::ranges::min_element(
          ways.at(m), {}, [](const Way& w) { return median(w.replay->times); });
      for (size_t i = 0; i < ceiling.size(); ++i) ceiling[i] += best.replay->times[i];
      if (mixes.size() == 1) note_ceiling(m, best);
    }
    for (const Case& c : cases) results.push_back(result(c, ceiling));
    return results;
  }

  void note_ceiling(const Mix& mix, const Way& best) {
    const double us = median(best.replay->times);
    const double bytes = static_cast<double>(mix.bytes() * elements());
    report_.ceilings.push_back({str(shape_.rows, "x", shape_.cols, " ", mix.name(), " ",
                                    best.way->entry, best.way->persistent ? " persistent" : ""),
                                bytes / us * 1e-6, "TB/s"});
  }

  [[nodiscard]] BenchResult result(const Case& c, std::vector<double> ceiling) const {
    for (double& us : ceiling) us *= c.entry->beyond_mixes();
    BenchResult r = result_of(*c.entry, c.replay->times, ceiling);
    r.checked = true;
    const std::vector<cuda::KernelNode> kernels = c.replay->kernels();
    const auto size = [](const cuda::KernelNode& k) {
      return static_cast<uint64_t>(k.grid_x) * k.grid_y * k.grid_z * k.block_x;
    };
    const auto largest = std::ranges::max_element(kernels, {}, size);
    r.kernels = static_cast<int>(kernels.size() / c.replay->launches());
    if (largest == kernels.end()) return r;
    r.threads = static_cast<int>(largest->block_x * largest->block_y * largest->block_z);
    r.registers = cuda::attribute(cuda::FunctionAttribute::registers, largest->function);
    for (const cuda::KernelNode& k : kernels)
      r.local_bytes = std::max(r.local_bytes,
                               cuda::attribute(cuda::FunctionAttribute::local_bytes, k.function));
    const char* name = nullptr;
    if (driver().function_get_name && driver().function_get_name(&name, largest->function) == 0)
      r.kernel = name;
    return r;
  }

  const BenchArgs& args_;
  Shape shape_;
  DType dtype_;
  BenchReport& report_;
  cuda::CurrentContext context_;
  OwnStream stream_;
  unsigned multiprocessors_ = 1;
  int64_t in_play_ = 0;
  std::vector<BenchEntry> entries_;
  std::map<Mix, Ceiling> ceilings_;
  Arena arena_;
  std::mt19937 random_{3};
};

}  // namespace

void bench_cuda(const BenchArgs& args, const std::vector<Shape>& shapes, BenchReport& report) {
  const cuda::CurrentContext context;
  const cuda::DeviceInfo device = cuda::device_info(context.device());
  report.on_gpu = true;
  report.device = str(device.name, ", ", device.arch());
  print_head(args, report);
  // Must run first, before any other compilation.
  if (args.costs()) report.costs = bench_compile_costs(device.arch());
  for (const Shape& shape : shapes) Bench(args, shape, report).run();
  if (args.costs())
    for (BenchNumber& n : bench_launch_costs()) report.costs.push_back(std::move(n));
}

}  // namespace tenon::bench
