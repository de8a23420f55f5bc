// How many processors this process may use.
#pragma once

#include <filesystem>

namespace tenon::cpu {

// Those of its affinity, as far as the quota of its control groups pays for them.
int processors();

// The quota alone, rounded up, in a file system at `root`; 0 without one. Reads both versions of
// control groups.
int quota(const std::filesystem::path& root = "/");

}  // namespace tenon::cpu
