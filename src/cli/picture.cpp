// Draws the SVG picture and the text histogram. Coordinates are pixels. x is log2 of the magnitude,
// and the three charts of a panel share it.
#include "cli/picture.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace tenon::cli {

namespace {

constexpr double kWidth = 980, kLeft = 172, kRight = 700;
constexpr double kBars = 150, kRow = 20, kErrors = 140;
constexpr double kTop = 64, kPanelGap = 36;
constexpr double kLeastError = 1e-3;  // the error chart shows 0.1% to 100%

// Colours by scaling mode, in the order of the enum. e5m2 is dashed. Renderers without media
// queries use the light colours.
constexpr std::string_view kStyle = R"(
text{font:12px system-ui,sans-serif;fill:#1f2328}.h{font-size:16px;font-weight:600}
.s{fill:#59636e}.e{text-anchor:end}.c{text-anchor:middle}.bg{fill:#fff}
.bar{fill:#8c959f}.lost{fill:#cf222e}.zero{fill:none;stroke:#8c959f;stroke-dasharray:2 2}
.g{stroke:#d1d9e0;stroke-width:1}.p{fill:none;stroke-width:2;stroke-linecap:round}
.m1{stroke:#a23b8c}.m2{stroke:#0969da}.m3{stroke:#bc4c00}.m4{stroke:#1a7f37}.m5{stroke:#8a6a00}
.d{stroke-dasharray:5 4;stroke-linecap:butt}.faint{stroke-width:4;opacity:.4}.range{stroke-width:8}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.bg{fill:#0d1117}
.bar{fill:#7d8590}.lost{fill:#ff7b72}.zero{stroke:#7d8590}.g{stroke:#30363d}
.m1{stroke:#e28ad2}.m2{stroke:#58a6ff}.m3{stroke:#f0883e}.m4{stroke:#3fb950}.m5{stroke:#d9b62b}}
)";

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

// The range of exponents that occur. Empty if there are none.
struct Span {
  int least = 0, most = -1;
  [[nodiscard]] int size() const { return most - least + 1; }
};

int exponent_of(size_t bin) { return static_cast<int>(bin) + kLeastExponent; }
const Bin& bin_at(const std::vector<Bin>& bins, int exponent) {
  static const Bin kNone;
  if (exponent < kLeastExponent || exponent > kMostExponent) return kNone;
  return bins[static_cast<size_t>(exponent - kLeastExponent)];
}

Span occupied(const std::vector<Bin>& bins) {
  Span s;
  for (size_t i = 0; i < bins.size(); ++i) {
    if (bins[i].count == 0) continue;
    if (s.size() == 0) s.least = exponent_of(i);
    s.most = exponent_of(i);
  }
  return s;
}

// log2 of the smallest subnormal, the smallest normal and the largest number of a format.
struct Limits {
  double tiny, normal, most;
};
Limits limits(DType d) {
  const DTypeInfo& f = info(d);
  return {1.0 - f.bias - f.mantissa_bits, 1.0 - f.bias, std::log2(static_cast<double>(f.max))};
}

double relative_error(const Bin& b) { return b.squares > 0 ? std::sqrt(b.errors / b.squares) : 0; }

std::string share_text(double share) {
  return share == 0 ? "0%" : fmt::format("{:.3g}%", 100 * share);
}

class Svg {
 public:
  void text(double x, double y, std::string_view classes, std::string_view content) {
    out_ += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\">{}</text>\n", x, y, classes,
                        escaped(content));
  }
  void line(double x1, double y1, double x2, double y2, std::string_view classes) {
    out_ += fmt::format(
        "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" class=\"{}\"/>\n", x1, y1,
        x2, y2, classes);
  }
  void rect(double x, double y, double w, double h, std::string_view classes,
            std::string_view tip = {}) {
    out_ += fmt::format(
        "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" class=\"{}\">", x, y, w,
        h, classes);
    if (!tip.empty()) out_ += "<title>" + escaped(tip) + "</title>";
    out_ += "</rect>\n";
  }
  void path(const std::string& points, std::string_view classes, std::string_view tip) {
    out_ += fmt::format("<path d=\"{}\" class=\"{}\"><title>{}</title></path>\n", points, classes,
                        escaped(tip));
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

class Panel {
 public:
  Panel(const Report& report, double top, Svg& svg) : r_(report), top_(top), svg_(svg) {
    data_ = span_ = occupied(r_.before.bins);
    for (const Outcome& o : r_.after) {
      if (o.least_scale == 0) continue;
      const Limits l = limits(o.trial.format.dtype);
      widen(static_cast<int>(std::floor(l.tiny + std::log2(o.least_scale))));
      widen(static_cast<int>(std::ceil(l.most + std::log2(o.most_scale))) - 1);
    }
    if (span_.size() == 0) span_ = {-1, 0};
  }

  static double height(const Report& r) {
    return kTop + kBars + 40 + kRow * static_cast<double>(r.after.size()) + 50 + kErrors + 30;
  }

  void draw() {
    svg_.text(16, top_ + 20, "h", r_.name);
    const Census& b = r_.before;
    svg_.text(16, top_ + 38, "s",
              fmt::format("{} {}, {} elements, amax {:.4g}, zeros {}, not finite {}", r_.shape,
                          name_of(r_.type), b.elements, b.amax, percent(b.zeros, b.elements),
                          percent(b.nonfinite, b.elements)));
    const double base = top_ + kTop + kBars;
    bars(base);
    axis(base);
    ranges(base + 40);
    errors(base + 40 + kRow * static_cast<double>(r_.after.size()) + 50);
  }

 private:
  // Format ranges may extend beyond the chart: the chart is scaled to the elements.
  void widen(int exponent) {
    constexpr int kBelow = 12, kAbove = 4;
    if (data_.size() > 0)
      exponent = std::clamp(exponent, data_.least - kBelow, data_.most + kAbove);
    if (span_.size() == 0) span_ = {exponent, exponent};
    span_.least = std::min(span_.least, exponent);
    span_.most = std::max(span_.most, exponent);
  }
  [[nodiscard]] double x(double log2) const {
    const double share = (log2 - span_.least) / span_.size();
    return kLeft + (kRight - kLeft) * std::clamp(share, 0.0, 1.0);
  }
  static std::string mode_class(const Trial& r) {
    return fmt::format("m{}{}", static_cast<int>(r.format.scaling),
                       r.format.dtype == DType::e5m2 ? " d" : "");
  }

  void bars(double base) {
    const Census& b = r_.before;
    int64_t most = b.zeros;
    for (const Bin& bin : b.bins) most = std::max(most, bin.count);
    // Every nonzero count gets a visible bar, so that rare outliers can be seen.
    const auto height = [&](int64_t n) {
      return n == 0 ? 0.0 : std::max(1.5, kBars * static_cast<double>(n) / most);
    };
    svg_.text(16, base - kBars + 8, "s", "share of elements");
    if (most > 0) svg_.text(16, base - kBars + 24, "s", "tallest " + percent(most, b.elements));
    if (r_.after.size() == 1 && r_.after[0].flushed > 0) {
      svg_.rect(16, base - kBars + 34, 9, 9, "lost");
      svg_.text(30, base - kBars + 43, "s", "flushed to zero");
    }
    if (b.zeros > 0) {
      const double h = height(b.zeros);
      svg_.rect(kLeft - 24, base - h, 14, h, "zero", "zero: " + percent(b.zeros, b.elements));
      svg_.text(kLeft - 17, base + 16, "s c", "0");
    }
    for (int e = span_.least; e <= span_.most; ++e) {
      const int64_t n = bin_at(b.bins, e).count;
      if (n == 0) continue;
      const double h = height(n);
      const double width = std::max(0.5, x(e + 1) - x(e) - 1);
      const std::string tip = fmt::format("2^{} to 2^{}: {}", e, e + 1, percent(n, b.elements));
      svg_.rect(x(e), base - h, width, h, "bar", tip);
      // With a single recipe, the flushed elements are drawn inside the bars.
      const int64_t lost = r_.after.size() == 1 ? bin_at(r_.after[0].bins, e).flushed : 0;
      if (lost > 0) {
        const double part = h * static_cast<double>(lost) / static_cast<double>(n);
        svg_.rect(x(e), base - part, width, part, "lost", "flushed " + percent(lost, n));
      }
    }
  }

  void axis(double base) {
    svg_.line(kLeft, base, kRight, base, "g");
    int step = 1;
    while (span_.size() / step > 14) step *= 2;
    for (int e = span_.least; e <= span_.most + 1; ++e)
      if (e % step == 0) {
        svg_.line(x(e), base, x(e), base + 4, "g");
        svg_.text(x(e), base + 16, "s c", fmt::format("{}", e));
      }
    svg_.text(kRight + 16, base + 16, "s", "log2 of |v|");
  }

  void ranges(double top) {
    constexpr double kSnr = 765, kSaturated = 855, kFlushed = 945;
    svg_.text(16, top - 4, "s", "can represent");
    svg_.text(kSnr, top - 4, "s e", "SNR");
    svg_.text(kSaturated, top - 4, "s e", "saturated");
    svg_.text(kFlushed, top - 4, "s e", "flushed");
    double y = top + kRow / 2;
    for (const Outcome& o : r_.after) {
      const std::string mode = mode_class(o.trial);
      svg_.line(16, y, 34, y, "p " + mode);
      svg_.text(40, y + 4, "", o.trial.name);
      if (o.least_scale > 0) {
        const Limits l = limits(o.trial.format.dtype);
        const double low = std::log2(o.least_scale);
        const double high = std::log2(o.most_scale);
        svg_.line(x(l.tiny + low), y, x(l.most + high), y, mode + " faint");
        if (l.most + low > l.normal + high)
          svg_.line(x(l.normal + high), y, x(l.most + low), y, mode + " range");
      }
      const bool exact = std::isinf(o.snr_db);
      svg_.text(kSnr, y + 4, "e", exact ? "exact" : fmt::format("{:.1f} dB", o.snr_db));
      svg_.text(kSaturated, y + 4, "e", percent(o.saturated, r_.before.elements));
      svg_.text(kFlushed, y + 4, "e", percent(o.flushed, r_.before.elements));
      y += kRow;
    }
    svg_.text(kLeft, y + 4, "s",
              "thick: normal numbers under every scale; thin: subnormals, or under some scale");
  }

  void errors(double top) {
    const auto y_of = [&](double error) {
      const double share = std::log10(std::max(error, kLeastError)) / std::log10(kLeastError);
      return top + kErrors * std::clamp(share, 0.0, 1.0);
    };
    svg_.text(16, top + 8, "s", "relative RMS");
    svg_.text(16, top + 24, "s", "error by size");
    for (const double level : {1.0, 0.1, 0.01, 0.001}) {
      svg_.line(kLeft, y_of(level), kRight, y_of(level), "g");
      svg_.text(kRight + 12, y_of(level) + 4, "s", share_text(level));
    }
    for (const Outcome& o : r_.after) {
      std::string points;
      bool pen_down = false;
      for (int e = span_.least; e <= span_.most; ++e) {
        const Bin& b = bin_at(o.bins, e);
        if (b.count > 0)  // a single point is drawn as a short line
          points += fmt::format("{}{:.1f} {:.1f}h1", pen_down ? "L" : "M", x(e + 0.5),
                                y_of(relative_error(b)));
        pen_down = b.count > 0;
      }
      if (!points.empty()) svg_.path(points, "p " + mode_class(o.trial), o.trial.name);
    }
  }

  const Report& r_;
  double top_;
  Svg& svg_;
  Span data_, span_;
};

}  // namespace

std::string percent(int64_t part, int64_t whole) {
  return share_text(whole ? static_cast<double>(part) / static_cast<double>(whole) : 0);
}

std::string svg_picture(const std::string& file, std::span<const Report> reports) {
  Svg svg;
  double height = 8;
  std::string about;
  for (const Report& r : reports) {
    Panel(r, height, svg).draw();
    height += Panel::height(r) + kPanelGap;
    about += fmt::format("{}, {} {}:", r.name, r.shape, name_of(r.type));
    for (const Outcome& o : r.after)
      about += fmt::format(
          " {} has a relative RMS error of {}, saturates {} and flushes {} to zero.", o.trial.name,
          share_text(o.relative_rms), percent(o.saturated, r.before.elements),
          percent(o.flushed, r.before.elements));
    about += '\n';
  }
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" width=\"{0:.0f}\" "
      "height=\"{1:.0f}\" role=\"img\" aria-labelledby=\"title desc\">\n"
      "<title id=\"title\">What quantisation does to {2}</title>\n<desc id=\"desc\">{3}</desc>\n"
      "<style>{4}</style>\n<rect class=\"bg\" width=\"{0:.0f}\" height=\"{1:.0f}\"/>\n{5}</svg>\n",
      kWidth, height, escaped(file), escaped(about), kStyle, svg.take());
}

std::string text_histogram(const Report& r) {
  const Span span = occupied(r.before.bins);
  if (span.size() == 0 || r.after.empty()) return "";
  constexpr int kMostRows = 24, kBarWidth = 40;
  const int step = (span.size() + kMostRows - 1) / kMostRows;
  struct Group {
    int64_t count = 0;
    Bin after;
  };
  std::vector<Group> groups;
  int64_t most = 1;
  for (int e = span.most; e >= span.least; e -= step) {
    Group g;
    for (int k = std::max(e - step + 1, span.least); k <= e; ++k) {
      const Bin& b = bin_at(r.after[0].bins, k);
      g.count += bin_at(r.before.bins, k).count;
      g.after.flushed += b.flushed;
      g.after.squares += b.squares;
      g.after.errors += b.errors;
    }
    most = std::max(most, g.count);
    groups.push_back(g);
  }
  std::string out = fmt::format("  {:>8}  {:>8}  {:<{}}  {:>8}  {:>8}   {}\n", "|v| from", "share",
                                "", kBarWidth, "error", "flushed", r.after[0].trial.name);
  for (size_t i = 0; i < groups.size(); ++i) {
    const Group& g = groups[i];
    const int from = std::max(span.most - static_cast<int>(i + 1) * step + 1, span.least);
    const auto length = static_cast<size_t>(
        std::ceil(kBarWidth * static_cast<double>(g.count) / static_cast<double>(most)));
    const bool empty = g.count == 0;
    out += fmt::format("  {:>8}  {:>8}  {:<{}}  {:>8}  {:>8}\n", fmt::format("2^{}", from),
                       percent(g.count, r.before.elements), std::string(length, '#'), kBarWidth,
                       empty ? "" : share_text(relative_error(g.after)),
                       empty ? "" : percent(g.after.flushed, g.count));
  }
  return out;
}

std::string spark_line(const Census& census) {
  const Span span = occupied(census.bins);
  if (span.size() == 0) return "";
  constexpr int kMostCells = 32;
  const int step = (span.size() + kMostCells - 1) / kMostCells;
  std::vector<int64_t> cells;
  for (int e = span.least; e <= span.most; e += step) {
    int64_t n = 0;
    for (int k = e; k < std::min(e + step, span.most + 1); ++k) n += bin_at(census.bins, k).count;
    cells.push_back(n);
  }
  const int64_t most = *std::ranges::max_element(cells);
  constexpr std::string_view kLevels[] = {" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  std::string out = fmt::format("2^{} ", span.least);
  for (const int64_t n : cells)
    out += kLevels[static_cast<size_t>(
        std::ceil(8 * static_cast<double>(n) / static_cast<double>(most)))];
  return out + fmt::format(" 2^{}", span.most + 1);
}

}  // namespace tenon::cli
