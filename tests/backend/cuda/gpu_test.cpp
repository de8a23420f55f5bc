// Tests on a GPU: graphs of every kind of step, tensors with more than 2^32 elements, concurrent
// threads, streams and contexts, and the cost of a launch. Without a GPU every test is skipped with
// the reason.
#include <chrono>
#include <cstdio>
#include <set>
#include <thread>

#include "backend/cuda/driver.h"
#include "backend/cuda/kernels.h"
#include "backend/cuda/nvrtc.h"
#include "backend/cuda/vector.h"
#include "lower/data.h"
#include "lower/single_activation.h"
#include "lower/single_norm.h"
#include "support/gpu_graph.h"
#include "support/gpu_large.h"
#include "support/support.h"

namespace tenon::test {
namespace {

using Bytes = std::vector<uint8_t>;

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    for (const auto& why : {cuda::why_no_gpu(), cuda::why_no_nvrtc()})
      if (why) GTEST_SKIP() << *why;
  }
};

Bytes normal_numbers(DType dtype, size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  const auto size = static_cast<size_t>(info(dtype).bytes);
  Bytes bytes(count * size);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t code = encode(dtype, normal(random));
    std::memcpy(bytes.data() + i * size, &code, size);
  }
  return bytes;
}

// A plan with buffers on the device.
class DevicePlan {
 public:
  DevicePlan(const std::string& chain, PlanRequest request, int64_t rows)
      : plan_(Plan::build(chain, on_cuda(std::move(request)))),
        rows_(rows),
        workspace_(static_cast<size_t>(plan_.workspace_bytes(rows))) {
    unsigned seed = 1;
    for (size_t i = 0; i < plan_.buffers().size(); ++i) {
      const Buffer& b = plan_.buffers()[i];
      if (b.role == Role::workspace) {
        buffers_.emplace_back();
        first_.emplace_back();
        continue;
      }
      Bytes bytes(static_cast<size_t>(b.bytes(rows)));
      const auto elements = bytes.size() / static_cast<size_t>(info(b.dtype).bytes);
      if (b.random)
        start_state(bytes);
      else if (b.role == Role::param)
        plan_.initialise(i, 3, bytes.data());
      else if (b.role == Role::state)
        bytes = numbers(elements, 1.0F);
      else
        bytes = normal_numbers(b.dtype, elements, seed++);
      buffers_.push_back(std::make_unique<cuda::DeviceBuffer>(bytes.size()));
      first_.push_back(std::move(bytes));
    }
    reset();
  }

  void reset() {
    for (size_t i = 0; i < buffers_.size(); ++i)
      if (buffers_[i]) buffers_[i]->from_host(first_[i].data());
  }

  void run(void* stream) const {
    std::vector<void*> memory;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const auto& b = buffers_[plan_.owner(i)];
      memory.push_back(b ? b->data() : nullptr);
    }
    for (const Pass pass : {Pass::forward, Pass::backward})
      plan_.run(pass, rows_, memory, workspace_.data(), {.stream = stream});
  }

  // The bytes of every buffer.
  [[nodiscard]] std::vector<Bytes> contents() const {
    std::vector<Bytes> all;
    for (const auto& b : buffers_) {
      Bytes& bytes = all.emplace_back(b ? b->size() : 0);
      if (b) b->to_host(bytes.data());
    }
    return all;
  }

  [[nodiscard]] const std::string& name(size_t buffer) const {
    return plan_.buffers()[buffer].name;
  }
  [[nodiscard]] std::set<std::string> makers() const {
    std::set<std::string> all;
    for (const Pass pass : {Pass::forward, Pass::backward})
      for (const PlanStep& s : data_of(plan_).steps(pass))
        if (s.chosen.kernel) all.insert(std::string(s.chosen.maker));
    return all;
  }
  // The offset of the caller's random state.
  [[nodiscard]] uint64_t offset() const {
    uint64_t state[5] = {};
    const size_t at = plan_.with(Role::rng).at(0);
    buffers_[at]->to_host(state);
    return state[1];
  }
  [[nodiscard]] Bytes output() const { return contents()[plan_.with(Role::output).at(0)]; }

  static constexpr uint64_t kOffset = 11;

 private:
  static PlanRequest on_cuda(PlanRequest r) {
    r.options.device = Device::cuda;
    return r;
  }
  static Bytes numbers(size_t count, float value) {
    Bytes bytes(count * sizeof value);
    for (size_t i = 0; i < count; ++i)
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    return bytes;
  }
  static void start_state(Bytes& bytes) {
    const uint64_t state[5] = {42, kOffset, 0, 0, 1 << 20};
    std::memcpy(bytes.data(), state, std::min(bytes.size(), sizeof state));
  }

  Plan plan_;
  int64_t rows_;
  cuda::DeviceBuffer workspace_;
  std::vector<std::unique_ptr<cuda::DeviceBuffer>> buffers_;
  std::vector<Bytes> first_;  // initial contents
};

