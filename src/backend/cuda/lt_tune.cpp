// Times the heuristics of a class of products.
#include "backend/cuda/lt_tune.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "backend/cuda/cache.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr int kHeuristics = 8, kRounds = 5;

}  // namespace

bool tunes() {
  static const bool kAllowed = [] {
    const char* text = std::getenv("TENON_TUNE");
    return !text || std::string_view(text) != "0";
  }();
  return kAllowed;
}

namespace {

int64_t up(int64_t n) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(n, 1))));
}

CacheKey class_of(const CurrentContext& context, const LtProduct& p, char varies) {
  const DeviceInfo device = device_info(context.device());
  const int64_t k = p.turn_a ? p.a.rows : p.a.cols;
  std::string text = str(
      "product of ", device.name, "\nd ", p.d.rows, "x", varies == 'm' ? up(p.d.cols) : p.d.cols,
      " ", info(p.d.dtype).name, " k ", varies == 'k' ? up(k) : k, "\na", p.turn_a ? "T" : "", " b",
      p.turn_b ? "T" : "", p.bias ? " bias" : "", p.c.rows > 0 ? " c" : "", p.fast ? " fast" : "");
  // An algorithm may read vectors, so the addresses and strides of a class have equal alignments.
  for (const LtMatrix* m : {&p.a, &p.b, &p.c, &p.d}) {
    const auto stride = static_cast<uintptr_t>(m->ld * info(m->dtype).bytes);
    text += str("\n", info(m->dtype).name, " scales ", m->scale ? static_cast<int>(m->scales) : -1,
                " aligned ", alignment(m->data), " ", alignment(reinterpret_cast<void*>(stride)));
  }
  return {str("cublaslt ", cublaslt().version), device.arch(), text};
}

// The fastest algorithms of this process, by the text of the class.
std::map<std::string, LtAlgorithm>& winners() {
  static auto* const kWinners = new std::map<std::string, LtAlgorithm>;
  return *kWinners;
}
std::mutex& winners_lock() {
  static auto* const kLock = new std::mutex;
  return *kLock;
}

std::optional<LtAlgorithm> known(const CacheKey& key) {
  {
    const std::lock_guard lock(winners_lock());
    if (const auto found = winners().find(key.arch + key.source); found != winners().end())
      return found->second;
  }
  const std::optional<CachedImage> kept = Cache::shared().find(key);
  LtAlgorithm algorithm{};
  if (!kept || kept->image.size() != sizeof algorithm) return std::nullopt;
  std::memcpy(&algorithm, kept->image.data(), sizeof algorithm);
  return algorithm;
}

class Events {
 public:
  Events() {
    for (Event& e : both) check(driver().event_create(&e, 0), "creating an event");
  }
  ~Events() {
    for (const Event e : both) driver().event_destroy(e);
  }
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  std::array<Event, 2> both{};
};

// The choice with the smallest time over several interleaved rounds. The first round warms up.
LtChoice fastest(const Lt& lt, LtHandle handle, const std::vector<LtChoice>& choices,
                 const LtProduct& product, void* workspace, Stream stream) {
  const Events events;
  std::vector<float> least(choices.size(), 1e30F);
  for (int round = 0; round <= kRounds; ++round)
    for (size_t i = 0; i < choices.size(); ++i) {
      check(driver().event_record(events.both[0], stream), "timing a product");
      if (!multiply(lt, handle, choices[i], product, workspace, stream)) continue;
      check(driver().event_record(events.both[1], stream), "timing a product");
      check(driver().stream_synchronize(stream), "timing a product");
      float ms = 0;
      check(driver().event_elapsed_time(&ms, events.both[0], events.both[1]), "timing a product");
      if (round > 0) least[i] = std::min(least[i], ms);
    }
  return choices[static_cast<size_t>(std::ranges::min_element(least) - least.begin())];
}

// Memory for a second result. Empty if there is none.
class SecondResult {
 public:
  SecondResult(const LtMatrix& d, const RunArgs& call) {
    const auto bytes = static_cast<size_t>(d.ld * d.cols * info(d.dtype).bytes);
    if (call.scratch)
      data_ = d.data;
    else if (call.options && call.options->allocate)
      data_ = call.options->allocate(call.options->user, bytes);
    else
      try {
        data_ = own_.emplace(bytes, static_cast<Stream>(call.stream)).data();
      } catch (const Error&) {  // the pool is empty
      }
  }
  [[nodiscard]] void* data() const { return data_; }

 private:
  std::optional<StreamMemory> own_;
  void* data_ = nullptr;
};

}  // namespace

LtChoice tuned(const Lt& lt, LtHandle handle, const CurrentContext& context, const LtChoice& first,
               const LtProduct& product, char varies, void* workspace, const RunArgs& call) {
  const auto stream = static_cast<Stream>(call.stream);
  if (!tunes()) return first;
  const CacheKey key = class_of(context, product, varies);
  LtChoice best;
  if (const auto algorithm = known(key)) best = checked(lt, handle, product, *algorithm);
  if (!best.found) {
    if (captures(stream)) return first;
    const std::vector<LtChoice> all = heuristics(lt, handle, product, kHeuristics);
    if (all.empty()) return first;
    best = all[0];
    if (all.size() > 1) {
      // No lock is held: the stream may wait for work that another thread has yet to enqueue. Two
      // threads may then time one class.
      const SecondResult result(product.d, call);
      if (!result.data()) {
        // Trying again in every call would cost more than it may gain.
        best.tuned = true;
        remember(context.id(), product, best);
        return best;
      }
      LtProduct timed = product;
      timed.d.data = result.data();
      best = fastest(lt, handle, all, timed, workspace, stream);
    }
    Cache::shared().keep(
        key, {std::string(reinterpret_cast<const char*>(&best.algorithm), sizeof best.algorithm)},
        "product");
  }
  {
    const std::lock_guard lock(winners_lock());
    winners()[key.arch + key.source] = best.algorithm;
  }
  best.tuned = true;
  remember(context.id(), product, best);
  return best;
}

}  // namespace tenon::cuda
