// Finds the known name that is nearest to a misspelled one.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "tenon/error.h"

namespace tenon {

class Nearest {
 public:
  explicit Nearest(std::string_view name) : name_(name), least_((name.size() + 1) / 3) {}

  void offer(std::string_view candidate) {
    if (name_.size() > kMostLetters || candidate.size() > kMostLetters) return;
    const size_t d = edits(name_, candidate);
    if (d > least_ || (d == least_ && !best_.empty())) return;
    least_ = d;
    best_ = candidate;
  }
  // " (did you mean 'gelu'?)", or an empty text.
  [[nodiscard]] std::string text() const {
    return best_.empty() ? "" : str(" (did you mean '", best_, "'?)");
  }

 private:
  static constexpr size_t kMostLetters = 64;  // longer names are not typing mistakes

  // The number of insertions, deletions and replacements between two names.
  static size_t edits(std::string_view a, std::string_view b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j < row.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
      size_t diagonal = row[0]++;
      for (size_t j = 1; j < row.size(); ++j) {
        const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      }
    }
    return row.back();
  }

  std::string_view name_;
  size_t least_;  // at most a third of the letters may differ
  std::string best_;
};

}  // namespace tenon
