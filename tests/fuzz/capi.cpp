// Fuzzer of the C ABI: converts bytes to valid and invalid calls of every function. For libFuzzer,
// or a seeded run with TENON_FUZZ_MAIN.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "support/modes.h"
#include "tenon/tenon.h"

namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kMany = 100000;  // no side with elements is this long

long calls = 0, successes = 0;

// Converts the bytes of the fuzzer to choices. After their end every choice is 0, the default.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : at_(data), left_(size) {}

  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *at_++;
  }
  size_t below(size_t n) { return (byte() | (n > 256 ? static_cast<size_t>(byte()) << 8 : 0)) % n; }
  bool one_in(size_t n) { return below(n) == n - 1; }
  template <class T, size_t n>
  T pick(const std::array<T, n>& list) {
    return list[below(n)];
  }
  uint64_t number() {
    uint64_t v = 0;
    for (int i = 0; i < 8; ++i) v = v << 8 | byte();
    return v;
  }

 private:
  const uint8_t* at_;
  size_t left_;
};

int64_t size_of(int32_t dtype) {
  return dtype == TENON_F32 ? 4 : dtype == TENON_F16 || dtype == TENON_BF16 ? 2 : 1;
}
bool empty(const tenon_view& v) { return v.rows == 0 || v.cols == 0; }
bool same(const tenon_view& a, const tenon_view& b) {
  return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.dtype == b.dtype &&
         (a.stride == b.stride || a.rows == 1);
}

using tenon::test::kSpecified;
using tenon::test::Mode;
using Shape = tenon::test::ref::Size;
constexpr const Mode* kNone = kSpecified;
using tenon::test::ref::data_size;
using tenon::test::ref::up;

// updated: the result depends on the previous contents.
enum class Use : uint8_t { read, written, updated, ignored };

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Memory of exact size, so that a sanitizer detects the first byte after it.
struct Buffer {
  std::unique_ptr<uint8_t, Free> memory;
  size_t size = 0;
  std::vector<uint8_t> before;

  explicit Buffer(size_t n) : memory(static_cast<uint8_t*>(std::malloc(n))), size(n) {}
  [[nodiscard]] bool holds(const void* p) const {
    const auto* b = static_cast<const uint8_t*>(p);
    return b >= memory.get() && b < memory.get() + size;
  }
};

// One call: its memory, its views, and its expected result.
class Call {
 public:
  explicit Call(Bytes& in) : in(in), noise_(in.number() | 1) {}

  Bytes& in;
  std::string what;
  bool odd = false;   // an argument is unusual: the call may fail
  bool must = false;  // the call must fail
  // An argument may be missing by chance. Its related arguments are then not checked.
  bool vague = false;

  // With probability 1/n, makes the call invalid.
  bool spoil(size_t n) {
    if (!in.one_in(n)) return false;
    odd = true;
    return true;
  }

  void* memory(size_t n) {
    buffers_.emplace_back(n);
    return buffers_.back().memory.get();
  }
  // Memory filled with random values.
  void* filled(size_t n) {
    auto* p = static_cast<uint8_t*>(memory(n));
    fill(p, n, true);
    return p;
  }
  const tenon_view* keep(const tenon_view& v, Use use) {
    if (use != Use::ignored)
      parts_.push_back({v, use == Use::written || use == Use::updated, use == Use::updated});
    views_.push_back(v);
    return &views_.back();
  }

  // A view that fits in its own memory, or an invalid one.
  const tenon_view* view(int64_t rows, int64_t cols, int32_t dtype, Use use) {
    tenon_view v{nullptr, rows, cols, cols, dtype};
    if (spoil(40)) return spoilt(v, use);
    return own(v, use);
  }
  const tenon_view* plain(int64_t rows, int64_t cols, Use use) {
    return view(rows, cols, static_cast<int32_t>(in.below(3)), use);
  }
  const tenon_view* number(Use use) { return view(1, 1, TENON_F32, use); }

  // A zero-terminated text in memory of exact size.
  const char* text(const std::string& s) {
    auto* p = static_cast<char*>(memory(s.size() + 1));
    std::memcpy(p, s.c_str(), s.size() + 1);
    return p;
  }
  const char* text_or_noise(const std::string& s) {
    if (!spoil(50)) return text(s);
    const size_t kind = in.below(4);
    if (kind == 0) return nullptr;
    vague = true;  // it may be another valid text
    switch (kind) {
      case 1: {
        std::string noise;
        for (size_t n = in.below(24); n > 0; --n) noise += static_cast<char>(in.byte());
        return text(noise.c_str());
      }
      case 2: {
        std::string changed = s;
        if (!changed.empty()) changed[in.below(changed.size())] = static_cast<char>(in.byte());
        return text(changed.c_str());
      }
      default:
        return text(s + s.substr(0, in.below(s.size() + 1)));
    }
  }

  // A struct in memory of exactly the size in its size field, or with a wrong size.
  template <class T>
  const T* sized(T value) {
    value.size = sizeof(T);
    size_t bytes = sizeof(T);
    const size_t kind = in.one_in(12) ? 1 + in.below(4) : 0;
    if (kind == 1 || kind == 2) value.size = bytes = sizeof(T) + 1 + in.below(64);
    if (kind == 3) value.size = bytes = sizeof(size_t) + in.below(sizeof(T) - sizeof(size_t));
    if (kind == 4) {
      constexpr std::array<size_t, 4> kSizes{0, 4097, size_t{1} << 40, SIZE_MAX};
      value.size = in.pick(kSizes);
    }
    auto* p = static_cast<uint8_t*>(memory(bytes));
    std::memset(p, 0, bytes);
    std::memcpy(p, &value, std::min(bytes, sizeof(T)));
    if (kind == 2) p[sizeof(T) + in.below(bytes - sizeof(T))] = 1;
    if (kind > 1) odd = must = true;
    return reinterpret_cast<const T*>(p);
  }

  const tenon_options* options() {
    if (in.below(2) == 0) return nullptr;
    tenon_options o{};
    o.precision = static_cast<int32_t>(in.below(2));
    o.rounding = static_cast<int32_t>(in.below(2));
    if (in.one_in(8)) o.stream = &o;  // ignored on the CPU
    if (spoil(40)) {
      constexpr std::array<int32_t, 4> kWrong{-1, 2, 99, std::numeric_limits<int32_t>::min()};
      constexpr std::array kMembers{&tenon_options::precision, &tenon_options::rounding,
                                    &tenon_options::device};
      o.*in.pick(kMembers) = in.pick(kWrong);
      must = true;
    }
    return sized(o);
  }

  // Runs f and checks its effects.
  template <class F>
  void run(F f) {
    for (Buffer& b : buffers_) b.before.assign(b.memory.get(), b.memory.get() + b.size);
    if (shared_) find_overlaps();
    const int code = f();
    ++calls;
    const std::string_view message = tenon_last_error();
    check(code >= TENON_OK && code <= TENON_UNSUPPORTED, "code " + std::to_string(code));
    check((code == TENON_OK) == message.empty(), "code and message disagree");
    if (code == TENON_OK) check(vague || !must, "a wrong call succeeds");
    if (code != TENON_OK) check(odd, "a right call fails");
    ok = code == TENON_OK;
    successes += ok;
    if (ok && !odd) once_more(f);
    unchanged(!ok);
  }
  bool ok = false;

  void check(bool holds, const std::string& problem) const {
    if (holds) return;
    std::fprintf(stderr, "fuzz_capi: %s: %s; message: '%s'\n", what.c_str(), problem.c_str(),
                 tenon_last_error());
    std::abort();
  }

 private:
  struct Part {
    tenon_view view;
    bool written, updated;
  };

