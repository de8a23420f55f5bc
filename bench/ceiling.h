// Pure data movement with the reads and writes of a mix: what a kernel's time is compared with.
#pragma once

#include <string>
#include <vector>

#include "bench/cases.h"

namespace tenon::bench {

// One way to move the bytes.
struct CeilingWay {
  std::string entry;
  unsigned threads = 256;
  int vectors = 1;          // of 16 bytes a thread takes from each stream
  bool persistent = false;  // as many blocks as run at once
};

struct Ceiling {
  Mix mix;
  int reads = 0, writes = 0;  // streams
  int width = 2;              // bytes an element in a written stream
  std::string text = {};
  std::vector<CeilingWay> ways = {};
};
Ceiling ceiling_of(const Mix& mix);

// As the text has it.
struct CeilingArguments {
  static constexpr int kStreams = 8;
  const void* in[kStreams] = {};
  void* out[kStreams] = {};
  unsigned long long vectors = 0;  // of a read stream
};

}  // namespace tenon::bench
