// Describes a plan as stable text and as JSON.
#include "report/describe.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "choice/backends.h"
#include "core/fp_mode.h"
#include "core/text.h"
#include "lower/parameters.h"
#include "runtime/views.h"
#include "tenon/error.h"

namespace tenon {

namespace {

std::string quoted(std::string_view text) { return json_text(valid_utf8(text)); }

template <class List, class F>
std::string joined(const List& list, const char* between, F text) {
  std::string out;
  bool first = true;
  for (const auto& item : list) {
    out += (first ? "" : between) + text(item);
    first = false;
  }
  return out;
}

// The tensor that a view belongs to. The columnwise encoding has its own buffer.
std::string view_name(const PlanData& d, const BufferView& view) {
  std::string name = d.buffers[static_cast<size_t>(view.buffer)].name;
  const bool turned =
      view.orientation == Orientation::columnwise && view.form == BufferView::Form::data;
  if (turned && name.ends_with(".t")) name.resize(name.size() - 2);
  return name;
}

// Marks tensor names while a formula is assembled, because a tensor may have the name of a part.
constexpr char kTensor = '\x01';

// Without the padding that a buffer may have for alignment.
int64_t view_bytes(const BufferView& s, int64_t rows) {
  const auto bytes = [](const Shape& shape, DType d) {
    return shape.rows * shape.cols * info(d).bytes;
  };
  const int64_t m = s.rows(rows);
  switch (s.form) {
    case BufferView::Form::data:
      return bytes(s.format.data_shape(m, s.cols, s.orientation), s.format.dtype);
    case BufferView::Form::scale:
      return bytes(s.format.scale_shape(m, s.cols, s.orientation), info(s.format.scaling).scale);
    case BufferView::Form::scalar:
      return info(DType::f32).bytes;
    case BufferView::Form::none:
      break;
  }
  return 0;
}

std::string view_name(const PlanData& d, const std::vector<BufferView>& views, size_t i) {
  if (i >= views.size() || views[i].buffer == kNoBuffer) return "none";
  return kTensor + view_name(d, views[i]);
}

std::string column_text(const ColumnMap& m) {
  if (m == ColumnMap{}) return "";
  const std::string offset = m.offset ? str("+", m.offset) : "";
  if (m.contiguous()) return str("[c", offset, "]");
  return str("[c/", m.block, "*", m.stride, "+c%", m.block, offset, "]");
}

std::string load_name(const PlanData& d, const PlanStep& s, const Load& l) {
  switch (l.from) {
    case Load::From::product:
      if (l.dtype != DType::f32)
        return str("round(product", column_text(l.columns), ", ", info(l.dtype).name, ")");
      return "product" + column_text(l.columns);
    case Load::From::total:
      return str("total", l.arg);
    case Load::From::random:
      return str("random", l.arg);
    case Load::From::parameter:
      return l.arg < s.parameters.size() ? str(s.parameters[l.arg]) : str("p", l.arg);
    case Load::From::column:
      return view_name(d, s.in, l.arg) + "[r]";
    default:
      return view_name(d, s.in, l.arg) + column_text(l.columns);
  }
}

std::string store_text(const PlanData& d, const PlanStep& s, const Store& to,
                       const std::string& value) {
  if (to.to == Store::To::encoded) {
    const Encoder& e = s.step.encoders[to.arg];
    const std::string name =
        view_name(d, s.out, e.out + (e.rowwise ? Encoder::row_data : Encoder::column_data));
    return str(name, column_text(to.columns), " = quantise(", value, ")");
  }
  const std::string name = view_name(d, s.out, to.arg);
  switch (to.to) {
    case Store::To::column_sum:
      return str(name, column_text(to.columns), " = sum_of_rows(", value, ")");
    case Store::To::row_sum:
      return str(name, "[r] = sum_of_columns(", value, ")");
    case Store::To::sum:
      return str(name, " = sum(", value, ")");
    case Store::To::amax:
      return str(name, " = amax(", value, to.join ? str(", ", name) : "", ")");
    case Store::To::column:
      return str(name, "[r] = ", value);
    default:
      return str(name, column_text(to.columns), " = ", value);
  }
}

// Names formulas that occur several times. One result is often stored, summed and measured.
std::vector<std::string> name_repeats(std::vector<std::string>& formulas, size_t next) {
  std::vector<std::string> named;
  constexpr size_t kMost = 64;  // each one is searched in all others
  if (formulas.size() > kMost) return named;
  for (size_t i = 0; i < formulas.size(); ++i) {
    const std::string text = formulas[i];
    if (text.find_first_of(" (*/") == std::string::npos) continue;
    // Only as a whole or as an argument, where precedence does not matter.
    const auto places = [&](const std::string& in) {
      std::vector<size_t> list;
      for (size_t at = in.find(text); at != std::string::npos; at = in.find(text, at + 1)) {
        const size_t end = at + text.size();
        const bool opens = at == 0 || in[at - 1] == '(' || in.substr(0, at).ends_with(", ");
        const bool closes = end == in.size() || in[end] == ')' || in[end] == ',';
        if (opens && closes) list.push_back(at);
      }
      return list;
    };
    size_t uses = 0;
    for (const std::string& f : formulas) uses += places(f).size();
    if (uses < 2) continue;
    const std::string name = str("v", next + named.size());
    for (std::string& f : formulas) {
      std::vector<size_t> list = places(f);
      for (auto it = list.rbegin(); it != list.rend(); ++it) {
        const size_t at = *it, end = at + text.size();
        // Removes parentheses around the name, except those of a call.
        const bool bare = at > 0 && f[at - 1] == '(' && end < f.size() && f[end] == ')' &&
                          (at == 1 || !(is_letter(f[at - 2]) || is_digit(f[at - 2])));
        f.replace(bare ? at - 1 : at, text.size() + (bare ? 2 : 0), name);
      }
    }
    named.push_back(str(name, " = ", text));
  }
  return named;
}

// The parts of a formula that a line uses: v1, total0.
std::vector<std::string_view> parts_in(std::string_view line) {
  std::vector<std::string_view> list;
  for (size_t i = 0; i < line.size();) {
    if (!is_letter(line[i])) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < line.size() && (is_letter(line[end]) || is_digit(line[end]) || line[end] == '.'))
      ++end;
    const std::string_view word = line.substr(i, end - i);
    const bool tensor = i > 0 && line[i - 1] == kTensor;
    const size_t digits = word.starts_with("total") ? 5 : 1;
    if (!tensor && (word[0] == 'v' || word[0] == 't') && word.size() > digits &&
        std::ranges::all_of(word.substr(digits), is_digit))
      list.push_back(word);
    i = end;
  }
  return list;
}

// Renames t1 to v1, because tensors of the workspace are named t1 too.
void rename_parts(std::string& line) {
  for (const std::string_view part : parts_in(line))
    if (!part.starts_with("total")) line[static_cast<size_t>(part.data() - line.data())] = 'v';
}

// Orders lines `name = …`, so that every part comes before its uses.
std::vector<std::string> in_order(std::vector<std::string> lines) {
  std::vector<std::string> out, missing;
  for (const std::string& line : lines)
    for (const std::string_view part : parts_in(std::string_view(line).substr(0, line.find(" = "))))
      missing.emplace_back(part);
  const auto ready = [&](const std::string& line) {
    return std::ranges::none_of(
        parts_in(std::string_view(line).substr(line.find(" = "))),
        [&](std::string_view part) { return std::ranges::find(missing, part) != missing.end(); });
  };
  while (!lines.empty()) {
    auto it = std::ranges::find_if(lines, ready);
    if (it == lines.end()) it = lines.begin();
    std::erase(missing, it->substr(0, it->find(" = ")));
    out.push_back(std::move(*it));
    lines.erase(it);
  }
  return out;
}

class Describer {
 public:
  Describer(const PlanData& d, int64_t rows, const Speed& speed)
      : d_(d), rows_(rows), speed_(speed) {}