struct Subject {
  const char* chain;
  int64_t rows, cols;
  DType dtype;
  const char* recipe;
};
constexpr Subject kSubjects[] = {
    {"gelu", 130, 256, DType::bf16, "none"},
    {"bias swiglu", 150, 272, DType::bf16, "none"},
    {"bias gelu_erf", 37, 61, DType::f32, "none"},
    {"rmsnorm", 70, 1024, DType::bf16, "none"},
    {"layernorm bias gelu", 33, 264, DType::f32, "none"},
    {"l2norm", 9, 45, DType::f16, "none"},
    {"bias dropout(0.25) add", 128, 512, DType::bf16, "none"},
    {"dropout(0.5) bias dropout(0.1)", 41, 45, DType::f32, "none"},
    {"linear(64,96) bias swiglu linear(48,32)", 65, 64, DType::f32, "none"},
    {"linear(256,256) bias gelu linear(256,128)", 256, 256, DType::bf16, "delayed"},
    {"linear(256,256) bias gelu linear(256,128)", 256, 256, DType::bf16, "current"},
    {"linear(256,512) swiglu linear(256,128)", 256, 256, DType::bf16, "mxfp8"},
    {"linear(256,512) bias geglu linear(256,128)", 256, 256, DType::bf16, "block"},
    {"linear(160,96) bias gelu linear(96,32)", 70, 160, DType::f32, "mxfp8"},
};

PlanRequest request_of(const Subject& s, Precision precision = Precision::native) {
  PlanRequest r;
  r.cols = s.cols;
  r.dtype = s.dtype;
  r.recipe = recipe(s.recipe);
  r.options.precision = precision;
  return r;
}

Step step_of(const std::string& act) {
  ActivationForm form;
  form.x = DType::bf16;
  form.y = DType::bf16;
  form.cols = 1024;
  return activation_step(activation(act), form);
}

// Needs only NVRTC.
TEST(JoinedTexts, HoldTheKernelsOfAll) {
  if (const auto why = cuda::why_no_nvrtc()) GTEST_SKIP() << *why;
  std::vector<std::string> texts;
  size_t all = 0;
  for (const char* act : {"gelu", "silu", "swiglu"}) {
    texts.push_back(cuda::VectorProgram(step_of(act)).text());
    all += texts.back().size();
    EXPECT_EQ(cuda::skeletons_of(texts.back()), cuda::skeletons_of(texts[0]));
  }
  const std::string text = cuda::joined(texts);
  EXPECT_LT(2 * text.size(), all);
  const std::string image = cuda::compile(text, "sm_90a").image;
  for (const char* part : {"part0_", "part1_", "part2_"})
    EXPECT_NE(image.find(std::string(part) + "tenon_vector_kernel"), std::string::npos) << part;
  EXPECT_EQ(image.find("part3_"), std::string::npos);
}

// A replay gives the result of the run, also after the memory was reset.
TEST_F(Gpu, GraphsOfEveryKindOfStepReplay) {
  std::set<std::string> makers;
  for (const Subject& s : kSubjects) {
    SCOPED_TRACE(str(s.chain, " ", s.rows, "x", s.cols, " ", s.recipe));
    DevicePlan plan(s.chain, request_of(s), s.rows);
    for (const std::string& m : plan.makers()) makers.insert(m);
    const GpuStream stream;
    plan.run(stream.get());  // compiles
    stream.wait();
    const std::vector<Bytes> expected = plan.contents();
    const GpuGraph graph(stream, [&] { plan.run(stream.get()); });
    for (int turn = 0; turn < 2; ++turn) {
      plan.reset();
      graph.replay();
      const std::vector<Bytes> got = plan.contents();
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(got[i] == expected[i]) << plan.name(i) << ", replay " << turn;
    }
  }
  for (const char* maker : {"vector map", "tiled map", "block map", "row map", "plain"})
    EXPECT_TRUE(makers.contains(maker)) << maker;
}

