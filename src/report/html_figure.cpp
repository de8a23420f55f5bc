// Draws the figure of a plan. Coordinates are pixels; text widths are those of a monospaced font.
#include <algorithm>
#include <map>

#include "report/html.h"
#include "tenon/error.h"

namespace tenon::page {

namespace {

constexpr double kCard = 306, kBetween = 284, kGutter = 32;
constexpr double kPad = 14, kPill = 34, kGap = 30;
constexpr double kChipHeight = 22, kChipLetter = 7.25, kLineHeight = 18, kLineLetter = 6.9;
constexpr double kKept = 196, kKeptHeight = 42, kKeptGap = 10;

std::string num(double v) { return short_number(v); }

// The number of characters of a UTF-8 text.
size_t letters(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned>(c) & 0xc0) != 0x80; }));
}

std::string cut_to(std::string text, size_t most) {
  if (letters(text) <= most) return text;
  size_t at = 0;
  for (size_t n = 0; at < text.size() && n < most; ++n) do
      ++at;
    while (at < text.size() && (static_cast<unsigned>(text[at]) & 0xc0) == 0x80);
  return text.substr(0, at) + "…";
}

std::string text_at(double x, double y, std::string_view classes, std::string_view text) {
  return str("<text x=\"", num(x), "\" y=\"", num(y), "\" class=\"", classes, "\">", escaped(text),
             "</text>");
}

std::string box(double x, double y, double w, double h, double r, std::string_view classes) {
  return str("<rect x=\"", num(x), "\" y=\"", num(y), "\" width=\"", num(w), "\" height=\"", num(h),
             "\" rx=\"", num(r), "\" class=\"", classes, "\"/>");
}

std::string path(const std::string& d, std::string_view classes) {
  return str("<path d=\"", d, "\" class=\"", classes, "\"/>");
}

std::string tip(std::string_view text) { return str("<title>", escaped(text), "</title>"); }

// An arrow head with its tip at (x, y). It points down, up, left or right.
std::string arrow_head(double x, double y, char to, std::string_view classes) {
  const std::string_view shape = to == 'd'   ? "l-4-7h8z"
                                 : to == 'u' ? "l-4 7h8z"
                                 : to == 'r' ? "l-7-4v8z"
                                             : "l7-4v8z";
  return path(str("M", num(x), " ", num(y), shape), classes);
}

struct Line {
  std::string name, format;
  std::string_view role;
};

// A tensor may have two encodings of which only one is saved.
Role role_of(const PlanData& d, const PlanStep& s, const std::string& name) {
  Role role = Role::workspace;
  for (const BufferView& view : s.out)
    if (view.buffer != kNoBuffer) {
      const Buffer& b = d.buffers[static_cast<size_t>(view.buffer)];
      if ((b.name == name || b.name == name + ".t") && b.role != Role::workspace) role = b.role;
    }
  return role;
}

class Card {
 public:
  Card(const Model& m, const Shown& s) : model_(m), shown_(s) {
    double x = kPad;
    for (const Shown::Chip& c : s.chips) {
      const double w =
          static_cast<double>(std::min<size_t>(letters(c.text), 32)) * kChipLetter + 16;
      if (x > kPad && x + w > kCard - kPad) x = kPad, ++chip_rows_;
      chips_.push_back({x, chip_rows_ - 1, w});
      x += w + 6;
    }
    for (const PlanStep::Write& w : s.step->writes) {
      if (w.name.ends_with(".amax")) continue;
      const Role role = role_of(m.d, *s.step, w.name);
      lines_.push_back({w.name, format_of(w.operand), kRoles[static_cast<size_t>(role)]});
    }
  }

  [[nodiscard]] double height() const {
    return 36 + chip_rows_ * (kChipHeight + 6) + 4 +
           kLineHeight * static_cast<double>(lines_.size()) + 38;
  }

