// Vector instructions of AVX-512 or AVX2 in a function that asmjit compiles: words, loads, stores.
#pragma once

#include <asmjit/x86.h>

#include <cstdint>
#include <map>

#include "tenon/dtype.h"
#include "tenon/expr.h"

namespace tenon::cpu::jit {

namespace x86 = asmjit::x86;

// A constant, or a register. A dying register may be overwritten. An ordinary value is neither NaN
// nor 0.
struct Value {
  x86::Vec reg = {};
  uint32_t bits = 0;
  bool constant = false, dies = false, ordinary = false;
};

// Forms of instructions (Node::detail). fma may negate its product or its summand, abs its result.
// The second factor of mul may be a power: a·2^b with an integer b.
enum Form : uint8_t { kNothing, kProduct = 1, kSummand = 2, kResult = 1, kPower = 1 };

// How bf16 results are rounded. half_up: only a tie differs from even. exact: they are bf16
// already.
enum class Rounding : uint8_t { even, half_up, exact };
struct Bf16 {
  Rounding rounding = Rounding::even;
  // Whether a NaN may have bits other than those that arithmetic on bf16 values gives.
  bool any_nan = true;
};

class Vectors {
 public:
  // Instructions that keep a value for the whole function are inserted at `start`.
  Vectors(x86::Compiler& cc, bool wide, asmjit::BaseNode* start)
      : cc_(cc), wide_(wide), start_(start) {}

  [[nodiscard]] bool wide() const { return wide_; }
  [[nodiscard]] int lanes() const { return wide_ ? 16 : 8; }
  [[nodiscard]] int bytes() const { return 4 * lanes(); }

  x86::Vec fresh();
  x86::Vec zero();
  // The value of every word except leaves, select, round, and those of hardware.h.
  x86::Vec word(Word w, const Value& a, const Value& b, const Value& c, int form);
  // 2^x and 1/x, with an error of a few ulp, or of 2^-13.7. Only with AVX-512.
  x86::Vec exp2(const x86::Vec& x, bool rough);
  x86::Vec reciprocal(const x86::Vec& x, bool rough);
  x86::Vec select(Rel rel, const Value& a, const Value& b, const Value& then, const Value& other);
  x86::Vec round(DType dtype, x86::Vec a);

  // A register that holds the constant in the whole function.
  x86::Vec kept(uint32_t bits);
  // An operand of an instruction that reads memory.
  x86::Mem memory(uint32_t bits);
  x86::Vec broadcast(const x86::Mem& from, DType dtype);

  // Elements in order. With a mask, only the first ones are accessed.
  x86::Vec load(DType dtype, const x86::Mem& from, const x86::KReg* mask);
  void store(DType dtype, const x86::Mem& to, x86::Vec v, const x86::KReg* mask, bool stream,
             Bf16 bf16);
  // The elements of one line of bf16: those with even and with odd index.
  struct Pair {
    x86::Vec even, odd;
  };
  Pair load_pair(const x86::Mem& from, const x86::KReg* mask);
  void store_pair(DType dtype, const x86::Mem& to, const Pair& v, const x86::KReg* mask,
                  bool stream, Bf16 bf16);
  // The FP8 codes of two pairs. Only with AVX-512.
  void store_line(DType dtype, const x86::Mem& to, const Pair& first, const Pair& second,
                  bool stream);
  // Two vectors of 16-bit results. Only with AVX-512.
  void store_halves(DType dtype, const x86::Mem& to, const x86::Vec& first, const x86::Vec& second,
                    bool stream, Bf16 bf16);
  // The first and the second half of the elements of a pair.
  Pair in_order(const Pair& v);
  x86::Vec sum(const x86::Vec& a, const x86::Vec& b) { return binary(x86::Inst::kIdVaddps, a, b); }

  // The sums of neighbours: those of a, then those of b.
  x86::Vec sum_pairs(const x86::Vec& a, const x86::Vec& b);
  // The tree sum of all lanes, in every lane.
  x86::Vec sum_lanes(x86::Vec v);
  x86::Vec where(const asmjit::Operand& mask, const x86::Vec& then, const x86::Vec& other) {
    return blend(mask, other, then);
  }

  // most = max(most, bits of |v|). `inside` limits it to some lanes.
  void join_amax(x86::Vec most, x86::Vec v, const asmjit::Operand* inside);
  // The lanes first, first + step, … that are below `count`, as a mask or a vector.
  asmjit::Operand lanes_below(const x86::Gp& count, int first, int step);

  template <class... Operands>
  void emit(x86::Inst::Id id, const Operands&... operands) {
    cc_.emit(id, operands...);
  }

 private:
  x86::Vec reg(const Value& v);
  // A register, or a constant in memory.
  asmjit::Operand any(const Value& v);
  x86::Vec extreme(bool most, Value a, Value b);
  x86::Vec fma(Value a, Value b, Value c, int negated);
  x86::Vec binary(x86::Inst::Id id, const asmjit::Operand& a, const asmjit::Operand& b);
  x86::Vec shifted(x86::Inst::Id id, const x86::Vec& a, int count);
  // Where `mask` is set (a mask register, or a vector), `then`, else `other`.
  x86::Vec blend(const asmjit::Operand& mask, const x86::Vec& other, const asmjit::Operand& then);
  asmjit::Operand compare(int predicate, const x86::Vec& a, const asmjit::Operand& b);
  x86::Vec rounded_bf16(const x86::Vec& v, Bf16 bf16);  // in the upper halves
  x86::Vec encoded(DType dtype, const x86::Vec& v);     // FP8 codes in 32-bit lanes
  x86::Vec encoded_pair(DType dtype, const Pair& v);    // two codes in each lane
  // |v| rounded to FP8 with an offset: the sum, and the offset.
  struct Sum {
    x86::Vec sum, offset;
  };
  Sum fp8_sum(DType dtype, const x86::Vec& v);
  x86::Vec widened(DType dtype, const x86::Vec& codes);  // FP8 codes in the low bytes of an xmm
  void put(const x86::Mem& to, const x86::Vec& v, int size, const x86::KReg* mask, bool stream);

  x86::Compiler& cc_;
  bool wide_;
  asmjit::BaseNode* start_;
  std::map<uint32_t, x86::Vec> kept_;
};

}  // namespace tenon::cpu::jit
