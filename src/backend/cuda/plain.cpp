// Chooses the kernels of a step and sets their arguments.
#include "backend/cuda/plain.h"

#include <algorithm>

#include "backend/cuda/body.h"
#include "backend/cuda/eight.h"
#include "backend/cuda/nvrtc.h"
#include "backend/cuda/skeletons.h"
#include "core/scaling.h"
#include "expr/print.h"
#include "step/split.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarp = 32;
constexpr int64_t kMostBlocks = 1 << 15;  // threads loop over the rest
constexpr int64_t kSumRows = 128, kSumElements = 256;
constexpr size_t kAlignment = 64;

// The input from an earlier kernel and the output for a later one.
struct Memory {
  float* from = nullptr;
  float* to = nullptr;
  int64_t count = 0;
};

bool turned(const Encoder& e, Orientation o) {
  return o == Orientation::columnwise && info(e.format.scaling).transposes;
}
// Counts each element once: in the rowwise encoding if there is one.
bool counts(const Encoder& e, Orientation o) {
  return e.counts && (o == Orientation::rowwise || !e.rowwise);
}

std::string side_text(const char* name, const Matrix& m, bool k_first, size_t at) {
  const Blocks b = m.format.blocks(m.orientation);
  const bool scaled = m.format.scaling != Scaling::none;
  return str("struct ", name, " {\n  using Format = ", format(m.format.dtype),
             ";\n  using Scale = ", format(info(m.format.scaling).scale),
             ";\n  static constexpr int kPlace = ", at, ", kBlockRows = ", b.rows,
             ", kBlockCols = ", b.cols, ";\n  static constexpr bool kFirst = ", flag(k_first),
             ", kTurned = ", flag(m.codes_transposed()), ", kSingle = ", flag(scaled && b.single()),
             ", kScalesTurned = ", flag(b.transposed), ", kSwizzled = ", flag(m.format.swizzled),
             ", kRowwise = ", flag(m.orientation == Orientation::rowwise), ";\n};\n");
}

// value(): selects the store that computes a column of the tensor.
std::string encoder_text(const Step& step, size_t number) {
  std::string value;
  for (const size_t k : stores_to(step, Store::To::encoded))
    if (step.stores[k].arg == number)
      value += str("    if (tenon_unmapped(a.at[Body::kLoads + ", k,
                   "], a.cols, column, step))\n      return tenon_value<Body, ", k,
                   ">(a, row, step);\n");
  return str(scaling_text(step, number), "struct Encoder", number, " : Scaling", number,
             " {\n  template <class A>\n  __device__ static float value(const A& a, TenonI64 row, "
             "TenonI64 column) {\n    TenonI64 step = 0;\n",
             value, "    return 0.0f;\n  }\n};\n");
}

}  // namespace

// Walks over a step in one order, to write its text or to list the launches of a call.
class PlainProgram::Writer {
 public:
  explicit Writer(const Step& step) : step_(step), writes_(true) {}
  Writer(const Step& step, const RunArgs& args)
      : step_(step), args_(&args), memory_(static_cast<std::byte*>(args.workspace)) {
    begin(args.rows);
  }
  Writer(const Step& step, int64_t rows) : step_(step) { begin(rows); }

  void walk() {
    prepare_places();
    if (step_.gemm()) return product();
    totals();
    for (size_t k = 0; k < step_.stores.size(); ++k) store(k);
    for (size_t e = 0; e < step_.encoders.size(); ++e) encoder(e);
    if (!stores_to(step_, Store::To::tile).empty())
      kernel("tiles", "<Body>", rows_ * step_.cols, kThreads);
  }

  [[nodiscard]] size_t used() const { return used_; }
  std::string text;
  std::vector<std::string> entries;
  int64_t bodies = 0;  // kernels that compute the body, each from the loads
  std::vector<Launch> all;

 private:
  void begin(int64_t given) {
    rows_ = step_.body_rows(given);
    inner_ = step_.gemm() ? step_.gemm()->inner_for(given) : 0;
  }

  void prepare_places() {
    places_.assign(step_.encoders.size() * kEncoderPlaces + (step_.gemm() ? 4 : 0), {});
    if (writes_ && step_.gemm()) {
      const size_t at = step_.encoders.size() * kEncoderPlaces;
      text += side_text("SideA", step_.gemm()->a, step_.gemm()->a.transposed, at);
      text += side_text("SideB", step_.gemm()->b, !step_.gemm()->b.transposed, at + 2);
    }
    for (size_t e = 0; writes_ && e < step_.encoders.size(); ++e) text += encoder_text(step_, e);
    if (!args_) return;
    for (size_t e = 0; e < step_.encoders.size(); ++e)
      std::ranges::copy(encoder_places(step_.encoders[e], *args_),
                        places_.begin() + static_cast<int64_t>(e * kEncoderPlaces));
    for (const Load& l : step_.loads) accesses_.push_back(load_access(l, *args_));
    for (const Store& s : step_.stores)
      accesses_.push_back(s.to == Store::To::encoded ? access({}, s.columns)
                                                     : access(args_->out[s.arg], s.columns));
    if (!step_.gemm()) return;
    size_t at = step_.encoders.size() * kEncoderPlaces;
    for (const Matrix* m : {&step_.gemm()->a, &step_.gemm()->b}) {
      places_[at] = place(args_->in[m->arg]);
      if (m->format.scaling != Scaling::none) places_[at + 1] = place(args_->in[m->arg + 1]);
      at += 2;
    }
  }

