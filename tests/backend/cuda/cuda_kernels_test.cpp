// Tests of CUDA kernels emulated on the host: strict steps of conformance cases, norms and products
// must give the bits of the CPU. NVRTC compiles the same texts for every architecture.
#include <set>

#include "backend/cuda/block.h"
#include "backend/cuda/driver.h"
#include "backend/cuda/nvrtc.h"
#include "backend/cuda/plain.h"
#include "backend/cuda/row.h"
#include "backend/cuda/skeletons.h"
#include "backend/cuda/tile.h"
#include "backend/cuda/vector.h"
#include "lazy/builder.h"
#include "runtime/execute.h"
#include "step/split.h"
#include "support/cuda_emulator.h"
#include "support/plan_support.h"
#include "support/support.h"
#include "support/trial.h"

namespace tenon::test {
namespace {

// A run of a step: its inputs and outputs.
struct Call {
  std::shared_ptr<Step> step;
  int64_t rows = 0;
  std::vector<View> in, out;
  std::vector<std::vector<uint8_t>> before, in_bytes, wrote;
  std::vector<float> parameters;
  std::vector<uint64_t> random;
  std::string where;
};

std::vector<std::vector<uint8_t>> copied(std::span<const View> views) {
  std::vector<std::vector<uint8_t>> all;
  for (const View& v : views) {
    std::vector<uint8_t>& bytes = all.emplace_back(static_cast<size_t>(span_bytes(v)));
    if (!bytes.empty()) std::memcpy(bytes.data(), v.data, bytes.size());
  }
  return all;
}

class Emulated : public testing::Test {
 protected:
  // Runs a product and its body as two steps, as the plain maker does. Records both.
  static void run_split(const Step& step, const RunArgs& args) {
    const Split split = split_after_product(step, [](const Step&, DType) { return false; });
    const int64_t rows = step.body_rows(args.rows);
    std::vector<float> product(static_cast<size_t>(rows * split.stride));
    std::vector<View> in(args.in.begin(), args.in.end()), out(args.out.begin(), args.out.end());
    in.resize(split.in + 1);
    out.resize(split.out + 1);
    in[split.in] = out[split.out] = matrix(product.data(), DType::f32, rows, split.stride);
    RunArgs half = args;
    half.in = in;
    half.out = out;
    execute(split.first, half, {});
    half.rows = rows;
    execute(split.second, half, {});
  }

  // Records every strict step with a new text, up to `most`.
  void note(const Step& step, const RunArgs& args, const std::function<void()>& go) {
    if (step.gemm() && !is_bare_product(step)) {
      if (step.strict_bits() && calls.size() < most) run_split(step, args);
      return go();
    }
    const bool wanted = step.strict_bits() && calls.size() < most && keys.insert(step.key()).second;
    if (!wanted) return go();
    Call c;
    c.step = std::make_shared<Step>(step);
    c.rows = args.rows;
    c.in.assign(args.in.begin(), args.in.end());
    c.out.assign(args.out.begin(), args.out.end());
    c.in_bytes = copied(args.in);
    c.before = copied(args.out);
    c.parameters.assign(args.parameters.begin(), args.parameters.end());
    if (args.random) c.random.assign(args.random, args.random + 5);
    c.where = where;
    go();
    c.wrote = copied(args.out);
    calls.push_back(std::move(c));
  }

  // The same after the run of a trial. The trial keeps the inputs.
  void noted(const Step& step, const RunArgs& args) {
    note(step, args, [] {});
    if (calls.empty() || calls.back().step->key() != step.key()) return;
    Call& c = calls.back();
    for (auto& bytes : c.before) std::ranges::fill(bytes, uint8_t{0xcd});
    constexpr float kHeld = 0.25F;  // initial value of the amax slot in a trial
    for (const Store& s : step.stores)
      if (s.join) std::memcpy(c.before[s.arg].data(), &kHeld, sizeof kHeld);
  }

