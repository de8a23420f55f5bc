// Keeps memory blocks per thread, and a few large ones for all threads. Takes the best fit first.
#include "core/scratch.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

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

// Large blocks belong to no thread, so that a process with many threads does not keep many. Each
// slot has a flag instead of a lock: after fork() a slot may stay taken, but nothing waits for it.
struct Slot {
  std::atomic_flag taken;
  Block block;

  // The block after an exchange with `other`, unless `fits` refuses the kept block.
  template <class Fits>
  Block exchange(const Block& other, const Fits& fits) {
    if (taken.test_and_set(std::memory_order_acquire)) return other;
    const Block found = fits(block) ? std::exchange(block, other) : other;
    taken.clear(std::memory_order_release);
    return found;
  }
};
constinit Slot shared[2];

size_t alignment_of(size_t bytes) { return bytes > kMostKeptScratch ? kHugePage : kAlignment; }

Block make(size_t bytes) {
  const size_t unit = bytes > kMostKeptScratch ? kHugePage : kPage;
  if (kKeeps) bytes = (bytes + unit - 1) / unit * unit;
  void* const data = ::operator new(bytes, std::align_val_t(alignment_of(bytes)));
  // Huge pages reduce the time of the first access, and later misses of the address cache.
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

Block take_shared(size_t bytes) {
  for (Slot& slot : shared) {
    const Block b = slot.exchange({}, [&](const Block& kept) { return kept.bytes >= bytes; });
    if (b.data) return b;
  }
  return make(bytes);
}

// Keeps the larger blocks: they serve more calls.
void keep_shared(Block b) {
  // The system may take the pages when memory is short. Until then, another call costs no faults.
  madvise(b.data, b.bytes / kHugePage * kHugePage, MADV_FREE);
  if (b.bytes <= kMostSharedScratch)
    for (Slot& slot : shared)
      b = slot.exchange(b, [&](const Block& kept) { return kept.bytes < b.bytes; });
  if (b.data) drop(b);
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
  if (kKeeps && bytes > kMostKeptScratch) {
    const Block b = take_shared(bytes);
    data_ = b.data;
    bytes_ = b.bytes;
    return;
  }
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
  if (kKeeps && bytes_ > kMostKeptScratch) {
    keep_shared(b);
    return;
  }
  if (!kKeeps || kept.ended) {
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
