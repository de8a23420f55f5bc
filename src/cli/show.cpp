// `tenon show`: an activation's formula, derivative, error bound and code.
#include <fmt/core.h>

#include "cli/commands.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

int show(const std::string& text, bool backward) {
  fmt::print("{}", tenon::show(activation(text), backward));
  return ok;
}

}  // namespace tenon::cli