  void check() {
    ASSERT_FALSE(calls.empty());
    check_all<cuda::PlainProgram>(cuda::plain_skeletons(),
                                  [](const Step&) { return std::string(); });
    vectors +=
        check_all<cuda::VectorProgram>(cuda::vector_skeletons(), cuda::VectorProgram::refusal);
    tiles += check_all<cuda::TileProgram>(cuda::tile_skeletons(), cuda::TileProgram::refusal);
    blocks += check_all<cuda::BlockProgram>(cuda::block_skeletons(), cuda::BlockProgram::refusal);
    rows += check_all<cuda::RowProgram>(cuda::row_skeletons(), cuda::RowProgram::refusal);
    if (cuda::why_no_gpu() || cuda::why_no_nvrtc()) return;
    for (const Call& c : calls) check_on_gpu(c);
  }

  // Runs the same call on the device, with the maker that the backend chooses.
  static void check_on_gpu(const Call& c) {
    std::vector<std::unique_ptr<cuda::DeviceBuffer>> buffers;
    const auto upload = [&](std::vector<View> views, const std::vector<std::vector<uint8_t>>& bytes,
                            std::vector<size_t>& shifts) {
      for (size_t i = 0; i < views.size(); ++i) {
        shifts.push_back(reinterpret_cast<uintptr_t>(views[i].data) % 64);
        std::vector<uint8_t> host(bytes[i].size() + 64);
        std::ranges::copy(bytes[i], host.begin() + static_cast<int64_t>(shifts[i]));
        buffers.push_back(std::make_unique<cuda::DeviceBuffer>(host.size()));
        buffers.back()->from_host(host.data());
        if (views[i].data)
          views[i].data = static_cast<uint8_t*>(buffers.back()->data()) + shifts[i];
      }
      return views;
    };
    std::vector<size_t> in_shifts, out_shifts;
    const std::vector<View> in = upload(c.in, c.in_bytes, in_shifts);
    const size_t first = buffers.size();
    const std::vector<View> out = upload(c.out, c.before, out_shifts);
    cuda::DeviceBuffer random(5 * sizeof(uint64_t));
    if (!c.random.empty()) random.from_host(c.random.data());
    const Chosen chosen = kernel_for(*c.step, Device::cuda);
    chosen.kernel->run({.rows = c.rows,
                        .in = in,
                        .out = out,
                        .parameters = c.parameters,
                        .random = static_cast<const uint64_t*>(random.data())});
    for (const size_t o : written(*c.step)) {
      std::vector<uint8_t> host(buffers[first + o]->size());
      buffers[first + o]->to_host(host.data());
      View view = c.out[o];
      if (view.data) view.data = host.data() + out_shifts[o];
      compare(view, c.wrote[o], c, o);
    }
  }

  // Returns the number of calls that a kind of program supports. All must give the bits of the CPU.
  template <class Program, class Refusal>
  size_t check_all(const std::string& skeletons, Refusal refusal) {
    Emulator emulator(skeletons);
    std::vector<std::unique_ptr<Program>> programs;
    std::vector<Call*> suited;
    size_t taken = 0;  // calls
    for (Call& c : calls) {
      if (!refusal(*c.step).empty()) continue;
      const size_t before = suited.size();
      const auto add = [&](std::unique_ptr<Program> program) {
        if (!program->fits(copy_of(c)->args)) return;
        emulator.add(program->text());
        programs.push_back(std::move(program));
        suited.push_back(&c);
      };
      add(std::make_unique<Program>(*c.step));
      taken = suited.size() > before ? taken + 1 : taken;
      if constexpr (std::is_constructible_v<Program, const Step&, bool>)
        add(std::make_unique<Program>(*c.step, true));  // whole tiles only
    }
    if (suited.empty()) return 0;
    emulator.compile();
    for (size_t i = 0; i < suited.size(); ++i) check(emulator, i, *programs[i], *suited[i]);
    return taken;
  }