  std::string step(const PlanStep& s, size_t number) const {
    std::string out = str("  ", s.weights ? "w" : str(number), "  ", head_name(s), " ", s.step.name,
                          s.weights ? "  (when the weights changed)" : "", "\n");
    out += "       reads  " +
           joined(reads_of(d_, s), ", ",
                  [](const Read& r) {
                    return str(r.name, r.side == Orientation::columnwise ? ":col" : "");
                  }) +
           "\n";
    out += "       writes " +
           joined(s.writes, ", ",
                  [](const PlanStep::Write& w) {
                    return str(w.name, " (", format_of(w.operand), ")");
                  }) +
           "\n";
    out += str("       maker  ", maker_of(d_, s, rows_), ", ", bytes_of(d_, s, rows_), " bytes");
    if (const int64_t flops = s.step.flops(s.rows(rows_))) out += str(", ", flops, " flops");
    if (const auto floor = floor_us(d_, s, rows_, speed_))
      out += str(", floor ", fixed(*floor, 2), " us");
    out += "\n";
    const auto listed = [](const std::vector<AlternativeStep>& steps, std::string_view maker) {
      return joined(steps, ", then ", [maker](const AlternativeStep& p) {
        const std::string by = p.maker == maker ? "" : str(" by ", p.maker);
        return str(p.head, " ", p.name, by, ", ", p.bytes, " bytes");
      });
    };
    if (const auto steps = steps_of(d_, s, rows_); !steps.empty())
      out += str("       steps  ", listed(steps, maker_of(d_, s, rows_)), "\n");
    for (const Choice::Refused& r : refused_makers(s))
      out += str("       not    ", r.maker, ": ", r.refusal.why, "\n");
    for (const Alternative& a : alternatives(d_, s, rows_))
      out += str("       or     ", a.maker, " ", a.when, ": ", listed(a.steps, a.maker), "\n");
    if (!s.why.empty()) out += "       why    " + s.why + "\n";
    return out;
  }

