// Blocks that a thread keeps, best fit first.
#include "core/scratch.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace tenon {

namespace {

constexpr size_t kAlignment = 128;  // also of a line of a GPU's cache
constexpr size_t kPage = 4096;      // blocks have whole pages, so that sizes recur
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kBlocks = 4;  // a product nests three

// Sanitizers see each block by itself, at its very size.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kKeeps = false;
#else
constexpr bool kKeeps = true;
#endif

struct Block {
  void* data;
  size_t bytes;
};

// Without constructor and destructor: calls come from destructors of the host's thread-local and
// static objects, too, when ours have run.
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
  // Fresh for each call, so the time to touch its pages counts.
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
  thread_local const End end;  // made here, so that it ends before anything kept would leak
  (void)end;
  // The smallest one goes: it serves the fewest calls.
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
