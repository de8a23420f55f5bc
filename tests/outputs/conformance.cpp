// Hashes of the conformance list, with every case in strict precision.
#include <atomic>
#include <thread>

#include "outputs/hash.h"
#include "support/trial.h"

namespace tenon::test {
namespace {

uint64_t hash_of(const support::Case& c) {
  support::Trial trial(c, Device::cpu);
  Hash hash;
  hash.number(trial.run([](const auto&...) { return std::nullopt; }).has_value());
  // Includes inputs, because a call must not change them.
  for (const support::Matrix& m : trial.matrices()) hash.elements(m.view);
  return hash.value();
}

}  // namespace

void hash_conformance(const Report& report, Sample sample) {
  std::vector<support::Case> list = support::cases();
  std::erase_if(list, [&](const support::Case&) { return !sample(); });
  for (support::Case& c : list)
    c.values[static_cast<size_t>(support::Column::precision)] = "strict";
  std::vector<uint64_t> hashes(list.size());
  std::atomic<size_t> next = 0;
  const auto work = [&] {
    for (size_t i = next++; i < list.size(); i = next++) hashes[i] = hash_of(list[i]);
  };
  std::thread other(work);
  work();
  other.join();
  for (size_t i = 0; i < list.size(); ++i) report("conformance", list[i].text(), hashes[i]);
}

}  // namespace tenon::test