  float* take(int64_t floats) {
    float* const here = memory_ ? reinterpret_cast<float*>(memory_ + used_) : nullptr;
    used_ += static_cast<size_t>(rup(floats * static_cast<int64_t>(sizeof(float)), kAlignment));
    return here;
  }

  // Adds a kernel with its own name. The text calls tenon_<what><template arguments>.
  void kernel(const std::string& what, const std::string& with, int64_t work, unsigned threads,
              const Memory& m = {}) {
    const size_t number = entries.size();
    entries.push_back(str("tenon_plain_", number));
    bodies += with.starts_with("<Body");
    if (writes_)
      text += str("extern \"C\" __global__ void ", entries.back(),
                  "(const __grid_constant__ Arguments a) {\n  tenon_", what, with, "(a);\n}\n");
    if (!args_ || work <= 0) return;
    const int64_t wanted = threads == kWarp ? work : cdiv(work, threads);
    const TenonPlainHead head{rows_,  step_.cols, inner_, random_state(*args_),
                              m.from, m.to,       m.count};
    all.push_back(launch_of(number, std::clamp<int64_t>(wanted, 1, kMostBlocks), threads, head,
                            accesses_, places_));
  }

  // Sets the address of the loads of a total to the output of an earlier kernel.
  void point(uint32_t total, float* data) {
    if (!args_) return;
    for (size_t i = 0; i < step_.loads.size(); ++i) {
      const Load& l = step_.loads[i];
      if (l.from != Load::From::total || l.arg != total) continue;
      accesses_[i] = access({}, l.columns);
      accesses_[i].data = reinterpret_cast<TenonU8*>(data);
      accesses_[i].stride = 1;
    }
  }

  void product() {
    constexpr int64_t kTile = 64;
    const std::string to = format(step_.stores[0].dtype);
    kernel("product_tiles", str("<SideA, SideB, ", to, ", ", step_.loads.size(), ">"),
           cdiv(rows_, kTile) * cdiv(step_.cols, kTile) * kThreads, kThreads);
  }

  // A total reads the totals before it. Memory is assigned first: a kernel may load unused totals.
  void totals() {
    std::vector<float*> to;
    for (uint32_t t = 0; t < step_.totals().size(); ++t) {
      to.push_back(take(rows_));
      point(t, to[t]);
    }
    for (size_t t = 0; t < to.size(); ++t)
      kernel("totals", str("<Body, ", step_.stores.size() + t, ">"), rows_, kWarp,
             {nullptr, to[t], 0});
  }

  void store(size_t k) {
    const Store& s = step_.stores[k];
    const std::string of = str("<Body, ", k);
    const std::string as = str(", ", format(s.dtype), ">");
    switch (s.to) {
      case Store::To::tile:
      case Store::To::encoded:
        return;
      case Store::To::column:
        return kernel("columns", of + as, rows_, kThreads);
      case Store::To::row_sum:
        return kernel("row_sums", of + as, rows_, kWarp);
      case Store::To::column_sum: {
        const int64_t blocks = cdiv(rows_, kSumRows);
        float* const parts = take(blocks * step_.cols);
        kernel("column_parts", str(of, ", ", flag(s.ordered), ">"), blocks * step_.cols, kThreads,
               {nullptr, parts, blocks * step_.cols});
        return kernel("column_sums", of + as, step_.cols, kThreads, {parts, nullptr, blocks});
      }
      case Store::To::sum:
        return sum(of, as);
      case Store::To::amax: {
        float* const most = take(1);
        kernel("clear", "", 1, kThreads, {nullptr, most, 1});
        kernel("amax_parts", of + ">", rows_ * step_.cols, kThreads, {nullptr, most, 0});
        return kernel("amax_end", str(of, ", ", flag(s.join), ">"), 1, kThreads,
                      {most, nullptr, 0});
      }
    }
  }

  // One kernel serves all levels after the first.
  void sum(const std::string& of, const std::string& as) {
    int64_t n = cdiv(rows_ * step_.cols, kSumElements);
    float* parts = take(std::max<int64_t>(n, 1));
    float* more = take(std::max<int64_t>(cdiv(n, kSumElements), 1));
    kernel("sum_parts", of + ">", n, kThreads, {nullptr, parts, n});
    kernel("sum_more", "", n > 1 ? cdiv(n, kSumElements) : 0, kThreads, {parts, more, n});
    // Levels alternate between two buffers. A level has at most 1/256 of the values of the previous
    // one.
    if (n > 1) {
      for (n = cdiv(n, kSumElements), std::swap(parts, more); n > 1;
           n = cdiv(n, kSumElements), std::swap(parts, more))
        if (args_) {
          Launch again = all.back();
          auto* head = reinterpret_cast<TenonPlainHead*>(again.arguments.data());
          head->from = parts;
          head->to = more;
          head->count = n;
          all.push_back(std::move(again));
        }
    }
    kernel("sum_end", of + as, 1, kThreads, {parts, nullptr, n});
  }