  // A copy of the memory of a call that a program may write to.
  struct Copy {
    std::vector<std::vector<uint8_t>> in_bytes, out_bytes;
    std::vector<View> in, out;
    RunArgs args;
  };
  static std::vector<View> placed(std::vector<View> views,
                                  std::vector<std::vector<uint8_t>>& bytes) {
    for (size_t i = 0; i < views.size(); ++i) {
      if (!views[i].data) continue;
      // Same alignment modulo 64 as in the call.
      const size_t shift = reinterpret_cast<uintptr_t>(views[i].data) % 64;
      std::vector<uint8_t> moved(bytes[i].size() + 128);
      const size_t at = (64 - reinterpret_cast<uintptr_t>(moved.data()) % 64) % 64 + shift;
      std::ranges::copy(bytes[i], moved.begin() + static_cast<int64_t>(at));
      bytes[i] = std::move(moved);
      views[i].data = bytes[i].data() + at;
    }
    return views;
  }
  static std::unique_ptr<Copy> copy_of(const Call& c) {
    auto copy = std::make_unique<Copy>();
    copy->in_bytes = c.in_bytes;
    copy->out_bytes = c.before;
    copy->in = placed(c.in, copy->in_bytes);
    copy->out = placed(c.out, copy->out_bytes);
    copy->args = {.rows = c.rows,
                  .in = copy->in,
                  .out = copy->out,
                  .parameters = c.parameters,
                  .random = c.random.empty() ? nullptr : c.random.data()};
    return copy;
  }
  void check(Emulator& emulator, size_t number, const cuda::Program& program, Call& c) const {
    std::vector<uint8_t> workspace(program.workspace(c.rows) + 64, 0xcd);
    const auto address = reinterpret_cast<uintptr_t>(workspace.data());
    const std::unique_ptr<Copy> copy = copy_of(c);
    copy->args.workspace = workspace.data() + (64 - address % 64) % 64;
    for (const cuda::Launch& l : program.launches(copy->args)) {
      const std::string& entry = program.entries()[l.entry];
      const unsigned threads = few_add && entry.ends_with("_sums") ? 32 : l.threads;
      emulator.run(number, entry, l.blocks, l.down, threads, l.arguments.data());
    }
    for (const size_t o : written(*c.step)) compare(copy->out[o], c.wrote[o], c, o);
  }

  static std::set<size_t> written(const Step& step) {
    std::set<size_t> all;
    for (const Store& s : step.stores)
      if (s.to != Store::To::encoded) all.insert(s.arg);
    for (const Encoder& e : step.encoders) {
      if (e.counts) all.insert(e.out + Encoder::health);
      for (const Orientation o : kOrientations) {
        if (e.has(o)) all.insert(e.data(o));
        if (e.has(o) || e.format.blocks(o).single()) all.insert(e.scale_inv(o));
      }
    }
    return all;
  }

  // All NaNs are equal.
  static void compare(const View& got, const std::vector<uint8_t>& want, const Call& c, size_t o) {
    const int64_t size = info(got.dtype).bytes;
    for (int64_t r = 0; r < got.rows; ++r)
      for (int64_t i = 0; i < got.cols; ++i) {
        const int64_t at = (r * got.stride + i) * size;
        uint32_t a = 0, b = 0;
        std::memcpy(&a, static_cast<const uint8_t*>(got.data) + at, static_cast<size_t>(size));
        std::memcpy(&b, want.data() + at, static_cast<size_t>(size));
        if (a == b) continue;
        if (std::isnan(decode(got.dtype, a)) && std::isnan(decode(got.dtype, b))) continue;
        ADD_FAILURE() << c.where << "\n"
                      << c.step->describe() << "\nrows " << c.rows << ", output " << o << " (" << r
                      << ", " << i << "): " << std::hex << a << ", the CPU has " << b;
        return;
      }
  }

