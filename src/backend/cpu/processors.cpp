// Reads the affinity mask and the quotas of control groups.
#include "backend/cpu/processors.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

namespace tenon::cpu {

namespace {

namespace fs = std::filesystem;

std::string word_of(const fs::path& file) {
  std::string word;
  std::ifstream(file) >> word;
  return word;
}

double number(const std::string& text) { return std::strtod(text.c_str(), nullptr); }

// The quota of one group, in processors. 0 if it has none.
double group_quota(const fs::path& group) {
  if (std::ifstream both(group / "cpu.max"); both) {
    std::string quota, period;
    both >> quota >> period;
    return number(period) > 0 ? number(quota) / number(period) : 0;  // "max" is not a number
  }
  const double period = number(word_of(group / "cpu.cfs_period_us"));
  return period > 0 ? number(word_of(group / "cpu.cfs_quota_us")) / period : 0;
}

}  // namespace

int quota(const fs::path& root) {
  double least = 0;
  const auto look = [&](const fs::path& group) {
    const double bound = group_quota(group);
    if (bound > 0) least = least > 0 ? std::min(least, bound) : bound;
  };
  // Lines are number:controllers:/path. Version 2 has the number 0 and no controllers.
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (!controllers.empty() && ("," + controllers + ",").find(",cpu,") == std::string::npos)
      continue;
    fs::path top = root / "sys/fs/cgroup";
    std::error_code none;
    if (!controllers.empty()) top /= fs::exists(top / controllers, none) ? controllers : "cpu";
    // The quotas of parent groups apply too.
    fs::path group = fs::path(line.substr(second + 1)).relative_path();
    look(top);
    for (; !group.empty(); group = group.parent_path()) look(top / group);
  }
  const auto whole = static_cast<int>(std::min(least, 1e6));
  return whole + (whole < least ? 1 : 0);
}

int processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int count = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  if (sched_getaffinity(0, sizeof(set), &set) == 0) count = std::max(1, CPU_COUNT(&set));
  const int paid = quota();
  return paid > 0 ? std::min(count, paid) : count;
}

}  // namespace tenon::cpu
