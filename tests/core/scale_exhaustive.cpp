// Tests the E8M0 rule against integers, for every non-negative fp32 value as an amax. It takes
// about a minute, so it is run by hand: scale_exhaustive [threads].
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "core/scaling.h"
#include "support/quantize_reference.h"

int main(int argc, char** argv) {
  using namespace tenon;
  using namespace tenon::test;
  const unsigned cores = std::max(1U, std::thread::hardware_concurrency());
  const int threads = argc > 1 ? std::max(1, std::atoi(argv[1])) : static_cast<int>(cores);
  constexpr uint64_t kPatterns = uint64_t{1} << 31;
  constexpr uint64_t kSlice = uint64_t{1} << 20;
  float multipliers[256];
  for (int e = 0; e < 256; ++e) multipliers[e] = ref::e8m0_multiplier(static_cast<uint8_t>(e));
  uint64_t wrong = 0;
  for (const DType d : kFp8) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<uint64_t> next{0}, bad{0}, sum{0};
    const auto work = [&] {
      for (uint64_t first = next.fetch_add(kSlice); first < kPatterns;
           first = next.fetch_add(kSlice)) {
        uint64_t seen = 0;
        for (uint64_t a = first; a < first + kSlice; ++a) {
          const auto amax = static_cast<uint32_t>(a);
          const Scale got = scale_e8m0(amax, d);
          const uint8_t want = ref::e8m0(amax, d);
          seen += want;
          if (got.inverse == want && equal(got.multiplier, multipliers[want])) continue;
          if (bad.fetch_add(1) < 10)
            std::printf("%s amax bits 0x%08x: got %u, expected %u\n", info(d).name.data(), amax,
                        got.inverse, static_cast<unsigned>(want));
        }
        sum += seen;
      }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(work);
    work();
    for (std::thread& t : others) t.join();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    std::printf("e8m0 rule, %s: %llu patterns, %llu wrong, sum of exponents %llu, %.1f s\n",
                info(d).name.data(), static_cast<unsigned long long>(kPatterns),
                static_cast<unsigned long long>(bad.load()),
                static_cast<unsigned long long>(sum.load()), time.count());
    wrong += bad;
  }
  return wrong == 0 ? 0 : 1;
}