  std::string pass(const char* title, const std::vector<PlanStep>& steps) const {
    size_t passes = 0;
    for (const PlanStep& s : steps) passes += !s.weights;
    std::string out = str(title, ": ", passes, passes == 1 ? " pass\n" : " passes\n");
    size_t number = 0;
    for (const PlanStep& s : steps) {
      number += !s.weights;
      out += step(s, number);
    }
    return out;
  }

  std::string json_step(const PlanStep& s) const {
    const auto line = [](const std::string& t) { return t; };
    std::string out = str("{\"name\":", quoted(s.step.name), ",\"head\":", quoted(head_name(s)),
                          ",\"ops\":[", joined(s.ops, ",", [](size_t i) { return str(i); }),
                          "],\"maker\":", quoted(maker_of(d_, s, rows_)),
                          ",\"body\":", quoted(joined(body_lines(d_, s), "; ", line)),
                          ",\"reads\":[", joined(reads_of(d_, s), ",", [](const Read& r) {
                            const bool row = r.side == Orientation::rowwise;
                            return quoted(str(r.name, row ? ":row" : ":col"));
                          }));
    out += "],\"writes\":[" + joined(s.writes, ",", [](const PlanStep::Write& w) {
             return str("{\"buffer\":", quoted(w.name),
                        ",\"format\":", quoted(info(w.operand.format.dtype).name),
                        ",\"mode\":", quoted(info(w.operand.format.scaling).name),
                        ",\"orient\":", quoted(orient(w.operand)), "}");
           });
    const std::optional<double> floor = floor_us(d_, s, rows_, speed_);
    out += str("],\"bytes\":", bytes_of(d_, s, rows_), ",\"flops\":", s.step.flops(s.rows(rows_)),
               ",\"floor_us\":", floor ? str(*floor) : "null",
               ",\"when\":", quoted(s.weights ? "weights_changed" : "always"),
               ",\"why\":", quoted(s.why), ",\"refused\":[");
    out += joined(refused_makers(s), ",", [](const Choice::Refused& r) {
      return str("{\"maker\":", quoted(r.maker), ",\"why\":", quoted(r.refusal.why), "}");
    });
    const auto listed = [](const std::vector<AlternativeStep>& steps) {
      return joined(steps, ",", [](const AlternativeStep& p) {
        return str("{\"name\":", quoted(p.name), ",\"head\":", quoted(p.head),
                   ",\"maker\":", quoted(p.maker), ",\"bytes\":", p.bytes, "}");
      });
    };
    out += str("],\"steps\":[", listed(steps_of(d_, s, rows_)), "],\"alternatives\":[");
    out += joined(alternatives(d_, s, rows_), ",", [&](const Alternative& a) {
      return str("{\"maker\":", quoted(a.maker), ",\"when\":", quoted(a.when), ",\"steps\":[",
                 listed(a.steps), "]}");
    });
    return out + "]}";
  }