  uint64_t noise() {
    noise_ ^= noise_ << 13;
    noise_ ^= noise_ >> 7;
    noise_ ^= noise_ << 17;
    return noise_;
  }
  void fill(uint8_t* p, size_t n, bool numbers) {
    for (size_t i = 0; i < n; i += 4) {
      const uint64_t bits = noise();
      auto word = static_cast<uint32_t>(bits >> 20);
      if (numbers && (bits & 15) != 0) {
        const float value = static_cast<float>(static_cast<int32_t>(word)) * 0x1p-29F;
        std::memcpy(&word, &value, 4);
      }
      std::memcpy(p + i, &word, std::min<size_t>(4, n - i));
    }
  }

  const tenon_view* own(tenon_view v, Use use) {
    if (v.rows > 1 && v.rows <= kMany && in.below(4) == 1)
      v.stride += static_cast<int64_t>(in.below(9));
    if (v.rows <= 1 && in.one_in(12)) {
      constexpr std::array<int64_t, 4> kAny{0, -1, kHuge, kLowest};  // never used
      v.stride = in.pick(kAny);
    }
    const size_t shift = in.one_in(4) ? in.below(8) : 0;
    size_t bytes = 0;
    if (!empty(v)) {
      const int64_t apart = v.rows == 1 ? 0 : (v.rows - 1) * v.stride;
      bytes = static_cast<size_t>((apart + v.cols) * size_of(v.dtype));
    }
    auto* p = static_cast<uint8_t*>(memory(bytes + shift));
    fill(p + shift, bytes, v.dtype == TENON_F32);
    v.data = p + shift;
    if (empty(v) && v.rows != v.cols && in.one_in(4)) v.data = nullptr;
    return keep(v, use);
  }

  const tenon_view* spoilt(tenon_view v, Use use) {
    if (v.rows > kMany || v.cols > kMany) return own(v, use);
    const bool used = use != Use::ignored;
    constexpr std::array<int64_t, 6> kNegative{-1, -2, -128, -kHuge, kLowest, kLowest + 1};
    constexpr std::array<int64_t, 4> kTooMany{kHuge, kHuge - 1, int64_t{1} << 62, int64_t{1} << 61};
    const auto small = [&] { v.data = memory(1 + in.below(64)); };
    switch (in.below(12)) {
      case 0:
        must |= used && !empty(v);
        vague |= v.rows == 0 && v.cols == 0;
        return keep(v, use);
      case 1:
        v.rows += 1 + static_cast<int64_t>(in.below(2));
        return own(v, use);
      case 2:
        v.cols += 1 + static_cast<int64_t>(in.below(2));
        v.stride = v.cols;
        return own(v, use);
      case 3:
        std::swap(v.rows, v.cols);
        v.stride = v.cols;
        return own(v, use);
      case 4:
        small();
        (in.below(2) ? v.rows : v.cols) = in.pick(kNegative);
        if (in.below(2)) v.stride = in.pick(kNegative);
        must |= used;
        return keep_wild(v);
      case 5:
        small();
        (in.below(2) ? v.rows : v.cols) = in.pick(kTooMany);
        if (in.below(2)) v.stride = in.pick(kTooMany);
        must |= used;
        return keep_wild(v);
      case 6:
        small();
        v.rows = std::max<int64_t>(v.rows, 2);
        v.cols = std::max<int64_t>(v.cols, 1);
        v.stride = in.below(2) ? in.pick(kTooMany) : in.below(2) ? in.pick(kNegative) : v.cols - 1;
        must |= used;
        return keep_wild(v);
      case 7: {
        constexpr std::array<int32_t, 4> kWrong{-1, 6, 1000, std::numeric_limits<int32_t>::min()};
        small();
        v.dtype = in.pick(kWrong);
        must = true;
        return keep_wild(v);
      }
      case 8:
        v.dtype = static_cast<int32_t>(in.below(6));
        return own(v, use);
      case 9:
        vague = true;
        v.rows = v.cols = 0;
        return keep_wild(v);
      default:
        return on_another(v, use);
    }
  }
  // Has no memory, so there is nothing to compare.
  const tenon_view* keep_wild(const tenon_view& v) { return keep(v, Use::ignored); }

  // A view inside of the memory of an earlier view.
  const tenon_view* on_another(tenon_view v, Use use) {
    if (parts_.empty() || empty(v)) return own(v, use);
    const Part& other = parts_[in.below(parts_.size())];
    if (empty(other.view) || !other.view.data) return own(v, use);
    if (in.below(2)) v.stride = std::max(v.cols, other.view.stride);
    if (v.rows > 1 && v.stride > (int64_t{1} << 32)) v.stride = v.cols;
    auto* from = static_cast<uint8_t*>(other.view.data) + in.below(4) * in.below(300);
    const size_t bytes = static_cast<size_t>(((v.rows - 1) * (v.rows > 1 ? v.stride : 0) + v.cols) *
                                             size_of(v.dtype));
    for (const Buffer& b : buffers_)
      if (b.holds(other.view.data) && b.holds(from) &&
          bytes <= static_cast<size_t>(b.memory.get() + b.size - from)) {
        v.data = from;
        shared_ = true;
        return keep(v, use);
      }
    return own(v, use);
  }

  // Calls f(first, bytes) for the rows of a view.
  template <class F>
  static void rows(const tenon_view& v, F f) {
    if (empty(v) || !v.data) return;
    const int64_t size = size_of(v.dtype);
    auto* p = static_cast<uint8_t*>(v.data);
    for (int64_t r = 0; r < v.rows; ++r)
      f(p + (r == 0 ? 0 : r * v.stride * size), static_cast<size_t>(v.cols * size));
  }

  // It is an error if an output partially overlaps another tensor.
  void find_overlaps() {
    for (const Buffer& b : buffers_) {
      std::vector<const Part*> inside;
      for (const Part& p : parts_)
        if (b.holds(p.view.data) && !empty(p.view)) inside.push_back(&p);
      for (const Part* out : inside) {
        if (!out->written) continue;
        std::vector<uint8_t> mask(b.size);
        rows(out->view,
             [&](uint8_t* p, size_t n) { std::memset(&mask[p - b.memory.get()], 1, n); });
        for (const Part* other : inside) {
          if (other == out || same(other->view, out->view)) continue;
          rows(other->view, [&](uint8_t* p, size_t n) {
            must |= std::find(&mask[p - b.memory.get()], &mask[p - b.memory.get()] + n, 1) !=
                    &mask[p - b.memory.get()] + n;
          });
        }
      }
    }
  }

  // Results must not depend on the previous contents of outputs: every element is written.
  template <class F>
  void once_more(F f) {
    std::vector<std::vector<uint8_t>> after;
    for (Buffer& b : buffers_) {
      after.emplace_back(b.memory.get(), b.memory.get() + b.size);
      std::copy(b.before.begin(), b.before.end(), b.memory.get());
    }
    for (const Part& part : parts_)
      if (part.written && !part.updated)
        rows(part.view, [](uint8_t* p, size_t n) {
          for (size_t i = 0; i < n; ++i) p[i] ^= 0xff;
        });
    check(f() == TENON_OK, "the same call fails");
    for (size_t i = 0; i < after.size(); ++i)
      check(std::equal(after[i].begin(), after[i].end(), buffers_[i].memory.get()),
            "the same call has another result");
  }

  // Only outputs may be written. A call that fails must not write at all.
  void unchanged(bool outputs_too) {
    for (Buffer& b : buffers_) {
      if (!outputs_too)
        for (const Part& part : parts_) {
          if (!part.written || !b.holds(part.view.data)) continue;
          rows(part.view,
               [&](uint8_t* p, size_t n) { std::memcpy(&b.before[p - b.memory.get()], p, n); });
        }
      check(std::equal(b.before.begin(), b.before.end(), b.memory.get()),
            outputs_too ? "a call that fails has written" : "written outside of the outputs");
    }
  }

  std::deque<Buffer> buffers_;
  std::deque<tenon_view> views_;
  std::vector<Part> parts_;
  uint64_t noise_;
  bool shared_ = false;
};

