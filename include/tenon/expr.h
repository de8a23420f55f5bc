// Scalar formulas: a hash-consed graph of words, built by ordinary C++ expressions.
#pragma once

#include "tenon/cxx20.h"
#ifdef TENON_CXX20

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/dtype.h"

#pragma GCC visibility push(default)

namespace tenon {

// The operations of formulas. Words after `round` occur only in lowered graphs, in which
// polynomials have replaced the transcendental words.
// clang-format off
enum class Word : uint8_t {
  constant, load,
  add, sub, mul, div, min, max,
  neg, abs, sqrt, rsqrt,
  exp, expm1, log, log1p, sigmoid, tanh, erf, erfc,
  select, round,
  fma, inverse, pow2, exponent, mantissa,
};
// clang-format on

enum class WordKind : uint8_t { leaf, basic, transcendental, lowered };

struct WordInfo {
  std::string_view name;
  int arity;
  WordKind kind;
  double beta;  // error bound in ulp of the fp32 result
};

inline constexpr std::array<WordInfo, 27> kWords{{
    {"constant", 0, WordKind::leaf, 0},
    {"load", 0, WordKind::leaf, 0},
    {"add", 2, WordKind::basic, 0.5},
    {"sub", 2, WordKind::basic, 0.5},
    {"mul", 2, WordKind::basic, 0.5},
    {"div", 2, WordKind::basic, 0.5},
    {"min", 2, WordKind::basic, 0.5},
    {"max", 2, WordKind::basic, 0.5},
    {"neg", 1, WordKind::basic, 0.5},
    {"abs", 1, WordKind::basic, 0.5},
    {"sqrt", 1, WordKind::basic, 0.5},
    {"rsqrt", 1, WordKind::basic, 1.5},
    {"exp", 1, WordKind::transcendental, 1},
    {"expm1", 1, WordKind::transcendental, 2.5},
    {"log", 1, WordKind::transcendental, 2.5},
    {"log1p", 1, WordKind::transcendental, 2.5},
    {"sigmoid", 1, WordKind::transcendental, 2.5},
    {"tanh", 1, WordKind::transcendental, 2.5},
    {"erf", 1, WordKind::transcendental, 2.5},
    {"erfc", 1, WordKind::transcendental, 2.5},
    {"select", 4, WordKind::basic, 0.5},
    {"round", 1, WordKind::basic, 0.5},
    {"fma", 3, WordKind::lowered, 0.5},
    {"inverse", 1, WordKind::lowered, 0.5},
    {"pow2", 1, WordKind::lowered, 0},
    {"exponent", 1, WordKind::lowered, 0},
    {"mantissa", 1, WordKind::lowered, 0},
}};

constexpr size_t index(Word w) { return static_cast<size_t>(w); }
constexpr const WordInfo& info(Word w) { return kWords[index(w)]; }

// A comparison exists only as the condition of a select.
enum class Rel : uint8_t { lt, le, gt, ge, eq, ne };
inline constexpr std::array<std::string_view, 6> kRels{"<", "<=", ">", ">=", "==", "!="};

struct Node {
  Word word = Word::constant;
  uint8_t detail = 0;            // Rel of a select, DType of a round
  float value = 0;               // value of a constant
  uint32_t slot = 0;             // slot of a load
  std::array<uint32_t, 4> in{};  // children; for a select: left, right, then, else

  [[nodiscard]] int arity() const { return info(word).arity; }
  [[nodiscard]] Rel rel() const { return static_cast<Rel>(detail); }
  [[nodiscard]] DType dtype() const { return static_cast<DType>(detail); }
};

class Graph;

// A value in a graph. A constant joins a graph when it is combined with a value of that graph.
class Expr {
 public:
  Expr(float constant = 0) : constant_(constant) {}  // NOLINT: a number is an expression
  Expr(Graph* graph, uint32_t id) : graph_(graph), id_(id) {}

  [[nodiscard]] Graph* graph() const { return graph_; }
  [[nodiscard]] uint32_t id() const { return id_; }
  [[nodiscard]] bool is_constant() const;
  [[nodiscard]] float constant() const;  // only for constants

 private:
  Graph* graph_ = nullptr;
  uint32_t id_ = 0;
  float constant_ = 0;
};

// Owns the nodes. Equal nodes are one node. Children come before their parents.
class Graph {
 public:
  static constexpr uint32_t kMaxNodes = 1U << 16;

  // A lowered graph is never differentiated, so abs(−x) becomes abs(x) and words share more nodes.
  explicit Graph(bool lowered = false) : lowered_(lowered) {}
  Graph(const Graph&) = default;  // existing Exprs still point to the original graph
  Graph& operator=(const Graph&) = delete;
  ~Graph() = default;

