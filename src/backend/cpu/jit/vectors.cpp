// The instructions of each word, dtype and store.
#include "backend/cpu/jit/vectors.h"

#include <array>
#include <cassert>
#include <span>
#include <utility>

#include "backend/cpu/jit/exp2.h"

namespace tenon::cpu::jit {

namespace {

using asmjit::Imm;
using asmjit::Operand;
namespace Id = x86::Inst;

constexpr uint32_t kSign = 0x80000000U, kMagnitude = 0x7fffffffU, kNan = 0x7fc00000U;
constexpr uint32_t bits_of(float f) { return __builtin_bit_cast(uint32_t, f); }

// Predicates of vcmpps: quiet, and ordered but for !=.
constexpr int kEqual = 0x00, kUnordered = 0x03, kOrdered = 0x07;
constexpr std::array kPredicates{0x11, 0x12, 0x1e, 0x1d, kEqual, 0x04};
// The relation with its operands exchanged.
constexpr std::array kMirrored{Rel::gt, Rel::ge, Rel::lt, Rel::le, Rel::eq, Rel::ne};

// vpternlogd: bits of the third operand choose the first or the second.
constexpr int kThirdFirstElseSecond = 0xe4, kThirdSecondElseFirst = 0xd8;

// FP8 by one addition: for a = 1.f·2^e, adding 2^(e + 23 − m)·(1 + k·2^−23) rounds to m bits of
// fraction. The code is then in the low bits of sum + (sum >> shift).
struct Fp8 {
  uint32_t max, nan;  // as fp32; nan becomes code 0x7f
  uint32_t least;     // the exponent of the smallest normal number
  uint32_t add;       // to the exponent of a
  int shift;
};
constexpr Fp8 fp8(DType d) {
  if (d == DType::e4m3) return {bits_of(448.0F), bits_of(480.0F), 121U << 23, (20U << 23) + 24, 20};
  return {bits_of(57344.0F), bits_of(114688.0F), 113U << 23, (21U << 23) + 104, 21};
}

}  // namespace

x86::Vec Vectors::fresh() {
  if (wide_) return cc_.newZmm();
  return cc_.newYmm();
}

x86::Vec Vectors::zero() {
  const x86::Vec v = fresh();
  emit(wide_ ? Id::kIdVpxord : Id::kIdVpxor, v, v, v);
  return v;
}

x86::Mem Vectors::memory(uint32_t bits) {
  if (wide_) return cc_.newUInt32Const(asmjit::ConstPoolScope::kLocal, bits)._1to16();
  std::array<uint32_t, 8> all;
  all.fill(bits);
  return cc_.newConst(asmjit::ConstPoolScope::kLocal, all.data(), sizeof all);
}

x86::Vec Vectors::kept(uint32_t bits) {
  const auto found = kept_.find(bits);
  if (found != kept_.end()) return found->second;
  asmjit::BaseNode* const here = cc_.setCursor(start_);
  const x86::Vec v = fresh();
  emit(Id::kIdVbroadcastss, v, cc_.newUInt32Const(asmjit::ConstPoolScope::kLocal, bits));
  const bool same = here == start_;
  start_ = cc_.cursor();
  cc_.setCursor(same ? start_ : here);
  return kept_[bits] = v;
}

x86::Vec Vectors::reg(const Value& v) { return v.constant ? kept(v.bits) : v.reg; }
Operand Vectors::any(const Value& v) {
  if (v.constant) return memory(v.bits);
  return v.reg;
}

x86::Vec Vectors::binary(Id::Id id, const Operand& a, const Operand& b) {
  const x86::Vec v = fresh();
  emit(id, v, a, b);
  return v;
}

x86::Vec Vectors::shifted(Id::Id id, const x86::Vec& a, int count) {
  return binary(id, a, Imm(count));
}

Operand Vectors::compare(int predicate, const x86::Vec& a, const Operand& b) {
  if (!wide_) {
    const x86::Vec m = fresh();
    emit(Id::kIdVcmpps, m, a, b, Imm(predicate));
    return m;
  }
  const x86::KReg k = cc_.newKw();
  emit(Id::kIdVcmpps, k, a, b, Imm(predicate));
  return k;
}

x86::Vec Vectors::blend(const Operand& mask, const x86::Vec& other, const Operand& then) {
  const x86::Vec v = fresh();
  if (wide_)
    cc_.k(mask.as<x86::KReg>()).overwrite().emit(Id::kIdVblendmps, v, other, then);
  else
    emit(Id::kIdVblendvps, v, other, then, mask);
  return v;
}

x86::Vec Vectors::fma(Value a, Value b, Value c, int negated) {
  struct Forms {
    Id::Id with132, with213, with231;
  };
  constexpr std::array<Forms, 4> kForms{
      {{Id::kIdVfmadd132ps, Id::kIdVfmadd213ps, Id::kIdVfmadd231ps},
       {Id::kIdVfnmadd132ps, Id::kIdVfnmadd213ps, Id::kIdVfnmadd231ps},
       {Id::kIdVfmsub132ps, Id::kIdVfmsub213ps, Id::kIdVfmsub231ps},
       {Id::kIdVfnmsub132ps, Id::kIdVfnmsub213ps, Id::kIdVfnmsub231ps}}};
  const Forms& form = kForms[static_cast<size_t>(negated)];
  if (a.constant) std::swap(a, b);
  if (b.constant && b.bits == bits_of(1.0F) && negated == kNothing)
    return c.constant ? binary(Id::kIdVaddps, reg(a), any(c))
                      : binary(Id::kIdVaddps, c.reg, any(a));
  // One operand at most is in memory, and the result replaces an operand.
  if (!c.constant && c.dies) {
    emit(form.with231, c.reg, reg(a), any(b));
    return c.reg;
  }
  if (!b.constant && b.dies && !(a.dies && !a.constant)) std::swap(a, b);
  x86::Vec to = reg(a);
  if (a.constant || !a.dies) {
    to = fresh();
    emit(Id::kIdVmovaps, to, reg(a));
  }
  if (b.constant && !c.constant)
    emit(form.with132, to, c.reg, memory(b.bits));
  else
    emit(form.with213, to, reg(b), any(c));
  return to;
}

// IEEE 754-2019 minimum and maximum. The instructions return the second operand if one operand is
// NaN or both are zeros.
x86::Vec Vectors::extreme(bool most, Value a, Value b) {
  const Id::Id id = most ? Id::kIdVmaxps : Id::kIdVminps;
  if (b.constant || (b.ordinary && !a.constant)) std::swap(a, b);
  if (a.ordinary && !a.constant) return binary(id, a.reg, any(b));
  const bool nan = a.constant && (a.bits & kMagnitude) > bits_of(__builtin_inff());
  if (a.constant && !b.constant && !nan) {
    const x86::Vec v = binary(id, kept(a.bits), b.reg);
    // max(+0, −0) is now −0. Adding +0 changes no other value.
    if (most && a.bits == 0) return binary(Id::kIdVaddps, v, kept(0));
    const bool negative_zero = a.bits == kSign;
    if (most || !negative_zero) return v;
  }
  const x86::Vec left = reg(a), right = reg(b);
  if (wide_) {
    // This instruction orders zeros, but prefers numbers to NaNs.
    constexpr int kSignOfResult = 4;
    const x86::Vec v = fresh();
    emit(Id::kIdVrangeps, v, left, right, Imm((most ? 1 : 0) | kSignOfResult));
    const Operand nan = compare(kUnordered, left, right);
    cc_.k(nan.as<x86::KReg>()).emit(Id::kIdVaddps, v, left, right);
    return v;
  }
  const x86::Vec v = binary(id, left, right);
  const x86::Vec zeros = binary(most ? Id::kIdVandps : Id::kIdVorps, left, right);
  const x86::Vec ordered = blend(compare(kEqual, left, right), v, zeros);
  return blend(compare(kUnordered, left, left), ordered, left);
}

x86::Vec Vectors::word(Word w, const Value& a, const Value& b, const Value& c, int form) {
  const Value one{.bits = bits_of(1.0F), .constant = true};
  const auto commutes = [&](Id::Id id) {
    return a.constant ? binary(id, reg(b), any(a)) : binary(id, a.reg, any(b));
  };
  const auto exponent = [&](const x86::Vec& x) {
    constexpr uint32_t kRootHalf = 0x3f3504f3;
    return shifted(Id::kIdVpsrad, binary(Id::kIdVpsubd, x, memory(kRootHalf)), 23);
  };
  switch (w) {
    case Word::add:
      return commutes(Id::kIdVaddps);
    case Word::mul:
      return form == kPower ? binary(Id::kIdVscalefps, reg(a), any(b)) : commutes(Id::kIdVmulps);
    case Word::sub:
      return binary(Id::kIdVsubps, reg(a), any(b));
    case Word::div:
      return binary(Id::kIdVdivps, reg(a), any(b));
    case Word::min:
    case Word::max:
      return extreme(w == Word::max, a, b);
    case Word::neg:
      return binary(Id::kIdVxorps, reg(a), memory(kSign));
    case Word::abs:
      return form == kResult ? binary(Id::kIdVorps, reg(a), memory(kSign))
                             : binary(Id::kIdVandps, reg(a), memory(kMagnitude));
    case Word::inverse:
      return binary(Id::kIdVdivps, reg(one), any(a));
    case Word::sqrt:
    case Word::rsqrt: {
      const x86::Vec root = fresh();
      emit(Id::kIdVsqrtps, root, reg(a));
      return w == Word::sqrt ? root : binary(Id::kIdVdivps, reg(one), root);
    }
    case Word::fma:
      return fma(a, b, c, form);
    case Word::pow2:
      return shifted(Id::kIdVpslld, reg(a), 23);
    case Word::exponent: {
      const x86::Vec v = fresh();
      emit(Id::kIdVcvtdq2ps, v, exponent(reg(a)));
      return v;
    }
    case Word::mantissa:
      return binary(Id::kIdVpsubd, reg(a), shifted(Id::kIdVpslld, exponent(reg(a)), 23));
    default:
      assert(false && "not a lowered word");
      return reg(a);
  }
}

x86::Vec Vectors::exp2(const x86::Vec& x, bool rough) {
  assert(wide_);
  constexpr int kFloor = 1;
  const x86::Vec f = binary(Id::kIdVreduceps, x, Imm(kFloor));
  const std::span<const float> c = rough ? std::span<const float>(kExp2Rough) : kExp2;
  x86::Vec p = fresh();
  emit(Id::kIdVmovaps, p, kept(bits_of(c.back())));
  for (size_t k = c.size() - 1; k-- > 0;) emit(Id::kIdVfmadd213ps, p, f, memory(bits_of(c[k])));
  return binary(Id::kIdVscalefps, p, x);  // uses the integer part of x
}

x86::Vec Vectors::reciprocal(const x86::Vec& x, bool rough) {
  assert(wide_);
  const x86::Vec r = fresh();
  if (rough) {
    emit(Id::kIdVrcp14ps, r, x);
    return r;
  }
  // One step of Newton's method. It makes NaN of zeros and infinities: their results are set.
  constexpr uint32_t kInverses = 0x00870600;  // 0: ±inf, −inf: −0, +inf: +0
  emit(Id::kIdVrcp14ps, r, x);
  const x86::Vec error = fresh();
  emit(Id::kIdVmovaps, error, kept(bits_of(1.0F)));
  emit(Id::kIdVfnmadd231ps, error, x, r);
  emit(Id::kIdVfmadd213ps, error, r, r);
  emit(Id::kIdVfixupimmps, error, x, kept(kInverses), Imm(0));
  return error;
}

x86::Vec Vectors::select(Rel rel, const Value& a, const Value& b, const Value& then,
                         const Value& other) {
  const bool mirror = a.constant && !b.constant;
  const Rel used = mirror ? kMirrored[static_cast<size_t>(rel)] : rel;
  const Value &left = mirror ? b : a, &right = mirror ? a : b;
  const Operand mask = compare(kPredicates[static_cast<size_t>(used)], reg(left), any(right));
  const auto zero = [](const Value& v) { return v.constant && v.bits == 0; };
  if (!wide_ && zero(then)) return binary(Id::kIdVandnps, mask, any(other));
  if (!wide_ && zero(other)) return binary(Id::kIdVandps, mask, any(then));
  return blend(mask, reg(other), any(then));
}

x86::Vec Vectors::rounded_bf16(const x86::Vec& v, Bf16 bf16) {
  constexpr uint32_t kHalf = 0x8000, kBelowHalf = 0x7fff, kLast = 0x10000;
  x86::Vec sum = fresh();
  if (bf16.rounding == Rounding::exact) {
    emit(Id::kIdVmovaps, sum, v);
    return sum;
  }
  if (bf16.rounding == Rounding::half_up) {
    emit(Id::kIdVpaddd, sum, v, memory(kHalf));
  } else if (wide_) {
    const x86::KReg odd = cc_.newKw();
    const x86::Vec one = kept(1);
    emit(Id::kIdVptestmd, odd, v, kept(kLast));
    emit(Id::kIdVpaddd, sum, v, kept(kBelowHalf));
    cc_.k(odd).emit(Id::kIdVpaddd, sum, sum, one);
  } else {
    const x86::Vec last = binary(Id::kIdVpand, shifted(Id::kIdVpsrld, v, 16), memory(1));
    emit(Id::kIdVpaddd, sum, binary(Id::kIdVpaddd, v, last), memory(kBelowHalf));
  }
  // The sum of other NaNs may overflow.
  return bf16.any_nan ? blend(compare(kUnordered, v, v), sum, kept(kNan)) : sum;
}

Vectors::Sum Vectors::fp8_sum(DType dtype, const x86::Vec& v) {
  const Fp8 f = fp8(dtype);
  const x86::Vec magnitude = binary(Id::kIdVandps, v, memory(kMagnitude));
  const x86::Vec capped = binary(Id::kIdVminps, kept(f.max), magnitude);
  const x86::Vec a = binary(Id::kIdVpminud, capped, memory(f.nan));
  const x86::Vec exponent = binary(wide_ ? Id::kIdVpandd : Id::kIdVpand, a, memory(0x7f800000));
  const x86::Vec normal = binary(Id::kIdVpmaxud, exponent, memory(f.least));
  const x86::Vec offset = binary(Id::kIdVpaddd, normal, memory(f.add));
  return {binary(Id::kIdVaddps, a, offset), offset};
}

x86::Vec Vectors::encoded(DType dtype, const x86::Vec& v) {
  const x86::Vec sum = fp8_sum(dtype, v).sum;
  const x86::Vec code = binary(Id::kIdVpaddd, sum, shifted(Id::kIdVpsrld, sum, fp8(dtype).shift));
  // A NaN has no sign.
  const Operand number = compare(kOrdered, v, v);
  if (wide_) {
    const x86::Vec sign = fresh();
    cc_.k(number.as<x86::KReg>()).z().emit(Id::kIdVpsrld, sign, v, Imm(24));
    emit(Id::kIdVpternlogd, sign, code, memory(0x7f), Imm(kThirdSecondElseFirst));
    return sign;
  }
  const x86::Vec sign = shifted(Id::kIdVpsrld, binary(Id::kIdVpand, v, number), 24);
  return binary(Id::kIdVpor, binary(Id::kIdVpand, sign, memory(0x80)),
                binary(Id::kIdVpand, code, memory(0x7f)));
}

x86::Vec Vectors::round(DType dtype, x86::Vec a) {
  switch (dtype) {
    case DType::bf16: {
      const x86::Vec v = binary(Id::kIdVandps, rounded_bf16(a, {}), memory(0xffff0000));
      return v;
    }
    case DType::f16: {
      const x86::Vec v = fresh();
      const x86::Vec half = wide_ ? x86::Vec(cc_.newYmm()) : x86::Vec(cc_.newXmm());
      emit(Id::kIdVcvtps2ph, half, a, Imm(0));
      emit(Id::kIdVcvtph2ps, v, half);
      return v;
    }
    case DType::e4m3:
    case DType::e5m2: {
      const Sum s = fp8_sum(dtype, a);
      const x86::Vec magnitude = binary(Id::kIdVsubps, s.sum, s.offset);
      const x86::Vec sign = binary(Id::kIdVandps, a, memory(kSign));
      const x86::Vec number = binary(Id::kIdVorps, magnitude, sign);
      return blend(compare(kUnordered, a, a), number, kept(kNan));
    }
    default:
      assert(dtype == DType::f32);
      return a;
  }
}

x86::Vec Vectors::broadcast(const x86::Mem& from, DType dtype) {
  const x86::Vec v = fresh();
  if (dtype == DType::f32) {
    emit(Id::kIdVbroadcastss, v, from);
  } else if (dtype == DType::bf16) {
    emit(Id::kIdVpbroadcastw, v, from);
    return shifted(Id::kIdVpslld, v, 16);
  } else {
    assert(dtype == DType::f16);
    const x86::Vec half = wide_ ? x86::Vec(cc_.newYmm()) : x86::Vec(cc_.newXmm());
    emit(Id::kIdVpbroadcastw, half, from);
    emit(Id::kIdVcvtph2ps, v, half);
  }
  return v;
}

// e5m2 is the upper byte of f16. e4m3 as f16 with the fraction in place is 2^-8 of its value.
x86::Vec Vectors::widened(DType dtype, const x86::Vec& codes) {
  const x86::Vec half = wide_ ? x86::Vec(cc_.newYmm()) : x86::Vec(cc_.newXmm());
  emit(Id::kIdVpmovzxbw, half, codes);
  emit(Id::kIdVpsllw, half, half, Imm(8));
  const x86::Vec v = fresh();
  if (dtype == DType::e5m2) {
    emit(Id::kIdVcvtph2ps, v, half);
    return v;
  }
  // The sign moves with the code: bit 14 becomes a copy of it.
  constexpr uint32_t kWithoutCopy = 0xbfffbfff;
  std::array<uint32_t, 8> all;
  all.fill(kWithoutCopy);
  const x86::Mem mask = cc_.newConst(asmjit::ConstPoolScope::kLocal, all.data(), half.size());
  emit(Id::kIdVpsraw, half, half, Imm(1));
  emit(Id::kIdVpand, half, half, mask);
  emit(Id::kIdVcvtph2ps, v, half);
  const x86::Vec value = binary(Id::kIdVmulps, v, memory(bits_of(256.0F)));
  const x86::Vec magnitude = binary(Id::kIdVandps, value, memory(kMagnitude));
  return blend(compare(kEqual, magnitude, memory(bits_of(480.0F))), value, kept(kNan));
}

x86::Vec Vectors::load(DType dtype, const x86::Mem& from, const x86::KReg* mask) {
  const x86::Vec v = fresh();
  const auto masked = [&](Id::Id id, const x86::Vec& to) {
    if (mask)
      cc_.k(*mask).z().emit(id, to, from);
    else
      emit(id, to, from);
  };
  switch (dtype) {
    case DType::f32:
      masked(Id::kIdVmovups, v);
      return v;
    case DType::f16:
      masked(Id::kIdVcvtph2ps, v);
      return v;
    case DType::bf16:
      masked(Id::kIdVpmovzxwd, v);
      return shifted(Id::kIdVpslld, v, 16);
    default: {
      assert(dtype == DType::e4m3 || dtype == DType::e5m2);
      const x86::Vec codes = cc_.newXmm();
      if (mask)
        masked(Id::kIdVmovdqu8, codes);
      else
        emit(wide_ ? Id::kIdVmovdqu : Id::kIdVmovq, codes, from);
      return widened(dtype, codes);
    }
  }
}

// Writes the low `size` bytes of each 32-bit lane.
void Vectors::put(const x86::Mem& to, const x86::Vec& v, int size, const x86::KReg* mask,
                  bool stream) {
  if (wide_) {
    const auto masked = [&](Id::Id id) {
      if (mask)
        cc_.k(*mask).emit(id, to, v);
      else
        emit(id, to, v);
    };
    if (size == 4) return masked(stream && !mask ? Id::kIdVmovntps : Id::kIdVmovups);
    return masked(size == 2 ? Id::kIdVpmovdw : Id::kIdVpmovdb);
  }
  if (size == 4) return emit(stream ? Id::kIdVmovntps : Id::kIdVmovups, to, v);
  // Packing works in halves of the register.
  const x86::Vec words = binary(Id::kIdVpackusdw, v, v);
  const x86::Vec joined = fresh();
  emit(Id::kIdVpermq, joined, words, Imm(0x08));
  const x86::Xmm low = joined.as<x86::Ymm>().half();
  if (size == 2) return emit(Id::kIdVmovdqu, to, low);
  const x86::Xmm codes = cc_.newXmm();
  emit(Id::kIdVpackuswb, codes, low, low);
  emit(Id::kIdVmovq, to, codes);
}

void Vectors::store(DType dtype, const x86::Mem& to, x86::Vec v, const x86::KReg* mask, bool stream,
                    Bf16 bf16) {
  switch (dtype) {
    case DType::f32:
      return put(to, v, 4, mask, stream);
    case DType::bf16:
      return put(to, shifted(Id::kIdVpsrld, rounded_bf16(v, bf16), 16), 2, mask, stream);
    case DType::f16: {
      if (mask) {
        cc_.k(*mask).emit(Id::kIdVcvtps2ph, to, v, Imm(0));
      } else {
        emit(Id::kIdVcvtps2ph, to, v, Imm(0));
      }
      return;
    }
    default:
      assert(dtype == DType::e4m3 || dtype == DType::e5m2);
      return put(to, encoded(dtype, v), 1, mask, stream);
  }
}

Vectors::Pair Vectors::load_pair(const x86::Mem& from, const x86::KReg* mask) {
  const x86::Vec line = fresh();
  if (mask)
    cc_.k(*mask).z().emit(Id::kIdVmovdqu16, line, from);
  else
    emit(Id::kIdVmovups, line, from);
  return {shifted(Id::kIdVpslld, line, 16),
          binary(Id::kIdVandps, line, wide_ ? Operand(kept(0xffff0000)) : memory(0xffff0000))};
}

x86::Vec Vectors::encoded_pair(DType dtype, const Pair& v) {
  const x86::Vec even = encoded(dtype, v.even);
  return binary(wide_ ? Id::kIdVpord : Id::kIdVpor, even,
                shifted(Id::kIdVpslld, encoded(dtype, v.odd), 8));
}

void Vectors::store_pair(DType dtype, const x86::Mem& to, const Pair& v, const x86::KReg* mask,
                         bool stream, Bf16 bf16) {
  if (dtype != DType::bf16) {
    const x86::Vec codes = encoded_pair(dtype, v);
    if (!wide_ || !mask) return put(to, codes, 2, nullptr, false);
    const x86::Ymm low = cc_.newYmm();
    emit(Id::kIdVpmovdw, low, codes);
    cc_.k(*mask).emit(Id::kIdVmovdqu8, to, low);
    return;
  }
  const x86::Vec even = shifted(Id::kIdVpsrld, rounded_bf16(v.even, bf16), 16);
  x86::Vec line = rounded_bf16(v.odd, bf16);
  if (wide_)
    emit(Id::kIdVpternlogd, line, even, kept(0xffff0000), Imm(kThirdFirstElseSecond));
  else
    emit(Id::kIdVpblendw, line, even, line, Imm(0xaa));
  if (mask)
    cc_.k(*mask).emit(Id::kIdVmovdqu16, to, line);
  else
    emit(stream ? Id::kIdVmovntps : Id::kIdVmovups, to, line);
}

void Vectors::store_line(DType dtype, const x86::Mem& to, const Pair& first, const Pair& second,
                         bool stream) {
  assert(wide_);
  const x86::Ymm low = cc_.newYmm(), high = cc_.newYmm();
  emit(Id::kIdVpmovdw, low, encoded_pair(dtype, first));
  emit(Id::kIdVpmovdw, high, encoded_pair(dtype, second));
  const x86::Zmm line = cc_.newZmm();
  emit(Id::kIdVinserti64x4, line, low.zmm(), high, Imm(1));
  emit(stream ? Id::kIdVmovntps : Id::kIdVmovups, to, line);
}

void Vectors::store_halves(DType dtype, const x86::Mem& to, const x86::Vec& first,
                           const x86::Vec& second, bool stream, Bf16 bf16) {
  assert(wide_);
  const auto half = [&](const x86::Vec& v) {
    const x86::Ymm h = cc_.newYmm();
    if (dtype == DType::bf16)
      emit(Id::kIdVpmovdw, h, shifted(Id::kIdVpsrld, rounded_bf16(v, bf16), 16));
    else
      emit(Id::kIdVcvtps2ph, h, v, Imm(0));
    return h;
  };
  const x86::Ymm low = half(first);
  const x86::Zmm line = cc_.newZmm();
  emit(Id::kIdVinserti64x4, line, low.zmm(), half(second), Imm(1));
  emit(stream ? Id::kIdVmovntps : Id::kIdVmovups, to, line);
}

Vectors::Pair Vectors::in_order(const Pair& v) {
  if (!wide_) {
    // Unpacking works in halves of the register.
    const x86::Vec low = binary(Id::kIdVunpcklps, v.even, v.odd);
    const x86::Vec high = binary(Id::kIdVunpckhps, v.even, v.odd);
    const Pair order{fresh(), fresh()};
    emit(Id::kIdVperm2f128, order.even, low, high, Imm(0x20));
    emit(Id::kIdVperm2f128, order.odd, low, high, Imm(0x31));
    return order;
  }
  const auto half = [&](int begin) {
    // Element i is lane i ÷ 2 of the even ones, or 16 lanes later of the odd ones.
    std::array<int32_t, 16> from;
    for (int i = 0; i < 16; ++i) from[i] = (begin + i) / 2 + (i % 2) * 16;
    const x86::Vec index = fresh();
    emit(Id::kIdVmovups, index,
         cc_.newConst(asmjit::ConstPoolScope::kLocal, from.data(), sizeof from));
    // Not vpermi2ps: asmjit's tables say that it does not read its first operand.
    emit(Id::kIdVpermi2d, index, v.even, v.odd);
    return index;
  };
  return {half(0), half(16)};
}

x86::Vec Vectors::sum_pairs(const x86::Vec& a, const x86::Vec& b) {
  if (!wide_) {
    // Halves of the register are added apart.
    const x86::Vec halves = binary(Id::kIdVhaddps, a, b), order = fresh();
    emit(Id::kIdVpermq, order, halves, Imm(0xd8));
    return order;
  }
  const auto every_second = [&](int begin) {
    std::array<int32_t, 16> from;
    for (int i = 0; i < 16; ++i) from[i] = 2 * i + begin;
    const x86::Vec index = fresh();
    emit(Id::kIdVmovups, index,
         cc_.newConst(asmjit::ConstPoolScope::kLocal, from.data(), sizeof from));
    emit(Id::kIdVpermi2d, index, a, b);
    return index;
  };
  return sum(every_second(0), every_second(1));
}

x86::Vec Vectors::sum_lanes(x86::Vec v) {
  constexpr int kNeighbours = 0xb1, kPairs = 0x4e;
  v = sum(v, binary(Id::kIdVpermilps, v, Imm(kNeighbours)));
  v = sum(v, binary(Id::kIdVpermilps, v, Imm(kPairs)));
  const auto quarters = [&](int order) {
    const x86::Vec moved = fresh();
    emit(wide_ ? Id::kIdVshuff32x4 : Id::kIdVperm2f128, moved, v, v, Imm(order));
    return sum(v, moved);
  };
  if (!wide_) return quarters(1);
  v = quarters(kNeighbours);
  return quarters(kPairs);
}

Operand Vectors::lanes_below(const x86::Gp& count, int first, int step) {
  std::array<int32_t, 16> numbers;
  for (int i = 0; i < 16; ++i) numbers[i] = first + step * i;
  const x86::Mem index =
      cc_.newConst(asmjit::ConstPoolScope::kLocal, numbers.data(), static_cast<size_t>(bytes()));
  const x86::Vec all = fresh();
  const x86::Xmm one = cc_.newXmm();
  emit(Id::kIdVmovd, one, count.r32());
  emit(Id::kIdVpbroadcastd, all, one);
  if (!wide_) return binary(Id::kIdVpcmpgtd, all, index);
  const x86::KReg k = cc_.newKw();
  emit(Id::kIdVpcmpgtd, k, all, index);
  return k;
}

void Vectors::join_amax(x86::Vec most, x86::Vec v, const Operand* inside) {
  x86::Vec magnitude = fresh();
  const x86::Mem all = memory(kMagnitude);
  if (inside && wide_)
    cc_.k(inside->as<x86::KReg>()).z().emit(Id::kIdVandps, magnitude, v, all);
  else
    emit(Id::kIdVandps, magnitude, v, all);
  if (inside && !wide_) emit(Id::kIdVpand, magnitude, magnitude, *inside);
  emit(Id::kIdVpmaxud, most, most, magnitude);
}

}  // namespace tenon::cpu::jit
