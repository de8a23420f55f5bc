// A progress bar on stderr, only where somebody looks at it.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <string>

namespace tenon::cli {

class Progress {
 public:
  explicit Progress(size_t total) : total_(total), on_(isatty(STDERR_FILENO) != 0) {}
  ~Progress() {
    if (on_ && total_ > 0) std::fputs("\r\033[K", stderr);
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const std::string& what) {
    ++done_;
    const size_t percent = total_ ? 100 * done_ / total_ : 100;
    if (!on_ || percent == shown_) return;
    shown_ = percent;
    constexpr size_t kWidth = 30;
    const std::string bar(kWidth * percent / 100, '#');
    std::fprintf(stderr, "\r\033[K[%-30s] %3zu%% %.60s", bar.c_str(), percent, what.c_str());
    std::fflush(stderr);
  }

 private:
  size_t total_, done_ = 0, shown_ = 101;
  bool on_;
};

}  // namespace tenon::cli
