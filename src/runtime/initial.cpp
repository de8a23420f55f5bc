// Initial values of parameters.
#include <cstring>

#include "core/fp_mode.h"
#include "core/philox.h"
#include "tenon/error.h"
#include "tenon/plan.h"

namespace tenon {

namespace {

// FNV-1a hash: each name has its own random stream.
uint64_t stream_of(std::string_view name) {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

}  // namespace

void Plan::initialise(size_t buffer, uint64_t seed, void* memory) const {
  const FpMode ieee;
  require(buffer < buffers().size(), "plan: there is no buffer ", buffer, "; it has ",
          buffers().size());
  const Buffer& b = buffers()[buffer];
  require(b.role == Role::param, "plan: '", b.name,
          "' is no parameter; only those start as something");
  const auto size = static_cast<size_t>(info(b.dtype).bytes);
  const size_t n = static_cast<size_t>(b.bytes(0)) / size;  // parameters do not depend on the rows
  require(memory || n == 0, "plan: no address for '", b.name, "', which is to start as something");
  const uint64_t stream = stream_of(b.name);
  const double low = b.initial.low, range = double{b.initial.high} - low;
  RandomWords words{};
  for (size_t i = 0; i < n; ++i) {
    if (i % 4 == 0) words = philox(seed, i / 4, stream);
    const double u = (words.w[i % 4] >> 8) * 0x1p-24;
    const uint32_t code = encode(b.dtype, static_cast<float>(low + range * u));
    std::memcpy(static_cast<char*>(memory) + i * size, &code, size);
  }
}

}  // namespace tenon