// Products are timed on scratch memory, ahead of a capture. A capture itself is refused.
TEST_F(Gpu, PrepareTimesProducts) {
  PlanRequest r{.dtype = DType::bf16, .recipe = recipe("delayed")};
  r.options.device = Device::cuda;
  const Plan plan = Plan::build("linear(256,1024) bias swiglu linear(512,256) dropout(0.5)", r);
  const GpuStream stream;
  plan.prepare(384, nullptr, stream.get());
  const auto size = static_cast<size_t>(plan.prepare_bytes(384));
  cuda::DeviceBuffer memory(size + kAligned);
  const auto at = reinterpret_cast<uintptr_t>(memory.data());
  plan.prepare(384, static_cast<char*>(memory.data()) + (kAligned - at % kAligned) % kAligned,
               stream.get());
  stream.wait();
  std::string why;
  const GpuGraph graph(stream, [&] {
    try {
      plan.prepare(384, nullptr, stream.get());
    } catch (const Error& e) {
      why = e.what();
    }
  });
  EXPECT_NE(why.find("being captured"), std::string::npos) << why;
}

// The state is in device memory and advances there, so every replay has another mask.
TEST_F(Gpu, ReplaysOfDropoutDrawAnew) {
  const Subject s{"dropout(0.5) bias dropout(0.1)", 64, 256, DType::f32, "none"};
  DevicePlan plan(s.chain, request_of(s), s.rows);
  const GpuStream stream;
  std::vector<Bytes> eager;
  for (int i = 0; i < 3; ++i) {
    plan.run(stream.get());
    stream.wait();
    eager.push_back(plan.output());
    EXPECT_EQ(plan.offset(), DevicePlan::kOffset + 2 * static_cast<uint64_t>(i + 1));
  }
  const GpuGraph graph(stream, [&] { plan.run(stream.get()); });
  plan.reset();
  for (int i = 0; i < 3; ++i) {
    graph.replay();
    EXPECT_TRUE(plan.output() == eager[static_cast<size_t>(i)]) << i;
    EXPECT_EQ(plan.offset(), DevicePlan::kOffset + 2 * static_cast<uint64_t>(i + 1));
  }
  EXPECT_FALSE(eager[0] == eager[1]);
  EXPECT_FALSE(eager[1] == eager[2]);
}

// More than 2^31 elements.

// Samples of a large tensor, mostly at indices that fail with 32 bits.
std::vector<int64_t> samples(int64_t elements) {
  std::mt19937_64 random(5);
  std::vector<int64_t> all{0, 1, elements - 1, elements - 2};
  for (const int64_t edge : {int64_t{1} << 31, int64_t{1} << 30, int64_t{1} << 29})
    for (int64_t d = -2; d <= 2; ++d) all.push_back(edge + d);
  for (int i = 0; i < 200; ++i)
    all.push_back(static_cast<int64_t>(random() % static_cast<uint64_t>(elements)));
  std::erase_if(all, [&](int64_t i) { return i < 0 || i >= elements; });
  return all;
}

// A tensor filled with one byte value, with other values at the samples.
class Large {
 public:
  Large(DType dtype, int64_t elements)
      : size_(static_cast<size_t>(info(dtype).bytes)),
        buffer_(static_cast<size_t>(elements) * size_) {
    const cuda::CurrentContext context;
    cuda::check(cuda::driver().memset_bytes(buffer_.data(), kByte, buffer_.size()), "filling");
  }
  void set(int64_t i, uint32_t code) const {
    const cuda::CurrentContext context;
    cuda::check(cuda::driver().memcpy_to_device(at(i), &code, size_), "writing a sample");
  }
  [[nodiscard]] uint32_t get(int64_t i) const {
    const cuda::CurrentContext context;
    uint32_t code = 0;
    cuda::check(cuda::driver().memcpy_to_host(&code, at(i), size_), "reading a sample");
    return code;
  }
  [[nodiscard]] void* data() const { return buffer_.data(); }

