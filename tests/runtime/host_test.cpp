// What hosts do around calls: floating-point modes, calls from destructors, schedulers of their
// own, exhausted memory, definitions that change.
#include <fenv.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <future>
#include <new>
#include <thread>

#include "core/scratch.h"
#include "support/plan_support.h"
#include "tenon/tenon.h"

namespace {
bool exhausted = false;  // then no memory is given to anybody

void* give(size_t bytes, size_t alignment) {
  void* p = nullptr;
  if (exhausted || posix_memalign(&p, std::max<size_t>(alignment, sizeof(void*)), bytes) != 0)
    throw std::bad_alloc();
  return p;
}
}  // namespace

void* operator new(size_t bytes) { return give(bytes, 16); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return give(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return exhausted ? nullptr : std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace tenon::test {
namespace {

constexpr const char* kBlock =
    "layernorm linear(out=96) bias gelu dropout(0.3) linear(out=64) scale(0.3) rmsnorm";

void as_it_is(const std::function<void()>& f) { f(); }

// Both passes of a chain in strict precision: all that it wrote. `host` says how the library is
// called, to build the plan and to run it.
std::vector<Numbers> results(std::string_view chain, int64_t rows = 300,
                             void (*host)(const std::function<void()>&) = as_it_is) {
  const PlanRequest request{.cols = 64, .options = {.precision = Precision::strict}};
  host([&] { (void)Plan::build(chain, request); });
  Session s(chain, request, rows);
  std::map<std::string, Numbers> given;
  fill(s, given);
  if (s.has("dy")) s.set("dy", normal(s.get("dy").size(), 5));
  host([&] {
    s.run(Pass::forward);
    s.run(Pass::backward);
  });
  std::vector<Numbers> all;
  for (const Buffer& b : s.plan.buffers())
    if (b.role == Role::output || b.role == Role::grad) all.push_back(s.get(b.name));
  return all;
}

// A text that no cache knows; the label changes no number.
std::string fresh(std::string_view chain) {
  static int number = 0;
  return str(chain, " identity:fresh", number++);
}

template <int mode>
void rounding(const std::function<void()>& f) {
  fesetround(mode);
  f();
  fesetround(FE_TONEAREST);
}
constexpr auto kRoundings = {rounding<FE_UPWARD>, rounding<FE_DOWNWARD>, rounding<FE_TOWARDZERO>};

void trapping(const std::function<void()>& f) {
  feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW | FE_UNDERFLOW | FE_INEXACT);
  f();
  fedisableexcept(FE_ALL_EXCEPT);
}

TEST(Host, RoundingModesChangeNoConstant) {
  for (const char* chain : {"layernorm(eps=0.0123)", "dropout(0.3)", "elu(alpha=0.3)",
                            "leaky_relu(slope=0.1)", "scale(0.3)", "l2norm(eps=0.0123)",
                            "act(\"x*0.1*0.3 + beta*x; beta = 0.7\")", "rmsnorm(eps=0.0123)"}) {
    for (const auto mode : kRoundings)
      EXPECT_TRUE(results(fresh(chain), 300, mode) == results(fresh(chain))) << chain;
  }
}

TEST(Host, RoundingModesChangeNoFolding) {
  const auto folded = [] {
    volatile float third = 0.3F;
    return (Expr(0.1F) * Expr(third) + exp(Expr(third)) / Expr(0.7F)).constant();
  };
  const float expected = folded();
  const std::string shown = show(activation("mish"), true);
  for (const auto mode : kRoundings)
    mode([&] {
      EXPECT_EQ(bits(folded()), bits(expected));
      EXPECT_EQ(show(activation("mish"), true), shown);
    });
}

TEST(Host, RoundingModesChangeNoDefinition) {
  std::string odd;
  rounding<FE_UPWARD>([&] {
    define("host_mode", "x*0.1*0.3 + beta; beta = 0.3");
    odd = formula(activation("host_mode")) + pinned("host_mode");
  });
  define("host_mode", "x*0.1*0.3 + beta; beta = 0.3");
  EXPECT_EQ(odd, formula(activation("host_mode")) + pinned("host_mode"));
}

TEST(Host, UnmaskedTrapsAreNotMet) {
  std::string text;
  float infinite = 0;
  trapping([&] {
    text = show(activation("gelu_erf"), true);
    const Plan plan =
        Plan::build("layernorm(eps=1e-40) elu(alpha=1e-42) dropout(0.1)", {.cols = 64});
    text += plan.describe(7) + plan.json(7) + plan.html(7);
    define("host_traps", "x*1e-30*1e-30 + exp(89)*0.1");
    infinite = (exp(Expr(100.0F)) * Expr(1e38F)).constant();
  });
  EXPECT_FALSE(text.empty());
  EXPECT_EQ(infinite, kInf);
  constexpr const char* kSmall = "layernorm(eps=1e-40) linear(out=32) bias gelu dropout(0.1)";
  EXPECT_TRUE(results(fresh(kSmall), 300, trapping) == results(fresh(kSmall)));
}

// Calls when the thread's own objects are gone.
struct Late {
  std::vector<Numbers>* to = nullptr;
  std::string* error = nullptr;
  ~Late() {
    if (!to) return;
    *to = results(fresh(kBlock));  // nothing that a cache has
    tenon_define("1", "x");
    *error = tenon_last_error();
  }
};

TEST(Host, CallsFromThreadLocalDestructors) {
  const std::vector<Numbers> expected = results(kBlock);
  std::vector<Numbers> got;
  std::string error;
  std::thread([&] {
    thread_local Late late;  // made before anything of the library's, so destroyed after it
    late.to = &got;
    late.error = &error;
    (void)results(kBlock);
    tenon_define("1", "x");
  }).join();
  EXPECT_TRUE(got == expected);
  EXPECT_NE(error.find("'1' is not a name"), std::string::npos) << error;
}

struct Static {
  bool armed = false;
  std::vector<Numbers> expected;
  ~Static() {
    if (armed) _exit(results(fresh(kBlock)) == expected ? 0 : 1);
  }
};
Static static_object;

// The program anew: sanitizers allow no threads in a fork of one that has some.
void fresh_program() { testing::FLAGS_gtest_death_test_style = "threadsafe"; }

TEST(Host, CallsFromStaticDestructors) {
  fresh_program();
  EXPECT_EXIT(
      {
        static_object.expected = results(kBlock);
        static_object.armed = true;
        std::exit(7);
      },
      testing::ExitedWithCode(0), "");
}

TEST(Host, CallsFromExitHandlers) {
  fresh_program();
  static std::vector<Numbers> expected;
  expected = results(kBlock);
  EXPECT_EXIT(
      {
        (void)results(kBlock);
        std::atexit([] { _exit(results(fresh(kBlock)) == expected ? 0 : 1); });
        std::exit(7);
      },
      testing::ExitedWithCode(0), "");
}

// A scheduler that runs other work, here other calls, on the thread that waits for a piece.
class Stealing {
 public:
  explicit Stealing(std::function<void()> other) : other_(std::move(other)) {
    set_parallel_for([this](int64_t n, const std::function<void(int64_t, int64_t)>& body) {
      for (int64_t i = 0; i < n; ++i) {
        body(i, i + 1);
        if (inside_) continue;
        inside_ = true;
        other_();
        inside_ = false;
      }
    });
  }
  ~Stealing() { set_parallel_for({}); }
  Stealing(const Stealing&) = delete;
  Stealing& operator=(const Stealing&) = delete;

 private:
  std::function<void()> other_;
  bool inside_ = false;
};

TEST(Host, OtherCallsBetweenPieces) {
  constexpr const char* kOther = "rmsnorm linear(out=256) bias silu linear(out=32) layernorm";
  const std::vector<Numbers> other = results(kOther, 70);
  constexpr const char* kWide = "linear(out=1024) bias gelu linear(out=64)";
  for (const char* chain : {kBlock, "bias gelu", "layernorm", kWide})
    // Blocks of rows that each thread packs itself need 16 of them.
    for (const int64_t rows : {int64_t{40}, int64_t{chain == kWide ? 2100 : 700}}) {
      const std::vector<Numbers> expected = results(chain, rows);
      int stolen = 0;
      std::vector<Numbers> got;
      {
        const Stealing scheduler([&] {
          if (stolen++ % 7 == 0) {
            EXPECT_TRUE(results(kOther, 70) == other);
          }
        });
        got = results(chain, rows);
      }
      EXPECT_TRUE(stolen > 0 || rows < 300) << chain;
      EXPECT_TRUE(got == expected) << chain << " of " << rows << " rows";
    }
}

TEST(Host, ExhaustedMemoryIsAnError) {
  std::vector<float> x(64), y(64);
  const tenon_view in{x.data(), 1, 64, 64, TENON_F32}, out{y.data(), 1, 64, 64, TENON_F32};
  tenon_forward_args args{};
  args.size = sizeof args;
  args.x = &in;
  args.y = &out;
  exhausted = true;
  const int code = tenon_forward("x*sigmoid(x)*0.25 + tanh(x)", &args, nullptr);
  const bool said = std::strstr(tenon_last_error(), "out of memory") != nullptr;
  tenon_plan* plan = nullptr;
  const int built = tenon_plan_build("gelu layernorm linear(out=8)", nullptr, nullptr, &plan);
  exhausted = false;
  EXPECT_EQ(code, TENON_RUNTIME);
  EXPECT_TRUE(said);
  EXPECT_NE(built, TENON_OK);
  EXPECT_EQ(tenon_forward("x*sigmoid(x)*0.25 + tanh(x)", &args, nullptr), TENON_OK);
}

// Allocators of sanitizers keep what was freed. Memory that the system may take back at any time
// does not count.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
int64_t resident_bytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  std::getline(file, line);  // the range of addresses
  std::string name, unit;
  int64_t held = 0;
  for (int64_t kb = 0; file >> name >> kb >> unit;)
    held += name == "Rss:" ? kb : name == "LazyFree:" ? -kb : 0;
  return held << 10;
}

TEST(Host, LargeCallsLeaveNoMemory) {
  const auto normalise = [](int64_t cols) {
    std::vector<float> x(static_cast<size_t>(cols), 1.0F), y(x.size()), r(1);
    l2_normalization(matrix(x.data(), DType::f32, 1, cols), matrix(y.data(), DType::f32, 1, cols),
                     matrix(r.data(), DType::f32, 1, 1));
  };
  normalise(64);
  const int64_t before = resident_bytes();
  normalise(int64_t{1} << 25);
  EXPECT_LT(resident_bytes() - before, int64_t{24} << 20);
  EXPECT_LE(kept_scratch(), kMostKeptScratch);
}

TEST(Host, LargeScratchIsUsedAgain) {
  constexpr size_t kLarge = kMostKeptScratch + 4096;
  const auto touch = [](const Scratch& s) { std::memset(s.data(), 1, kLarge); };
  void* first = nullptr;
  {
    const Scratch one(kLarge), other(kLarge);
    EXPECT_NE(one.data(), other.data());
    touch(one);
    touch(other);
    first = one.data();
  }
  // The last blocks of another thread too: they belong to no thread.
  bool found = false;
  std::thread([&] {
    const Scratch one(kLarge), other(kLarge), more(kLarge);
    touch(more);
    found = one.data() == first || other.data() == first;
  }).join();
  EXPECT_TRUE(found);
}

TEST(Host, LongTextsAreNotKept) {
  const int64_t before = resident_bytes();
  for (size_t i = 0; i < 300; ++i)
    EXPECT_EQ(activation(std::string((1U << 20) + i, ' ') + "relu").name, "relu");
  EXPECT_LT(resident_bytes() - before, int64_t{24} << 20);
}
#endif

TEST(Host, NamesHaveALimit) {
  const std::string name(2'000'000, 'n');
  expect_error([&] { define(name, "x"); }, Code::invalid_argument, {"2000000 bytes", "256"});
  expect_error([&] { activation(name); }, Code::invalid_argument, {"2000000 bytes"});
  expect_error([&] { define(std::string(257, 'n'), "x"); }, Code::invalid_argument, {"257 bytes"});
  EXPECT_NO_THROW(define(std::string(256, 'n'), "x"));
  expect_error([] { activation(std::string(256, 'm')); }, Code::invalid_argument, {"not known"});
  expect_error(
      [&] {
        define({.name = "host_parameter", .parameters = {{name, 1}}, .body = [](const Args& in) {
                  return in.x;
                }});
      },
      Code::invalid_argument, {"host_parameter"});
}

// Calls the library when it is destroyed.
struct Calling {
  ~Calling() {
    (void)activation("relu");
    (void)activation_names();
  }
};
Activation calling(const std::string& name, float factor) {
  const auto held = std::make_shared<Calling>();
  return {.name = name, .body = [held, factor](const Args& in) { return in.x * Expr(factor); }};
}

// Runs f on a thread of its own; one that never comes back ends the program.
void in_time(const std::function<void()>& f) {
  auto done = std::async(std::launch::async, f);
  if (done.wait_for(std::chrono::seconds(120)) == std::future_status::ready) return done.get();
  std::fprintf(stderr, "deadlock\n");
  std::abort();
}

TEST(Host, BodiesAreDestroyedOutsideOfTheLock) {
  in_time([] {
    for (int i = 0; i < 4; ++i) define(calling("host_calling", static_cast<float>(i)));
    (void)activation("host_calling");
    define("host_calling", "x");
    std::vector<float> x(8), y(8);
    // More than any table holds, so that each of them is emptied.
    for (int i = 0; i < 4200; ++i)
      forward(calling("unregistered", static_cast<float>(i % 3)),
              {.x = matrix(x.data(), DType::f32, 1, 8), .y = matrix(y.data(), DType::f32, 1, 8)});
  });
}

TEST(Host, PinnedTextsKeepTheirMeaning) {
  const auto value = [](std::string_view text) {
    float x = 3, y = 0;
    forward(activation(text),
            {.x = matrix(&x, DType::f32, 1, 1), .y = matrix(&y, DType::f32, 1, 1)});
    return y;
  };
  define("host_zz", "x*k; k = 2");
  const std::string whole = pinned("host_zz"), given = pinned(" host_zz(k=5) "),
                    inside = pinned("1e3 + host_zz(x) - host_zz (x, 4); host_zz = 7");
  EXPECT_EQ(whole.substr(0, 8), "host_zz@");
  EXPECT_EQ(pinned(whole), whole);
  EXPECT_EQ(pinned("gelu(x) + tanh(x)"), "gelu(x) + tanh(x)");
  define("host_zz", "x*k; k = 10");
  EXPECT_EQ(value("host_zz"), 30);
  EXPECT_EQ(value(whole), 6);
  EXPECT_EQ(value(given), 15);
  EXPECT_EQ(value(inside), 1000 + 6 - 12);
  EXPECT_EQ(activation(whole).name, "host_zz");
  EXPECT_TRUE(results(str("act(\"", whole, "\")")) == results("act(\"x*k; k = 2\")"));
  EXPECT_NE(pinned("host_zz"), whole);
  EXPECT_EQ(activation(pinned("scaled(gated(host_zz))")).inputs, 2);
  EXPECT_NE(pinned("scaled(gated(host_zz))").find("host_zz@"), std::string::npos);
  define("host_zz", "x*k; k = 2");
  EXPECT_EQ(pinned("host_zz"), whole);  // the same contents are the same definition
  for (const char* text : {"host_zz@0000000000000000", "2*host_zz@0000000000000000(x)"})
    expect_error([&] { activation(text); }, Code::invalid_argument,
                 {"host_zz@0000000000000000", "define it"});
  size_t size = 0;
  EXPECT_EQ(tenon_pinned("host_zz", nullptr, 0, &size), TENON_OK);
  EXPECT_EQ(size, whole.size() + 1);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // 65,536 of them
TEST(Host, DefinitionsHaveALimit) {
  for (int i = 0; i < 70000; ++i) {
    try {
      define("host_many", str("x*", i, ".5"));
    } catch (const Error& e) {
      EXPECT_NE(std::string_view(e.what()).find("parameters"), std::string_view::npos);
      EXPECT_GT(i, 60000);
      EXPECT_NO_THROW((void)activation("host_many"));
      return;
    }
  }
  FAIL() << "no limit was met";
}
#endif

}  // namespace
}  // namespace tenon::test
