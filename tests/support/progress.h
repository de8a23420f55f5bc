// Progress on stderr: a bar on a terminal, otherwise nothing or a few lines.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <string>

namespace tenon::support {

class Progress {
 public:
  enum class Lines : bool { no, yes };
  explicit Progress(size_t total, Lines lines = Lines::no)
      : total_(total), on_(isatty(STDERR_FILENO) != 0), lines_(lines == Lines::yes && !on_) {}
  ~Progress() { hide(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Clears the bar before other output is printed on its line.
  void hide() {
    if (!on_ || shown_ == kNothing) return;
    std::fputs("\r\033[K", stderr);
    shown_ = kNothing;
  }

  void step(const std::string& what) {
    ++done_;
    const size_t percent = total_ ? 100 * done_ / total_ : 100;
    if (percent == shown_ || !(on_ || (lines_ && percent % 10 == 0))) return;
    shown_ = percent;
    if (lines_) {
      std::fprintf(stderr, "%3zu%% %.60s\n", percent, what.c_str());
      return;
    }
    constexpr size_t kWidth = 30;
    const std::string bar(kWidth * percent / 100, '#');
    std::fprintf(stderr, "\r\033[K[%-30s] %3zu%% %.60s", bar.c_str(), percent, what.c_str());
    std::fflush(stderr);
  }

 private:
  static constexpr size_t kNothing = 101;  // larger than any percentage

  size_t total_, done_ = 0, shown_ = kNothing;
  bool on_, lines_;
};

}  // namespace tenon::support