  static constexpr uint8_t kByte = 0x3f;

 private:
  [[nodiscard]] uint8_t* at(int64_t i) const {
    return static_cast<uint8_t*>(buffer_.data()) + static_cast<size_t>(i) * size_;
  }

  size_t size_;
  cuda::DeviceBuffer buffer_;
};

uint32_t sample_code(size_t i) { return 0x3c00U + static_cast<uint32_t>(i * 7 % 0x400U); }

// f of one bf16 value on the CPU.
uint32_t on_cpu(const Activation& f, uint32_t code) {
  uint32_t result = 0;
  const View x = matrix(&code, DType::bf16, 1, 1), y = matrix(&result, DType::bf16, 1, 1);
  forward(f, {.x = x, .y = y}, {.precision = Precision::strict});
  return result;
}

constexpr Options kStrictCuda{.precision = Precision::strict, .device = Device::cuda};

// In place: one row of odd length for the flat map, rows of whole vectors for the vector map.
TEST_F(Gpu, MapsOfMoreThan2To31Elements) {
  const Activation f = activation("gelu");
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, (int64_t{1} << 31) + 7},
                                   {(int64_t{1} << 15) + 1, int64_t{1} << 16}}) {
    SCOPED_TRACE(str(rows, "x", cols));
    const Large x(DType::bf16, rows * cols);
    const std::vector<int64_t> at = samples(rows * cols);
    for (size_t i = 0; i < at.size(); ++i) x.set(at[i], sample_code(i));
    std::map<int64_t, uint32_t> given;
    for (size_t i = 0; i < at.size(); ++i) given[at[i]] = sample_code(i);
    const View v = matrix(x.data(), DType::bf16, rows, cols);
    const cuda::CurrentContext context;
    forward(f, {.x = v, .y = v}, kStrictCuda);
    cuda::check(cuda::driver().context_synchronize(), "waiting");
    const uint32_t filled = Large::kByte * 0x101U;
    for (const auto& [i, code] : given) {
      EXPECT_EQ(x.get(i), on_cpu(f, code)) << i;
      const int64_t next = std::min(i + 9, rows * cols - 1);
      if (given.contains(next)) continue;
      EXPECT_EQ(x.get(next), on_cpu(f, filled)) << next;
    }
  }
}

// More than 2^32 elements: 18 GB.

// gelu(x), rowwise and optionally columnwise. The initial contents of memory are the multiplier.
BandCall encoded(const Format& format, bool both) {
  return [=](Tensors& results, const View& x, const Options& options) {
    const auto encoding = [&](Orientation o) -> Encoding {
      return {results.make(format.dtype, format.data_shape(x.rows, x.cols, o)),
              results.make(info(format.scaling).scale, format.scale_shape(x.rows, x.cols, o))};
    };
    Tensor y(format, encoding(Orientation::rowwise),
             both ? encoding(Orientation::columnwise) : Encoding{});
    if (format.scaling == Scaling::delayed) {
      y.scale = results.make(DType::f32, {1, 1});
      y.amax = results.make(DType::f32, {1, 1});
    }
    forward(activation("gelu"), {.x = x, .y = y}, options);
  };
}

NormForm rms_form(const View& x, const Options& options) {
  NormForm form;
  form.cols = x.cols;
  form.precision = options.precision;
  form.x = x.dtype;
  form.gamma = x.dtype;
  form.y = Operand(x.dtype);
  return form;
}

// RMSNorm with its saved column. The initial contents of memory are gamma.
void rms_norm(Tensors& results, const View& x, const Options& options) {
  NormForm form = rms_form(x, options);
  form.rstdev = true;
  std::vector<View> in(NormArgs::inputs), out(NormArgs::outputs);
  in[NormArgs::x] = x;
  in[NormArgs::gamma] = results.make(x.dtype, {1, x.cols});
  out[NormArgs::y] = results.make(x.dtype, {x.rows, x.cols});
  out[NormArgs::rstdev] = results.make(DType::f32, {x.rows, 1});
  const float eps = 1e-5F;
  execute(norm_step(form), {.rows = x.rows, .in = in, .out = out, .parameters = {&eps, 1}},
          options);
}

