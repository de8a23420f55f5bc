// The pool. After fork() a child starts with none and makes its own at the first call.
#include "backend/cpu/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/fp_mode.h"

namespace tenon::cpu {

namespace {

thread_local bool inside = false;

void run_part(const Range& body, int64_t begin, int64_t end) {
  const FpMode ieee;
  inside = true;
  try {
    body(begin, end);
  } catch (...) {
    inside = false;
    throw;
  }
  inside = false;
}

class Pool {
 public:
  explicit Pool(int count) {
    try {
      for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {
      // The system has no more threads for us; those that started are enough.
    }
    count_ = static_cast<int>(workers_.size()) + 1;
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
    {
      const std::lock_guard guard(mutex_);
      body_ = &body;
      size_ = n;
      pending_ = count_ - 1;
      error_ = nullptr;
      ++round_;
    }
    wake_.notify_all();
    part(0);
    std::unique_lock guard(mutex_);
    done_.wait(guard, [&] { return pending_ == 0; });
    body_ = nullptr;
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  void part(int i) {
    const int64_t begin = size_ * i / count_;
    const int64_t end = size_ * (i + 1) / count_;
    if (begin == end) return;
    try {
      run_part(*body_, begin, end);
    } catch (...) {
      const std::lock_guard guard(mutex_);
      error_ = std::current_exception();
    }
  }

  void work(int i) {
    uint64_t seen = 0;
    std::unique_lock guard(mutex_);
    while (true) {
      wake_.wait(guard, [&] { return stop_ || round_ != seen; });
      if (stop_) return;
      seen = round_;
      guard.unlock();
      part(i);
      guard.lock();
      if (--pending_ == 0) done_.notify_one();
    }
  }

  int count_ = 1;
  std::mutex use_, mutex_;
  std::condition_variable wake_, done_;
  const Range* body_ = nullptr;
  int64_t size_ = 0;
  int pending_ = 0;
  uint64_t round_ = 0;
  bool stop_ = false;
  std::exception_ptr error_;
  std::vector<std::thread> workers_;
};

int default_threads() {
  for (const char* name : {"TENON_THREADS", "OMP_NUM_THREADS"})
    if (const char* text = std::getenv(name)) {
      char* end = nullptr;
      const long value = std::strtol(text, &end, 10);
      // OMP_NUM_THREADS may be a list; its first number counts.
      const bool whole = end != text && (*end == '\0' || *end == ',');
      if (whole && value > 0 && value <= kMaxThreads) return static_cast<int>(value);
      std::fprintf(stderr, "tenon: %s=%s is ignored; give 1 to %d\n", name, text, kMaxThreads);
    }
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

struct State {
  std::mutex mutex;
  int count = default_threads();
  std::shared_ptr<Pool> pool;
  std::shared_ptr<const std::function<void(int64_t, const Range&)>> replacement;
};

std::atomic<State*>& state_pointer() {
  static std::atomic<State*> pointer = [] {
    // The parent's threads do not exist in the child: forget its state without touching it.
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
    run_part(body, 0, n);
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