int64_t side(Bytes& in) {
  switch (in.below(16)) {
    case 0:
      return 1 + static_cast<int64_t>(in.below(3));
    case 1:
      return 0;
    case 2:
      return 31 + static_cast<int64_t>(in.below(3));
    case 3:
      return 127 + static_cast<int64_t>(in.below(3));
    case 4:
      return static_cast<int64_t>(in.below(300));
    default:
      return 1 + static_cast<int64_t>(in.below(24));
  }
}
// Usually few elements. Without elements, one side may have any length.
Shape shape(Bytes& in) {
  if (in.one_in(150)) return {int64_t{1} << (20 + in.below(38)), 0};
  if (in.one_in(150)) return {0, int64_t{1} << (20 + in.below(38))};
  Shape s{side(in), side(in)};
  if (s.rows * s.cols > 16384 && !in.one_in(8)) s.rows = 1 + s.rows % 8;
  return s;
}
bool endless(Shape s) { return s.rows > kMany || s.cols > kMany; }

// A tensor as a view or encoded: one of the two pointers is set.
struct Given {
  const tenon_view* plain = nullptr;
  const tenon_tensor* encoded = nullptr;
  // The properties of the tensor, to check the results.
  const Mode* mode = kNone;
  bool swizzled = false, powers = false;
  int32_t dtype = 0;
  std::array<const tenon_view*, 2> data{}, scales{};
  const tenon_view *health = nullptr, *amax = nullptr;
};

Given encoded(Call& c, Shape s, Use use) {
  Given g;
  g.mode = kSpecified + c.in.below(std::size(kSpecified));
  g.dtype = static_cast<int32_t>(g.mode == kNone ? c.in.below(3) : 3 + c.in.below(2));
  tenon_tensor t{};
  t.dtype = g.dtype;
  if (g.mode->rule) {
    constexpr std::array<float, 5> kEps{0, 1e-12F, 0.5F, 1e30F, 0x1p-149F};
    t.eps = c.in.pick(kEps);
    t.power_of_two = static_cast<int32_t>(c.in.below(3));
  }
  g.powers = t.power_of_two == TENON_POWER_OF_TWO ||
             (t.power_of_two == TENON_MODE_DEFAULT && g.mode->pow2);
  g.swizzled = g.mode->e8m0 && c.in.below(2);
  t.swizzled = g.swizzled;
  const size_t which = 1 + c.in.below(3);
  const std::array has{(which & 1) != 0, (which & 2) != 0};
  const int32_t scale_dtype = g.mode->e8m0 ? TENON_E8M0 : TENON_F32;
  for (const size_t column : {size_t{0}, size_t{1}}) {
    if (!has[column]) continue;
    const Shape d = data_size(*g.mode, s.rows, s.cols, column);
    g.data[column] = c.view(d.rows, d.cols, g.dtype, use);
    if (g.mode == kNone) continue;
    const Shape n = g.mode->scales(s.rows, s.cols, column);
    // One scale may be given with either encoding, in one place or in two.
    if (g.mode->single && column == 1 && has[0] && c.in.below(2)) {
      g.scales[1] = c.in.below(2) ? g.scales[0] : nullptr;
      continue;
    }
    if (g.swizzled) {
      tenon_view v{nullptr, n.rows, n.cols, n.cols, scale_dtype};
      const size_t bytes = static_cast<size_t>(n.rows == 0 || n.cols == 0 ? 0 : n.rows * n.cols);
      v.data = c.memory(bytes);
      std::memset(v.data, 0x55, bytes);
      if (c.spoil(60) && n.rows > 1 && n.cols > 0) {
        v.stride += 1;  // not dense
        v.data = nullptr;
        c.must = true;
      }
      g.scales[column] = c.keep(v, use);
    } else {
      g.scales[column] = c.view(n.rows, n.cols, scale_dtype, use);
    }
  }
  const bool writes = use == Use::written;
  if (g.mode->given && writes) t.scale = c.number(Use::read);
  if (g.mode->single && writes && c.in.below(2)) {
    t.amax_given = !g.mode->given && c.in.below(3) == 1 ? 1 : 0;
    const Use found = g.mode->given ? Use::updated : Use::written;
    t.amax = g.amax = c.number(t.amax_given ? Use::read : found);
  }
  if (g.mode != kNone && writes && c.in.below(2))
    g.health = t.health = c.view(1, 3, TENON_F32, use);
  t.scaling = c.text_or_noise(g.mode->name.data());
  c.vague = c.vague || !t.scaling;
  t.data = g.data[0], t.columnwise_data = g.data[1];
  t.scale_inv = g.scales[0], t.columnwise_scale_inv = g.scales[1];
  if (c.spoil(30)) {
    const auto wild = [&](const tenon_view*& v) {
      v = c.view(1 + static_cast<int64_t>(c.in.below(2)), 1, TENON_F32, use);
      c.vague = true;  // it may be unused
    };
    constexpr std::array<float, 4> kBadEps{-1, NAN, INFINITY, -1e-40F};
    constexpr std::array<int32_t, 4> kBadNumbers{-1, 3, 99, std::numeric_limits<int32_t>::min()};
    constexpr std::array<int32_t, 4> kBadDtypes{-1, 6, 99, TENON_E8M0};
    switch (c.in.below(13)) {
      case 0:
        t.dtype = c.in.pick(kBadDtypes);
        c.must = true;
        break;
      case 1:
        // The view and the tensor have different dtypes.
        t.dtype = (t.dtype + 1 + static_cast<int32_t>(c.in.below(4))) % 5;
        c.must |= t.dtype != g.dtype;
        break;
      case 2:
        t.eps = c.in.pick(kBadEps);
        c.must = true;
        break;
      case 3:
        t.power_of_two = c.in.pick(kBadNumbers);
        c.must = true;
        break;
      case 4:
        t.power_of_two = 1;
        t.swizzled = 1;
        c.must = true;
        break;
      case 5:
        t.data = t.columnwise_data = nullptr;
        c.must = true;
        break;
      case 6:
        t.scaling = c.text(kSpecified[c.in.below(std::size(kSpecified))].name.data());
        c.vague = true;
        break;
      case 7:
        wild(t.scale);
        break;
      case 8:
        wild(t.amax);
        t.amax_given = static_cast<int32_t>(c.in.below(2));
        break;
      case 9:
        wild(t.health);
        break;
      case 10:
        wild(t.scale_inv);
        break;
      case 11:
        wild(t.columnwise_scale_inv);
        break;
      default:
        (c.in.below(2) ? t.data : t.columnwise_data) = nullptr;
        c.vague = true;
        break;
    }
  }
  g.encoded = c.sized(t);
  return g;
}

Given tensor(Call& c, Shape s, Use use) {
  if (c.in.below(2)) return encoded(c, s, use);
  Given g;
  g.dtype = static_cast<int32_t>(c.in.below(3));
  g.plain = c.view(s.rows, s.cols, g.dtype, use);
  return g;
}

uint32_t code_at(const tenon_view& v, int64_t offset) {
  uint32_t code = 0;
  const int64_t size = size_of(v.dtype);
  std::memcpy(&code, static_cast<const char*>(v.data) + offset * size, static_cast<size_t>(size));
  return code;
}

