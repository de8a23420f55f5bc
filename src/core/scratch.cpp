// Keeps memory blocks per thread. Takes the best fit first.
#include "core/scratch.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace tenon {

namespace {

constexpr size_t kAlignment = 128;  // also the size of a GPU cache line
constexpr size_t kPage = 4096;      // blocks are whole pages, so that sizes repeat
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kBlocks = 4;  // a product nests three

// Under sanitizers each block is allocated separately, with its exact size.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

struct Block {
  void* data;
  size_t bytes;
};

// Has no constructor and no destructor: destructors of the host may call the library after ours
// have run.
struct Kept {
  Block blocks[kBlocks];
  int count;
  size_t bytes;
  bool ended;
};
thread_local constinit Kept kept{};

size_t alignment_of(size_t bytes) { return bytes > kMostKeptScratch ? kHugePage : kAlignment; }

Block make(size_t bytes) {
  if (kKeeps) bytes = (bytes + kPage - 1) / kPage * kPage;
  void* const data = ::operator new(bytes, std::align_val_t(alignment_of(bytes)));
  // This memory is new in each call, so the time to touch its pages matters. Huge pages reduce it.
  if (bytes > kMostKeptScratch) madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
  return {data, bytes};
}

void drop(const Block& b) { ::operator delete(b.data, std::align_val_t(alignment_of(b.bytes))); }

Block remove(int i) {
  const Block b = kept.blocks[i];
  kept.blocks[i] = kept.blocks[--kept.count];
  kept.bytes -= b.bytes;
  return b;
}

struct End {
  ~End() {
    kept.ended = true;
    while (kept.count > 0) drop(remove(kept.count - 1));
  }
};

}  // namespace

Scratch::Scratch(size_t bytes) : data_(nullptr), bytes_(0) {
  if (bytes == 0) return;
  int best = -1;
  for (int i = 0; i < kept.count; ++i)
    if (kept.blocks[i].bytes >= bytes &&
        (best < 0 || kept.blocks[i].bytes < kept.blocks[best].bytes))
      best = i;
  const Block b = best < 0 ? make(bytes) : remove(best);
  data_ = b.data;
  bytes_ = b.bytes;
}

Scratch::~Scratch() {
  if (!data_) return;
  const Block b{data_, bytes_};
  if (!kKeeps || kept.ended || bytes_ > kMostKeptScratch) {
    drop(b);
    return;
  }
  thread_local const End end;  // its destructor frees the kept blocks
  (void)end;
  // Drops the smallest block: it serves the fewest calls.
  while (kept.count == kBlocks || kept.bytes + b.bytes > kMostKeptScratch) {
    const auto* least =
        std::min_element(kept.blocks, kept.blocks + kept.count,
                         [](const Block& x, const Block& y) { return x.bytes < y.bytes; });
    drop(remove(static_cast<int>(least - kept.blocks)));
  }
  kept.blocks[kept.count++] = b;
  kept.bytes += b.bytes;
}

size_t kept_scratch() { return kept.bytes; }

}  // namespace tenon