  void encoder(size_t number) {
    const Encoder& e = step_.encoders[number];
    const std::string name = str("Encoder", number);
    const int64_t elements = rows_ * e.cols;
    float* health = nullptr;
    constexpr int64_t kHealthWords = 6;  // three 64-bit numbers
    if (e.counts) {
      health = take(kHealthWords);
      kernel("clear", "", kHealthWords, kThreads, {nullptr, health, kHealthWords});
    }
    for (const Orientation o : kOrientations) {
      const Blocks b = e.format.blocks(o);
      const bool rowwise = o == Orientation::rowwise;
      if (e.has(o)) {
        const std::string with = str("<Body, ", name, ", ", flag(rowwise), ", ", flag(turned(e, o)),
                                     ", ", flag(counts(e, o)));
        if (b.single())
          kernel("encode_elements", with + ">", elements, kThreads, {nullptr, health, 0});
        else
          kernel("encode_blocks",
                 str(with, ", ", b.rows, ", ", b.cols, ", ", flag(b.transposed), ">"),
                 cdiv(rows_, b.rows) * cdiv(e.cols, b.cols), kWarp, {nullptr, health, 0});
      }
      // Either encoding may hold a single scale.
      if (info(e.format.scaling).scales(1, 1, o).rows == 0 || (!b.single() && !e.has(o))) continue;
      const View v = args_ ? args_->out[e.scale_inv(o)] : View{};
      kernel("encode_end",
             str("<", name, ", ", flag(rowwise), ", ", b.rows, ", ", b.cols, ", ",
                 flag(b.transposed), ">"),
             v.rows * v.cols, kThreads);
    }
    if (e.counts) kernel("health_end", str("<", name, ">"), 1, kThreads, {health, nullptr, 0});
  }

  const Step& step_;
  bool writes_ = false;
  const RunArgs* args_ = nullptr;
  int64_t rows_ = 0, inner_ = 0;
  std::vector<TenonAccess> accesses_;
  std::vector<TenonPlace> places_;
  std::byte* memory_ = nullptr;
  size_t used_ = 0;
};

PlainProgram::PlainProgram(const Step& step) : step_(step) {
  Writer w(step_);
  w.walk();
  entries_ = w.entries;
  bodies_ = w.bodies;
  const char* const at = "const TenonAccess* at, ";
  const char* const element = "TenonI64 row, TenonI64 column, ";
  text_ = str(
      plain_skeletons(), "struct Body {\n  static constexpr int kLoads = ", step.loads.size(),
      ", kRoots = ", step.stores.size() + step.totals().size(), ";\n  __device__ static void load(",
      at, "const TenonU64* random, ", element, "float* in) {\n", indented(load_lines(step)),
      "  }\n  __device__ static void compute(const float* in, float* out) {\n",
      indented(compute_lines(step)), "  }\n  __device__ static void store(", at, element,
      "const float* out) {\n", indented(store_lines(step)), "  }\n};\n",
      arguments_text("TenonPlainHead", step.loads.size() + step.stores.size(),
                     step.encoders.size() * kEncoderPlaces + (step.gemm() ? 4 : 0)),
      w.text);
  // Many small kernels that are not tuned: compile fast. Products would become too slow.
  if (!step.gemm()) text_ += kCompileFast;
}

size_t PlainProgram::workspace(int64_t rows) const {
  Writer w(step_, rows);
  w.walk();
  return w.used();
}

int64_t PlainProgram::extra_bytes(int64_t rows) const {
  Step loads = step_;
  loads.stores.clear();
  loads.encoders.clear();
  const int64_t again = std::max<int64_t>(bodies_ - 1, 0) * loads.bytes(rows);
  return Program::extra_bytes(rows) + again;
}

std::vector<Launch> PlainProgram::launches(const RunArgs& args) const {
  Writer w(step_, args);
  w.walk();
  return std::move(w.all);
}

Attempt make_plain(const Step& step, const Target& /*target*/) {
  if (step.gemm() && !is_bare_product(step))
    return split_after_product(step, [](const Step&, DType) { return true; });
  const size_t bytes = sizeof(TenonPlainHead) +
                       (step.loads.size() + step.stores.size() + 1) * sizeof(TenonAccess) +
                       (step.encoders.size() * kEncoderPlaces + 4) * sizeof(TenonPlace);
  if (bytes > kArgumentBytes)
    return Refusal{str(step.loads.size() + step.stores.size(),
                       " loads and stores; a kernel's arguments hold fewer")};
  return kernel_of(step.name, std::make_unique<PlainProgram>(step));
}

}  // namespace tenon::cuda