 private:
  const PlanData& d_;
  int64_t rows_;
  Speed speed_;
};

}  // namespace

std::string_view head_name(const PlanStep& s) {
  return s.opaque ? s.chosen.maker : s.step.head_name();
}

std::string orient(const Operand& o) {
  return str(o.rowwise ? "row" : "", o.columnwise ? "col" : "");
}

std::string format_of(const Operand& o) {
  std::string text(info(o.format.dtype).name);
  if (o.format.scaling != Scaling::none) text += str(" ", info(o.format.scaling).name);
  if (o.format.scaling != Scaling::none || o.columnwise) text += " " + orient(o);
  return text;
}

std::string input_text(const PlanRequest& r) {
  const Operand input =
      r.input_encoding ? operand(*r.input_encoding) : Operand(r.input_dtype.value_or(r.dtype));
  const bool same = input.format == Format{.dtype = r.dtype};
  return str(format_of(input), same ? "" : str(", computed in ", info(r.dtype).name));
}

std::vector<Read> reads_of(const PlanData& d, const PlanStep& s) {
  std::vector<Read> list;
  for (const BufferView& view : s.in) {
    if (view.buffer == kNoBuffer || view.form == BufferView::Form::scale) continue;
    std::string name = view_name(d, view);
    const bool known = std::ranges::any_of(
        list, [&](const Read& r) { return r.name == name && r.side == view.orientation; });
    if (!known) list.push_back({std::move(name), view.buffer, view.orientation});
  }
  if (s.random != kNoBuffer)
    list.push_back({d.buffers[static_cast<size_t>(s.random)].name, s.random});
  return list;
}

std::vector<std::string> body_lines(const PlanData& d, const PlanStep& s) {
  const Step& step = s.step;
  std::vector<std::string> lines;
  if (s.opaque) return lines;
  if (step.gemm()) {
    const auto matrix = [&](const Matrix& m) {
      return view_name(d, s.in, m.arg) + (m.transposed ? ".T" : "");
    };
    lines.push_back(str("product = ", matrix(step.gemm()->a), " @ ", matrix(step.gemm()->b),
                        step.gemm()->fast ? ", accumulate=fast" : ""));
  }
  std::vector<std::string> names;
  for (const Load& l : step.loads) names.push_back(load_name(d, s, l));
  const std::vector<uint32_t> roots = step.roots();
  std::string text = formula_text(*step.graph, roots, names);
  std::vector<std::string> formulas;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    formulas.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  // Shared parts come first, then the roots: stores, then totals.
  const size_t shared = formulas.size() - std::min(formulas.size(), roots.size());
  for (std::string& f : formulas) rename_parts(f);
  const auto first_root = formulas.begin() + static_cast<ptrdiff_t>(shared);
  std::vector<std::string> parts(formulas.begin(), first_root);
  formulas.erase(formulas.begin(), first_root);
  for (std::string& named : name_repeats(formulas, shared + 1)) parts.push_back(std::move(named));
  const size_t stores = step.stores.size();
  for (size_t i = stores; i < formulas.size(); ++i)
    parts.push_back(str("total", i - stores, " = sum_of_columns(", formulas[i], ")"));
  for (std::string& line : in_order(std::move(parts))) lines.push_back(std::move(line));
  for (size_t i = 0; i < std::min(stores, formulas.size()); ++i)
    lines.push_back(store_text(d, s, step.stores[i], formulas[i]));
  for (std::string& line : lines) std::erase(line, kTensor);
  return lines;
}