  [[nodiscard]] std::string draw(double x, double y) const {
    const Shown& s = shown_;
    std::string out = str("<g>", tip(str(s.tag, ": ", s.step->step.name)));
    out += box(x, y, kCard, height(), 10, "card");
    out += text_at(x + kPad, y + 23, "tag", s.tag);
    const std::string head = str(head_name(*s.step), s.note.empty() ? "" : " · ", s.note);
    out += text_at(x + kCard - kPad, y + 23, "soft end", cut_to(head, 40));
    const double chips = y + 36;
    for (size_t i = 0; i < chips_.size(); ++i) {
      const Shown::Chip& c = s.chips[i];
      const auto [cx, row, w] = chips_[i];
      const double top = chips + (row) * (kChipHeight + 6);
      out +=
          str("<g>", tip(c.title), box(x + cx, top, w, kChipHeight, 6, str("chip ", c.kind)),
              text_at(x + cx + w / 2, top + 15, str("chipt ", c.kind), cut_to(c.text, 31)), "</g>");
    }
    double at = chips + chip_rows_ * (kChipHeight + 6) + 4;
    for (const Line& l : lines_) {
      const auto room = static_cast<size_t>((kCard - 2 * kPad - 22) / kLineLetter);
      const size_t left = room - std::min(room, letters(l.format)) - 2;
      out += str("<circle cx=\"", num(x + kPad + 4), "\" cy=\"", num(at + 8),
                 "\" r=\"3.5\" class=\"dot ", l.role, "\"/>");
      out += str("<g>", tip(str(l.name, " (", l.format, "), ", l.role)),
                 text_at(x + kPad + 16, at + 12, "line", cut_to(l.name, left)), "</g>");
      out += text_at(x + kCard - kPad, at + 12, "line soft end", l.format);
      at += kLineHeight;
    }
    const double share =
        model_.bytes ? static_cast<double>(s.bytes) / static_cast<double>(model_.bytes) : 0;
    std::string cost = bytes_text(s.bytes);
    if (s.flops) cost += " · " + flops_text(s.flops);
    at += 5;
    out += text_at(x + kPad, at + 15, "soft", cost);
    out += text_at(x + kCard - kPad, at + 15, "soft end", percent_text(share));
    out += box(x + kPad, at + 21, kCard - 2 * kPad, 3, 1.5, "track");
    out += box(x + kPad, at + 21, std::max(2.0, share * (kCard - 2 * kPad)), 3, 1.5, "fill");
    return out + "</g>";
  }

 private:
  struct ChipPlace {
    double x;
    double row;
    double width;
  };
  const Model& model_;
  const Shown& shown_;
  std::vector<ChipPlace> chips_;
  double chip_rows_ = 1;
  std::vector<Line> lines_;
};

std::vector<int> buffers_in(const std::vector<BufferView>& views) {
  std::vector<int> list;
  for (const BufferView& s : views)
    if (s.buffer != kNoBuffer) list.push_back(s.buffer);
  return list;
}

bool meet(const std::vector<int>& a, const std::vector<int>& b) {
  return std::ranges::any_of(a, [&](int i) { return std::ranges::find(b, i) != b.end(); });
}

// Whether a buffer is a tensor or, if the tensor is encoded, its codes or scales.
bool part_of(const Buffer& b, std::string_view tensor) {
  if (b.name == tensor) return true;
  const bool ends = b.role == Role::input || b.role == Role::output;
  return ends && b.name.starts_with(tensor) && b.name[tensor.size()] == '.';
}

// One pass as a column of cards between its input and its output.
class Column {
 public:
  Column(const Model& m, const std::vector<Shown>& passes, std::string_view in,
         std::string_view out)
      : model_(m), passes_(passes) {
    for (const Shown& s : passes) cards_.emplace_back(m, s);
    for (size_t b = 0; b < m.d.buffers.size(); ++b) {
      const Buffer& buffer = m.d.buffers[b];
      // A channel may have one of these names too, so these roles are skipped.
      if (buffer.role == Role::workspace || buffer.role == Role::saved) continue;
      if (part_of(buffer, in)) in_.push_back(static_cast<int>(b));
      if (part_of(buffer, out)) out_.push_back(static_cast<int>(b));
    }
  }

  [[nodiscard]] double least_height() const {
    double h = kPill * (out_.empty() ? 1 : 2);
    for (const Card& c : cards_) h += c.height();
    return h + kGap * gaps();
  }

  // Time goes down, or up if `up`.
  void place(double x, double top, double height, bool up, bool gutter_right) {
    x_ = x;
    up_ = up;
    gutter_right_ = gutter_right;
    const double gap = kGap + (height - least_height()) / gaps();
    double at = up ? top + height : top;
    const auto next = [&](double h) {
      const double y = up ? at - h : at;
      at = up ? y - gap : y + h + gap;
      return y;
    };
    in_top_ = next(kPill);
    tops_.clear();
    for (const Card& c : cards_) tops_.push_back(next(c.height()));
    if (!out_.empty()) out_top_ = next(kPill);
  }