// Properties of every encoded tensor, independent of its values.
void check_encoded(const Call& c, const Given& g, Shape s) {
  if (!c.ok || c.odd || !g.encoded || g.mode == kNone || endless(s)) return;
  const uint32_t largest = g.dtype == TENON_E4M3 ? 0x7e : 0x7b;
  for (const size_t column : {size_t{0}, size_t{1}}) {
    const tenon_view* d = g.data[column];
    for (int64_t r = 0; d && !empty(*d) && r < d->rows; ++r)
      for (int64_t k = 0; k < d->cols; ++k) {
        const uint32_t code = code_at(*d, (r == 0 ? 0 : r * d->stride) + k);
        c.check((code & 0x7f) <= largest || code == 0x7f, "code " + std::to_string(code));
      }
    const tenon_view* n = g.scales[column];
    if (!d || !n || g.mode->given) continue;
    const Shape block = g.mode->block[column];
    const Shape used =
        g.mode->single ? Shape{1, 1} : Shape{up(s.rows, block.rows), up(s.cols, block.cols)};
    const bool turned = g.mode->turned[column];
    int64_t padding = 0;
    for (int64_t i = 0; i < n->rows; ++i)
      for (int64_t j = 0; j < n->cols; ++j) {
        const uint32_t code = code_at(*n, (i == 0 ? 0 : i * n->stride) + j);
        if (g.swizzled) {
          padding += code == 0;
          continue;
        }
        const bool inside =
            turned ? j < used.rows && i < used.cols : i < used.rows && j < used.cols;
        if (!inside) {
          c.check(code == 0, "padding is not zero");
        } else if (!g.mode->e8m0) {
          float inverse = 0;
          std::memcpy(&inverse, &code, sizeof inverse);
          c.check(inverse >= 0 && std::isfinite(inverse), "scale_inv is no scale");
          c.check(!g.powers || (code & 0x7fffffU) == 0 || inverse < 0x1p-126F, "no power of two");
        }
      }
    if (g.swizzled)
      c.check(padding >= n->rows * n->cols - used.rows * used.cols, "padding is not zero");
  }
  if (g.health) {
    float sum = 0;
    for (int64_t i = 0; i < 3; ++i) {
      float count = 0;
      const uint32_t code = code_at(*g.health, i);
      std::memcpy(&count, &code, sizeof count);
      c.check(count >= 0, "a negative count");
      sum += count;
    }
    c.check(sum <= static_cast<float>(s.rows * s.cols), "more counted than there is");
  }
  if (g.amax && !g.mode->given && !g.encoded->amax_given)
    c.check(code_at(*g.amax, 0) >> 31 == 0, "a negative amax");
}

struct Act {
  const char* text;
  int inputs;
  bool scaled;
};
constexpr std::array<Act, 20> kActs{{{"relu", 1, false},
                                     {"gelu", 1, false},
                                     {"silu", 1, false},
                                     {"swiglu", 2, false},
                                     {"elu(alpha=0.5)", 1, false},
                                     {"scaled(srelu)", 1, true},
                                     {"gated(tanh)", 2, false},
                                     {"scaled(geglu)", 2, true},
                                     {"x*sigmoid(beta*x); beta = 1.25", 1, false},
                                     {"clamped_swiglu(limit=2, alpha=1.5)", 2, false},
                                     {"gelu_erf", 1, false},
                                     {"softplus", 1, false},
                                     {"mish", 1, false},
                                     {"hardswish", 1, false},
                                     {"leaky_relu", 1, false},
                                     {"glu", 2, false},
                                     {"situglu", 2, false},
                                     {"gated(x*x; k = 2)", 2, false},
                                     {"scaled(round(x, bf16) + 1)", 1, true},
                                     {"a*max(b, 0)", 2, false}}};

// The common inputs of forward and backward.
struct Inputs {
  Act act;
  const char* text = nullptr;
  const char* layout = nullptr;
  Shape x{}, y{};
  bool separate = false;
  Given given_x, given_b;
  const tenon_view *bias = nullptr, *scale = nullptr;
};

Inputs inputs(Call& c) {
  Inputs i;
  i.act = c.in.pick(kActs);
  i.y = i.x = shape(c.in);
  i.separate = i.act.inputs == 2 && c.in.below(3) == 1;
  if (i.act.inputs == 2 && !i.separate) {
    i.x.cols *= 2;
    constexpr std::array<int64_t, 6> kBlocks{1, 2, 8, 32, 3, kHuge};
    const size_t kind = c.in.below(4);
    if (kind == 1) i.layout = c.text_or_noise("swapped");
    if (kind == 2) i.layout = c.text_or_noise("stacked");
    if (kind == 3) {
      const int64_t k = c.in.pick(kBlocks);
      if (i.y.cols % k != 0) c.odd = c.must = true;
      // A width that no tensor has is rejected. For an empty tensor it is valid.
      if (k == kHuge) c.odd = true;
      i.layout = c.text_or_noise("interleaved(" + std::to_string(k) + ")");
      c.vague = c.vague || !i.layout;
    }
  } else if (c.spoil(80)) {
    i.layout = c.text("interleaved(2)");
  }
  i.text = c.text_or_noise(i.act.text);
  if (c.in.one_in(60)) i.text = c.text(c.in.below(2) ? "fuzz_a" : "fuzz_b"), c.odd = true;
  i.given_x = tensor(c, i.x, Use::read);
  if (i.separate || c.spoil(100)) i.given_b = tensor(c, i.x, Use::read);
  const int64_t bias = i.separate ? 2 * i.x.cols : i.x.cols;
  if (c.in.below(3) == 1 && !endless(i.x)) i.bias = c.plain(1, bias, Use::read);
  if ((i.act.scaled && !endless(i.x)) || c.spoil(100)) {
    if (!endless(i.x)) i.scale = c.plain(i.x.rows, 1, Use::read);
  } else if (i.act.scaled) {
    c.odd = true;
  }
  return i;
}

// A plain result: with its own memory, or exactly in place of the input.
Given output(Call& c, Shape s, const Given& input) {
  if (!input.plain || c.odd || input.plain->rows != s.rows || input.plain->cols != s.cols ||
      c.in.below(6) != 1)
    return tensor(c, s, Use::written);
  Given g;
  g.plain = c.keep(*input.plain, Use::updated);
  g.dtype = input.dtype;
  return g;
}

void forward(Call& c) {
  c.what = "tenon_forward";
  const Inputs i = inputs(c);
  tenon_forward_args a{};
  Given y;
  const size_t outputs = c.in.below(4);
  if (outputs != 1) y = output(c, i.y, i.given_x);
  if (outputs == 1 || outputs == 2) a.amax = c.number(Use::written);
  a.x = i.given_x.plain, a.x_encoded = i.given_x.encoded;
  a.b = i.given_b.plain, a.b_encoded = i.given_b.encoded;
  a.y = y.plain, a.y_encoded = y.encoded;
  a.bias = i.bias, a.scale = i.scale, a.layout = i.layout;
  if (c.spoil(100)) a.y = c.plain(i.y.rows, i.y.cols, Use::written), c.vague = true;
  if (c.spoil(100)) a.x = nullptr, c.vague = true;
  const auto* args = c.in.one_in(200) ? (c.odd = c.must = true, nullptr) : c.sized(a);
  const auto* options = c.options();
  c.run([&] { return tenon_forward(i.text, args, options); });
  check_encoded(c, y, i.y);
}

void backward(Call& c) {
  c.what = "tenon_backward";
  const Inputs i = inputs(c);
  tenon_backward_args a{};
  const Given grad = tensor(c, i.y, Use::read);
  Given dx, db;
  const size_t outputs = c.in.below(8);
  if (outputs != 1) dx = output(c, i.x, c.in.below(2) ? i.given_x : grad);
  if (i.separate && outputs != 2) db = tensor(c, i.x, Use::written);
  const int64_t bias = i.separate ? 2 * i.x.cols : i.x.cols;
  if ((outputs == 1 || outputs == 3) && !endless(i.x)) a.dbias = c.plain(1, bias, Use::written);
  if (i.act.scaled && outputs > 3 && !endless(i.x)) a.dscale = c.plain(i.x.rows, 1, Use::written);
  if (outputs == 1 || outputs == 4) a.amax = c.number(Use::written);
  a.grad = grad.plain, a.grad_encoded = grad.encoded;
  a.x = i.given_x.plain, a.x_encoded = i.given_x.encoded;
  a.b = i.given_b.plain, a.b_encoded = i.given_b.encoded;
  a.dx = dx.plain, a.dx_encoded = dx.encoded;
  a.db = db.plain, a.db_encoded = db.encoded;
  a.bias = i.bias, a.scale = i.scale, a.layout = i.layout;
  if (c.spoil(100)) a.grad = nullptr, c.vague = true;
  const auto* args = c.in.one_in(200) ? (c.odd = c.must = true, nullptr) : c.sized(a);
  const auto* options = c.options();
  c.run([&] { return tenon_backward(i.text, args, options); });
  check_encoded(c, dx, i.x);
  check_encoded(c, db, i.x);
}