// Its gradient with x as the incoming gradient. Returns the gradient of gamma, a sum of
// non-negative values.
View rms_norm_backward(Tensors& results, const View& x, const Options& options) {
  NormForm form = rms_form(x, options);
  form.grad = x.dtype;
  form.dgamma = DType::f32;
  std::vector<View> in(NormArgs::inputs), out(NormArgs::outputs);
  in[NormArgs::x] = in[NormArgs::grad] = x;
  in[NormArgs::gamma] = results.make(x.dtype, {1, x.cols});
  in[NormArgs::rstdev_in] = results.make(DType::f32, {x.rows, 1});
  out[NormArgs::y] = results.make(x.dtype, {x.rows, x.cols});
  out[NormArgs::dgamma] = results.make(DType::f32, {1, x.cols}, false);
  execute(norm_backward_step(form), {.rows = x.rows, .in = in, .out = out, .parameters = {}},
          options);
  return out[NormArgs::dgamma];
}

TEST_F(Gpu, TilesBlocksAndRowsOfMoreThan2To32Elements) {
  Bytes bytes = normal_numbers(DType::bf16, kBandRows * kBandCols, 7);
  const View band = matrix(bytes.data(), DType::bf16, kBandRows, kBandCols);
  Tensors inputs(Device::cuda);
  const View x = inputs.make(DType::bf16, {kManyRows, kBandCols});
  repeat(band, x);
  const auto expect = [&](const char* entry, const BandCall& call) {
    Tensors large(Device::cuda), small(Device::cpu);
    expect_bands(entry, x, band, call, large, small);
  };
  const Format delayed{.dtype = DType::e4m3, .scaling = Scaling::delayed};
  expect("tenon_tile_kernel", encoded(delayed, true));
  for (const Scaling scaling : {Scaling::mxfp8, Scaling::block1x128})
    for (const bool both : {false, true})
      expect("tenon_block_kernel", encoded({.dtype = DType::e4m3, .scaling = scaling}, both));
  expect("tenon_row_kernel", rms_norm);

  // Sums depend on all rows: 32 in order and a tree of fewer than 20 levels, twice.
  Tensors large(Device::cuda), small(Device::cpu);
  std::vector<View> sums;
  expect_bands(
      "tenon_row_kernel", x, band,
      [&](Tensors& results, const View& in, const Options& options) {
        sums.push_back(rms_norm_backward(results, in, options));
      },
      large, small);
  std::vector<float> got(kBandCols);
  const cuda::CurrentContext context;
  cuda::check(cuda::driver().memcpy_to_host(got.data(), sums[0].data, row_bytes(sums[0])),
              "copying sums");
  for (size_t c = 0; c < got.size(); ++c) {
    const double one = static_cast<const float*>(sums[1].data)[c];
    const double expected = one * (kManyRows / kBandRows);
    EXPECT_NEAR(got[c], expected, expected * 104 * 0x1p-24) << "dgamma " << c;
  }
}

// Threads, streams, contexts.

