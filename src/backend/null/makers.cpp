// A kernel that does nothing.
#include "backend/null/makers.h"

namespace tenon::null {

namespace {

class Nothing final : public Kernel {
 public:
  void run(const RunArgs& /*args*/) const override {}
};

Attempt make_nothing(const Step& /*step*/, const Target& /*target*/) {
  return std::make_shared<const Nothing>();
}

void draw_nothing(uint64_t* /*state*/, uint64_t* /*drawn*/, uint64_t /*count*/, void* /*stream*/) {}

const Target& here() {
  static const Target& kHere = *new Target{.name = "null", .device = Device::null, .here = true};
  return kHere;
}
void* take(size_t /*bytes*/, void* /*stream*/) { return nullptr; }
void give(void* /*memory*/, void* /*stream*/) {}
void fill(void* /*memory*/, size_t /*bytes*/, void* /*stream*/) {}

}  // namespace

const Backend& backend() {
  static constexpr Maker kMakers[] = {{"nothing", make_nothing}};
  static constexpr Backend kBackend{"null", Device::null, kMakers, here,
                                    take,   give,         fill,    draw_nothing};
  return kBackend;
}

}  // namespace tenon::null