  std::vector<Call> calls;
  std::set<std::string> keys;
  size_t most = 60;
  size_t vectors = 0, tiles = 0, blocks = 0, rows = 0;  // calls that each map supports
  bool few_add = false;  // partial sums with one warp per block: more than one iteration each
  std::string where;
};

// Activations on whole vectors: every store of the vector map and the tiled map, with whole and
// partial tiles.
TEST_F(Emulated, MapsGiveTheBitsOfActivations) {
  most = 200;
  set_observer([this](const Step& s, const RunArgs& a, const Options&,
                      const std::function<void()>& go) { note(s, a, go); });
  const Options strict{.precision = Precision::strict};
  size_t turn = 0;
  for (const char* act : {"gelu", "swiglu", "relu"})
    for (const bool backward : {false, true})
      for (const DType d : {DType::bf16, DType::f32, DType::f16, DType::e4m3, DType::e5m2})
        for (const bool delayed : {true, false})
          for (const bool columnwise : {false, true}) {
            const bool quantised = info(d).bytes == 1;
            if (!quantised && (delayed || columnwise)) continue;
            const Activation f = activation(act);
            ++turn;
            const int64_t rows = turn % 5 == 0 ? 256 : turn % 2 ? 150 : 13;
            const int64_t cols = turn % 3 ? 136 : 48;
            const int64_t wide = backward ? f.inputs * cols : cols;
            const Mat x = Mat(DType::bf16, rows, f.inputs * cols).fill(3, true);
            const Mat g = Mat(DType::f16, rows, cols).fill(4);
            const Mat bias = Mat(DType::f32, 1, f.inputs * cols).fill(5);
            const Mat y(d, rows, wide), t(d, wide, rows, rup(rows, 16) - rows);
            const Mat inverse(DType::f32, 1, 1), dbias(DType::bf16, 1, wide);
            Mat scale(DType::f32, 1, 1), amax(DType::f32, 1, 1);
            scale.set(0, 0, 2.5F);
            amax.set(0, 0, 0.25F);
            Tensor out = y.view();
            if (quantised) {
              const Scaling mode = delayed ? Scaling::delayed : Scaling::current;
              out = Tensor(Format{.dtype = d, .scaling = mode}, {y.view(), inverse.view()});
              if (columnwise) out.columnwise = {t.view(), inverse.view()};
              if (delayed) out.scale = scale.view();
              out.amax = amax.view();
            }
            where = str(act, backward ? " bwd " : " ", info(d).name, delayed ? " delayed" : "",
                        columnwise ? " rowcol " : " ", rows, "x", cols);
            Backward args{.grad = g.view(), .x = x.view(), .dx = out};
            if (turn % 4 > 1) args.dbias = dbias.view();
            if (backward)
              tenon::backward(f, args, strict);
            else
              tenon::forward(f, {.x = x.view(), .bias = bias.view(), .y = out}, strict);
          }
  set_observer({});
  check();
  EXPECT_GT(vectors, 20U);
  EXPECT_GT(tiles, 20U);
}

// An activation with block scales.
struct BlockCase {
  Scaling mode;
  const char* act;
  bool backward;
  int sides;  // 1 rowwise, 2 columnwise, 3 both
  int64_t rows, cols;
  bool dbias;
  size_t turn;  // selects the other properties

