// How many processors this process may use.
#pragma once

#include <filesystem>

namespace tenon::cpu {

// The processors of the affinity mask, limited by the quota of the control groups.
int processors();

// The quota alone, rounded up, from the file system at `root`. 0 if there is no quota. Supports
// control groups versions 1 and 2.
int quota(const std::filesystem::path& root = "/");

}  // namespace tenon::cpu
