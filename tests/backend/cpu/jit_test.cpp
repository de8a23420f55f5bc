// Tests of compiled bodies: the bits of the interpreter for steps by chance, and limits of size.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <optional>
#include <set>

#include "backend/cpu/finish.h"
#include "backend/cpu/tile_runner.h"
#include "choice/choose.h"
#include "core/philox.h"
#include "lazy/builder.h"
#include "support/support.h"
#include "support/verify.h"

namespace tenon::test {
namespace {

using From = Load::From;
using To = Store::To;

// The sets of this machine that compile different code.
std::vector<const cpu::Isa*> sets() {
  std::vector<const cpu::Isa*> all;
  for (const cpu::Isa& isa : cpu::isas_here())
    if (isa.jit && (all.empty() || all.back()->wide != isa.wide)) all.push_back(&isa);
  return all;
}

Step doubled() {
  StepBuilder build("doubled", 1, Precision::strict);
  const Expr x = build.load({From::tile, 0, DType::f32, {}});
  build.store({To::tile, 0, DType::f32, {}}, x + x);
  return build.finish();
}

#define SKIP_WITHOUT_JIT()                                         \
  if (sets().empty() || !cpu::compiled(doubled(), *sets().back())) \
  GTEST_SKIP() << "this processor, this build or TENON_ISA has no JIT"

// A matrix whose first or last byte is next to a page that cannot be accessed. The other bytes
// around its elements are guard bytes.
class Fenced {
 public:
  static constexpr uint8_t kPoison = 0xA5;

  Fenced(DType dtype, int64_t rows, int64_t cols, int64_t pad, bool at_end) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const int64_t stride = cols + pad, size = info(dtype).bytes;
    const auto used = static_cast<size_t>(rows > 0 ? ((rows - 1) * stride + cols) * size : 0);
    bytes_ = (used + 64 + page - 1) / page * page;
    mapped_ = bytes_ + 2 * page;
    base_ = static_cast<uint8_t*>(
        mmap(nullptr, mapped_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) std::abort();
    data_ = base_ + page;
    if (mprotect(data_, bytes_, PROT_READ | PROT_WRITE) != 0) std::abort();
    std::fill_n(data_, bytes_, kPoison);
    view = matrix(data_ + (at_end ? bytes_ - used : 0), dtype, rows, cols, stride);
  }
  ~Fenced() { munmap(base_, mapped_); }
  [[nodiscard]] size_t offset() const {
    return static_cast<size_t>(static_cast<uint8_t*>(view.data) - data_);
  }
  Fenced(const Fenced&) = delete;
  Fenced& operator=(const Fenced&) = delete;

  [[nodiscard]] std::vector<uint8_t> bytes() const { return {data_, data_ + bytes_}; }
  void restore(const std::vector<uint8_t>& bytes) const { std::ranges::copy(bytes, data_); }
  [[nodiscard]] uint8_t* element(int64_t r, int64_t c) const {
    return static_cast<uint8_t*>(view.data) + (r * view.stride + c) * info(view.dtype).bytes;
  }
  [[nodiscard]] bool guards_hold() const {
    std::vector<uint8_t> copy = bytes();
    for (int64_t r = 0; r < view.rows && view.cols > 0; ++r)
      std::fill_n(copy.begin() + (element(r, 0) - data_), view.cols * info(view.dtype).bytes,
                  kPoison);
    return std::ranges::all_of(copy, [](uint8_t b) { return b == kPoison; });
  }

  View view;