  [[nodiscard]] std::string text() const {
    return str(act, backward ? " bwd " : " ", info(mode).name, " sides ", sides, " ", rows, "x",
               cols, dbias ? " dbias" : "");
  }
  void run() const {
    const Activation f = activation(act);
    const DType d = turn % 2 ? DType::e4m3 : DType::e5m2;
    const int64_t wide = backward ? f.inputs * cols : cols;
    const Format format{
        .dtype = d, .scaling = mode, .swizzled = info(mode).scale == DType::e8m0 && turn % 2 == 0};
    const Mat x = Mat(DType::bf16, rows, f.inputs * cols).fill(3, turn % 4 == 1);
    const Mat g = Mat(DType::bf16, rows, cols).fill(4);
    const Mat y(d, rows, wide);
    const Mat t =
        info(mode).transposes ? Mat(d, wide, rows, rup(rows, 16) - rows) : Mat(d, rows, wide);
    const auto scales = [&](Orientation o) {
      const Shape s = format.scale_shape(rows, wide, o);
      return Mat(info(mode).scale, s.rows, s.cols);
    };
    const Mat rs = scales(Orientation::rowwise), cs = scales(Orientation::columnwise);
    const Mat sums(DType::f32, 1, wide);
    Tensor out(format, {});
    if (sides & 1) out.rowwise = {y.view(), rs.view()};
    if (sides & 2) out.columnwise = {t.view(), cs.view()};
    Backward args{.grad = g.view(), .x = x.view(), .dx = out};
    if (dbias) args.dbias = sums.view();
    const Options strict{.precision = Precision::strict};
    if (backward)
      tenon::backward(f, args, strict);
    else
      tenon::forward(f, {.x = x.view(), .y = out}, strict);
  }
};

std::vector<Scaling> block_modes() {
  std::vector<Scaling> list;
  for (size_t i = 1; i < kScalings.size(); ++i)
    if (!kScalings[i].reads_scale) list.push_back(static_cast<Scaling>(i));
  return list;
}

// Block scales: every mode and side, with whole and partial tiles.
TEST_F(Emulated, BlocksGiveTheBitsOfActivations) {
  most = 200;
  set_observer([this](const Step& s, const RunArgs& a, const Options&,
                      const std::function<void()>& go) { note(s, a, go); });
  size_t turn = 0;
  for (const Scaling mode : block_modes())
    for (const char* act : {"gelu", "reglu"})
      for (const bool backward : {false, true})
        for (const int sides : {1, 2, 3}) {
          const bool halves = backward && activation(act).inputs == 2;
          ++turn;
          const BlockCase c{.mode = mode,
                            .act = act,
                            .backward = backward,
                            .sides = sides,
                            .rows = turn % 3 ? 150 : 128,
                            .cols = halves || turn % 2 ? 256 : 168,
                            .dbias = turn % 2 != 0,
                            .turn = turn};
          where = c.text();
          c.run();
        }
  set_observer({});
  check();
  EXPECT_EQ(blocks, 12 * block_modes().size());
}

// Threads outside of a tile read the last row again, so outputs must not overwrite inputs.
TEST(Blocks, LeaveWhatLiesInPlaceOfAnInputToTheOtherKernel) {
  constexpr int64_t kRows = 150, kCols = 256;
  std::vector<uint16_t> x(kRows * kCols), b = x, g = x, db = x;
  std::vector<uint8_t> codes(kRows * kCols);
  std::vector<float> scales(8);
  const Format f{.dtype = DType::e4m3, .scaling = Scaling::block128x128};
  const Tensor dx(f, {matrix(codes.data(), DType::e4m3, kRows, kCols),
                      matrix(scales.data(), DType::f32, 2, 4)});
  const auto view = [](std::vector<uint16_t>& v) {
    return matrix(v.data(), DType::bf16, kRows, kCols);
  };
  for (std::vector<uint16_t>* const to : {&db, &b, &g}) {
    size_t calls = 0;
    set_observer(
        [&](const Step& s, const RunArgs& a, const Options&, const std::function<void()>&) {
          ++calls;
          EXPECT_EQ(cuda::BlockProgram(s).fits(a), to == &db);
        });
    backward(activation("swiglu"),
             {.grad = view(g), .x = view(x), .b = view(b), .dx = dx, .db = view(*to)});
    set_observer({});
    EXPECT_EQ(calls, 1U);
  }
}

// Decoding reads one scale, or eight, for eight codes: every mode, side and order of scales, whole
// tensors and gated halves.
TEST_F(Emulated, VectorsGiveTheBitsOfDecodedTensors) {
  most = 200;
  const auto noting = [this](const Step& s, const RunArgs& a, const Options&,
                             const std::function<void()>& go) { note(s, a, go); };
  size_t turn = 0, calls_of_vectors = 0;
  for (const Scaling mode :
       {Scaling::current, Scaling::block1x128, Scaling::block128x128, Scaling::mxfp8})
    for (const DType d : {DType::e4m3, DType::e5m2})
      for (const bool swizzled : {false, true})
        for (const bool columnwise : {false, true}) {
          if (swizzled && mode != Scaling::mxfp8) continue;
          ++turn;
          const int64_t rows = turn % 3 ? 150 : 33, cols = turn % 2 ? 272 : 136;
          const Format format{.dtype = d, .scaling = mode, .swizzled = swizzled};
          const Orientation o = columnwise ? Orientation::columnwise : Orientation::rowwise;
          const Shape scales = format.scale_shape(rows, cols, o);
          const Shape data = format.data_shape(rows, cols, o);
          const Mat codes(d, data.rows, data.cols),
              inverse(info(mode).scale, scales.rows, scales.cols);
          const Mat x = Mat(DType::bf16, rows, cols).fill(3, turn % 4 == 1);
          const Mat y(turn % 2 ? DType::bf16 : DType::f32, rows, cols);
          const Mat half(DType::bf16, rows, cols / 2);
          const Encoding encoding{codes.view(), inverse.view()};
          const Tensor t(format, columnwise ? Encoding{} : encoding,
                         columnwise ? encoding : Encoding{});
          tenon::quantize({.x = x.view(), .y = t});
          where = str(info(d).name, " ", info(mode).name, columnwise ? " col" : " row",
                      swizzled ? " swizzled" : "");
          set_observer(noting);
          dequantize(t, y.view(), {.precision = Precision::strict});
          tenon::forward(activation("reglu"), {.x = t, .y = half.view()},
                         {.precision = Precision::strict});
          set_observer({});
          calls_of_vectors += cols / 2 % 8 == 0 ? 2 : 1;
        }
  check();
  EXPECT_EQ(vectors, calls_of_vectors);
}

// Halves that share a block of columns. The first half ends at the end of the block, before it, or
// far into it, or there is only one half.
TEST_F(Emulated, BlocksGiveTheBitsOfHalvesThatShareABlock) {
  most = 200;
  set_observer([this](const Step& s, const RunArgs& a, const Options&,
                      const std::function<void()>& go) { note(s, a, go); });
  size_t turn = 0;
  for (const Scaling mode : block_modes())
    for (const int64_t cols : {360, 136, 40, 184, 200})
      for (const int sides : {1, 2, 3}) {
        ++turn;
        const BlockCase c{.mode = mode,
                          .act = turn % 2 ? "swiglu" : "reglu",  // a long formula, a short formula
                          .backward = true,
                          .sides = sides,
                          .rows = turn % 3 ? 128 + 22 * static_cast<int64_t>(turn % 2) : 33,
                          .cols = cols,
                          .dbias = turn % 4 > 1,
                          .turn = turn};
        where = c.text();
        c.run();
      }
  set_observer({});
  check();
  EXPECT_EQ(blocks, 15 * block_modes().size());
}

// Sums over more tiles than threads add at once, in narrow strips. Also strips of one line: one has
// columns of both halves, another has missing columns.
TEST_F(Emulated, SumsGiveTheBitsOfStrips) {
  most = 200;
  set_observer([this](const Step& s, const RunArgs& a, const Options&,
                      const std::function<void()>& go) { note(s, a, go); });
  few_add = true;
  struct Sums {
    const char* act;
    int64_t rows, cols;
  };
  for (const Sums& sums : {Sums{"relu", 8320, 24}, {"relu", 130, 4104}, {"reglu", 130, 2056}}) {
    const BlockCase c{.mode = Scaling::mxfp8,
                      .act = sums.act,
                      .backward = true,
                      .sides = 1,
                      .rows = sums.rows,
                      .cols = sums.cols,
                      .dbias = true,
                      .turn = 1};
    where = c.text();
    c.run();
  }
  // The tiled map: 130 rows of tiles, or 33 in strips of one line.
  for (const auto& [rows, cols] : {std::pair{8320, 24}, {2080, 4104}}) {
    const Mat x = Mat(DType::bf16, rows, cols).fill(3), g = Mat(DType::bf16, rows, cols).fill(4);
    const Mat dx(DType::bf16, rows, cols), dbias(DType::f32, 1, cols);
    where = str("relu bwd dbias ", rows, "x", cols);
    tenon::backward(activation("relu"),
                    {.grad = g.view(), .x = x.view(), .dx = dx.view(), .dbias = dbias.view()},
                    {.precision = Precision::strict});
  }
  set_observer({});
  check();
  EXPECT_EQ(blocks, 3U);
  EXPECT_EQ(tiles, 2U);
}

// Norms on whole vectors: short and long rows, with one or several vectors per thread.
TEST_F(Emulated, RowsGiveTheBitsOfNorms) {
  struct Case {
    const char* chain;
    int64_t rows, cols;
    DType dtype;
    const char* recipe = "none";
  };
  const Case cases[] = {{"rmsnorm", 70, 64, DType::bf16},
                        {"rmsnorm", 33, 1032, DType::f32},
                        {"layernorm", 70, 264, DType::bf16},
                        {"layernorm", 5, 8, DType::f16},
                        {"l2norm", 9, 2056, DType::f32},
                        {"rmsnorm", 3, 5000, DType::bf16},
                        {"add rmsnorm", 40, 96, DType::bf16},
                        {"layernorm", 16500, 40, DType::bf16},  // more sums than one launch adds
                        // The input of a product is quantised, rowwise and columnwise.
                        {"rmsnorm linear(64,32)", 40, 64, DType::bf16, "delayed"},
                        {"layernorm linear(264,32)", 36, 264, DType::bf16, "current"},
                        {"rmsnorm linear(160,32)", 40, 160, DType::bf16, "mxfp8"},
                        {"layernorm linear(264,32)", 9, 264, DType::f32, "block"}};
  set_observer([this](const Step& s, const RunArgs& a, const Options&,
                      const std::function<void()>& go) { note(s, a, go); });
  for (const Case& c : cases) {
    where = str(c.chain, " ", c.rows, "x", c.cols);
    PlanRequest request;
    request.dtype = c.dtype;
    request.cols = c.cols;
    request.recipe = recipe(c.recipe);
    request.options.precision = Precision::strict;
    Session s(c.chain, request, c.rows);
    std::map<std::string, Numbers> given;
    fill(s, given);
    s.run(Pass::forward);
    s.run(Pass::backward);
  }
  set_observer({});
  check();
  EXPECT_GE(rows, 16U);
}

// Cases that are far apart in the list have little in common.
TEST_F(Emulated, GivesTheBitsOfConformanceCases) {
  const std::vector<support::Case> cases = support::cases();
  constexpr size_t kStride = 149;
  for (size_t i = 0; i < cases.size(); i += kStride) {
    support::Case c = cases[i];
    c.values[static_cast<size_t>(support::Column::precision)] = "strict";
    where = c.text();
    const auto wrong = support::Trial(c, Device::cpu).run([this](const Step& s, const RunArgs& a) {
      noted(s, a);
      return std::nullopt;
    });
    EXPECT_FALSE(wrong.has_value()) << *wrong;
  }
  check();
}

TEST_F(Emulated, GivesTheBitsOfPlans) {
  struct Case {
    const char* chain;
    int64_t rows, cols;
    DType dtype;
    const char* recipe;
    Keep keep = Keep::input;
  };
  const Case cases[] = {
      // Steps with sums and columnwise results that read scales of blocks.
      {"bias gelu", 150, 272, DType::bf16, "none", Keep::fp8},
      {"bias swiglu", 33, 272, DType::bf16, "none", Keep::fp8},
      {"linear(128,256) bias gelu", 150, 128, DType::bf16, "delayed", Keep::fp8},
      {"linear(128,256) bias swiglu", 150, 128, DType::bf16, "mxfp8", Keep::fp8},
      {"linear(128,256) bias silu", 140, 128, DType::f32, "block", Keep::fp8},
      {"rmsnorm(70) linear(70,33) bias gelu", 41, 70, DType::f32, "none"},
      {"layernorm(300) linear(300,64) swiglu linear(32,17)", 150, 300, DType::bf16, "none"},
      {"l2norm bias dropout(0.25) add", 37, 45, DType::f16, "none"},
      {"linear(64,96) bias swiglu linear(48,32)", 65, 64, DType::bf16, "delayed"},
      {"linear(64,96) bias swiglu linear(48,32)", 65, 64, DType::bf16, "current"},
      {"linear(160,96) bias gelu linear(96,32)", 70, 160, DType::bf16, "mxfp8"},
      {"linear(160,288) bias geglu linear(144,32)", 140, 160, DType::f32, "block"},
      {"make_extra_output>r rmsnorm linear(33,66) swiglu linear(33,33) add<r", 29, 33, DType::f32,
       "none"},
  };
  set_observer([this](const Step& s, const RunArgs& a, const Options&,
                      const std::function<void()>& go) { note(s, a, go); });
  for (const Case& c : cases) {
    where = c.chain;
    PlanRequest request;
    request.dtype = c.dtype;
    request.cols = c.cols;
    request.recipe = recipe(c.recipe);
    request.keep = c.keep;
    request.options.precision = Precision::strict;
    Session s(c.chain, request, c.rows);
    for (const Buffer& b : s.plan.buffers()) {
      if (b.random) {
        if (b.role == Role::rng) s.random(7);
      } else if (b.role == Role::param || b.role == Role::input || b.role == Role::extra_in) {
        s.set(b.name, rounded(normal(s.get(b.name).size(), b.name.size(), 1), b.dtype));
      }
    }
    s.run(Pass::forward);
    s.run(Pass::backward);
  }
  set_observer({});
  check();
  const auto tiles_read_blocks = std::ranges::count_if(calls, [](const Call& c) {
    const auto reads = [](const Load& l) { return l.from == Load::From::block; };
    return std::ranges::any_of(c.step->loads, reads) &&
           !cuda::VectorProgram::refusal(*c.step).empty() &&
           (cuda::TileProgram::refusal(*c.step).empty() ||
            cuda::BlockProgram::refusal(*c.step).empty());
  });
  EXPECT_GE(tiles_read_blocks, 5);
}

// One text with every kind of kernel, for every relevant generation.
TEST(CudaTexts, CompilesForEveryArchitecture) {
  if (const auto why = cuda::why_no_nvrtc())
    FAIL() << *why << "\nrun ./dev test, which installs it";
  const auto all = [](bool totals) {
    StepBuilder build("all", 64, Precision::strict);
    const Expr x = build.load({Load::From::tile, 0, DType::bf16, {}});
    const Expr draw = build.load({.from = Load::From::random, .arg = 0});
    const Expr y = x * rsqrt(totals ? build.total(x * x) : x * x) + draw;
    build.store({Store::To::tile, 0, DType::f16, {}}, y);
    build.store({Store::To::column_sum, 1, DType::f32, {}}, y);
    build.store({Store::To::row_sum, 2, DType::f32, {}}, y);
    build.store({Store::To::sum, 3, DType::f32, {}}, y);
    build.store({Store::To::amax, 4, DType::f32, {}}, y);
    return build.finish();
  };
  std::vector<std::string> texts{cuda::PlainProgram(all(true)).text()};
  Step step = all(false);
  uint32_t out = 5;
  for (const char* name : {"delayed", "mxfp8", "block"}) {
    const Format f = recipe(name).input;
    step.encoders.push_back(
        {.format = f, .cols = 64, .out = out, .columnwise = true, .counts = true});
    step.stores.push_back({.to = Store::To::encoded,
                           .arg = static_cast<uint32_t>(step.encoders.size() - 1),
                           .dtype = f.dtype,
                           .value = step.stores[0].value});
    out += Encoder::outputs;
  }
  const Format f8 = recipe("mxfp8").input;
  step.head =
      Gemm{.a = {.arg = 0, .format = f8}, .b = {.arg = 2, .format = f8}, .cols = 64, .inner = 64};
  texts.push_back(cuda::PlainProgram(step).text());
  StepBuilder vectors("vectors", 64, Precision::native);
  const Expr v = sigmoid(vectors.load({Load::From::tile, 0, DType::f16, {}}));
  vectors.store({Store::To::tile, 0, DType::bf16, {}}, v);
  vectors.store({Store::To::tile, 1, DType::f16, {}}, v);
  vectors.store({Store::To::amax, 2, DType::f32, {}}, v);
  Step quantised = vectors.finish();
  for (const DType d : {DType::e4m3, DType::e5m2}) {
    quantised.encoders.push_back(
        {.format = {.dtype = d, .scaling = Scaling::delayed}, .cols = 64, .out = 3});
    quantised.stores.push_back({.to = Store::To::encoded,
                                .arg = static_cast<uint32_t>(quantised.encoders.size() - 1),
                                .dtype = d,
                                .value = quantised.stores[0].value});
  }
  texts.push_back(cuda::VectorProgram(quantised).text());
  quantised.encoders[0].columnwise = true;
  texts.push_back(cuda::TileProgram(quantised).text());
  quantised.encoders.resize(1);
  quantised.stores.pop_back();
  quantised.encoders[0].format.scaling = Scaling::block1x128;
  texts.push_back(cuda::BlockProgram(quantised).text());
  StepBuilder norm("norm", 4096, Precision::strict);
  const Expr w = norm.load({Load::From::tile, 0, DType::bf16, {}});
  norm.store({Store::To::tile, 0, DType::bf16, {}}, w * rsqrt(norm.total(w * w)));
  texts.push_back(cuda::RowProgram(norm.finish()).text());
  for (const char* arch : {"sm_80", "sm_90a", "sm_100a", "sm_120a"})
    for (const std::string& text : texts)
      EXPECT_GT(cuda::compile(text, arch).image.size(), 100U) << arch;
}

}  // namespace
}  // namespace tenon::test
