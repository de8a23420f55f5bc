// Kernels that only move data, with the reads and writes of a mix: the reference for kernel times.
#pragma once

#include <string>
#include <vector>

#include "bench/cases.h"

namespace tenon::bench {

// One variant of the copy kernel.
struct CeilingWay {
  std::string entry;
  unsigned threads = 256;
  int vectors = 1;          // vectors of 16 bytes per thread and stream
  bool persistent = false;  // as many blocks as can run at the same time
};

struct Ceiling {
  Mix mix;
  int reads = 0, writes = 0;  // number of streams
  int read_width = 2;         // bytes per element of a read stream
  int width = 2;              // the same for a written stream
  std::string text = {};
  std::vector<CeilingWay> ways = {};
};
Ceiling ceiling_of(const Mix& mix);

// Must match `Arguments` in the kernel text.
struct CeilingArguments {
  static constexpr int kStreams = 8;
  const void* in[kStreams] = {};
  void* out[kStreams] = {};
  unsigned long long vectors = 0;  // vectors of a read stream
};

}  // namespace tenon::bench