 private:
  uint8_t *base_, *data_;
  size_t bytes_, mapped_;
};

uint32_t code_of(const uint8_t* at, DType d) {
  uint32_t code = 0;
  std::memcpy(&code, at, static_cast<size_t>(info(d).bytes));
  return code;
}

// Any bits, special values, all NaNs and ordinary values.
uint32_t any_code(std::mt19937& random, DType d) {
  const uint32_t all = 0xffffffffU >> (32 - 8 * info(d).bytes);
  const auto any = static_cast<uint32_t>(random()) & all;
  if (info(d).bytes == 1 || random() % 8 == 0) return any;
  // Some NaNs have all bits set: rounding must not make them overflow.
  if (random() % 16 == 0) return all >> (random() % 2);
  const float v = random() % 6 == 0 ? kSpecials[random() % std::size(kSpecials)]
                                    : std::normal_distribution<float>(0, 3)(random);
  return encode(d, v);
}

// Runs a body as its kernel does, on one thread.
void run(const cpu::TileRunner& body, const cpu::Loops& loops, const Step& step,
         const RunArgs& args, const View& product) {
  const cpu::Grid grid = cpu::make_grid(step, args.rows);
  std::vector<float> sums(cpu::leftover_floats(step, grid) + 16);
  cpu::Leftovers left = cpu::no_leftovers(step, grid, sums.data());
  for (int64_t i = 0; i < grid.items(); ++i) {
    cpu::ProductRange range{0, product.cols, static_cast<float*>(product.data), product.stride};
    if (product.data) range.data += i / grid.chunks() * grid.block_rows * product.stride;
    body.run(args, grid, i, left, std::span(&range, product.data ? size_t{1} : size_t{0}));
  }
  cpu::finish(step, loops, args, grid, left);
}

// A step by chance with its operands.
class Random {
 public:
  Random(unsigned seed, int64_t cols, Precision precision = Precision::strict)
      : random_(seed), cols_(cols), rows_(below(7)), precision_(precision) {
    if (cols > 100) rows_ = 1 + below(14);
    if (cols == kStreamed) rows_ = 600;  // results of more than a megabyte
    // Rows that begin with a counter, and rows that begin in the middle of one.
    if (one_in(2)) state_[3] = 8 * static_cast<uint64_t>(below(3));
    if (one_in(2)) state_[4] = static_cast<uint64_t>(cols);
    build();
  }

  static constexpr int64_t kStreamed = 1024;

