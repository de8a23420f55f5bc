// `tenon show`: prints the formula, derivative, error bound and code of an activation.
#include <fmt/core.h>

#include "cli/command.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

extern const Command kShowCommand{
    "show", "formula, derivative, error bound and printed code", []() -> Bound {
      static std::string text;
      static bool backward = false;
      return {{{.name = "ACTIVATION",
                .value = &text,
                .about = "a name, gated(…), or a formula (after -- if it starts with a minus)",
                .required = true},
               {"--backward", &backward, "print the code of the derivative"}},
              [] {
                fmt::print("{}", tenon::show(activation(text), backward));
                return ok;
              }};
    }};

}  // namespace tenon::cli