  [[nodiscard]] double top(size_t i) const { return tops_[i]; }
  [[nodiscard]] double height(size_t i) const { return cards_[i].height(); }
  [[nodiscard]] double middle(size_t i) const { return tops_[i] + height(i) / 2; }
  [[nodiscard]] double in_middle() const { return in_top_ + kPill / 2; }
  [[nodiscard]] double out_middle() const { return out_top_ + kPill / 2; }
  [[nodiscard]] bool needs_gutter() const {
    for (size_t from = 0; from + 2 < nodes(); ++from)
      for (size_t to = from + 2; to < nodes(); ++to)
        if (feeds(from, to)) return true;
    return false;
  }

  [[nodiscard]] std::string draw() const {
    std::string out = edges();
    out += pill(in_.front(), in_top_);
    if (!out_.empty()) out += pill(out_.front(), out_top_);
    for (size_t i = 0; i < cards_.size(); ++i) out += cards_[i].draw(x_, tops_[i]);
    return out;
  }

 private:
  [[nodiscard]] double gaps() const {
    return static_cast<double>(cards_.size()) + (out_.empty() ? 0 : 1);
  }

  [[nodiscard]] std::string pill(int buffer, double y) const {
    const Buffer& b = model_.d.buffers[static_cast<size_t>(buffer)];
    const std::string text =
        str(b.name, "   ", b.rows(model_.rows), " × ", b.cols, "   ", info(b.dtype).name);
    return box(x_, y, kCard, kPill, kPill / 2, "pill") +
           text_at(x_ + kCard / 2, y + 21, "line mid", text);
  }

  // Top and height of a node in time order: the input, the passes, the output.
  [[nodiscard]] std::pair<double, double> span(size_t node) const {
    if (node == 0) return {in_top_, kPill};
    if (node <= cards_.size()) return {tops_[node - 1], cards_[node - 1].height()};
    return {out_top_, kPill};
  }

  [[nodiscard]] size_t nodes() const { return cards_.size() + (out_.empty() ? 1 : 2); }

  // Whether a later node reads a buffer that an earlier node wrote.
  [[nodiscard]] bool feeds(size_t from, size_t to) const {
    const auto made = from == 0 ? in_ : buffers_in(passes_[from - 1].step->out);
    const auto read = to > cards_.size() ? out_ : buffers_in(passes_[to - 1].step->in);
    return meet(made, read);
  }

  // Draws an edge from each step to the steps that read its results: to the next node directly,
  // past other nodes through the gutter.
  [[nodiscard]] std::string edges() const {
    std::string out;
    std::vector<size_t> busy;  // by lane: the last node that an edge passes
    for (size_t from = 0; from + 1 < nodes(); ++from) {
      std::vector<size_t> far;
      for (size_t to = from + 1; to < nodes(); ++to) {
        if (!feeds(from, to)) continue;
        if (to > from + 1) {
          far.push_back(to);
          continue;
        }
        const double x = x_ + kCard / 2;
        const double start = up_ ? span(from).first : span(from).first + span(from).second;
        const double end = up_ ? span(to).first + span(to).second : span(to).first;
        const double tail = up_ ? 2 : -2;
        out += path(str("M", num(x), " ", num(start), "V", num(end + tail * 3)), "edge");
        out += arrow_head(x, end + tail, up_ ? 'u' : 'd', "head");
      }
      if (far.empty()) continue;
      size_t lane = 0;
      while (lane < busy.size() && busy[lane] > from) ++lane;
      if (lane == busy.size()) busy.push_back(0);
      busy[lane] = far.back();
      out += detour(from, far, lane);
    }
    return out;
  }