  void compare() {
    const std::vector<std::vector<uint8_t>> before = contents();
    const auto run_on = [&](const cpu::TileRunner& body, const cpu::Loops& loops) {
      for (size_t i = 0; i < all_.size(); ++i) all_[i].restore(before[i]);
      const RunArgs args{
          .rows = rows_, .in = in_, .out = out_, .parameters = parameters_, .random = state_};
      run(body, loops, step_, args, product_);
      return contents();
    };
    const cpu::Loops& loops = *cpu::isas_here()[0].loops;
    const auto expected = run_on(*cpu::interpreter(step_, loops), loops);
    for (const cpu::Isa* isa : sets()) {
      const auto body = cpu::compiled(step_, *isa);
      body->prepare();
      const auto got = run_on(*body, *isa->loops);
      for (size_t i = 0; i < all_.size(); ++i) {
        const Fenced& m = all_[i];
        if (!inputs_.contains(i) && !m.guards_hold())
          ADD_FAILURE() << isa->name << " wrote outside of a result\n" << describe();
        if (got[i] != expected[i]) compare(*isa, m, got[i], expected[i]);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }

  // Native results only have a bound.
  void check_bounds() {
    const std::vector<std::vector<uint8_t>> before = contents();
    RunArgs args{
        .rows = rows_, .in = in_, .out = out_, .parameters = parameters_, .random = state_};
    const auto wrong = [&](const cpu::TileRunner& body, const cpu::Loops& loops) {
      for (size_t i = 0; i < all_.size(); ++i) all_[i].restore(before[i]);
      run(body, loops, step_, args, {});
      return verify(step_, args);
    };
    // Some formulas by chance have no useful bound.
    const cpu::Loops& loops = *cpu::isas_here()[0].loops;
    if (wrong(*cpu::interpreter(step_, loops), loops)) return;
    for (const cpu::Isa* isa : sets())
      if (const auto what = wrong(*cpu::compiled(step_, *isa), *isa->loops))
        ADD_FAILURE() << isa->name << ": " << *what << "\n" << describe();
  }

  [[nodiscard]] std::string describe() const {
    std::vector<std::string> names;
    for (size_t i = 0; i < step_.loads.size(); ++i) names.push_back(str("x", i));
    return str(rows_, "x", cols_, ": ", step_.describe(), "\n",
               formula_text(*step_.graph, step_.roots(), names));
  }

 private:
  int64_t below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
  template <class List>
  auto any(const List& list) {
    return list[static_cast<size_t>(below(static_cast<int64_t>(std::size(list))))];
  }
  [[nodiscard]] std::vector<std::vector<uint8_t>> contents() const {
    std::vector<std::vector<uint8_t>> list;
    for (const Fenced& m : all_) list.push_back(m.bytes());
    return list;
  }

  void compare(const cpu::Isa& isa, const Fenced& m, const std::vector<uint8_t>& got,
               const std::vector<uint8_t>& expected) const {
    const uint8_t* const first = m.element(0, 0);
    const DType d = m.view.dtype;
    for (int64_t r = 0; r < m.view.rows; ++r)
      for (int64_t c = 0; c < m.view.cols; ++c) {
        const size_t at = m.offset() + static_cast<size_t>(m.element(r, c) - first);
        const uint32_t a = code_of(&got[at], d), b = code_of(&expected[at], d);
        const float x = decode(d, a), y = decode(d, b);
        if (a == b || (std::isnan(x) && std::isnan(y))) continue;
        ADD_FAILURE() << isa.name << ": (" << r << ", " << c << ") of " << m.view.rows << "x"
                      << m.view.cols << " " << info(d).name << " is " << x << " = 0x" << std::hex
                      << a << ", interpreted " << y << " = 0x" << b << std::dec << "\n"
                      << describe();
        return;
      }
  }

  View matrix_of(DType d, int64_t rows, int64_t cols, bool input) {
    const Fenced& m = all_.emplace_back(d, rows, cols, below(4), one_in(2));
    if (input) inputs_.insert(all_.size() - 1);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < cols && input; ++c) {
        const uint32_t code = any_code(random_, d);
        std::memcpy(m.element(r, c), &code, static_cast<size_t>(info(d).bytes));
      }
    return m.view;
  }

  ColumnMap any_map() {
    if (direct_) return {1, 1, one_in(4) ? below(5) : 0};
    if (one_in(3)) {
      const int64_t block = any(std::array<int64_t, 3>{1, 3, 8});
      return {block, 2 * block, one_in(2) ? block : 0};
    }
    return {1, 1, one_in(3) ? below(5) : 0};
  }
  [[nodiscard]] int64_t width(const ColumnMap& m) const {
    return cols_ == 0 ? m.offset : m(cols_ - 1) + 1;
  }

  Expr load(StepBuilder& to) {
    Load l{.dtype = static_cast<DType>(below(5))};  // e8m0 is only for scales
    constexpr std::array kKinds{From::tile,      From::tile,   From::tile,
                                From::row,       From::column, From::scalar,
                                From::parameter, From::random, From::product};
    l.from = any(kKinds);
    if (l.from == From::product && !gemm_) l.from = From::tile;
    if (l.from == From::random && direct_) l.from = From::row;
    if (l.from != From::tile && !info(l.dtype).plain) l.dtype = any(kPlain);
    const auto view = [&](int64_t rows, int64_t cols) {
      l.arg = static_cast<uint32_t>(in_.size());
      in_.push_back(matrix_of(l.dtype, rows, cols, true));
    };
    if (l.from == From::tile && !direct_ && one_in(6)) {
      l.transposed = true;
      view(cols_, rows_);
    } else if (l.from == From::tile) {
      l.columns = any_map();
      view(rows_, width(l.columns));
    } else if (l.from == From::row) {
      l.columns = any_map();
      view(1, width(l.columns));
    } else if (l.from == From::column) {
      view(rows_, 1);
    } else if (l.from == From::scalar) {
      view(1, 1);
    } else if (l.from == From::parameter) {
      l.dtype = DType::f32;
      l.arg = static_cast<uint32_t>(parameters_.size());
      parameters_.push_back(from_bits(any_code(random_, DType::f32)));
    } else if (l.from == From::random) {
      l.dtype = DType::f32;
      l.arg = static_cast<uint32_t>(below(2));
    } else {
      l.dtype = DType::f32;
      l.columns = {1, 1, one_in(2) ? cols_ : 0};  // halves of the product
    }
    loads_.push_back(l);
    const Expr e = to.load(l);
    if (l.from == From::column || l.from == From::scalar || l.from == From::parameter)
      flat_.push_back(e);
    return e;
  }

  Expr operation(const std::vector<Expr>& from) {
    const auto e = [&] { return one_in(7) ? Expr(any(kConstants)) : any(from); };
    // Near the end of its domain a function of an inexact value has no bound.
    const auto exact = [&] { return precision_ == Precision::strict ? e() : any(loaded_); };
    switch (below(26)) {
      case 0:
        return e() + e();
      case 1:
        return e() - e();
      case 2:
        return e() * e();
      case 3:
        return e() / e();
      case 4:
        return min(e(), e());
      case 5:
        return max(e(), e());
      case 6:
        return -e();
      case 7:
        return abs(e());
      case 8:
        return sqrt(exact());
      case 9:
        return rsqrt(exact());
      case 10:
        return exp(e());
      case 11:
        return expm1(e());
      case 12:
        return log(exact());
      case 13:
        return log1p(exact());
      case 14:
        return sigmoid(e());
      case 15:
        return tanh(e());
      case 16:
        return erf(e());
      case 17:
        return erfc(e());
      case 18:
        return round(e(), static_cast<DType>(1 + below(4)));
      case 19:
        return select(e() < e(), e(), e());
      case 20:
        return select(e() <= e(), e(), e());
      case 21:
        return select(e() > e(), e(), e());
      case 22:
        return select(e() >= e(), e(), e());
      case 23:
        return select(e() == e(), e(), e());
      case 24:
        return select(e() != e(), e(), e());
      default:
        return e() * e() + e();
    }
  }

  void store(StepBuilder& to, Expr value) {
    const bool strict = precision_ == Precision::strict;
    Store s{.dtype = strict ? any(kPlain) : any(kHalves)};
    constexpr std::array kDirect{To::tile, To::tile, To::column_sum, To::amax};
    if (strict && one_in(8)) return store_encoded(to, value);
    constexpr std::array kKinds{To::tile,    To::tile, To::tile, To::tile, To::column_sum,
                                To::row_sum, To::sum,  To::amax, To::amax, To::column};
    s.to = direct_ ? any(kDirect) : any(kKinds);
    if (!strict && s.to == To::sum) s.to = To::tile;  // with an f32 result native is strict
    if (s.to == To::column && flat_.empty()) s.to = To::tile;
    s.arg = static_cast<uint32_t>(out_.size());
    if (s.to == To::tile) {
      s.dtype = static_cast<DType>(strict ? below(5) : 1 + below(4));
      s.columns = any_map();
      // Exactly in place of an input with the same elements.
      const std::optional<View> same = strict && one_in(2) ? in_place(s) : std::nullopt;
      out_.push_back(same ? *same : matrix_of(s.dtype, rows_, width(s.columns), false));
    } else if (s.to == To::column_sum) {
      s.ordered = one_in(4);
      out_.push_back(matrix_of(s.dtype, 1, cols_, false));
    } else if (s.to == To::row_sum || s.to == To::column) {
      out_.push_back(matrix_of(s.dtype, rows_, 1, false));
      if (s.to == To::column) value = sigmoid(any(flat_)) + any(flat_);
    } else {
      s.dtype = DType::f32;
      out_.push_back(matrix_of(s.dtype, 1, 1, false));
    }
    to.store(s, value);
  }

  // A quantised tensor of any mode, in one or both orientations.
  void store_encoded(StepBuilder& to, Expr value) {
    Operand o;
    o.format.dtype = one_in(2) ? DType::e4m3 : DType::e5m2;
    o.format.scaling = static_cast<Scaling>(1 + below(kScalings.size() - 1));
    o.columnwise = !direct_ && one_in(2);
    o.rowwise = !o.columnwise || one_in(2);
    o.counts = !direct_ && one_in(3);
    const auto scale = static_cast<uint32_t>(in_.size());
    in_.push_back(matrix_of(DType::f32, 1, 1, true));
    const Piece piece{value, {}};
    to.store(o, static_cast<uint32_t>(out_.size()), scale, cols_, std::span(&piece, 1));
    for (const Orientation side : kOrientations) {
      const bool has = side == Orientation::rowwise ? o.rowwise : o.columnwise;
      const Shape data = o.format.data_shape(rows_, cols_, side);
      const Shape scales = o.format.scale_shape(rows_, cols_, side);
      const DType scale_dtype = info(o.format.scaling).scale;
      out_.push_back(has ? matrix_of(o.format.dtype, data.rows, data.cols, false) : View{});
      out_.push_back(has ? matrix_of(scale_dtype, scales.rows, scales.cols, false) : View{});
    }
    out_.push_back(o.counts ? matrix_of(DType::f32, 1, 3, false) : View{});
  }

  // The view of a tile load with this dtype and these columns that is not yet overwritten.
  std::optional<View> in_place(const Store& s) {
    for (size_t i = 0; i < loads_.size(); ++i) {
      const Load& l = loads_[i];
      if (l.from != From::tile || l.transposed || l.dtype != s.dtype || !(l.columns == s.columns) ||
          used_.contains(l.arg))
        continue;
      used_.insert(l.arg);
      return in_[l.arg];
    }
    return std::nullopt;
  }

  void build() {
    StepBuilder to("random", cols_, precision_);
    const bool strict = precision_ == Precision::strict;
    gemm_ = strict && cols_ != kStreamed && one_in(4);
    direct_ = cols_ == kStreamed || one_in(3);  // nothing passes through slots
    const bool totals = !gemm_ && one_in(3);
    std::vector<Expr> values;
    for (int64_t i = 1 + below(4); i > 0; --i) values.push_back(load(to));
    loaded_ = values;
    for (int64_t i = 1 + below(12); i > 0; --i) {
      values.push_back(operation(values));
      if (totals && one_in(3)) {
        values.push_back(to.total(values.back()));
        flat_.push_back(values.back());
      }
    }
    for (int64_t i = 0, n = 1 + below(4); i < n; ++i)
      store(to, values[values.size() - 1 - static_cast<size_t>(i) % values.size()]);
    step_ = to.finish();
    if (!gemm_) return;
    step_.head = Gemm{.a = {}, .b = {}, .cols = 2 * cols_, .inner = 8};
    if (cols_ > 0) product_ = matrix_of(DType::f32, rows_, 2 * cols_, true);
  }

  static inline const std::array kConstants{
      0.0F, -0.0F, 1.0F,  -1.0F,    0.5F, 3.0F, kInf, kNan, from_bits(0xffffffffU),
      2.0F, 7e-3F, 1e30F, 0x1p-149F};
  static constexpr std::array kHalves{DType::f16, DType::bf16};
  std::mt19937 random_;
  int64_t cols_, rows_;
  Precision precision_;
  bool gemm_ = false, direct_ = false;
  std::deque<Fenced> all_;
  std::set<size_t> inputs_;
  std::set<uint32_t> used_;
  std::vector<Load> loads_;
  std::vector<Expr> flat_, loaded_;
  std::vector<View> in_, out_;
  std::vector<float> parameters_;
  View product_;
  uint64_t state_[5] = {0x1234567890ULL, 3, 1, 2, 4096};
  Step step_;
};

TEST(Jit, StrictBodiesHaveTheBitsOfTheInterpreter) {
  SKIP_WITHOUT_JIT();
  unsigned seed = 0;
  const auto compare = [&](int64_t cols) {
    ++seed;
    if (!chosen()) return;
    SCOPED_TRACE(str("seed ", seed));
    Random(seed, cols).compare();
  };
  for (int round = 0; round < 24; ++round)
    for (int64_t cols = 0; cols <= 70 && !HasFailure(); ++cols) compare(cols);
  for (const int64_t cols : {127, 128, 257, 300, 511, 512, 513, 1031, 4160})
    for (int round = 0; round < 12 && !HasFailure(); ++round) compare(cols);
  for (int round = 0; round < 10 && !HasFailure(); ++round) compare(Random::kStreamed);
  // Items of whole rows, and what is left of a wider row.
  for (const int64_t cols : {9001, 33000})
    for (int round = 0; round < 6 && !HasFailure(); ++round) compare(cols);
}

TEST(Jit, NativeBodiesAreWithinTheBound) {
  SKIP_WITHOUT_JIT();
  unsigned seed = 10000;
  for (int round = 0; round < 40; ++round)
    for (int64_t cols = 0; cols <= 70 && !HasFailure(); cols += 1 + cols / 8) {
      ++seed;
      if (!chosen()) continue;
      SCOPED_TRACE(str("seed ", seed));
      Random(seed, cols, Precision::native).check_bounds();
    }
}

// Native quotients multiply by 1/x, also of zeros and infinities. A sigmoid of 0 is a difference
// from 1 that remains.
TEST(Jit, NativeFunctionsOfSpecialValues) {
  SKIP_WITHOUT_JIT();
  constexpr auto kCount = static_cast<int64_t>(std::size(kSpecials));
  StepBuilder build("quotient", kCount, Precision::native);
  const Expr a = build.load({From::tile, 0, DType::f32, {}});
  const Expr b = build.load({From::tile, 1, DType::f32, {}});
  build.store({To::tile, 0, DType::f16, {}}, a / log1p(b));
  build.store({To::tile, 1, DType::bf16, {}}, tanh(a / b));
  build.store({To::tile, 2, DType::bf16, {}}, sigmoid(b) - 1.0F);
  const Step step = build.finish();
  Mat left(DType::f32, kCount, kCount), right(DType::f32, kCount, kCount);
  for (int64_t r = 0; r < kCount; ++r)
    for (int64_t c = 0; c < kCount; ++c) {
      left.set(r, c, kSpecials[r]);
      right.set(r, c, kSpecials[c]);
    }
  for (const cpu::Isa* isa : sets()) {
    Mat y(DType::f16, kCount, kCount), z(DType::bf16, kCount, kCount),
        w(DType::bf16, kCount, kCount);
    const std::array in{left.view(), right.view()};
    const std::array out{y.view(), z.view(), w.view()};
    RunArgs args;
    args.rows = kCount;
    args.in = in;
    args.out = out;
    run(*cpu::compiled(step, *isa), *isa->loops, step, args, {});
    EXPECT_EQ(verify(step, args), std::nullopt) << isa->name;
  }
}

// A step with these loads, which all have their own view, and one store.
template <class Formula>
Step step_of(size_t loads, DType dtype, int64_t cols, Formula formula) {
  StepBuilder build("formula", cols, Precision::strict);
  std::vector<Expr> in;
  for (uint32_t i = 0; i < loads; ++i) in.push_back(build.load({From::tile, i, dtype, {}}));
  build.store({To::tile, 0, dtype, {}}, formula(in));
  return build.finish();
}

// Runs it on all sets and compares with the interpreter.
void compare_sets(const Step& step, DType dtype, int64_t rows) {
  std::deque<Mat> in;
  std::vector<View> views;
  for (size_t i = 0; i < step.loads.size(); ++i)
    views.push_back(
        in.emplace_back(dtype, rows, step.cols).fill(static_cast<unsigned>(i), true).view());
  const auto result = [&](const cpu::TileRunner& body, const cpu::Loops& loops) {
    Mat y(dtype, rows, step.cols);
    const View out = y.view();
    RunArgs args;
    args.rows = rows;
    args.in = views;
    args.out = std::span(&out, 1);
    run(body, loops, step, args, {});
    return y;
  };
  const cpu::Loops& baseline = *cpu::isas_here()[0].loops;
  const Mat expected = result(*cpu::interpreter(step, baseline), baseline);
  for (const cpu::Isa* isa : sets()) {
    const auto body = cpu::compiled(step, *isa);
    const auto start = std::chrono::steady_clock::now();
    body->prepare();
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
    std::printf("%s: %u nodes, %zu views: compiled in %.1f ms\n", std::string(isa->name).c_str(),
                step.graph->size(), step.loads.size() + step.stores.size(), took.count());
    const Mat got = result(*body, *isa->loops);
    EXPECT_TRUE(got.guards_hold());
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c)
        if (!equal(got.at(r, c), expected.at(r, c))) {
          ADD_FAILURE() << isa->name << " (" << r << ", " << c << "): " << got.at(r, c)
                        << ", interpreted " << expected.at(r, c);
          return;
        }
  }
}

TEST(Jit, CompilesLongAndDeepFormulas) {
  SKIP_WITHOUT_JIT();
  for (const DType d : kPlain) {
    // 64 levels of eight values each.
    compare_sets(step_of(2, d, 75,
                         [](const std::vector<Expr>& in) {
                           std::vector<Expr> v;
                           for (int i = 0; i < 8; ++i)
                             v.push_back(in[0] * (0.1F * static_cast<float>(i + 1)) + in[1]);
                           for (int level = 0; level < 64; ++level) {
                             const std::vector<Expr> old = v;
                             for (size_t i = 0; i < 8; ++i)
                               v[i] = level % 2 ? max(old[i], old[(i + 3) % 8] * 0.5F)
                                                : old[i] - old[(i + 1) % 8] * 0.25F;
                           }
                           Expr sum = v[0];
                           for (size_t i = 1; i < 8; ++i) sum = sum + v[i];
                           return sum;
                         }),
                 d, 3);
    // More live values than registers: 60 functions, then their products in reverse.
    compare_sets(step_of(1, d, 75,
                         [](const std::vector<Expr>& in) {
                           std::vector<Expr> v;
                           for (int i = 0; i < 60; ++i)
                             v.push_back(sigmoid(in[0] * (1 + 0.03F * static_cast<float>(i))));
                           Expr sum = in[0];
                           for (const Expr& e : v) sum = sum + e;
                           for (size_t i = v.size(); i-- > 0;) sum = sum * (1.5F - v[i]);
                           return sum;
                         }),
                 d, 2);
  }
}

TEST(Jit, CompilesUpToFortyViews) {
  const auto sum = [](const std::vector<Expr>& in) {
    Expr s = in[0];
    for (size_t i = 1; i < in.size(); ++i) s = s * 0.5F + in[i];
    return s;
  };
  SKIP_WITHOUT_JIT();
  for (const DType d : kPlain) {
    const Step most = step_of(cpu::kMostCompiledViews - 1, d, 75, sum);
    const Step more = step_of(cpu::kMostCompiledViews, d, 75, sum);
    compare_sets(most, d, 3);
    for (const cpu::Isa* isa : sets()) {
      EXPECT_EQ(cpu::jit_refusal(most, *isa, true), "");
      EXPECT_EQ(cpu::jit_refusal(more, *isa, true),
                "the JIT takes 40 loads, stores and encoders, and this step has 41");
    }
    EXPECT_EQ(kernel_for(most, Device::cpu).maker, "jit");
    EXPECT_EQ(kernel_for(more, Device::cpu).maker, "executor");
  }
}

}  // namespace
}  // namespace tenon::test
