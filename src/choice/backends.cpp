// The list of backends, one line per backend.
#include "choice/backends.h"

#include "backend/cpu/makers.h"
#include "backend/cuda/makers.h"
#include "backend/null/makers.h"
#include "tenon/error.h"

namespace tenon {

std::span<const Backend* const> backends() {
  static const Backend* const kList[] = {&cpu::backend(), &cuda::backend(), &null::backend()};
  return kList;
}

const Backend& backend_for(Device device) {
  const auto list = backends();  // in the order of their numbers
  const auto number = static_cast<size_t>(device);
  if (number < list.size()) return *list[number];
  fail(Code::unsupported, "device ", static_cast<int>(device),
       ": this build has no backend for it");
}

}  // namespace tenon
