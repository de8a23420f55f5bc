// Prints a lowered formula as C++ statements, which are also valid CUDA.
#pragma once

#include <string>

#include "tenon/expr.h"

namespace tenon {

// A constant as an exact C++ literal.
std::string literal(float value);

// Prints one `const float tN = …;` per line, with loads as `in[slot]`, then `out[i] = tN;` for each
// root. The statements call functions of device/words.cuh. `name` gives the names of these
// functions.
std::string_view word_name(Word w);
std::string print(const Graph& lowered, std::span<const uint32_t> roots,
                  std::string_view (*name)(Word) = word_name);

}  // namespace tenon