void quantize(Call& c) {
  c.what = "tenon_quantize";
  const Shape s = shape(c.in);
  tenon_quantize_args a{};
  const Given x = tensor(c, s, Use::read);
  const Given y = c.in.below(4) == 1 ? output(c, s, x) : encoded(c, s, Use::written);
  a.x = x.plain, a.x_encoded = x.encoded;
  a.y = y.plain, a.y_encoded = y.encoded;
  if (c.in.below(4) == 1 && !endless(s)) a.dbias = c.plain(1, s.cols, Use::written);
  if (c.in.below(4) == 1) a.amax = c.number(Use::written);
  if (c.spoil(60)) {
    c.vague = true;
    (c.in.below(2) ? a.x : a.y) = nullptr;
  }
  const auto* args = c.in.one_in(200) ? (c.odd = c.must = true, nullptr) : c.sized(a);
  const auto* options = c.options();
  c.run([&] { return tenon_quantize(args, options); });
  check_encoded(c, y, s);
}

void delayed_update(Call& c) {
  c.what = "tenon_delayed_update";
  const Shape s{1 + side(c.in) % 40, side(c.in) % 40};
  const tenon_view* history = c.view(s.rows, s.cols, TENON_F32, Use::updated);
  const tenon_view* scale = c.view(1, s.cols, TENON_F32, Use::updated);
  int32_t dtype = static_cast<int32_t>(3 + c.in.below(2));
  int32_t margin = static_cast<int32_t>(c.in.below(129)) - 64;
  if (c.spoil(30)) dtype = static_cast<int32_t>(c.in.below(3)), c.must = true;
  if (c.spoil(30)) margin = c.in.below(2) ? 65 : std::numeric_limits<int32_t>::min(), c.must = true;
  if (c.spoil(60)) history = nullptr, c.must = true;
  if (c.spoil(60)) scale = nullptr, c.must = true;
  const auto* options = c.options();
  const auto recent = static_cast<int32_t>(c.in.below(2));
  c.run([&] { return tenon_delayed_update(history, scale, dtype, margin, recent, options); });
}

// Five values in their own memory. All states that contain the columns are valid.
uint64_t* random_state(Call& c, int64_t cols, bool training) {
  if (!training && c.in.below(2)) return nullptr;
  if (c.spoil(60)) {
    c.must |= training;
    return nullptr;
  }
  auto* state = static_cast<uint64_t*>(c.memory(5 * sizeof(uint64_t)));
  const auto width = static_cast<uint64_t>(cols);
  state[0] = c.in.number(), state[1] = c.in.number(), state[2] = c.in.number();
  state[3] = c.in.below(2) ? c.in.number() >> 1 : 0;
  state[4] = state[3] + width + c.in.below(9);
  if (cols > 0 && c.spoil(60)) {
    if (c.in.below(2))
      state[4] = width - 1;
    else
      state[3] = state[4] - width + 1;
    c.must |= training;
  }
  return state;
}
double probability(Call& c) {
  constexpr std::array<double, 6> kRight{0.1, 0, 0.5, 1, 1e-300, 0.9999999};
  constexpr std::array<double, 4> kWrong{-0.1, 1.0000001, NAN, INFINITY};
  if (!c.spoil(40)) return c.in.pick(kRight);
  c.must = true;
  return c.in.pick(kWrong);
}

void dropout(Call& c) {
  c.what = "tenon_bias_dropout_add";
  const Shape s = shape(c.in);
  tenon_dropout_args a{};
  Given x;
  x.dtype = static_cast<int32_t>(c.in.below(3));
  a.x = x.plain = c.view(s.rows, s.cols, x.dtype, Use::read);
  if (c.in.below(2) && !endless(s)) a.bias = c.plain(1, s.cols, Use::read);
  if (c.in.below(2)) a.residual = c.plain(s.rows, s.cols, Use::read);
  const bool in_place = !c.odd && c.in.below(6) == 1;
  a.y = in_place ? c.keep(*a.x, Use::updated) : c.plain(s.rows, s.cols, Use::written);
  a.p = probability(c);
  a.training = c.in.below(4) != 1;
  a.random = random_state(c, s.cols, a.training);
  if (c.spoil(80)) a.x = nullptr, c.must = true;
  if (c.spoil(80)) a.y = nullptr, c.must = true;
  const auto* args = c.in.one_in(200) ? (c.odd = c.must = true, nullptr) : c.sized(a);
  const auto* options = c.options();
  const uint64_t offset = a.random ? a.random[1] : 0;
  c.run([&] {
    const int code = tenon_bias_dropout_add(args, options);
    if (code == TENON_OK && a.training) {
      c.check(a.random[1] == offset + 1, "the offset is not moved by one");
      a.random[1] = offset;
    }
    return code;
  });
}

void dropout_backward(Call& c) {
  c.what = "tenon_bias_dropout_add_backward";
  const Shape s = shape(c.in);
  tenon_dropout_backward_args a{};
  a.grad = c.plain(s.rows, s.cols, Use::read);
  const size_t outputs = 1 + c.in.below(7);
  if (outputs & 1) a.dx = c.plain(s.rows, s.cols, Use::written);
  if (outputs & 2) {
    if (endless(s))
      c.odd = true;
    else
      a.dbias = c.plain(1, s.cols, Use::written);
  }
  if (outputs & 4) a.dresidual = c.plain(s.rows, s.cols, Use::written);
  a.p = probability(c);
  a.training = c.in.below(4) != 1;
  a.random = random_state(c, s.cols, a.training);
  if (c.spoil(80)) a.grad = nullptr, c.must = true;
  const auto* args = c.in.one_in(200) ? (c.odd = c.must = true, nullptr) : c.sized(a);
  const auto* options = c.options();
  c.run([&] { return tenon_bias_dropout_add_backward(args, options); });
}

struct FusedText {
  const char *formula, *arguments;
  size_t count;
};
constexpr std::array<FusedText, 6> kFused{{{"x", "x", 1},
                                           {"x*s + row*c; c = 2", "x, row,s", 3},
                                           {"select(p > q, exp(p), q)", "p,q", 2},
                                           {"gelu(x + bias)", "x, bias", 2},
                                           {"1 + 0*t", "t", 1},
                                           {"max(u, v)/w - sqrt(abs(u))", " u ,\tv,\nw", 3}}};

// An array of views in memory of exact size.
const tenon_view* list(Call& c, const std::vector<const tenon_view*>& views) {
  auto* all = static_cast<tenon_view*>(c.memory(views.size() * sizeof(tenon_view)));
  for (size_t i = 0; i < views.size(); ++i) std::memcpy(&all[i], views[i], sizeof(tenon_view));
  return all;
}

