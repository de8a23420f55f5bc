// The computation of each word, for any value type. Only this file maps a word to its sequence.
#pragma once

#include "expr/words.h"
#include "tenon/expr.h"

namespace tenon {

// `Sequences` is words::Strict or words::Native. Leaves, select and round depend on more than
// values, so the readers handle them.
template <Word w, class Sequences, class V>
[[gnu::always_inline]] inline V word(V a, [[maybe_unused]] V b, [[maybe_unused]] V c) {
  if constexpr (w == Word::add) return a + b;
  if constexpr (w == Word::sub) return a - b;
  if constexpr (w == Word::mul) return a * b;
  if constexpr (w == Word::div) return a / b;
  if constexpr (w == Word::min) return min(a, b);
  if constexpr (w == Word::max) return max(a, b);
  if constexpr (w == Word::neg) return -a;
  if constexpr (w == Word::abs) return abs(a);
  if constexpr (w == Word::sqrt) return sqrt(a);
  if constexpr (w == Word::rsqrt) return V(1.0F) / sqrt(a);
  if constexpr (w == Word::exp) return Sequences::exp(a);
  if constexpr (w == Word::expm1) return Sequences::expm1(a);
  if constexpr (w == Word::log) return Sequences::log(a);
  if constexpr (w == Word::log1p) return Sequences::log1p(a);
  if constexpr (w == Word::sigmoid) return Sequences::sigmoid(a);
  if constexpr (w == Word::tanh) return Sequences::tanh(a);
  if constexpr (w == Word::erf) return Sequences::erf(a);
  if constexpr (w == Word::erfc) return Sequences::erfc(a);
  if constexpr (w == Word::fma) return fma(a, b, c);
  if constexpr (w == Word::inverse) return inverse(a);
  if constexpr (w == Word::pow2) return pow2(a);
  if constexpr (w == Word::exponent) return exponent(a);
  if constexpr (w == Word::mantissa) return mantissa(a);
  return a;
}

// One function pointer per word, for readers that know the word only at run time.
template <class Sequences, class V>
using WordFunction = V (*)(V, V, V);

template <class Sequences, class V, size_t... w>
constexpr auto word_table(std::index_sequence<w...>) {
  return std::array<WordFunction<Sequences, V>, sizeof...(w)>{
      [](V a, V b, V c) { return word<static_cast<Word>(w), Sequences, V>(a, b, c); }...};
}
template <class Sequences, class V>
inline constexpr auto kWordTable =
    word_table<Sequences, V>(std::make_index_sequence<kWords.size()>{});

}  // namespace tenon
