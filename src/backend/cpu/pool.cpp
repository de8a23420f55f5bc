// The thread pool. After fork() a child has no pool and creates its own at the first call.
#include "backend/cpu/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "backend/cpu/processors.h"
#include "core/fp_mode.h"

namespace tenon::cpu {

namespace {

thread_local bool inside = false;

// Runs in the floating-point mode of the caller.
void run_inside(const Range& body, int64_t begin, int64_t end) {
  inside = true;
  try {
    body(begin, end);
  } catch (...) {
    inside = false;
    throw;
  }
  inside = false;
}

void run_part(const Range& body, int64_t begin, int64_t end) {
  const FpMode ieee;
  run_inside(body, begin, end);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spins until `ready`, or for the time that a caller needs between two steps. A sleeping thread
// wakes up late, and often on the core of the thread that woke it.
template <class Ready>
bool spin(const Ready& ready) {
  constexpr auto kTime = std::chrono::microseconds(100);
  constexpr auto kAlone = std::chrono::microseconds(20);  // then yields to other threads
  constexpr int kLooks = 64;                              // checks between two reads of the clock
  const auto start = std::chrono::steady_clock::now();
  for (auto spent = start - start; spent < kTime;
       spent = std::chrono::steady_clock::now() - start) {
    for (int i = 0; i < kLooks; ++i) {
      if (ready()) return true;
      relax();
    }
    if (spent > kAlone) sched_yield();
  }
  return false;
}

// Systems often wake a thread on the core of the waking thread. The two then share the core until
// the scheduler notices. This moves the thread off that core, then restores its affinity.
void leave(int cpu) {
  cpu_set_t all;
  if (cpu < 0 || sched_getcpu() != cpu || sched_getaffinity(0, sizeof(all), &all) != 0) return;
  cpu_set_t others = all;
  CPU_CLR(static_cast<size_t>(cpu), &others);
  if (CPU_COUNT(&others) == 0) return;
  sched_setaffinity(0, sizeof(others), &others);
  sched_setaffinity(0, sizeof(all), &all);
}

// Each thread takes its own share of the range piece by piece, then pieces that other threads have
// left. So a late or slow thread does not delay the others.
class Pool {
 public:
  explicit Pool(int count) : spins_(count <= processors()) {
    try {
      for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
      // The system cannot start more threads. The ones that started are enough.
    }
  }
  ~Pool() {
    {
      const std::lock_guard guard(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // False if the pool is busy.
  bool run(int64_t n, const Range& body) {
    const std::unique_lock use(use_, std::try_to_lock);
    if (!use) return false;
    const auto count = static_cast<int64_t>(workers_.size()) + 1;
    body_ = &body;
    error_ = nullptr;
    caller_ = sched_getcpu();
    piece_ = std::max<int64_t>(1, n / (count * kPieces));
    if (shares_.size() != static_cast<size_t>(count)) shares_ = std::vector<Share>(count);
    for (int64_t i = 0; i < count; ++i) {
      Share& share = shares_[static_cast<size_t>(i)];
      share.next.store(n * i / count, std::memory_order_relaxed);
      share.end = n * (i + 1) / count;
    }
    gate_.fetch_and(~kClosed, std::memory_order_release);
    {
      const std::lock_guard guard(mutex_);
      ++round_;
    }
    wake_.notify_all();
    share(0);
    gate_.fetch_or(kClosed);
    const auto alone = [&] { return gate_.load() == kClosed; };
    if (!spin(alone)) {
      std::unique_lock guard(mutex_);
      done_.wait(guard, alone);
    }
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  struct alignas(64) Share {
    std::atomic<int64_t> next = 0;
    int64_t end = 0;
  };
  static constexpr int64_t kPieces = 8;          // pieces per share
  static constexpr uint32_t kClosed = 1U << 31;  // no thread may begin; low bits: threads inside

  void share(size_t first) {
    for (size_t i = 0; i < shares_.size(); ++i) {
      Share& share = shares_[(first + i) % shares_.size()];
      while (true) {
        const int64_t begin = share.next.fetch_add(piece_, std::memory_order_relaxed);
        if (begin >= share.end) break;
        run_piece(begin, std::min(begin + piece_, share.end));
      }
    }
  }

  void run_piece(int64_t begin, int64_t end) {
    try {
      run_part(*body_, begin, end);
    } catch (...) {
      const std::lock_guard guard(mutex_);
      error_ = std::current_exception();
      for (Share& share : shares_) share.next.store(share.end, std::memory_order_relaxed);
    }
  }

  void work(int i) {
    uint64_t seen = 0;
    const auto news = [&] { return stop_ || round_ != seen; };
    while (true) {
      if (!spins_ || !spin(news)) {
        std::unique_lock guard(mutex_);
        wake_.wait(guard, news);
      }
      if (stop_) return;
      seen = round_;
      if ((gate_.fetch_add(1) & kClosed) == 0) {
        leave(caller_);
        share(static_cast<size_t>(i));
      }
      if (gate_.fetch_sub(1) == (kClosed | 1)) {
        const std::lock_guard guard(mutex_);
        done_.notify_one();
      }
    }
  }

  const bool spins_;  // false if threads share a core
  std::mutex use_, mutex_;
  std::condition_variable wake_, done_;
  const Range* body_ = nullptr;
  int64_t piece_ = 1;
  int caller_ = -1;  // core of the caller
  std::vector<Share> shares_;
  std::exception_ptr error_;
  std::atomic<uint32_t> gate_ = kClosed;
  std::atomic<uint64_t> round_ = 0;
  std::atomic<bool> stop_ = false;
  std::vector<std::thread> workers_;
};

int default_threads() {
  for (const char* name : {"TENON_THREADS", "OMP_NUM_THREADS"})
    if (const char* text = std::getenv(name)) {
      char* end = nullptr;
      const long value = std::strtol(text, &end, 10);
      // OMP_NUM_THREADS may be a list. Only its first number is used.
      const bool whole = end != text && (*end == '\0' || *end == ',');
      if (whole && value > 0 && value <= kMaxThreads) return static_cast<int>(value);
      std::fprintf(stderr, "tenon: %s=%s is ignored; give 1 to %d\n", name, text, kMaxThreads);
    }
  return processors();
}

struct State {
  std::mutex mutex;
  int count = default_threads();
  std::shared_ptr<Pool> pool;
  std::shared_ptr<const std::function<void(int64_t, const Range&)>> replacement;
};

std::atomic<State*>& state_pointer() {
  static std::atomic<State*> pointer = [] {
    // The threads of the parent do not exist in the child. Forget the state without touching it.
    pthread_atfork(nullptr, nullptr, [] {
      State* old = state_pointer().load();
      auto* fresh = new State;
      fresh->count = old->count;
      state_pointer().store(fresh);
      inside = false;
    });
    return new State;
  }();
  return pointer;
}

State& state() { return *state_pointer().load(); }

}  // namespace

void parallel_for(int64_t n, const Range& body) {
  if (n <= 0) return;
  State& s = state();
  if (!inside && n > 1) {
    std::shared_ptr<Pool> pool;
    std::shared_ptr<const std::function<void(int64_t, const Range&)>> replacement;
    {
      const std::lock_guard guard(s.mutex);
      if (!s.pool && s.count > 1 && !s.replacement) s.pool = std::make_shared<Pool>(s.count);
      pool = s.pool;
      replacement = s.replacement;
    }
    if (replacement) {
      (*replacement)(n, [&](int64_t begin, int64_t end) { run_part(body, begin, end); });
      return;
    }
    if (pool && pool->run(n, body)) return;
  }
  if (inside)
    body(0, n);
  else
    run_inside(body, 0, n);
}

void set_parallel_for(std::function<void(int64_t n, const Range& body)> replacement) {
  State& s = state();
  const std::lock_guard guard(s.mutex);
  s.replacement = nullptr;
  if (replacement)
    s.replacement =
        std::make_shared<const std::function<void(int64_t, const Range&)>>(std::move(replacement));
}

int threads() {
  State& s = state();
  const std::lock_guard guard(s.mutex);
  return s.count;
}

void set_threads(int count) {
  State& s = state();
  std::shared_ptr<Pool> old;
  const std::lock_guard guard(s.mutex);
  s.count = count > 0 ? count : default_threads();
  std::swap(old, s.pool);
}

}  // namespace tenon::cpu