  [[nodiscard]] std::string detour(size_t from, const std::vector<size_t>& to, size_t lane) const {
    constexpr size_t kLanes = 3;  // lanes of the gutter; further edges share them
    const double side = gutter_right_ ? x_ + kCard : x_;
    const double away = gutter_right_ ? 1 : -1;
    const double x = side + away * (12 + 8 * static_cast<double>(lane % kLanes));
    const auto port = [&](size_t node, double share) {
      const auto [top, h] = span(node);
      return top + h * (up_ ? 1 - share : share);
    };
    std::string out;
    const double start = port(from, 0.72);
    for (const size_t node : to) {
      const double end = port(node, node > cards_.size() ? 0.5 : 0.28);
      const double bend = end > start ? 7 : -7;
      out += path(
          str("M", num(side), " ", num(start), "H", num(x - away * 7), "Q", num(x), " ", num(start),
              " ", num(x), " ", num(start + bend), "V", num(end - bend), "Q", num(x), " ", num(end),
              " ", num(x - away * 7), " ", num(end), "H", num(side + away * 6)),
          "edge");
      out += arrow_head(side + away * 2, end, gutter_right_ ? 'l' : 'r', "head");
    }
    return out;
  }

  const Model& model_;
  const std::vector<Shown>& passes_;
  std::vector<Card> cards_;
  std::vector<int> in_, out_;
  double x_ = 0, in_top_ = 0, out_top_ = 0;
  bool up_ = false, gutter_right_ = false;
  std::vector<double> tops_;
};

std::string kept_pill(const Kept& k, double x, double y, double width) {
  const auto room = static_cast<size_t>((width - 20) / kLineLetter);
  return str("<g>", tip(str(k.name, " (", k.format, "), ", k.bytes, " bytes")),
             box(x, y, width, kKeptHeight, 8, k.callers ? "kept callers" : "kept"),
             text_at(x + width / 2, y + 18, "line mid keptt", cut_to(k.name, room)),
             text_at(x + width / 2, y + 34, "small mid keptt",
                     str(k.format, " · ", bytes_text(k.bytes), k.callers ? " · the caller's" : "")),
             "</g>");
}

std::string curve(double x1, double y1, double x2, double y2) {
  const double half = (x1 + x2) / 2;
  return path(str("M", num(x1), " ", num(y1), "C", num(half), " ", num(y1), " ", num(half), " ",
                  num(y2), " ", num(x2), " ", num(y2)),
              "keep");
}

