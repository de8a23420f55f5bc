// The rounds of Philox, and the order of its words.
#include "backend/cpu/jit/draws.h"

#include <cstddef>

namespace tenon::cpu::jit {

namespace {

using asmjit::Imm;
using asmjit::Operand;
namespace Id = x86::Inst;

class Draws {
 public:
  Draws(x86::Compiler& cc, Vectors& v, const x86::Gp& input) : cc_(cc), v_(v), input_(input) {}

  // The four words of each counter, in the lower halves of lanes.
  std::array<x86::Vec, 4> words(const x86::Gp& counter) {
    std::array<uint64_t, 8> lanes;
    for (size_t i = 0; i < lanes.size(); ++i) lanes[i] = i;
    const x86::Vec first = v_.fresh();
    const x86::Xmm low = cc_.newXmm();
    emit(Id::kIdVmovq, low, counter);
    emit(Id::kIdVpbroadcastq, first, low);
    const x86::Mem in_order =
        cc_.newConst(asmjit::ConstPoolScope::kLocal, lanes.data(), static_cast<size_t>(v_.bytes()));
    // Indices of elements wrap at 2^64, so counters wrap at 2^61.
    x86::Vec c0 = apply(v_.wide() ? Id::kIdVpandq : Id::kIdVpand,
                        apply(Id::kIdVpaddq, first, in_order), all(~uint64_t{0} >> 3));
    x86::Vec c1 = right(c0);
    x86::Vec c2 = v_.fresh();
    emit(Id::kIdVpbroadcastq, c2, at(offsetof(RandomInput, high)));
    x86::Vec c3 = right(c2);
    const x86::Vec m0 = kept(kPhiloxMultiplier0), m1 = kept(kPhiloxMultiplier1);
    for (int round = 0; round < RandomInput::kRounds; ++round) {
      const auto key = static_cast<size_t>(offsetof(RandomInput, keys)) + 16 * size_t(round);
      const x86::Vec p0 = apply(Id::kIdVpmuludq, m0, c0);
      const x86::Vec p1 = apply(Id::kIdVpmuludq, m1, c2);
      c0 = differ(upper(p1), c1, key);
      c1 = p1;
      c2 = differ(right(p0), c3, key + 8);
      c3 = p0;
    }
    return {c0, c1, c2, c3};
  }

  // The draws of the first and of the second half of the counters, as 16-bit elements in order.
  std::array<x86::Vec, 2> lines(const std::array<x86::Vec, 4>& w) {
    const x86::Vec a = joined(w[0], w[1]), b = joined(w[2], w[3]);
    if (!v_.wide()) {
      const x86::Vec even = apply(Id::kIdVpunpcklqdq, a, b), odd = apply(Id::kIdVpunpckhqdq, a, b);
      const auto halves = [&](int order) {
        const x86::Vec line = v_.fresh();
        emit(Id::kIdVperm2i128, line, even, odd, Imm(order));
        return line;
      };
      return {halves(0x20), halves(0x31)};
    }
    const auto half = [&](int begin) {
      std::array<int32_t, 16> from;
      for (int i = 0; i < 16; ++i) from[i] = begin + i / 4 * 2 + i % 2 + (i % 4 < 2 ? 0 : 16);
      const x86::Vec line = v_.fresh();
      emit(Id::kIdVmovups, line,
           cc_.newConst(asmjit::ConstPoolScope::kLocal, from.data(), sizeof from));
      emit(Id::kIdVpermi2d, line, a, b);
      return line;
    };
    return {half(0), half(8)};
  }