void fused(Call& c, bool backward) {
  c.what = backward ? "tenon_fused_backward" : "tenon_fused_forward";
  const FusedText f = c.in.pick(kFused);
  const Shape s = shape(c.in);
  if (endless(s)) return;
  std::vector<const tenon_view*> in, gradients;
  for (size_t i = 0; i < f.count; ++i) {
    const size_t kind = c.in.below(5);
    const Shape n{kind == 1 || kind == 3 ? 1 : s.rows, kind == 2 || kind == 3 ? 1 : s.cols};
    in.push_back(c.plain(n.rows, n.cols, Use::read));
    if (!backward) continue;
    if (c.in.below(4) == 1)
      gradients.push_back(c.keep({nullptr, 0, 0, 0, TENON_F32}, Use::ignored));
    else
      gradients.push_back(c.plain(n.rows, n.cols, Use::written));
  }
  size_t count = f.count;
  const char* formula = c.text_or_noise(f.formula);
  const char* arguments = c.text_or_noise(f.arguments);
  const tenon_view* views = list(c, in);
  const tenon_view* to = backward ? list(c, gradients) : nullptr;
  const tenon_view* y = c.plain(s.rows, s.cols, backward ? Use::read : Use::written);
  if (c.spoil(40)) {
    const size_t kind = c.in.below(5);
    if (kind == 0) views = nullptr;
    if (kind == 1) y = nullptr;
    if (kind == 2) count = SIZE_MAX >> c.in.below(50);
    if (kind == 3) count = c.in.below(f.count);
    if (kind == 4 && backward) to = nullptr;
    c.must |= kind != 4 || backward;
  }
  const auto* options = c.options();
  c.run([&] {
    return backward ? tenon_fused_backward(formula, arguments, views, count, y, to, options)
                    : tenon_fused_forward(formula, arguments, views, count, y, options);
  });
}

void run(Call& c) {
  c.what = "tenon_run";
  constexpr std::array<const char*, 5> kNames{"relu", "gelu", "silu", "tanh", "qgelu"};
  const Shape s = shape(c.in);
  if (endless(s)) return;
  const auto matrix = [&](Use use) { return c.plain(s.rows, s.cols, use); };
  std::vector<const tenon_view*> in, out;
  std::string name = c.in.pick(kNames);
  switch (c.in.below(7)) {
    case 0:
      in = {matrix(Use::read)}, out = {matrix(Use::written)};
      break;
    case 1:
      in = {matrix(Use::read), c.plain(1, s.cols, Use::read)}, out = {matrix(Use::written)};
      name = "bias_" + name;
      break;
    case 2:
      in = {matrix(Use::read), matrix(Use::read)}, out = {matrix(Use::written)};
      name = "d" + name;
      break;
    case 3:
      in = {matrix(Use::read), matrix(Use::read), c.plain(1, s.cols, Use::read)};
      out = {c.plain(1, s.cols, Use::written), matrix(Use::written)};
      name = "bgrad_d" + name;
      break;
    case 4:
      in = {matrix(Use::read)}, out = {matrix(Use::written)};
      name = "l2normalization";
      break;
    case 5:
      in = {matrix(Use::read)};
      out = {matrix(Use::written), c.view(s.rows, 1, TENON_F32, Use::written)};
      name = "l2normalization_fwd";
      break;
    default:
      in = {matrix(Use::read), matrix(Use::read), c.view(s.rows, 1, TENON_F32, Use::read)};
      out = {matrix(Use::written)};
      name = "l2normalization_bwd";
      break;
  }
  size_t n = in.size(), m = out.size();
  const tenon_view* from = list(c, in);
  const tenon_view* to = list(c, out);
  if (c.spoil(30)) {
    constexpr std::array<size_t, 3> kMany{65, size_t{1} << 32, SIZE_MAX};
    const size_t kind = c.in.below(5);
    if (kind == 0) n = c.in.below(n);
    if (kind == 1) m = c.in.below(m);
    if (kind == 2) n = c.in.pick(kMany);
    if (kind == 3) from = nullptr;
    if (kind == 4) to = nullptr;
    c.must = true;
  }
  const char* text = c.text_or_noise(name);
  const auto* options = c.options();
  c.run([&] { return tenon_run(text, from, n, to, m, options); });
}

void define(Call& c) {
  c.what = "tenon_define";
  constexpr std::array<const char*, 5> kFormulas{"x*x", "k*x + fuzz_a(x); k = 3",
                                                 "fuzz_b(fuzz_b(x))", "a*b", "gelu(x) - x"};
  // Names live as long as the process, so there are few.
  constexpr std::array<const char*, 6> kNames{"fuzz_a", "fuzz_b", "gelu", "2x", "a b", "x"};
  const std::string formula = c.in.pick(kFormulas);
  const size_t name = c.in.below(kNames.size());
  c.odd = true;  // a called formula may be too large, or have two inputs
  if (name > 1) c.must = true;
  const char* text = c.in.one_in(20) ? nullptr : c.text(kNames[name]);
  c.must |= text == nullptr;
  const char* body = c.text_or_noise(formula);
  c.must |= body == nullptr;
  c.run([&] { return tenon_define(text, body); });
}

struct ChainText {
  const char* text;
  int64_t cols;  // of the input; 0: defined by the chain
};
constexpr std::array<ChainText, 18> kChains{
    {{"linear(8,16) bias gelu linear(16,8) bias", 0},
     {"gelu", 33},
     {"bias swiglu scale(0.5)", 66},
     {"linear(33,64) bias swiglu linear(32,33) bias dropout(0.1) add", 0},
     {"make_extra_output>r layernorm linear(24,40) bias silu linear(40,24) bias add<r", 0},
     {"rmsnorm(65) relu", 65},
     {"l2norm dropout(0.5)", 17},
     {"layernorm(64, zero_centered_gamma=true, eps=0.1) quantize", 64},
     {"reshape(16) gelu reshape(64)", 32},
     {"act(\"x*x/(1 + x*x)\") scale(-2) identity", 7},
     {"act(\"scaled(swiglu)\") make_extra_output", 16},
     {"all_reduce gelu all_gather reduce_scatter", 8},
     {"clamped_swiglu(layout=\"interleaved(4)\", limit=2) elu(alpha=0.5)", 64},
     {"quantize linear(160,48) quantize gelu", 0},
     {"mine bias mine", 5},
     {"linear(130,1) srelu linear(1,130)", 0},
     {"swiglu swiglu rmsnorm linear(4,4)", 16},
     {"dropout(0.1) gelu dropout(1) bias add", 40}}};
constexpr std::array<const char*, 16> kChainOps{
    "gelu",    "bias",        "linear(8,8)", "linear(8,16)",     "swiglu",   "add",
    "rmsnorm", "layernorm",   "l2norm",      "scale(0.5)",       "quantize", "dropout(0.25)",
    "mine",    "reshape(16)", "identity",    "make_extra_output"};

int mine_forward(void* /*user*/, int64_t /*rows*/, const tenon_view* x, const tenon_view* y,
                 char* why, size_t capacity) {
  if (x->rows == y->rows && x->cols == y->cols && x->dtype == y->dtype) {
    for (int64_t r = 0; r < y->rows; ++r)
      std::memcpy(static_cast<char*>(y->data) + r * y->stride * size_of(y->dtype),
                  static_cast<const char*>(x->data) + r * x->stride * size_of(x->dtype),
                  static_cast<size_t>(y->cols * size_of(y->dtype)));
    return 0;
  }
  std::snprintf(why, capacity, "other shapes");
  return 1;
}
int mine_backward(void* user, int64_t rows, const tenon_view* /*x*/, const tenon_view* dy,
                  const tenon_view* dx, char* why, size_t capacity) {
  return mine_forward(user, rows, dy, dx, why, capacity);
}

std::vector<tenon_buffer> buffers_of(Call& c, const tenon_plan* plan) {
  size_t count = 0;
  c.check(tenon_plan_buffers(plan, nullptr, 0, &count) == TENON_OK && count > 0, "no buffers");
  std::vector<tenon_buffer> list(c.in.one_in(3) ? c.in.below(count) : count);
  c.check(tenon_plan_buffers(plan, list.data(), list.size(), nullptr) == TENON_OK, "no list");
  list.resize(count);
  c.check(tenon_plan_buffers(plan, list.data(), count, nullptr) == TENON_OK, "no list");
  return list;
}

