// What the commands with a chain share.
#pragma once

#include "cli/commands.h"
#include "tenon/plan.h"

namespace tenon::cli {

// The text of the argument, or of the file that it names.
std::string chain_text(const ChainArgs& args);

PlanRequest request_of(const ChainArgs& args);

// `option` is what asked for it, for messages.
void write_file(std::string_view option, const std::string& path, std::string_view bytes);

// A plan whose errors say that a command has no opaque ops.
Plan build(const Chain& chain, const PlanRequest& request);

}  // namespace tenon::cli
