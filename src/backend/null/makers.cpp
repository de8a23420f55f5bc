// A kernel that does nothing.
#include "backend/null/makers.h"

namespace tenon::null {

namespace {

class Nothing final : public Kernel {
 public:
  void run(const RunArgs& /*args*/) const override {}
};

Attempt make_nothing(const Step& /*step*/) { return std::make_shared<const Nothing>(); }

void draw_nothing(uint64_t* /*state*/, uint64_t* /*drawn*/, uint64_t /*count*/, void* /*stream*/) {}

}  // namespace

const Backend& backend() {
  static constexpr Maker kMakers[] = {{"nothing", make_nothing}};
  static constexpr Backend kBackend{"null", Device::null, kMakers, draw_nothing};
  return kBackend;
}

}  // namespace tenon::null
