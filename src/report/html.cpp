// The HTML page that explains a plan. It has no scripts and loads nothing from other sites.
#include "report/html.h"

#include <algorithm>
#include <utility>

#include "core/fp_mode.h"
#include "lower/alone.h"
#include "tenon/error.h"

namespace tenon {

namespace {

using namespace page;  // NOLINT: this file is the page

std::string tag(std::string_view name, std::string_view attributes, const std::string& inside) {
  return str("<", name, attributes.empty() ? "" : " ", attributes, ">", inside, "</", name, ">");
}
std::string code(std::string_view text) { return str("<code>", escaped(text), "</code>"); }
std::string plural(size_t n, std::string_view noun, std::string_view more = "s") {
  return str(n, " ", noun, n == 1 ? "" : more);
}
double ratio(int64_t part, int64_t whole) {
  return whole ? static_cast<double>(part) / static_cast<double>(whole) : 0;
}

// The same ops one at a time, each with its own plan. An op that only copies its input costs
// nothing: the next op can read the input itself.
struct Alone {
  std::vector<int64_t> bytes;  // by op
  size_t passes = 0;
  int64_t total = 0;
};

int64_t bytes_without_copies(const PlanData& d, const PlanStep& step, int64_t rows) {
  int64_t bytes = bytes_of(d, step, rows);
  const Step& s = step.step;
  if (!s.is_map() || step.opaque) return bytes;
  size_t copies = 0;
  for (const Store& to : s.stores) {
    const Node& n = (*s.graph)[to.value];
    if (to.to != Store::To::tile || n.word != Word::load) continue;
    bytes -= step.rows(rows) * s.cols * info(to.dtype).bytes;
    ++copies;
  }
  return copies == s.stores.size() ? 0 : bytes;
}

std::optional<Alone> one_by_one(const PlanData& d, int64_t rows) {
  Alone all;
  OpsAlone ops(d.chain, d.request);
  int64_t cols = d.request.cols;
  bool needs = d.request.backward && d.request.input_grad;
  try {
    for (size_t i = 0; i < d.chain.size(); ++i) {
      auto [op, r] = ops.next(cols);
      r.input_grad = needs;
      const Plan plan = Plan::build(std::span(&op, 1), r);
      int64_t bytes = 0;
      for (const Pass pass : {Pass::forward, Pass::backward})
        for (const PlanStep& s : data_of(plan).steps(pass)) {
          if (s.weights) continue;
          const int64_t moved = bytes_without_copies(data_of(plan), s, rows);
          bytes += moved;
          all.passes += moved > 0;
        }
      all.bytes.push_back(bytes);
      all.total += bytes;
      needs = needs || !plan.with(Role::grad).empty();
      const Buffer& y = plan.buffers()[plan.with(Role::output)[0]];
      cols = y.cols;
      rows = y.rows(rows);
    }
  } catch (const Error&) {
    return std::nullopt;  // an op that can run only in its chain
  }
  return all;
}

class Page {
 public:
  Page(const Plan& plan, int64_t rows, const Speed& speed)
      : plan_(plan),
        d_(data_of(plan)),
        rows_(rows),
        speed_(speed),
        m_(model_of(d_, rows)),
        alone_(one_by_one(d_, rows)) {}

  std::string html() const {
    const std::string chain = print_chain(d_.chain);
    std::string out =
        str("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
            "style-src 'unsafe-inline'; img-src data:\">\n<link rel=\"icon\" href=\"data:,\">\n",
            tag("title", "", "Plan of " + escaped(chain)), "\n<style>", kStyle,
            "</style>\n</head>\n<body>\n<main>\n");
    out += header(chain) + before() + after() + passes() + memory();
    out += tag("footer", "",
               str("Made by Tenon ", TENON_VERSION,
                   ". Bytes count every input and every output of a pass once, scales included."));
    return out + "\n</main>\n</body>\n</html>\n";
  }

 private:
  std::string header(const std::string& chain) const {
    const PlanRequest& r = d_.request;
    const auto of = [](const auto& names, auto value) { return names[static_cast<size_t>(value)]; };
    std::string facts;
    for (const auto& [name, value] : std::vector<std::pair<std::string, std::string>>{
             {"input", str(rows_, " × ", r.cols, " ", input_text(r))},
             {"recipe", r.recipe.name},
             {"device", target_text(d_) + std::string(of(kDevices, r.options.device))},
             {"precision", std::string(of(kPrecisions, r.options.precision))},
             {"rounding", std::string(of(kRoundings, r.options.rounding))},
             {"keeps", std::string(of(kKeeps, r.keep))},
             {"mode", r.training ? "training" : "evaluation"}})
      facts += str("<div><dt>", name, "</dt><dd>", escaped(value), "</dd></div>");
    return str(
        "<header>\n<p class=\"mark\"><svg viewBox=\"0 0 28 16\" width=\"28\" height=\"16\" "
        "aria-hidden=\"true\"><path class=\"m1\" d=\"M1 1h12v4H9v6h4v4H1z\"/><path class=\"m2\" "
        "d=\"M11 6h5V1h11v14H16v-5h-5z\"/></svg>Tenon plan</p>\n<h1>",
        escaped(chain), "</h1>\n<dl class=\"facts\">", facts, "</dl>\n<p class=\"lead\">", lead(),
        "</p>\n", tiles(), "</header>\n");
  }

