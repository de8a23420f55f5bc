// The scaling modes as the specification states them: one row each, in the order of the library,
// independent of its table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace tenon::test {

namespace ref {

struct Size {
  int64_t rows, cols;
  friend bool operator==(const Size&, const Size&) = default;
};
constexpr int64_t up(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace ref

// In arrays, element 0 is rowwise and element 1 is columnwise.
struct Mode {
  std::string_view name;
  bool e8m0 = false;    // scales are e8m0, not fp32
  bool single = false;  // one scale for the tensor
  bool given = false;   // the caller gives it
  bool rule = false;    // fp32 scales from an amax: eps and power_of_two are parameters
  bool pow2 = false;    // scales are powers of two unless the caller says otherwise
  bool turns = true;    // columnwise data are [K, M]
  // Elements that share a scale. With a single scale the size is not used.
  ref::Size block[2] = {{32, 32}, {32, 32}};
  bool turned[2] = {};  // scale (i, j) is in row j, column i
  ref::Size (*scales)(int64_t m, int64_t k, bool column);
};

inline constexpr Mode kSpecified[] = {
    {.name = "none",
     .scales =
         [](int64_t, int64_t, bool) {
           return ref::Size{0, 0};
         }},
    {.name = "delayed",
     .single = true,
     .given = true,
     .scales =
         [](int64_t, int64_t, bool) {
           return ref::Size{1, 1};
         }},
    {.name = "current",
     .single = true,
     .rule = true,
     .scales =
         [](int64_t, int64_t, bool) {
           return ref::Size{1, 1};
         }},
    {.name = "mxfp8",
     .e8m0 = true,
     .pow2 = true,
     .turns = false,
     .block = {{1, 32}, {32, 1}},
     .scales =
         [](int64_t m, int64_t k, bool column) {
           return column ? ref::Size{ref::up(ref::up(m, 32), 4) * 4, ref::up(k, 128) * 128}
                         : ref::Size{ref::up(m, 128) * 128, ref::up(ref::up(k, 32), 4) * 4};
         }},
    {.name = "block1x128",
     .rule = true,
     .pow2 = true,
     .block = {{1, 128}, {128, 1}},
     .turned = {true, false},
     .scales =
         [](int64_t m, int64_t k, bool column) {
           return column ? ref::Size{ref::up(m, 128), ref::up(k, 4) * 4}
                         : ref::Size{ref::up(k, 128), ref::up(m, 4) * 4};
         }},
    {.name = "block128x128",
     .rule = true,
     .pow2 = true,
     .block = {{128, 128}, {128, 128}},
     .turned = {false, true},
     .scales =
         [](int64_t m, int64_t k, bool column) {
           return column ? ref::Size{ref::up(k, 128), ref::up(ref::up(m, 128), 4) * 4}
                         : ref::Size{ref::up(m, 128), ref::up(ref::up(k, 128), 4) * 4};
         }},
};

namespace ref {

inline Size data_size(const Mode& mode, int64_t m, int64_t k, bool column) {
  return column && mode.turns ? Size{k, m} : Size{m, k};
}

}  // namespace ref

}  // namespace tenon::test
