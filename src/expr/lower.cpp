// Traces the template of each word with expressions as values.
#include "expr/lower.h"

#include "expr/order.h"
#include "expr/word.h"

namespace tenon {

Expr fma(Expr a, Expr b, Expr c) {
  const std::array in{a, b, c};
  return apply_word(Word::fma, in);
}
Expr inverse(Expr x) { return apply_word(Word::inverse, x); }
Expr pow2(Expr n) { return apply_word(Word::pow2, n); }
Expr exponent(Expr x) { return apply_word(Word::exponent, x); }
Expr mantissa(Expr x) { return apply_word(Word::mantissa, x); }

Lowered lower(const Graph& graph, std::span<const uint32_t> roots, Precision precision) {
  Lowered out;
  std::vector<Expr> image(graph.size());
  const auto& table = precision == Precision::strict ? kWordTable<words::Strict, Expr>
                                                     : kWordTable<words::Native, Expr>;
  for (const uint32_t id : order(graph, roots)) {
    const Node& n = graph[id];
    const auto in = [&](int i) { return i < n.arity() ? image[n.in[i]] : Expr(); };
    switch (n.word) {
      case Word::constant:
        image[id] = Expr(n.value);
        break;
      case Word::load:
        image[id] = out.graph.load(n.slot);
        break;
      case Word::select:
        image[id] = select({n.rel(), in(0), in(1)}, in(2), in(3));
        break;
      case Word::round:
        image[id] = round(in(0), n.dtype());
        break;
      default:
        image[id] = table[index(n.word)](in(0), in(1), in(2));
    }
  }
  for (const uint32_t root : roots) out.roots.push_back(out.graph.id(image[root]));
  return out;
}

}  // namespace tenon