  std::string lead() const {
    std::string out = plural(d_.chain.size(), "op");
    out += d_.chain.size() == 1 ? " becomes " : " become ";
    out += tag("strong", "", plural(m_.forward.size(), "forward pass", "es"));
    if (!m_.backward.empty())
      out += " and " + tag("strong", "", plural(m_.backward.size(), "backward pass", "es"));
    if (!alone_ || alone_->total == 0 || m_.bytes >= alone_->total) return out + ".";
    const double less = 1 - ratio(m_.bytes, alone_->total);
    return str(out, ", which move ", tag("strong", "", percent_text(less) + " fewer bytes"),
               " than the same ops one at a time.");
  }

  std::string tiles() const {
    std::string out = "<ul class=\"tiles\">";
    const auto tile = [&](std::string_view name, const std::string& value,
                          const std::string& below) {
      out += str("<li><span class=\"name\">", name, "</span><span class=\"value\">", value,
                 "</span><span class=\"below\">", below, "</span></li>");
    };
    const size_t passes = m_.forward.size() + m_.backward.size();
    tile("passes", str(passes), alone_ ? str(alone_->passes, " one by one") : "");
    tile("bytes moved", bytes_text(m_.bytes),
         alone_ ? bytes_text(alone_->total) + " one by one" : "");
    if (m_.flops) tile("products", flops_text(m_.flops), "multiply and add");
    const std::optional<double> floor = floor_of(m_.forward, m_.backward);
    if (floor) tile("floor", fixed(*floor, 1) + " µs", "at " + short_number(speed_.gbps) + " GB/s");
    if (!m_.backward.empty()) tile("saved", bytes_text(plan_.saved_bytes(rows_)), "for backward");
    tile("workspace", bytes_text(plan_.workspace_bytes(rows_)), "during a pass");
    return out + "</ul>\n";
  }

  std::string before() const {
    std::string out =
        "<section aria-labelledby=\"before\">\n<h2 id=\"before\">Before: the chain</h2>\n"
        "<p class=\"note\">One box is one op";
    if (alone_)
      out += str(", with the memory that it would move alone",
                 m_.backward.empty() ? "" : " in both directions");
    out += ".</p>\n<ol class=\"chain\">";
    for (size_t i = 0; i < d_.chain.size(); ++i) {
      const Op& op = d_.chain[i];
      out += str("<li class=\"op ", kind_of(op.name), "\" title=\"op ", i,
                 "\"><span class=\"what\">", escaped(print_chain(std::span(&op, 1))), "</span>");
      if (alone_)
        out += str("<span class=\"cost\">",
                   alone_->bytes[i] ? bytes_text(alone_->bytes[i]) : "free", "</span>");
      out += "</li>";
    }
    return out + "</ol>\n</section>\n";
  }

  std::string after() const {
    std::string out =
        "<section aria-labelledby=\"after\">\n<h2 id=\"after\">After: the passes</h2>\n"
        "<p class=\"note\">One box is one pass over memory. Arrows are tensors; the bar is a "
        "pass's share of all bytes.";
    if (!m_.weights.empty())
      out += str(" Weights are quantised only when they changed (",
                 plural(m_.weights.size(), "step"), ", not drawn).");
    out += "</p>\n<p class=\"legend\">";
    for (const auto& [role, text] :
         std::initializer_list<std::pair<Role, const char*>>{{Role::output, "output"},
                                                             {Role::saved, "saved for backward"},
                                                             {Role::grad, "gradient"},
                                                             {Role::workspace, "workspace"}}) {
      if (m_.backward.empty() && (role == Role::saved || role == Role::grad)) continue;
      out +=
          str("<span><svg width=\"9\" height=\"9\" aria-hidden=\"true\"><circle cx=\"4.5\" "
              "cy=\"4.5\" r=\"4\" class=\"dot ",
              kRoles[static_cast<size_t>(role)], "\"/></svg>", text, "</span>");
    }
    out += "</p>\n";
    const bool both = !m_.backward.empty();
    out += str("<div class=\"figure", both ? "" : " single", "\">\n");
    if (both) out += figure(m_, true);
    return out + figure(m_, false) + "</div>\n</section>\n";
  }