// Repeats a backward call with quantised results and a bias gradient in one stream.
void run_often(unsigned seed) {
  constexpr int64_t kRows = 130, kCols = 256;
  const Activation f = activation("gelu");
  const Format format{.dtype = DType::e4m3, .scaling = Scaling::block1x128};
  const Bytes x = normal_numbers(DType::bf16, kRows * kCols, seed);
  const Bytes g = normal_numbers(DType::bf16, kRows * kCols, seed + 100);
  const Shape scales = format.scale_shape(kRows, kCols, Orientation::rowwise);
  struct Memory {
    Bytes y, s, b;
  };
  const auto sized = [&] {
    return Memory{Bytes(kRows * kCols), Bytes(static_cast<size_t>(scales.rows * scales.cols) * 4),
                  Bytes(kCols * 4)};
  };
  const auto call = [&](void* px, void* pg, void* py, void* ps, void* pb, const Options& o) {
    const Tensor dx(format, {matrix(py, DType::e4m3, kRows, kCols),
                             matrix(ps, DType::f32, scales.rows, scales.cols)});
    backward(f,
             {.grad = matrix(pg, DType::bf16, kRows, kCols),
              .x = matrix(px, DType::bf16, kRows, kCols),
              .dx = dx,
              .dbias = matrix(pb, DType::f32, 1, kCols)},
             o);
  };
  Memory expected = sized();
  Bytes cx = x, cg = g;
  call(cx.data(), cg.data(), expected.y.data(), expected.s.data(), expected.b.data(),
       {.precision = Precision::strict});
  const GpuStream stream;
  cuda::DeviceBuffer dx(x.size()), dg(g.size()), y(expected.y.size()), s(expected.s.size()),
      b(expected.b.size());
  dx.from_host(x.data());
  dg.from_host(g.data());
  Options options = kStrictCuda;
  options.stream = stream.get();
  for (int turn = 0; turn < 50; ++turn) {
    call(dx.data(), dg.data(), y.data(), s.data(), b.data(), options);
    if (turn % 10 != 9) continue;
    stream.wait();
    Memory got = sized();
    y.to_host(got.y.data());
    s.to_host(got.s.data());
    b.to_host(got.b.data());
    EXPECT_TRUE(got.y == expected.y) << seed << ", turn " << turn;
    EXPECT_TRUE(got.s == expected.s) << seed << ", turn " << turn;
    EXPECT_TRUE(got.b == expected.b) << seed << ", turn " << turn;
  }
}

TEST_F(Gpu, EightThreadsWithStreamsInTwoContexts) {
  const GpuContext second;
  std::vector<std::thread> all;
  std::vector<std::string> errors(8);
  for (unsigned i = 0; i < 8; ++i)
    all.emplace_back([&, i] {
      try {
        std::optional<GpuContext::Scope> scope;
        if (i % 2) scope.emplace(second);
        run_often(i);
      } catch (const std::exception& e) {
        errors[i] = e.what();
      }
    });
  for (std::thread& t : all) t.join();
  for (const std::string& e : errors) EXPECT_EQ(e, "");
}

// The host cost of a launch.

// The minimum of several rounds, in microseconds per call.
template <class Call>
double host_cost(const GpuStream& stream, Call call) {
  constexpr int kRounds = 20, kCalls = 200;
  double least = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    least = std::min(least, time.count() / kCalls);
    stream.wait();
  }
  return least;
}

// The bound is loose. The measured values are printed.
TEST_F(Gpu, AWarmCallCostsLittleMoreThanItsLaunch) {
  constexpr int64_t kCols = 1024;
  const GpuStream stream;
  cuda::DeviceBuffer x(kCols * 2), y(kCols * 2);
  const std::array in{matrix(x.data(), DType::bf16, 1, kCols)};
  const std::array out{matrix(y.data(), DType::bf16, 1, kCols)};
  const Activation f = activation("relu");
  const Step step = step_of("relu");
  const cuda::CurrentContext context;
  const cuda::VectorProgram program(step);
  std::vector<View> ins(ActivationArgs::inputs), outs(ActivationArgs::outputs);
  ins[ActivationArgs::x] = in[0];
  outs[ActivationArgs::y] = out[0];
  RunArgs args{.rows = 1, .in = ins, .out = outs, .parameters = {}};
  args.stream = stream.get();
  ASSERT_TRUE(program.fits(args));
  const cuda::Source source("cost", program.text(), program.entries()[0]);
  const cuda::Function function = source.load(context).function;
  cuda::Launch launch = program.launches(args)[0];
  void* values[] = {launch.arguments.data()};
  const double bare = host_cost(stream, [&] {
    cuda::driver().launch_kernel(function, launch.blocks, 1, 1, launch.threads, 1, 1, 0,
                                 stream.get(), values, nullptr);
  });
  const Chosen chosen = kernel_for(step, Device::cuda);
  const double kernel = host_cost(stream, [&] { chosen.kernel->run(args); });
  Options options{.device = Device::cuda};
  options.stream = stream.get();
  const double call = host_cost(stream, [&] { forward(f, {.x = in[0], .y = out[0]}, options); });
  std::printf(
      "host cost in us: the driver's launch %.2f, a kernel's run %.2f, a public call %.2f\n", bare,
      kernel, call);
  EXPECT_LT(kernel, 3 * bare);
}

}  // namespace
}  // namespace tenon::test