std::vector<Choice::Refused> refused_makers(const PlanStep& s) {
  std::vector<Choice::Refused> list;
  // The first step of a Split may have the same refusals as the whole step. Each is listed once.
  const auto add = [&](const std::vector<Choice::Refused>& refused) {
    for (const Choice::Refused& r : refused) {
      const bool again = std::ranges::any_of(list, [&](const Choice::Refused& o) {
        return o.maker == r.maker && o.refusal.why == r.refusal.why;
      });
      if (!again && !r.refusal.silent) list.push_back(r);
    }
  };
  add(s.refused);
  if (s.chosen.kernel) add(s.chosen.kernel->refused());
  return list;
}

namespace {

// The call with these rows, at aligned addresses. `f` gets the call and the way that it takes.
template <class F>
void with_call(const PlanData& d, const PlanStep& s, int64_t rows, const F& f) {
  std::vector<View> in, out;
  const RunArgs call = imagined_call(d, s, rows, kAligned, true, in, out);
  f(call, s.chosen.kernel->way(call));
}

// Adds the steps of a way, in order. The steps of a Split may be split again.
void add_steps(const Choice& choice, const Way& way, const Step& step, const std::string& name,
               const RunArgs& call, std::vector<AlternativeStep>& steps) {
  if (way.kernel) {
    steps.push_back({name, step.head_name(), way.maker,
                     step.bytes(call.rows) + way.kernel->extra_bytes(call.rows)});
    return;
  }
  const Split& split = way.halves->split;
  bool first = true;
  choice.each_half(*way.halves, call, [&](const Choice& half, const RunArgs& args) {
    add_steps(half, half.way(args), first ? split.first : split.second,
              first ? str(name, split.suffix) : name, args, steps);
    first = false;
  });
}

}  // namespace

std::string_view maker_of(const PlanData& d, const PlanStep& s, int64_t rows) {
  std::string_view maker = s.chosen.maker;
  if (s.chosen.kernel)
    with_call(d, s, rows, [&](const RunArgs&, const Way& taken) { maker = taken.maker; });
  return maker;
}

std::vector<AlternativeStep> steps_of(const PlanData& d, const PlanStep& s, int64_t rows) {
  std::vector<AlternativeStep> steps;
  if (!s.chosen.kernel) return steps;
  with_call(d, s, rows, [&](const RunArgs& call, const Way& taken) {
    if (taken.halves) add_steps(*s.chosen.kernel, taken, s.step, s.step.name, call, steps);
  });
  return steps;
}

std::vector<Alternative> alternatives(const PlanData& d, const PlanStep& s, int64_t rows) {
  std::vector<Alternative> list;
  if (!s.chosen.kernel) return list;
  const Choice& choice = *s.chosen.kernel;
  with_call(d, s, rows, [&](const RunArgs& call, const Way& taken) {
    int64_t least = 0;
    bool picky = false;
    const Way* before = nullptr;
    for (const Way& w : choice.ways()) {
      // Kernels of one maker are variants for some calls.
      const auto variant_of = [&](const Way* other) {
        return other && w.kernel && other->kernel && w.maker == other->maker;
      };
      const bool shown = !variant_of(std::exchange(before, &w)) && !variant_of(&taken);
      const bool earlier = &w < &taken;  // this call does not take it
      if (shown && &w != &taken && (earlier || least > 0 || picky)) {
        Alternative& a = list.emplace_back();
        a.maker = w.maker;
        if (earlier)
          a.when = w.least_rows > call.rows ? str("from ", w.least_rows, " rows")
                                            : "where the sizes fit";
        else if (least > 0)
          a.when = str("below ", least, " rows");
        if (picky && !earlier)
          a.when += str(a.when.empty() ? "" : ", or ", "where addresses or sizes do not fit");
        add_steps(choice, w, s.step, s.step.name, call, a.steps);
      }
      least = w.least_rows > 0 ? std::max(least, w.least_rows) : 0;
      picky = picky || !w.fits_all;
    }
  });
  return list;
}