  Expr load(uint32_t slot);
  Expr constant(float value);
  uint32_t id(Expr e);  // adds a free constant to this graph

  [[nodiscard]] bool lowered() const { return lowered_; }
  [[nodiscard]] uint32_t size() const { return static_cast<uint32_t>(nodes_.size()); }
  [[nodiscard]] const Node& operator[](uint32_t id) const { return nodes_[id]; }

  Expr intern(const Node& node);

 private:
  // The index of the node in `table_`, or of the free entry for it.
  [[nodiscard]] size_t place_of(const Node& node) const;
  void grow();

  bool lowered_;
  std::vector<Node> nodes_;
  // The ids of the nodes: a hash table with open addressing, at most half full. Planning makes many
  // small graphs, and std::unordered_map would allocate each entry.
  std::vector<uint32_t> table_;
};

// Applies a word. Simplifies only if no bit can change.
Expr apply_word(Word word, std::span<const Expr> in, uint8_t detail = 0);

inline Expr apply_word(Word word, Expr a) { return apply_word(word, std::span(&a, 1)); }
inline Expr apply_word(Word word, Expr a, Expr b) {
  const std::array in{a, b};
  return apply_word(word, in);
}

inline Expr operator+(Expr a, Expr b) { return apply_word(Word::add, a, b); }
inline Expr operator-(Expr a, Expr b) { return apply_word(Word::sub, a, b); }
inline Expr operator*(Expr a, Expr b) { return apply_word(Word::mul, a, b); }
inline Expr operator/(Expr a, Expr b) { return apply_word(Word::div, a, b); }
inline Expr operator-(Expr a) { return apply_word(Word::neg, a); }
inline Expr min(Expr a, Expr b) { return apply_word(Word::min, a, b); }
inline Expr max(Expr a, Expr b) { return apply_word(Word::max, a, b); }
inline Expr clamp(Expr x, Expr low, Expr high) { return max(min(x, high), low); }
inline Expr abs(Expr a) { return apply_word(Word::abs, a); }
inline Expr sqrt(Expr a) { return apply_word(Word::sqrt, a); }
inline Expr rsqrt(Expr a) { return apply_word(Word::rsqrt, a); }
inline Expr exp(Expr a) { return apply_word(Word::exp, a); }
inline Expr expm1(Expr a) { return apply_word(Word::expm1, a); }
inline Expr log(Expr a) { return apply_word(Word::log, a); }
inline Expr log1p(Expr a) { return apply_word(Word::log1p, a); }
inline Expr sigmoid(Expr a) { return apply_word(Word::sigmoid, a); }
inline Expr tanh(Expr a) { return apply_word(Word::tanh, a); }
inline Expr erf(Expr a) { return apply_word(Word::erf, a); }
inline Expr erfc(Expr a) { return apply_word(Word::erfc, a); }

struct Condition {
  Rel rel;
  Expr left, right;
};
inline Condition operator<(Expr a, Expr b) { return {Rel::lt, a, b}; }
inline Condition operator<=(Expr a, Expr b) { return {Rel::le, a, b}; }
inline Condition operator>(Expr a, Expr b) { return {Rel::gt, a, b}; }
inline Condition operator>=(Expr a, Expr b) { return {Rel::ge, a, b}; }
inline Condition operator==(Expr a, Expr b) { return {Rel::eq, a, b}; }
inline Condition operator!=(Expr a, Expr b) { return {Rel::ne, a, b}; }
inline Expr select(const Condition& c, Expr then, Expr otherwise) {
  const std::array in{c.left, c.right, then, otherwise};
  return apply_word(Word::select, in, static_cast<uint8_t>(c.rel));
}

// Rounds to the nearest value of a format, kept in fp32. Its derivative is 1.
inline Expr round(Expr a, DType dtype) {
  if (dtype == DType::f32) return a;
  return apply_word(Word::round, std::span(&a, 1), static_cast<uint8_t>(dtype));
}

// d(out)/d(wrt)·seed for each wrt, by reverse mode. All expressions must be in one graph.
std::vector<Expr> grad(Expr out, Expr seed, std::span<const Expr> wrt);

// The formula as text. Shared parts are named t1, t2, …. `loads` has the names of the loads by
// slot.
std::string formula_text(const Graph& graph, std::span<const uint32_t> roots,
                         std::span<const std::string> loads);

}  // namespace tenon

#pragma GCC visibility pop

#endif
