// The lowered formula as C++ statements, which CUDA reads too.
#pragma once

#include <string>

#include "tenon/expr.h"

namespace tenon {

// A constant as a C++ literal, exact to the bit.
std::string literal(float value);

// One `const float tN = …;` a line, loads written as `in[slot]`, then `out[i] = tN;` for each root.
// Reads the functions of device/words.cuh; `name` names them.
std::string_view word_name(Word w);
std::string print(const Graph& lowered, std::span<const uint32_t> roots,
                  std::string_view (*name)(Word) = word_name);

}  // namespace tenon
