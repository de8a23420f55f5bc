// What the commands with a chain share.
#pragma once

#include "cli/commands.h"
#include "tenon/plan.h"

namespace tenon::cli {

// The text of the argument, or of the file that it names.
std::string chain_text(const ChainArgs& args);
// The path of that file, or empty.
std::string chain_file(const ChainArgs& args);

PlanRequest request_of(const ChainArgs& args);

// A plan whose errors say that a command has no opaque ops.
Plan build(const Chain& chain, const PlanRequest& request);

}  // namespace tenon::cli
