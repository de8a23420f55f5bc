// Collects the data of the page from the steps and buffers of a plan.
#include <algorithm>
#include <cmath>

#include "report/html.h"
#include "tenon/error.h"

namespace tenon::page {

namespace {

Shown shown(const PlanData& d, const PlanStep& s, Pass pass, int64_t rows) {
  Shown out{.step = &s,
            .pass = pass,
            .tag = {},
            .bytes = bytes_of(d, s, rows),
            .flops = s.step.flops(s.rows(rows)),
            .chips = {},
            .note = {}};
  const bool backward = pass == Pass::backward;
  // A quantize step that is not an op of the chain quantises for the next op.
  if (s.step.name.starts_with("quantize") && s.ops.size() == 1 &&
      d.chain[s.ops[0]].name != "quantize") {
    out.chips.push_back({"quantize", "quantise for the product that reads it", "move"});
    out.note = str("for ", d.chain[s.ops[0]].name, s.ops[0]);
    return out;
  }
  for (const size_t i : s.ops) {
    const Op& op = d.chain[i];
    out.chips.push_back({str(backward ? "∂" : "", op.label.empty() ? op.name : op.label),
                         str("op ", i, ": ", print_chain(std::span(&op, 1))), kind_of(op.name)});
  }
  if (s.step.gemm() && backward)
    out.note = s.step.gemm()->inner ? "input gradient" : "weight gradient";
  return out;
}

// The tensor of a buffer. Data, transposed data and scales are one tensor.
std::string tensor_of(std::string name) {
  for (const std::string_view end : {".scale_inv", ".t"})
    if (name.ends_with(end)) name.resize(name.size() - end.size());
  return name;
}

// The encodings whose buffers are kept.
Operand kept_part(const PlanData& d, const Kept& k, Operand o) {
  const auto has = [&](const std::string& name) {
    return std::ranges::any_of(
        k.buffers, [&](int b) { return d.buffers[static_cast<size_t>(b)].name == name; });
  };
  o.rowwise = o.rowwise && has(k.name);
  o.columnwise = o.columnwise && has(k.name + ".t");
  return o;
}

bool uses(const std::vector<BufferView>& views, const std::vector<int>& buffers) {
  return std::ranges::any_of(views, [&](const BufferView& s) {
    return s.buffer != kNoBuffer && std::ranges::find(buffers, s.buffer) != buffers.end();
  });
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : valid_utf8(text)) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else if (c == '\'')
      out += "&#39;";
    else if ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f)
      out += "\xef\xbf\xbd";
    else
      out += c;
  }
  return out;
}

std::string short_number(double value) {
  std::string text = fixed(value, 1);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

namespace {

// Formats a count with three digits and a unit.
template <size_t n>
std::string with_unit(int64_t count, double step, const std::array<const char*, n>& units) {
  auto value = static_cast<double>(count);
  size_t unit = 0;
  for (; value >= 999.5 && unit + 1 < n; ++unit) value /= step;
  return str(unit == 0 ? str(count)
                       : fixed(value, value < 9.995   ? 2
                                      : value < 99.95 ? 1
                                                      : 0),
             " ", units[unit]);
}

}  // namespace

std::string bytes_text(int64_t bytes) {
  constexpr std::array kUnits{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  return with_unit(bytes, 1024, kUnits);
}

std::string flops_text(int64_t flops) {
  constexpr std::array kUnits{"FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"};
  return with_unit(flops, 1000, kUnits);
}

std::string percent_text(double share) {
  const double percent = 100 * share;
  if (percent > 0 && percent < 0.1) return "under 0.1\u00a0%";
  return fixed(percent, percent < 9.95 && percent > 0 ? 1 : 0) + "\u00a0%";
}

std::string_view kind_of(std::string_view op) {
  if (op == "linear") return "mul";
  if (op.ends_with("norm")) return "norm";
  for (const std::string_view name : {"quantize", "reshape", "identity", "make_extra_output",
                                      "all_reduce", "all_gather", "reduce_scatter"})
    if (op == name) return "move";
  return "map";
}

Model model_of(const PlanData& d, int64_t rows) {
  Model m{.d = d, .rows = rows, .forward = {}, .backward = {}, .weights = {}};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    std::vector<Shown>& list = pass == Pass::forward ? m.forward : m.backward;
    for (const PlanStep& s : d.steps(pass)) {
      Shown one = shown(d, s, pass, rows);
      std::vector<Shown>& to = s.weights ? m.weights : list;
      one.tag = str(s.weights ? "W" : pass == Pass::forward ? "F" : "B", to.size() + 1);
      if (!s.weights) {
        m.bytes += one.bytes;
        m.flops += one.flops;
      }
      to.push_back(std::move(one));
    }
  }
  return m;
}

std::vector<Kept> kept_of(const Model& m) {
  std::vector<Kept> list;
  for (size_t b = 0; b < m.d.buffers.size(); ++b) {
    const Buffer& buffer = m.d.buffers[b];
    const int id = static_cast<int>(b);
    const std::string name = tensor_of(buffer.name);
    const bool saved = buffer.role == Role::saved;
    const bool given =
        buffer.role == Role::input || buffer.role == Role::extra_in || buffer.role == Role::output;
    if (!saved && !given) continue;
    auto it = std::ranges::find(list, name, &Kept::name);
    if (it == list.end()) {
      Kept k{.name = name,
             .format = std::string(info(buffer.dtype).name),
             .buffers = {},
             .readers = {}};
      if (buffer.random) k.format = "random state";
      k.callers = given;
      it = list.insert(list.end(), std::move(k));
    }
    it->bytes += buffer.bytes(m.rows);
    it->buffers.push_back(id);
  }
  for (Kept& k : list) {
    for (size_t i = 0; i < m.forward.size(); ++i) {
      const PlanStep& s = *m.forward[i].step;
      const bool draws = std::ranges::find(k.buffers, s.random) != k.buffers.end() && s.random >= 0;
      if (k.producer >= 0 || !(uses(s.out, k.buffers) || draws)) continue;
      k.producer = static_cast<int>(i);
      for (const PlanStep::Write& w : s.writes)
        if (w.name == k.name) k.format = format_of(kept_part(m.d, k, w.operand));
    }
    for (size_t i = 0; i < m.backward.size(); ++i) {
      const PlanStep& s = *m.backward[i].step;
      const bool draws = s.random >= 0 && std::ranges::find(k.buffers, s.random) != k.buffers.end();
      if (uses(s.in, k.buffers) || draws) k.readers.push_back(i);
    }
  }
  // Inputs of the caller are listed only if backward reads an input of the forward pass again.
  std::erase_if(list, [&](const Kept& k) {
    const bool forward = std::ranges::any_of(m.forward, [&](const Shown& s) {
      return uses(s.step->in, k.buffers) || uses(s.step->out, k.buffers);
    });
    return k.readers.empty() || (k.callers && !forward);
  });
  return list;
}

}  // namespace tenon::page