  // The elements of a line as two vectors.
  std::array<x86::Vec, 2> vectors(const x86::Vec& line, bool pairs) {
    if (pairs)
      return {
          number(apply(v_.wide() ? Id::kIdVpandq : Id::kIdVpand, line, all(0x0000ffff0000ffff))),
          number(apply(Id::kIdVpsrld, line, Imm(16)))};
    const auto wide = [&](const Operand& half) {
      const x86::Vec words = v_.fresh();
      emit(Id::kIdVpmovzxwd, words, half);
      return number(words);
    };
    if (v_.wide()) {
      const x86::Ymm high = cc_.newYmm();
      emit(Id::kIdVextracti64x4, high, line, Imm(1));
      return {wide(line.as<x86::Zmm>().half()), wide(high)};
    }
    const x86::Xmm high = cc_.newXmm();
    emit(Id::kIdVextracti128, high, line, Imm(1));
    return {wide(line.as<x86::Ymm>().half()), wide(high)};
  }

 private:
  template <class... Operands>
  void emit(Id::Id id, const Operands&... operands) {
    cc_.emit(id, operands...);
  }
  x86::Vec apply(Id::Id id, const Operand& a, const Operand& b) {
    const x86::Vec v = v_.fresh();
    emit(id, v, a, b);
    return v;
  }
  [[nodiscard]] x86::Mem at(size_t offset) const {
    return x86::ptr(input_, static_cast<int32_t>(offset), 8);
  }
  // An operand with this number in every lane.
  Operand all(uint64_t number) {
    if (v_.wide())
      return cc_.newConst(asmjit::ConstPoolScope::kLocal, &number, sizeof number)._1to8();
    const std::array<uint64_t, 4> four{number, number, number, number};
    return cc_.newConst(asmjit::ConstPoolScope::kLocal, four.data(), sizeof four);
  }
  x86::Vec kept(uint64_t number) {
    const x86::Vec v = v_.fresh();
    emit(Id::kIdVpbroadcastq, v,
         cc_.newConst(asmjit::ConstPoolScope::kLocal, &number, sizeof number));
    return v;
  }
  x86::Vec right(const x86::Vec& a) { return apply(Id::kIdVpsrlq, a, Imm(32)); }
  // The same lower halves. Half of the shifts are shuffles, which take other ports.
  x86::Vec upper(const x86::Vec& a) { return apply(Id::kIdVpshufd, a, Imm(0xf5)); }
  // a ^ b ^ the key at `offset`. Overwrites a.
  x86::Vec differ(const x86::Vec& a, const x86::Vec& b, size_t offset) {
    constexpr int kXor = 0x96;
    if (v_.wide()) {
      emit(Id::kIdVpternlogq, a, b, at(offset)._1to8(), Imm(kXor));
      return a;
    }
    const x86::Vec key = v_.fresh();
    emit(Id::kIdVpbroadcastq, key, at(offset));
    return apply(Id::kIdVpxor, apply(Id::kIdVpxor, a, b), key);
  }
  // The lower halves of a, and those of b as upper halves.
  x86::Vec joined(const x86::Vec& a, const x86::Vec& b) {
    const x86::Vec upper = apply(Id::kIdVpsllq, b, Imm(32));
    if (!v_.wide()) {
      const x86::Vec v = v_.fresh();
      emit(Id::kIdVpblendd, v, a, upper, Imm(0xaa));
      return v;
    }
    constexpr int kThirdSecondElseFirst = 0xd8;
    emit(Id::kIdVpternlogq, upper, a, all(0xffffffff), Imm(kThirdSecondElseFirst));
    return upper;
  }
  x86::Vec number(const x86::Vec& v) {
    const x86::Vec f = v_.fresh();
    emit(Id::kIdVcvtdq2ps, f, v);
    return f;
  }

  x86::Compiler& cc_;
  Vectors& v_;
  x86::Gp input_;
};

}  // namespace

std::array<x86::Vec, 4> draws(x86::Compiler& cc, Vectors& v, const x86::Gp& counter,
                              const x86::Gp& input, bool pairs) {
  Draws d(cc, v, input);
  const std::array<x86::Vec, 2> lines = d.lines(d.words(counter));
  const std::array<x86::Vec, 2> first = d.vectors(lines[0], pairs);
  const std::array<x86::Vec, 2> second = d.vectors(lines[1], pairs);
  return {first[0], first[1], second[0], second[1]};
}

}  // namespace tenon::cpu::jit
