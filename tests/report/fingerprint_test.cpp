// Tests of Plan::fingerprint: what decides the bits of results changes it, and nothing else.
#include <gtest/gtest.h>

#include <set>

#include "tenon/activation.h"
#include "tenon/plan.h"

namespace tenon::test {
namespace {

struct Asked {
  const char* chain = "linear(32,64) bias swiglu linear(32,16)";
  DType dtype = DType::bf16;
  const char* recipe = "none";
  Precision precision = Precision::strict;
  Rounding rounding = Rounding::once;
  bool backward = true;
  const char* target = "sm_90a";
};

std::string fingerprint(const Asked& a) {
  PlanRequest r;
  r.dtype = a.dtype;
  r.recipe = recipe(a.recipe);
  r.backward = a.backward;
  r.target = a.target;
  r.options.precision = a.precision;
  r.options.rounding = a.rounding;
  r.options.device = std::string_view(a.target).starts_with("sm") ? Device::cuda : Device::cpu;
  return Plan::build(a.chain, r).fingerprint();
}

TEST(Fingerprint, EqualPlansHaveEqualOnes) {
  const std::string one = fingerprint({});
  EXPECT_EQ(one.size(), 32U);
  EXPECT_EQ(one.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_EQ(fingerprint({.chain = "linear(32,64)   bias  swiglu # same\n linear(32,16)"}), one);
}

TEST(Fingerprint, EverythingThatDecidesBitsChangesIt) {
  std::set<std::string> all;
  const Asked cases[] = {
      {},
      {.chain = "linear(32,64) bias geglu linear(32,16)"},
      {.chain = "linear(32,64) swiglu linear(32,16)"},
      {.chain = "linear(32,64) bias clamped_swiglu linear(32,16)"},
      {.chain = "linear(32,64) bias clamped_swiglu(limit=6) linear(32,16)"},
      {.chain = "linear(32,64) bias act(\"a*b\") linear(32,16)"},
      {.chain = "linear(32,64) bias act(\"b*a\") linear(32,16)"},
      {.chain = "linear(64,64) bias swiglu linear(32,16)"},
      {.dtype = DType::f32},
      {.dtype = DType::f16},
      {.recipe = "delayed"},
      {.recipe = "block"},
      {.precision = Precision::native},
      {.rounding = Rounding::eager},
      {.backward = false},
      {.target = "sm_80"},
      {.target = "avx512"},
  };
  for (const Asked& a : cases)
    EXPECT_TRUE(all.insert(fingerprint(a)).second)
        << a.chain << " " << a.recipe << " " << a.target << " has that of another case";
}

TEST(Fingerprint, ARedefinedNameChangesIt) {
  define("fingerprinted", "x*2");
  const std::string before = fingerprint({.chain = "bias(8) fingerprinted"});
  EXPECT_EQ(fingerprint({.chain = "bias(8) fingerprinted"}), before);
  define("fingerprinted", "x*3");
  EXPECT_NE(fingerprint({.chain = "bias(8) fingerprinted"}), before);
}

}  // namespace
}  // namespace tenon::test