// The bytes of a buffer by the formula in the header.
int64_t bytes_of(const tenon_buffer& b, int64_t rows) {
  const int64_t count = up(up(rows * b.rows_mul, b.rows_div), b.rows_round) * b.rows_round;
  return (count + b.rows_add) * b.cols * (b.random ? 8 : size_of(b.dtype));
}

void describe(Call& c, const tenon_plan* plan, int64_t rows, bool right) {
  constexpr std::array<const char*, 3> kFormats{"text", "json", "html"};
  const char* format = c.in.pick(kFormats);
  size_t size = 0;
  const int code = tenon_plan_describe(plan, rows, format, nullptr, 0, &size);
  c.check((code == TENON_OK) == (*tenon_last_error() == '\0'), "code and message disagree");
  c.check(code == TENON_OK || !right, "a plan that can be run cannot be described");
  if (code != TENON_OK) return;
  const size_t capacity = c.in.one_in(3) ? c.in.below(size + 2) : size + 1;
  std::vector<char> text(capacity, 'x');
  c.check(tenon_plan_describe(plan, rows, format, text.data(), capacity, nullptr) == TENON_OK,
          "the same description fails");
  if (capacity > 0)
    c.check(std::find(text.begin(), text.end(), '\0') != text.end(), "no final zero");
}

// Runs both passes with memory of exactly the sizes of the plan.
enum class Backward : uint8_t { none, some, all };
void run_plan(Call& c, const tenon_plan* plan, Backward pass, int64_t rows, bool runs) {
  constexpr int64_t kMostBytes = 1 << 24;
  const std::vector<tenon_buffer> buffers = buffers_of(c, plan);
  const size_t count = buffers.size();
  std::vector<int64_t> bytes(count);
  int64_t workspace = 0, total = 0;
  const int code = tenon_plan_sizes(plan, rows, bytes.data(), count, &workspace);
  describe(c, plan, rows, code == TENON_OK);
  const auto asked = static_cast<int32_t>(c.in.below(18));
  int64_t pass_bytes = 0;
  const int32_t pass_given = static_cast<int32_t>(c.in.below(3));
  if (tenon_plan_workspace(plan, pass_given, rows, asked, &pass_bytes) == TENON_OK)
    c.check(asked < 16 && pass_bytes <= workspace, "a pass needs more than all passes");
  if (code != TENON_OK) {
    c.check(rows < 1 || rows % 16 != 0 || rows > kMany, "a right row count is refused");
    std::vector<void*> nothing(count);
    c.check(tenon_plan_run(plan, 0, rows, nothing.data(), count, nullptr, 0, nullptr) != TENON_OK,
            "a row count without sizes runs");
    return;
  }
  for (size_t i = 0; i < count; ++i) {
    const int64_t n = bytes[i];
    c.check(n >= 0 && n == bytes_of(buffers[i], rows), "a size that its formula does not give");
    total = n > kMostBytes ? kMostBytes : total + n;
  }
  c.check(workspace >= 0, "a negative workspace");
  if (!runs || total + workspace >= kMostBytes) return;
  std::vector<void*> memory;
  for (const int64_t n : bytes) memory.push_back(c.filled(static_cast<size_t>(n)));
  for (size_t i = 0; i < count; ++i)
    if (buffers[i].role != TENON_ROLE_WORKSPACE && buffers[i].same_as >= 0)
      memory[i] = memory[static_cast<size_t>(buffers[i].same_as)];
  void* const work = c.filled(static_cast<size_t>(workspace));
  size_t given = count;
  if (c.in.one_in(16)) {
    given = c.in.below(count);
    c.check(tenon_plan_run(plan, 0, rows, memory.data(), given, work, 0, nullptr) != TENON_OK,
            "a plan runs with too few buffers");
    return;
  }
  const auto flags = static_cast<int32_t>(c.in.below(TENON_RUN_NO_TUNING + 2));
  const int forward = tenon_plan_run(plan, 0, rows, memory.data(), count, work, 0, nullptr);
  c.check(forward == TENON_OK, "a right forward run fails");
  const int again = tenon_plan_run(plan, 1, rows, memory.data(), count, work, flags, nullptr);
  // If no gradient is requested, there is no backward pass.
  c.check(again != TENON_OK || pass != Backward::none, "a backward pass that was not asked for");
  c.check(again == TENON_OK || pass != Backward::all, "a right backward run fails");
}

void plan(Call& c) {
  c.what = "tenon_plan_build";
  ChainText chain = c.in.pick(kChains);
  std::string text = chain.text;
  if (c.in.one_in(3)) {
    text.clear();
    for (size_t n = 1 + c.in.below(10); n > 0; --n) text += std::string(c.in.pick(kChainOps)) + " ";
    chain.cols = c.in.one_in(4) ? static_cast<int64_t>(c.in.below(40)) : 8;
    c.odd = true;  // widths may not match
  }
  tenon_plan_request r{};
  r.cols = chain.cols;
  r.dtype = static_cast<int32_t>(c.in.below(3));
  r.parameter_dtype_given = static_cast<int32_t>(c.in.below(2));
  r.parameter_dtype = static_cast<int32_t>(c.in.below(3));
  constexpr std::array<const char*, 7> kRecipes{nullptr,   "none",  "none", "delayed",
                                                "current", "mxfp8", "block"};
  constexpr std::array<const char*, 4> kKeeps{nullptr, "input", "fp8", "recompute"};
  if (const char* recipe = c.in.pick(kRecipes)) r.recipe = c.text_or_noise(recipe);
  if (const char* keep = c.in.pick(kKeeps)) r.keep = c.text_or_noise(keep);
  r.recipe_e4m3 = static_cast<int32_t>(c.in.below(2));
  r.evaluation = static_cast<int32_t>(c.in.below(2));
  r.forward_only = static_cast<int32_t>(c.in.below(2));
  r.no_input_grad = static_cast<int32_t>(c.in.one_in(4));
  const size_t grads = c.in.one_in(4) ? 1 + c.in.below(4) : 0;
  auto* list = static_cast<tenon_grad_request*>(c.memory(grads * sizeof(tenon_grad_request)));
  for (size_t i = 0; i < grads; ++i) {
    list[i] = tenon_grad_request{};
    list[i].unwanted = static_cast<int32_t>(c.in.below(2));
    list[i].dtype_given = static_cast<int32_t>(c.in.below(2));
    list[i].dtype = static_cast<int32_t>(c.in.below(3));
    list[i].accumulate = static_cast<int32_t>(c.in.below(2));
  }
  if (grads > 0) {
    c.odd = true;  // there may be fewer
    r.parameter_grads = list;
    r.parameter_grad_count = grads;
  }
  const auto encoding = [&]() -> const tenon_encoding* {
    if (!c.in.one_in(4)) return nullptr;
    auto* e = static_cast<tenon_encoding*>(c.memory(sizeof(tenon_encoding)));
    *e = {};
    e->format.dtype = static_cast<int32_t>(c.in.below(6));
    constexpr std::array<const char*, 6> kScalings{"delayed",    "current",      "mxfp8",
                                                   "block1x128", "block128x128", nullptr};
    if (const char* scaling = c.in.pick(kScalings)) e->format.scaling = c.text_or_noise(scaling);
    e->encodings = static_cast<int32_t>(c.in.below(4));
    e->swizzled = static_cast<int32_t>(c.in.below(2));
    c.odd = true;  // many of these are no encodings
    return e;
  };
  r.input_encoding = encoding();
  r.output_decoded = static_cast<int32_t>(c.in.below(2));
  const size_t requests = c.in.one_in(4) ? 1 + c.in.below(3) : 0;
  auto* op_requests = static_cast<tenon_op_request*>(c.memory(requests * sizeof(tenon_op_request)));
  for (size_t i = 0; i < requests; ++i) {
    op_requests[i] = tenon_op_request{};
    op_requests[i].weight_encoding = encoding();
    op_requests[i].output = static_cast<int32_t>(c.in.below(4));
  }
  if (requests > 0) {
    c.odd = true;
    r.op_requests = op_requests;
    r.op_request_count = requests;
  }
  tenon_opaque_op mine{};
  mine.name = "mine";
  mine.forward = mine_forward;
  mine.backward = mine_backward;
  r.opaque_ops = &mine;
  r.opaque_op_count = 1;
  constexpr std::array<int64_t, 6> kWrong{-1, kHuge, kLowest, int64_t{1} << 40, 0, 1};
  if (c.spoil(40)) r.cols = c.in.pick(kWrong);
  if (c.spoil(60)) r.dtype = -1, c.must = true;
  if (c.spoil(60)) r.opaque_op_count = SIZE_MAX, c.must = true;
  if (c.spoil(60)) r.parameter_grad_count = kMany, c.must = true;
  if (c.spoil(60)) mine.forward = nullptr, c.must = true;
  const char* words = c.text_or_noise(text);
  const bool defaults = c.in.one_in(200);
  if (defaults) c.odd = c.vague = true, r = {};
  const auto* request = defaults ? nullptr : c.sized(r);
  // A plan for CUDA can be created on any machine, but not run.
  const bool runs = !c.in.one_in(8);
  tenon_options cuda{};
  cuda.size = sizeof cuda;
  cuda.device = TENON_CUDA;
  const tenon_options* options = runs ? c.options() : &cuda;
  tenon_plan* made = nullptr;
  c.run([&] {
    tenon_plan_free(made);
    return tenon_plan_build(words, request, options, &made);
  });
  c.check(c.ok == (made != nullptr), "a handle without a plan, or a plan without a handle");
  if (!c.ok) return;
  constexpr std::array<int64_t, 12> kRows{
      8, 16, 1, 2, 3, 5, 0, -1, kHuge, kLowest, int64_t{1} << 40, 128};
  const Backward pass = r.forward_only    ? Backward::none
                        : r.no_input_grad ? Backward::some
                                          : Backward::all;
  const int64_t rows = c.in.pick(kRows);
  int64_t prepared = 0;
  if (runs && c.in.one_in(4) && tenon_plan_prepare_bytes(made, rows, &prepared) == TENON_OK &&
      prepared < int64_t{1} << 24)
    c.check(tenon_plan_prepare(made, rows, nullptr, nullptr) == TENON_OK, "prepare failed");
  run_plan(c, made, pass, rows, runs);
  tenon_plan_free(made);
}

