// The version number, from the build.
#include "tenon/tenon.hpp"

namespace tenon {

const char* version() { return TENON_VERSION; }

}  // namespace tenon