std::string target_text(const PlanData& d) {
  if (!d.request.target.empty()) return str("target ", d.target->name, ", ");
  // The target of this machine is not in the table.
  if (is_target(d.target->name) && d.target == &named_target(d.target->name))
    return str("target ", d.target->name, " (no GPU is here), ");
  return "";
}

int64_t bytes_of(const PlanData& d, const PlanStep& s, int64_t rows) {
  int64_t total = 0;
  for (const AlternativeStep& part : steps_of(d, s, rows)) total += part.bytes;
  if (total > 0) return total;
  if (s.chosen.kernel)
    with_call(d, s, rows, [&](const RunArgs& call, const Way& taken) {
      if (taken.kernel) total = taken.kernel->extra_bytes(call.rows);
    });
  if (s.random != kNoBuffer) total += d.buffers[static_cast<size_t>(s.random)].bytes(rows);
  for (const auto* list : {&s.in, &s.out}) {
    std::set<int> counted;  // a product's operand may also be a load
    for (const BufferView& view : *list)
      if (view.buffer != kNoBuffer && counted.insert(view.buffer).second)
        total += view_bytes(view, rows);
  }
  return total;
}

std::optional<double> floor_us(const PlanData& d, const PlanStep& s, int64_t rows,
                               const Speed& speed) {
  if (!(speed.gbps > 0)) return std::nullopt;
  double least = static_cast<double>(bytes_of(d, s, rows)) / speed.gbps * 1e-3;
  if (speed.gflops > 0) {
    const auto flops = static_cast<double>(s.step.flops(s.rows(rows)));
    // The rate is for 16-bit operands. 8-bit operands are at most twice as fast.
    const Gemm* const g = s.step.gemm();
    const auto narrow = [](const Matrix& m) { return info(m.format.dtype).bytes == 1; };
    const bool fast = g && narrow(g->a) && narrow(g->b) && d.target->fp8_products();
    const double rate = fast ? 2 * speed.gflops : speed.gflops;
    least = std::max(least, flops / rate * 1e-3);
  }
  return std::isfinite(least) ? std::optional(least) : std::nullopt;
}

std::string valid_utf8(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) {
      return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0U;
    };
    const unsigned lead = byte(0);
    const size_t length = lead < 0x80                    ? 1
                          : lead >= 0xc2 && lead <= 0xdf ? 2
                          : lead >= 0xe0 && lead <= 0xef ? 3
                          : lead >= 0xf0 && lead <= 0xf4 ? 4
                                                         : 0;
    bool good = length > 0;
    for (size_t k = 1; k < length; ++k) good = good && (byte(k) & 0xc0) == 0x80;
    // Rejects overlong forms, surrogates and code points above the last plane.
    if (lead == 0xe0) good = good && byte(1) >= 0xa0;
    if (lead == 0xed) good = good && byte(1) < 0xa0;
    if (lead == 0xf0) good = good && byte(1) >= 0x90;
    if (lead == 0xf4) good = good && byte(1) < 0x90;
    out += good ? text.substr(i, length) : std::string_view("\xef\xbf\xbd");
    i += good ? length : 1;
  }
  return out;
}

std::string fixed(double value, int digits) {
  std::array<char, 400> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::fixed, digits)
                       .ptr;
  return {buffer.data(), end};
}