  std::optional<double> floor_of(const std::vector<Shown>& a, const std::vector<Shown>& b) const {
    std::optional<double> sum;
    for (const auto* list : {&a, &b})
      for (const Shown& s : *list)
        if (const auto us = floor_us(d_, *s.step, rows_, speed_)) sum = sum.value_or(0) + *us;
    return sum;
  }

  std::string pass_rows(const Shown& s, size_t columns) const {
    const auto cell = [](std::string_view label, std::string_view classes, const std::string& in) {
      return str("<td data-label=\"", label, "\"",
                 classes.empty() ? "" : str(" class=\"", classes, "\""), ">", in, "</td>");
    };
    std::string chips, writes;
    for (const Shown::Chip& c : s.chips)
      chips += str("<span class=\"op ", c.kind, "\" title=\"", escaped(c.title), "\">",
                   escaped(c.text), "</span> ");
    if (!s.note.empty()) chips += tag("span", "class=\"soft\"", escaped(s.note));
    for (const PlanStep::Write& w : s.step->writes)
      writes += str("<li>", code(w.name), " <span class=\"soft\">", escaped(format_of(w.operand)),
                    "</span></li>");
    std::string out = str("<tbody>\n<tr><th scope=\"row\">", s.tag, "</th>");
    out += cell("ops", "ops", chips);
    out += cell("stores", "stores", str("<ul>", writes, "</ul>"));
    // Steps that only changed weights need are not part of the total.
    const auto amount = [&](int64_t n, int64_t all, const std::string& text) {
      const std::string number = str("<span title=\"", n, "\">", text, "</span>");
      if (s.step->weights) return str("<span class=\"amount\">", number, "</span>");
      const double share = ratio(n, all);
      return str("<span class=\"amount\">", number, " <span class=\"soft\">", percent_text(share),
                 "</span></span><span class=\"meter\" aria-hidden=\"true\"><span style=\"width:",
                 short_number(100 * share), "%\"></span></span>");
    };
    out += cell("bytes", "n", amount(s.bytes, m_.bytes, bytes_text(s.bytes)));
    if (m_.flops)
      out += cell("products", "n",
                  s.flops ? amount(s.flops, m_.flops, flops_text(s.flops))
                          : "<span class=\"soft\">–</span>");
    if (const auto us = floor_us(d_, *s.step, rows_, speed_))
      out += cell("floor", "n", fixed(*us, 1) + " µs");
    out += cell("maker", "", escaped(maker_of(d_, *s.step, rows_)));
    return out + "</tr>\n" + more(s, columns) + "</tbody>\n";
  }

  std::string more(const Shown& s, size_t columns) const {
    std::string out = str("<tr class=\"more\"><td></td><td colspan=\"", columns - 1, "\">");
    if (!s.step->why.empty())
      out += tag("p", "class=\"why\"", "<b>why</b> " + escaped(s.step->why));
    std::string reads, body;
    for (const Choice::Refused& r : refused_makers(*s.step))
      out += tag("p", "class=\"why\"",
                 str("<b>refused</b> ", escaped(r.maker), ": ", escaped(r.refusal.why)));
    const auto listed = [](const std::vector<AlternativeStep>& steps) {
      std::string parts;
      for (const AlternativeStep& p : steps)
        parts += str(parts.empty() ? "" : ", then ", code(p.name), " by ", escaped(p.maker), " ",
                     bytes_text(p.bytes));
      return parts;
    };
    if (const auto steps = steps_of(d_, *s.step, rows_); !steps.empty())
      out += tag("p", "class=\"why\"", "<b>steps</b> " + listed(steps));
    for (const Alternative& a : alternatives(d_, *s.step, rows_))
      out += tag("p", "class=\"why\"",
                 str("<b>or</b> ", escaped(a.maker), " ", escaped(a.when), ": ", listed(a.steps)));
    for (const Read& r : reads_of(d_, *s.step))
      reads += (reads.empty() ? "" : ", ") +
               code(str(r.name, r.side == Orientation::columnwise ? ":col" : ""));
    for (const std::string& line : body_lines(d_, *s.step)) body += escaped(line) + "\n";
    if (s.step->opaque)
      return str(out, "<p class=\"why\">",
                 head_name(*s.step) == "opaque" ? "an op of the caller's own" : "among the ranks",
                 ", reads ", reads, "</p></td></tr>\n");
    out += str("<details><summary>formula</summary><p>reads ", reads, "</p><pre tabindex=\"0\">",
               body, "</pre></details>");
    return out + "</td></tr>\n";
  }