void small_functions(Call& c) {
  switch (c.in.below(5)) {
    case 0: {
      c.what = "tenon_encoding_shape";
      constexpr std::array<int64_t, 6> kSizes{
          0, -1, kHuge, kLowest, int64_t{1} << 60, (int64_t{1} << 60) + 1};
      const auto size = [&] {
        return c.in.below(3) == 1 ? c.in.pick(kSizes) : static_cast<int64_t>(c.in.below(70000));
      };
      const int64_t rows = size(), cols = size();
      const int64_t most = int64_t{1} << 60;
      if (rows < 0 || cols < 0 || rows > most || cols > most) c.odd = c.must = true;
      const auto place = [&]() -> const tenon_view* {
        const tenon_view v{c.memory(16), 1, 16, 16, TENON_E8M0};
        return c.keep(v, Use::written);
      };
      const tenon_view* data = c.in.below(4) == 1 ? nullptr : place();
      const tenon_view* scales = c.in.below(4) == 1 ? nullptr : place();
      const Mode& mode = kSpecified[c.in.below(std::size(kSpecified))];
      const auto column = static_cast<int32_t>(c.in.below(3));
      const char* text = c.text_or_noise(mode.name.data());
      const auto numbers = [](const tenon_view* v) {
        return v ? static_cast<int64_t*>(v->data) : nullptr;
      };
      c.run([&] {
        return tenon_encoding_shape(text, rows, cols, column, numbers(data), numbers(scales));
      });
      if (!c.ok || c.odd) return;
      const Shape d = data_size(mode, rows, cols, column);
      const Shape n = mode.scales(rows, cols, column != 0);
      if (data) c.check(numbers(data)[0] == d.rows && numbers(data)[1] == d.cols, "data shape");
      if (scales)
        c.check(numbers(scales)[0] == n.rows && numbers(scales)[1] == n.cols, "scale shape");
      return;
    }
    case 1: {
      c.what = "tenon_names";
      const size_t capacity = c.in.below(400);
      const tenon_view v{c.memory(capacity), 1, static_cast<int64_t>(capacity), 0, TENON_E8M0};
      auto* buffer = static_cast<char*>(c.keep(v, Use::updated)->data);
      if (c.in.below(4) == 1) buffer = nullptr;
      const tenon_view n{c.memory(sizeof(size_t)), 1, sizeof(size_t), 0, TENON_E8M0};
      auto* size = static_cast<size_t*>(c.keep(n, Use::updated)->data);
      if (c.in.below(4) == 1) size = nullptr;
      c.run([&] { return tenon_names(buffer, capacity, size); });
      if (buffer && capacity > 0)
        c.check(std::find(buffer, buffer + capacity, '\0') != buffer + capacity, "no final zero");
      return;
    }
    case 2: {
      c.what = "tenon_set_threads";
      constexpr std::array<int32_t, 7> kCounts{
          1, 2, 0, 3, -1, 100000, std::numeric_limits<int32_t>::min()};
      const size_t count = c.in.below(kCounts.size());
      if (count > 3) c.odd = c.must = true;
      c.run([&] { return tenon_set_threads(kCounts[count]); });
      return;
    }
    case 3: {
      c.what = "tenon_activation_info";
      const char* act = c.text_or_noise("scaled(clamped_swiglu(alpha=1.5))");
      tenon_activation found{};
      const bool nowhere = c.spoil(20);
      if (nowhere) c.must = true;
      c.run([&] { return tenon_activation_info(act, nowhere ? nullptr : &found); });
      if (!c.ok || nowhere) return;
      for (size_t i = 0; i < found.parameter_count; ++i)
        c.check(std::strlen(found.parameters[i].name) > 0, "a parameter without a name");
      c.check(found.inputs == 1 || found.inputs == 2, "inputs");
      return;
    }
    default:
      if (std::strlen(tenon_version()) == 0 || !tenon_last_error()) std::abort();
      tenon_set_threads(1);
  }
}

void one_call(Bytes& in) {
  const size_t function = in.below(20);
  Call c(in);
  switch (function) {
    case 0:
    case 1:
      return quantize(c);
    case 2:
    case 3:
    case 4:
      return forward(c);
    case 5:
    case 6:
    case 7:
      return backward(c);
    case 8:
      return delayed_update(c);
    case 9:
      return dropout(c);
    case 10:
      return dropout_backward(c);
    case 11:
      return fused(c, false);
    case 12:
      return fused(c, true);
    case 13:
      return run(c);
    case 14:
      return define(c);
    case 15:
      return small_functions(c);
    default:
      return plan(c);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool kOneThread = [] { return tenon_set_threads(1) == TENON_OK; }();
  if (!kOneThread) std::abort();
  Bytes in(data, size);
  one_call(in);
  return 0;
}

#if defined(TENON_FUZZ_MAIN)

int main(int argc, char** argv) {
  const long iterations = argc > 1 ? std::atol(argv[1]) : 20000;
  std::mt19937 random(argc > 2 ? static_cast<uint32_t>(std::atol(argv[2])) : 1);
  std::vector<uint8_t> bytes;
  for (long i = 0; i < iterations; ++i) {
    bytes.resize(16 + random() % 240);
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  std::printf("%ld calls, %ld of them succeed\n", calls, successes);
  // Fails if the generator makes too few valid calls.
  return calls > 0 && successes * 10 > calls ? 0 : 1;
}

#endif