std::string Plan::describe(int64_t rows, const Speed& speed) const {
  const FpMode ieee;
  check_rows(rows);
  const PlanData& d = *data_;
  const PlanRequest& r = d.request;
  const Describer text(d, rows, speed);
  std::string out = str("chain   ", print_chain(d.chain), "\n");
  out += str("input   ", rows, " x ", r.cols, " ", input_text(r), ", recipe ", r.recipe.name, ", ",
             kDevices[static_cast<size_t>(r.options.device)], ", ", target_text(d),
             kPrecisions[static_cast<size_t>(r.options.precision)], ", ",
             kRoundings[static_cast<size_t>(r.options.rounding)], "\n\n");
  out += text.pass("forward", d.forward);
  if (!d.backward.empty()) out += "\n" + text.pass("backward", d.backward);
  for (size_t b = 0; b < d.buffers.size(); ++b)
    if (const size_t of = owner(b); of != b)
      out += str(d.backward.empty() ? "\n" : "", "  ", d.buffers[b].name, " is ",
                 d.buffers[of].name, ", not written\n");
  out += str("\nsaved   ", saved_bytes(rows), " bytes\n");
  for (const Buffer& b : d.buffers)
    if (b.role == Role::saved) out += str("  ", b.name, "  ", b.bytes(rows), "\n");
  // Weights that the forward pass encodes or casts, also for the backward pass.
  const std::vector<BufferUse> used = uses();
  for (size_t b = 0; b < d.buffers.size(); ++b) {
    const Buffer& buffer = d.buffers[b];
    const bool kept = used[b].writes[0] && used[b].reads[1] && !used[b].writes[1];
    if (buffer.role == Role::state && kept)
      out += str("  ", buffer.name, "  ", buffer.bytes(rows), ", of the weights\n");
  }
  const PlanRun aligned{.aligned = true};
  int64_t least = workspace_bytes(rows, Pass::forward, aligned);
  if (d.has_backward) least = std::max(least, workspace_bytes(rows, Pass::backward, aligned));
  const int64_t most = workspace_bytes(rows);
  out +=
      str("workspace ", least, " bytes",
          most == least ? "" : str(", ", most, " if addresses are no multiples of ", kCallAligned),
          "\n");
  return out;
}

std::string Plan::json(int64_t rows, const Speed& speed) const {
  const FpMode ieee;
  check_rows(rows);
  const PlanData& d = *data_;
  const PlanRequest& r = d.request;
  const Describer text(d, rows, speed);
  const auto step = [&](const PlanStep& s) { return text.json_step(s); };
  std::string out = str(
      "{\"format\":1,\"tenon\":", quoted(TENON_VERSION),
      ",\"chain\":", quoted(print_chain(d.chain)), ",\"dtype\":", quoted(info(r.dtype).name),
      ",\"recipe\":", quoted(r.recipe.name),
      ",\"device\":", quoted(kDevices[static_cast<size_t>(r.options.device)]),
      ",\"target\":", quoted(d.target->name), ",\"rows\":", rows,
      ",\"options\":{\"precision\":", quoted(kPrecisions[static_cast<size_t>(r.options.precision)]),
      ",\"rounding\":", quoted(kRoundings[static_cast<size_t>(r.options.rounding)]), "}");
  const auto same_as = [&](const Buffer& b) -> std::string {
    const auto number = static_cast<size_t>(&b - d.buffers.data());
    const size_t of = owner(number);
    return of == number ? "" : str(",\"same_as\":", quoted(d.buffers[of].name));
  };
  out += str(",\n\"forward\":[", joined(d.forward, ",\n", step), "],\n\"backward\":[",
             joined(d.backward, ",\n", step), "],\n\"buffers\":[");
  out += joined(d.buffers, ",\n", [&](const Buffer& b) {
    return str("{\"name\":", quoted(b.name),
               ",\"role\":", quoted(kRoles[static_cast<size_t>(b.role)]),
               ",\"dtype\":", quoted(b.random ? "u64" : info(b.dtype).name), ",\"rows\":[",
               b.rows.mul, ",", b.rows.div, ",", b.rows.round, ",", b.rows.add,
               "],\"cols\":", b.cols, ",\"inner\":", quoted(b.rows_inside ? "rows" : "cols"),
               ",\"bytes\":", b.bytes(rows), same_as(b), "}");
  });
  out += str("],\n\"saved_bytes\":", saved_bytes(rows),
             ",\"workspace_bytes\":", workspace_bytes(rows), "}\n");
  return out;
}

}  // namespace tenon
