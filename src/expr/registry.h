// Look-ups in the registry that the parser and the error messages need.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tenon/activation.h"

namespace tenon {

// By name or alias.
std::optional<Activation> registered(std::string_view name);

// Refuses `name@contents` that was never defined.
void check_pin(std::string_view name);

// " (did you mean 'gelu'?)", or nothing.
std::string suggestion(std::string_view name);

// The built-in rows of activations.cpp.
std::span<const Activation> built_in_activations();

// Grows with every definition: what a name means depends on nothing else.
uint64_t definitions();

}  // namespace tenon
