// Tests of the list with inline storage for a few elements.
#include "core/few.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

namespace tenon::test {

namespace {

// The list is 0, 1, 2, … for elements added one by one or together, before or after the inline
// storage is full.
TEST(Few, HoldsWhatWasAddedWhateverItsLength) {
  for (int one_by_one = 0; one_by_one <= 9; ++one_by_one)
    for (int at_once = 0; at_once <= 9; ++at_once) {
      Few<int, 4> list;
      std::vector<int> expected(static_cast<size_t>(2 * one_by_one + at_once));
      std::iota(expected.begin(), expected.end(), 0);
      for (int i = 0; i < one_by_one; ++i) list.push_back(i);
      list.append({expected.data() + one_by_one, static_cast<size_t>(at_once)});
      for (int i = 0; i < one_by_one; ++i) list.emplace_back(one_by_one + at_once + i);
      const Few<int, 4> copy = list;
      EXPECT_TRUE(std::ranges::equal(list, expected)) << one_by_one << " " << at_once;
      EXPECT_TRUE(std::ranges::equal(copy, expected)) << one_by_one << " " << at_once;
      EXPECT_EQ(list.empty(), expected.empty());
    }
}

}  // namespace

}  // namespace tenon::test
