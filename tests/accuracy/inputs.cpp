// Creates the chunks of inputs on demand. All of them together would not fit in a cache or a CI
// job.
#include "inputs.h"

#include <array>
#include <bit>
#include <cmath>
#include <memory>

#include "tenon/error.h"

namespace tenon::accuracy {

namespace {

constexpr int kNeighbours = 10000;  // per root and kink, half on each side

uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

// Chunk c of `count`: one value from each of kChunk equal slices of all bit patterns, ascending. So
// every chunk has every exponent and both signs.
uint32_t spread(uint32_t c, uint32_t count, size_t i) {
  const uint64_t slices = uint64_t{count} * kChunk;
  const uint64_t slice = i * count + c;
  const uint64_t width = (uint64_t{1} << 32) / slices;
  return static_cast<uint32_t>((slice << 32) / slices + mixed(slice) % width);
}

// The second input for value i: random bits, or a value of ordinary size.
uint32_t partner(uint32_t c, size_t i) {
  const uint64_t random = mixed((uint64_t{c} << 32 | i) + 0x9e3779b97f4a7c15U);
  const auto any = static_cast<uint32_t>(random);
  if (c % 2 == 0) return any;
  const auto exponent = static_cast<uint32_t>(117 + (random >> 32) % 16);  // 2^−10 … 2^6
  return (any & 0x807fffffU) | (exponent << 23);
}

Points spread_points(const Function& f, uint32_t c, uint32_t count) {
  Points p{{DType::f32, kChunk}, {DType::f32, f.gated() ? kChunk : 0}};
  for (size_t i = 0; i < kChunk; ++i) {
    const uint32_t own = spread(c, count, i);
    const uint32_t other = partner(c, i);
    const bool exchanged = f.gated() && c % 4 >= 2;
    p.a.set(i, exchanged ? other : own);
    if (f.gated()) p.b.set(i, exchanged ? own : other);
  }
  return p;
}

constexpr std::array<float, 32> kOthers{__builtin_nanf(""),
                                        __builtin_inff(),
                                        -__builtin_inff(),
                                        0.0F,
                                        -0.0F,
                                        0x1p-149F,
                                        -0x1p-149F,
                                        0x1p-133F,
                                        -0x1p-133F,
                                        0x1p-24F,
                                        -0x1p-24F,
                                        0x1.fep127F,
                                        -0x1.fep127F,
                                        65504.0F,
                                        -65504.0F,
                                        1.0F,
                                        -1.0F,
                                        7.0F,
                                        -7.0F,
                                        12.0F,
                                        -12.0F,
                                        15.0F,
                                        -15.0F,
                                        128.0F,
                                        -128.0F,
                                        3.0F,
                                        -3.0F,
                                        -75.2F,
                                        0.5F,
                                        -1.2784645F,
                                        0x1p-14F,
                                        0x1p14F};

// In the full run, special values come first. A quick run uses every few of them.
uint32_t other_code(DType dtype, uint32_t k, uint32_t count) {
  const uint32_t at = k * (64 / count);
  if (at < kOthers.size()) return encode(dtype, kOthers[at]);
  return static_cast<uint32_t>(mixed(at + 1000)) & 0xffffU;
}

Points code_points(const Function& f, DType dtype, uint32_t k, uint32_t count, bool exchanged) {
  Points p{{dtype, kChunk}, {dtype, f.gated() ? kChunk : 0}};
  const uint32_t other = f.gated() ? other_code(dtype, k, count) : 0;
  for (uint32_t i = 0; i < kChunk; ++i) {
    p.a.set(i, exchanged ? other : i);
    if (f.gated()) p.b.set(i, exchanged ? i : other);
  }
  return p;
}

// All neighbours along one input. The list is repeated up to a multiple of kChunk.
std::vector<uint32_t> neighbours(const Function& f, int which) {
  std::vector<uint32_t> codes;
  for (const float v : f.special_points(which, 1.0F)) {
    const auto bits = std::bit_cast<uint32_t>(v);
    // Zero has neighbours of both signs. Otherwise bit patterns increase with the distance from
    // zero.
    const uint32_t magnitude = bits & 0x7fffffffU;
    for (int i = -kNeighbours / 2; i < kNeighbours / 2; ++i) {
      const int64_t m = int64_t{magnitude} + i;
      const uint32_t sign = (bits ^ (m < 0 ? 0x80000000U : 0)) & 0x80000000U;
      const int64_t distance = m < 0 ? -m - 1 : m;
      codes.push_back(static_cast<uint32_t>(distance) | sign);
    }
  }
  const size_t full = codes.size();
  for (size_t i = 0; full > 0 && codes.size() % kChunk != 0; ++i) codes.push_back(codes[i % full]);
  return codes;
}

Points neighbour_points(const Function& f, const std::vector<uint32_t>& codes, size_t start,
                        int which) {
  Points p{{DType::f32, kChunk}, {DType::f32, f.gated() ? kChunk : 0}};
  for (size_t i = 0; i < kChunk; ++i) {
    const uint32_t other = partner(1, start + i);
    p.a.set(i, which == 0 ? codes[start + i] : other);
    if (f.gated()) p.b.set(i, which == 0 ? other : codes[start + i]);
  }
  return p;
}

}  // namespace

std::vector<Chunk> chunks(const Function& f, DType dtype, const Amounts& amounts) {
  std::vector<Chunk> list;
  if (dtype != DType::f32) {
    const uint32_t others = f.gated() ? amounts.others : 1;
    for (uint32_t k = 0; k < others; ++k)
      for (const bool exchanged : {false, true})
        if (f.gated() || !exchanged)
          list.emplace_back([&f, dtype, k, others, exchanged] {
            return code_points(f, dtype, k, others, exchanged);
          });
    return list;
  }
  for (uint32_t c = 0; c < amounts.spread; ++c)
    list.emplace_back([&f, c, count = amounts.spread] { return spread_points(f, c, count); });
  for (int which = 0; which < (f.gated() ? 2 : 1); ++which) {
    const auto codes = std::make_shared<const std::vector<uint32_t>>(neighbours(f, which));
    for (size_t start = 0; start < codes->size(); start += kChunk)
      list.emplace_back(
          [&f, codes, start, which] { return neighbour_points(f, *codes, start, which); });
  }
  return list;
}

Points patterns(uint32_t first, size_t count) {
  Points p{{DType::f32, count}, {}};
  for (size_t i = 0; i < count; ++i) p.a.set(i, first + static_cast<uint32_t>(i));
  return p;
}

Function for_all_patterns(const std::string& name) {
  Function f(Function::Group::unary, name);
  require(!f.gated(), "--exhaustive ", name, ": a gated function has 2^64 inputs");
  return f;
}

}  // namespace tenon::accuracy