  std::string pass_table(const char* title, const std::vector<Shown>& list) const {
    if (list.empty()) return "";
    std::vector<std::string_view> heads{"pass", "ops", "stores", "bytes"};
    if (m_.flops) heads.emplace_back("products");
    if (floor_of(m_.forward, m_.backward)) heads.emplace_back("floor");
    heads.emplace_back("maker");
    std::string out = str("<table class=\"passes\">\n<caption>", title, "</caption>\n<thead><tr>");
    for (const std::string_view h : heads)
      out += str("<th scope=\"col\" class=\"c-", h, "\">", h, "</th>");
    out += "</tr></thead>\n";
    for (const Shown& s : list) out += pass_rows(s, heads.size());
    return out + "</table>\n";
  }

  std::string passes() const {
    return str("<section aria-labelledby=\"passes\">\n<h2 id=\"passes\">Pass by pass</h2>\n",
               pass_table("Forward", m_.forward), pass_table("Backward", m_.backward),
               pass_table("Only when the weights changed, outside the shares", m_.weights),
               "</section>\n");
  }

  std::string memory() const {
    struct Group {
      std::string_view kind;
      const char* name;
      std::vector<Role> roles;
      int64_t bytes = 0;
      std::string list = {};
    };
    std::vector<Group> groups{
        {"saved", "Saved for backward", {Role::saved}},
        {"workspace", "Workspace", {Role::workspace}},
        {"param", "Parameters", {Role::param}},
        {"state", "Quantised weights, scales and amax", {Role::state, Role::rng}},
        {"grad", "Gradients", {Role::grad}},
        {"output",
         "Inputs and outputs",
         {Role::input, Role::output, Role::extra_in, Role::extra_out}}};
    int64_t total = 0;
    for (Group& g : groups) {
      for (const Buffer& b : d_.buffers) {
        if (std::ranges::find(g.roles, b.role) == g.roles.end()) continue;
        g.bytes += b.bytes(rows_);
        const int64_t n = b.rows(rows_);
        g.list += str("<tr><td>", code(b.name), "</td><td>",
                      b.rows_inside ? str(b.cols, " × ", n) : str(n, " × ", b.cols), " ",
                      b.random ? "u64" : info(b.dtype).name, "</td><td class=\"n\" title=\"",
                      b.bytes(rows_), "\">", bytes_text(b.bytes(rows_)), "</td></tr>");
      }
      // Workspace buffers share memory if they are never live at the same time.
      if (g.kind == "workspace") g.bytes = plan_.workspace_bytes(rows_);
      total += g.bytes;
    }
    std::string bar, rows;
    for (const Group& g : groups) {
      if (g.list.empty()) continue;
      const double share = ratio(g.bytes, total);
      bar += str("<span class=\"", g.kind, "\" style=\"width:", fixed(100 * share, 3),
                 "%\" title=\"", g.name, ", ", bytes_text(g.bytes), "\"></span>");
      rows +=
          str("<details><summary><span class=\"swatch ", g.kind, "\"></span><span>", g.name,
              "</span><span class=\"n\" title=\"", g.bytes, "\">", bytes_text(g.bytes),
              "</span><span class=\"n soft\">", percent_text(share), "</span></summary>",
              g.kind == "workspace" ? "<p>Tensors that never live at once share memory.</p>" : "",
              "<table class=\"buffers\"><thead><tr><th scope=\"col\">tensor</th><th "
              "scope=\"col\">shape</th><th scope=\"col\" class=\"n\">bytes</th></tr></thead>"
              "<tbody>",
              g.list, "</tbody></table></details>\n");
    }
    return str(
        "<section aria-labelledby=\"memory\">\n<h2 id=\"memory\">Memory bill</h2>\n"
        "<p class=\"note\">For ",
        plural(static_cast<size_t>(rows_), "row"), ", ", bytes_text(total),
        " in all. The plan itself serves any number of rows.</p>\n"
        "<div class=\"stack\" role=\"img\" aria-label=\"Memory by use\">",
        bar, "</div>\n<div class=\"bill\">\n", rows, "</div>\n</section>\n");
  }

  const Plan& plan_;
  const PlanData& d_;
  int64_t rows_;
  Speed speed_;
  Model m_;
  std::optional<Alone> alone_;
};

}  // namespace

std::string Plan::html(int64_t rows, const Speed& speed) const {
  const FpMode ieee;
  check_rows(rows);
  return Page(*this, rows, speed).html();
}

}  // namespace tenon
