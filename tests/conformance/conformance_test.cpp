// Tests every strict step of the conformance cases bit by bit against scalar references: functions
// of tests/accuracy, an independent tree sum, and quantize_reference.h.
#include <atomic>
#include <mutex>
#include <thread>

#include "accuracy/reference.h"
#include "support/quantize_reference.h"
#include "support/support.h"
#include "support/trial.h"
#include "support/verify.h"
#include "support/verify_encoded.h"

namespace tenon::test {
namespace {

using support::Case;
using support::Trial;
using Problem = std::optional<std::string>;

float tree(std::vector<float> v) {
  if (v.empty()) return 0;
  while (v.size() > 1) {
    std::vector<float> next;
    for (size_t i = 0; i + 1 < v.size(); i += 2) next.push_back(v[i] + v[i + 1]);
    if (v.size() % 2) next.push_back(v.back());
    v = std::move(next);
  }
  return v[0];
}

// Sums in the order of the gradients of gamma and beta.
float ordered(const std::vector<float>& v) {
  std::vector<float> blocks;
  for (size_t i = 0; i < v.size(); ++i) {
    if (i % 32 == 0)
      blocks.push_back(v[i]);
    else
      blocks.back() += v[i];
  }
  return tree(std::move(blocks));
}

// Equal bits after one rounding. All NaNs are equal.
Problem compare(const View& out, int64_t r, int64_t c, float value, std::string_view what) {
  const float got = decode(out.dtype, code_at(out, r * out.stride + c));
  const float want = accuracy::scalar::round_to(value, out.dtype);
  if (bits(got) == bits(want) || (std::isnan(got) && std::isnan(want))) return std::nullopt;
  return str(what, " (", r, ", ", c, ") is ", got, ", reference ", want);
}

// The contents of a view, row by row.
std::vector<uint8_t> dense(const View& v) {
  const int64_t size = info(v.dtype).bytes;
  std::vector<uint8_t> out(static_cast<size_t>(v.rows * v.cols * size));
  for (int64_t r = 0; r < v.rows && v.cols > 0; ++r)
    std::memcpy(out.data() + r * v.cols * size,
                static_cast<const uint8_t*>(v.data) + r * v.stride * size,
                static_cast<size_t>(v.cols * size));
  return out;
}

Problem differs(const View& v, const std::vector<uint8_t>& want, std::string_view what) {
  const std::vector<uint8_t> got = dense(v);
  if (got == want) return std::nullopt;
  size_t i = 0;
  while (i < std::min(got.size(), want.size()) && got[i] == want[i]) ++i;
  return str(what, ": byte ", i, " of ", want.size(), " differs");
}

Problem check_encoder(const Encoder& e, const RunArgs& args, const std::vector<float>& values) {
  const int64_t m = args.rows;
  Problem wrong;
  if (e.format.scaling == Scaling::none) {
    const View& out = args.out[e.data(Orientation::columnwise)];
    for (int64_t r = 0; r < m && !wrong; ++r)
      for (int64_t c = 0; c < e.cols && !wrong; ++c)
        wrong = compare(out, c, r, values[static_cast<size_t>(r * e.cols + c)], "transposed");
    return wrong;
  }
  Spec spec{.dtype = e.format.dtype,
            .mode = e.format.scaling,
            .row = e.rowwise,
            .column = e.columnwise,
            .eps = e.format.eps,
            .pow2 = e.format.power_of_two,
            .swizzled = e.format.swizzled};
  if (ref::single(spec.mode)) {
    float given = 0;
    std::memcpy(&given, args.in[e.scale].data, sizeof given);
    if (ref::mode_of(spec.mode).given)
      spec.scale = given;
    else if (const float most = from_bits(ref::amax_of(values.data(), m, e.cols));
             bits(given) != bits(most) && !(std::isnan(given) && std::isnan(most)))
      return str("current: the amax is ", given, ", not that of the values");
  }
  const Quantised want = quantise_ref(spec, values, m, e.cols);
  for (const Orientation o : kOrientations) {
    if (!e.has(o) || wrong) continue;
    const SideBytes& side = o == Orientation::rowwise ? want.row : want.column;
    wrong = differs(args.out[e.data(o)], side.data, spec.text() + " data");
    if (!wrong) wrong = differs(args.out[e.scale_inv(o)], side.scales, spec.text() + " scales");
  }
  if (e.counts && !wrong) {
    const std::array<uint64_t, 3> counts{want.saturated, want.flushed, want.nonfinite};
    for (int64_t i = 0; i < 3; ++i)
      if (!wrong)
        wrong = compare(args.out[e.out + Encoder::health], 0, i,
                        static_cast<float>(counts[static_cast<size_t>(i)]), "health");
  }
  return wrong;
}

Problem check_store(const Step& step, const Store& s, const RunArgs& args,
                    const std::vector<float>& v) {
  const int64_t rows = args.rows;
  const int64_t cols = step.cols;
  const auto at = [&](int64_t r, int64_t c) { return v[static_cast<size_t>(r * cols + c)]; };
  Problem wrong;
  const auto expect = [&](int64_t r, int64_t c, float value) {
    if (!wrong)
      wrong = compare(args.out[s.arg], r, c, value, kStoreNames[static_cast<size_t>(s.to)]);
  };
  switch (s.to) {
    case Store::To::tile:
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < cols; ++c) expect(r, s.columns(c), at(r, c));
      break;
    case Store::To::column_sum:
      for (int64_t c = 0; c < cols; ++c) {
        std::vector<float> column;
        for (int64_t r = 0; r < rows; ++r) column.push_back(at(r, c));
        expect(0, s.columns(c), s.ordered ? ordered(column) : tree(std::move(column)));
      }
      break;
    case Store::To::row_sum:
      for (int64_t r = 0; r < rows; ++r)
        expect(r, 0, tree({v.begin() + r * cols, v.begin() + (r + 1) * cols}));
      break;
    case Store::To::sum:
      expect(0, 0, tree(v));
      break;
    case Store::To::amax: {
      uint32_t most = s.join ? bits(0.25F) : 0;  // initial value of the slot in a trial
      for (const float x : v) most = std::max(most, bits(x) & 0x7fffffffU);
      expect(0, 0, from_bits(most));
      break;
    }
    case Store::To::encoded:
      break;
    case Store::To::column:
      for (int64_t r = 0; r < rows && cols > 0; ++r) expect(r, 0, at(r, 0));
      break;
  }
  return wrong;
}

std::atomic<size_t> strict_steps = 0;

Problem check_step(const Step& step, const RunArgs& args) {
  if (!step.strict_bits()) return std::nullopt;
  ++strict_steps;
  const auto n = static_cast<size_t>(args.rows * step.cols);
  std::vector<std::vector<float>> loads;
  std::vector<accuracy::Column> columns;
  for (const Load& l : step.loads) {
    std::vector<float>& values = loads.emplace_back();
    for (int64_t r = 0; r < args.rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c) values.push_back(load_element(l, args, r, c));
  }
  for (const auto& values : loads) columns.push_back({values.data()});
  std::vector<std::vector<float>> results;
  // Totals in order: a later total may read earlier ones.
  for (uint32_t t = 0; t < step.totals().size(); ++t) {
    accuracy::Reference(*step.graph, std::span(&step.totals()[t], 1)).run(n, columns, results);
    for (size_t i = 0; i < step.loads.size(); ++i) {
      if (step.loads[i].from != Load::From::total || step.loads[i].arg != t) continue;
      for (int64_t r = 0; r < args.rows; ++r) {
        const auto first = results[0].begin() + r * step.cols;
        std::fill_n(loads[i].begin() + r * step.cols, step.cols, tree({first, first + step.cols}));
      }
    }
  }
  accuracy::Reference(*step.graph, step.roots()).run(n, columns, results);

  std::vector<std::vector<float>> tensors;
  for (const Encoder& e : step.encoders)
    tensors.emplace_back(static_cast<size_t>(args.rows * e.cols));
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    if (Problem wrong = check_store(step, s, args, results[k])) return wrong;
    if (s.to != Store::To::encoded) continue;
    for (int64_t r = 0; r < args.rows; ++r)
      for (int64_t c = 0; c < step.cols; ++c)
        tensors[s.arg][static_cast<size_t>(r * step.encoders[s.arg].cols + s.columns(c))] =
            results[k][static_cast<size_t>(r * step.cols + c)];
  }
  for (size_t i = 0; i < step.encoders.size(); ++i)
    if (Problem wrong = check_encoder(step.encoders[i], args, tensors[i])) return wrong;
  return std::nullopt;
}

TEST(Conformance, StrictStepsHaveTheBitsOfTheScalarReferences) {
  std::vector<Case> list = support::cases();
  std::erase_if(list, [](const Case&) { return !chosen(); });
  std::atomic<size_t> next = 0;
  std::mutex reporting;
  const auto work = [&] {
    for (size_t i = next++; i < list.size(); i = next++) {
      const Problem wrong = Trial(list[i], Device::cpu).run(check_step);
      const std::lock_guard guard(reporting);
      if (wrong) ADD_FAILURE() << list[i].text() << ": " << *wrong;
    }
  };
  std::thread other(work);
  work();
  other.join();
  EXPECT_GE(strict_steps, list.size() / 2);
  RecordProperty("strict_steps", static_cast<int>(strict_steps));
}

}  // namespace
}  // namespace tenon::test