// Places kept tensors near the middle of their producer and readers, without overlap.
std::vector<double> kept_tops(const std::vector<Kept>& kept, const std::vector<double>& wanted,
                              double top, double bottom) {
  std::vector<size_t> order(kept.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::stable_sort(order, {}, [&](size_t i) { return wanted[i]; });
  std::vector<double> tops(kept.size());
  double least = top;
  for (const size_t i : order) {
    tops[i] = std::max(least, wanted[i] - kKeptHeight / 2);
    least = tops[i] + kKeptHeight + kKeptGap;
  }
  double most = bottom;
  for (auto it = order.rbegin(); it != order.rend(); ++it) {
    tops[*it] = std::min(tops[*it], most - kKeptHeight);
    most = tops[*it] - kKeptGap;
  }
  return tops;
}

// The ends of lines at the edge of a card, in the order of their other ends.
class Ports {
 public:
  void add(size_t card, double other_end) { ends_[card].push_back(other_end); }
  double at(const Column& c, size_t card, double other_end) {
    std::vector<double>& e = ends_[card];
    std::ranges::sort(e);
    const auto i = static_cast<double>(std::ranges::find(e, other_end) - e.begin());
    return c.top(card) + c.height(card) * (i + 1) / (static_cast<double>(e.size()) + 1);
  }

 private:
  std::map<size_t, std::vector<double>> ends_;
};

std::string frame(double width, double height, const Model& m, std::string_view name,
                  const std::string& body) {
  return str("<svg class=\"flow ", name, "\" viewBox=\"0 0 ", num(width), " ", num(height),
             "\" role=\"img\" aria-label=\"The passes of the plan: ", m.forward.size(),
             " forward, ", m.backward.size(), " backward; the table below says the same\">", body,
             "</svg>\n");
}

std::string wide_figure(const Model& m) {
  Column forward(m, m.forward, "x", "y");
  Column backward(m, m.backward, "dy", "dx");
  const std::vector<Kept> kept = kept_of(m);
  const double width = 2 * kGutter + 2 * kCard + kBetween;
  const double top = 34;
  const double height =
      std::max({forward.least_height(), backward.least_height(),
                static_cast<double>(kept.size()) * (kKeptHeight + kKeptGap) + 2 * kPill});
  const double left = kGutter;
  const double right = kGutter + kCard + kBetween;
  forward.place(left, top, height, false, false);
  backward.place(right, top, height, true, true);
  std::string out = text_at(left, 18, "column", "forward, down");
  out += text_at(right + kCard, 18, "column end", "backward, up");
  const double keep_left = left + kCard + (kBetween - kKept) / 2;
  if (!kept.empty()) out += text_at(keep_left + kKept / 2, 18, "column mid", "kept for backward");

  const auto maker_middle = [&](const Kept& k) {
    return k.producer < 0 ? forward.in_middle() : forward.middle(static_cast<size_t>(k.producer));
  };
  std::vector<double> wanted;
  for (const Kept& k : kept) {
    double sum = 0;
    for (const size_t r : k.readers) sum += backward.middle(r);
    const double readers =
        k.readers.empty() ? maker_middle(k) : sum / static_cast<double>(k.readers.size());
    wanted.push_back((maker_middle(k) + readers) / 2);
  }
  const std::vector<double> tops = kept_tops(kept, wanted, top, top + height - kPill - kGap / 2);
  Ports makers, readers;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (kept[i].producer >= 0) makers.add(static_cast<size_t>(kept[i].producer), tops[i]);
    for (const size_t r : kept[i].readers) readers.add(r, tops[i]);
  }
  for (size_t i = 0; i < kept.size(); ++i) {
    const Kept& k = kept[i];
    const double y = tops[i] + kKeptHeight / 2;
    const double from = k.producer < 0
                            ? forward.in_middle()
                            : makers.at(forward, static_cast<size_t>(k.producer), tops[i]);
    out += curve(left + kCard, from, keep_left, y);
    for (const size_t r : k.readers) {
      const double to = readers.at(backward, r, tops[i]);
      out += curve(keep_left + kKept, y, right - 7, to);
      out += arrow_head(right - 2, to, 'r', "keephead");
    }
    out += kept_pill(k, keep_left, tops[i], kKept);
  }
  // The step between y and dy is not part of the plan.
  const double y = forward.out_middle();
  out += path(str("M", num(left + kCard), " ", num(y), "H", num(right - 8)), "edge away");
  out += arrow_head(right - 2, y, 'r', "head");
  out += str("<rect x=\"", num(left + kCard + kBetween / 2 - 44), "\" y=\"", num(y - 10),
             "\" width=\"88\" height=\"20\" class=\"ground\"/>");
  out += text_at(left + kCard + kBetween / 2, y + 4, "soft mid", "your loss");
  out += forward.draw() + backward.draw();
  return frame(width, top + height + 6, m, "wide", out);
}

std::string narrow_figure(const Model& m) {
  Column forward(m, m.forward, "x", "y");
  Column backward(m, m.backward, m.backward.empty() ? "x" : "dy", "dx");
  const double left =
      forward.needs_gutter() || (!m.backward.empty() && backward.needs_gutter()) ? kGutter : 2;
  const double width = left + kCard + 4;
  double top = 26;
  forward.place(left, top, forward.least_height(), false, false);
  std::string out = text_at(left, 14, "column", "forward");
  out += forward.draw();
  top += forward.least_height();
  if (m.backward.empty()) return frame(width, top + 6, m, "narrow", out);
  const std::vector<Kept> kept = kept_of(m);
  top += 34;
  if (!kept.empty()) {
    out += text_at(left, top, "column", "kept for backward");
    top += 12;
    for (const Kept& k : kept) {
      out += kept_pill(k, left, top, kKept);
      std::string who = k.producer < 0 ? "in" : m.forward[static_cast<size_t>(k.producer)].tag;
      for (size_t i = 0; i < k.readers.size(); ++i)
        who += (i ? ", " : " → ") + m.backward[k.readers[i]].tag;
      out += text_at(left + kKept + 12, top + 26, "soft", cut_to(who, 14));
      top += kKeptHeight + kKeptGap;
    }
    top += 22;
  }
  out += text_at(left, top, "column", "backward");
  top += 12;
  backward.place(left, top, backward.least_height(), false, false);
  out += backward.draw();
  return frame(width, top + backward.least_height() + 6, m, "narrow", out);
}

}  // namespace

std::string figure(const Model& m, bool wide) { return wide ? wide_figure(m) : narrow_figure(m); }

}  // namespace tenon::page
