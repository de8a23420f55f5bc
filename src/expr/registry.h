// Look-ups in the registry for the parser and the error messages.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tenon/activation.h"

namespace tenon {

// Finds an activation by name or alias.
std::optional<Activation> registered(std::string_view name);

// Throws if `name@contents` was never defined.
void check_pin(std::string_view name);

// " (did you mean 'gelu'?)", or an empty text.
std::string suggestion(std::string_view name);

// The built-in activations of activations.cpp.
std::span<const Activation> built_in_activations();

// A counter of definitions. The meaning of a name changes only when it grows.
uint64_t definitions();

}  // namespace tenon
