// Prints formulas as text: C++ statements for compilers, infix lines for people.
#include "expr/print.h"

#include <charconv>
#include <cmath>

#include "expr/order.h"
#include "tenon/error.h"

namespace tenon {

namespace {

template <class Name>
std::string call(std::string_view function, const Node& n, const Name& in) {
  std::string text = str("tenon_", function, "(");
  for (int i = 0; i < n.arity(); ++i) text += str(i ? ", " : "", in(n.in[i]));
  return text + ")";
}

std::string_view infix(Word w) {
  switch (w) {
    case Word::add:
      return " + ";
    case Word::sub:
      return " - ";
    case Word::mul:
      return " * ";
    case Word::div:
      return " / ";
    default:
      return {};
  }
}

template <class Name>
std::string statement(const Node& n, const Name& in, std::string_view (*name)(Word)) {
  switch (n.word) {
    case Word::load:
      return str("in[", n.slot, "]");
    case Word::neg:
      return str("-", in(n.in[0]));
    case Word::select:
      return str(in(n.in[0]), " ", kRels[n.detail], " ", in(n.in[1]), " ? ", in(n.in[2]), " : ",
                 in(n.in[3]));
    case Word::round:
      return call(str("round_", info(n.dtype()).name), n, in);
    default:
      if (!infix(n.word).empty()) return str(in(n.in[0]), infix(n.word), in(n.in[1]));
      return call(name(n.word), n, in);
  }
}

// The shortest decimal that parses to the same fp32 value.
std::string decimal(float value) {
  std::array<char, 32> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  return {buffer.data(), end};
}

}  // namespace

std::string literal(float value) {
  if (!std::isfinite(value)) return str("tenon_bits(", __builtin_bit_cast(uint32_t, value), "u)");
  std::array<char, 40> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), std::fabs(value),
                                 std::chars_format::hex)
                       .ptr;
  const std::string digits = str("0x", std::string_view(buffer.data(), end), "f");
  return std::signbit(value) ? str("(-", digits, ")") : digits;
}

std::string_view word_name(Word w) { return info(w).name; }

std::string print(const Graph& graph, std::span<const uint32_t> roots,
                  std::string_view (*name)(Word)) {
  std::string text;
  // Numbers nodes in order of use, so that the text does not depend on how the graph was built.
  std::vector<uint32_t> number(graph.size(), 0);
  uint32_t next = 0;
  const auto in = [&](uint32_t id) {
    return graph[id].word == Word::constant ? literal(graph[id].value) : str("t", number[id]);
  };
  for (const uint32_t id : order(graph, roots)) {
    if (graph[id].word == Word::constant) continue;
    number[id] = next++;
    text += str("const float ", in(id), " = ", statement(graph[id], in, name), ";\n");
  }
  for (size_t i = 0; i < roots.size(); ++i) text += str("out[", i, "] = ", in(roots[i]), ";\n");
  return text;
}

std::string formula_text(const Graph& graph, std::span<const uint32_t> roots,
                         std::span<const std::string> loads) {
  const std::vector<uint32_t> nodes = order(graph, roots);
  std::vector<int> uses(graph.size(), 0);
  for (const uint32_t id : nodes)
    for (int i = 0; i < graph[id].arity(); ++i) ++uses[graph[id].in[i]];

  // Precedence of the text of each node: 0 sum, 1 product, 2 atom.
  struct Text {
    std::string text;
    int level = 2;
  };
  std::vector<Text> texts(graph.size());
  std::string lines;
  int shared = 0;
  const auto at = [&](uint32_t id, int level) {
    const Text& t = texts[id];
    return t.level < level ? str("(", t.text, ")") : t.text;
  };
  for (const uint32_t id : nodes) {
    const Node& n = graph[id];
    Text& t = texts[id];
    switch (n.word) {
      case Word::constant:
        t = {decimal(n.value), n.value < 0 || std::signbit(n.value) ? 0 : 2};
        break;
      case Word::load:
        t.text = n.slot < loads.size() ? loads[n.slot] : str("in", n.slot);
        break;
      case Word::add:
        t = {str(at(n.in[0], 0), " + ", at(n.in[1], 1)), 0};
        break;
      case Word::sub:
        t = {str(at(n.in[0], 0), " - ", at(n.in[1], 1)), 0};
        break;
      case Word::mul:
        t = {str(at(n.in[0], 1), "*", at(n.in[1], 2)), 1};
        break;
      case Word::div:
        t = {str(at(n.in[0], 1), "/", at(n.in[1], 2)), 1};
        break;
      case Word::neg:
        t = {str("-", at(n.in[0], 2)), 0};
        break;
      case Word::select:
        t.text = str("select(", at(n.in[0], 0), " ", kRels[n.detail], " ", at(n.in[1], 0), ", ",
                     at(n.in[2], 0), ", ", at(n.in[3], 0), ")");
        break;
      case Word::round:
        t.text = str("round(", at(n.in[0], 0), ", ", info(n.dtype()).name, ")");
        break;
      default:
        t.text = str(info(n.word).name, "(");
        for (int i = 0; i < n.arity(); ++i) t.text += str(i ? ", " : "", at(n.in[i], 0));
        t.text += ")";
    }
    if (uses[id] > 1 && n.arity() > 0) {
      const std::string label = str("t", ++shared);
      lines += str(label, " = ", t.text, "\n");
      t = {label, 2};
    }
  }
  for (const uint32_t root : roots) lines += at(root, 0) + "\n";
  return lines;
}

}  // namespace tenon
