// Checks that strict results keep their bits. Hashes the outputs of the conformance list, single
// calls, the golden chains and seeded random chains, and compares with golden/strict_hashes.txt.
//   outputs_hash             compares
//   outputs_hash --update    writes the file
//   outputs_hash --list      prints one line per case, to compare two source trees with diff
//   outputs_hash --some N    prints single calls and each N-th case of the conformance list and of
//                            the random chains, to compare two machines
#include "outputs/hash.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

namespace tenon::test {
namespace {

const std::string kFile = TENON_GOLDEN_DIR "/strict_hashes.txt";

std::string line(const std::string& name, uint64_t hash) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(hash));
  return name + " " + digits + "\n";
}

std::string read(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

int run(const std::string& mode, uint64_t every) {
  std::map<std::string, Hash> groups;
  const Report report = [&](const std::string& group, const std::string& name, uint64_t hash) {
    groups[group].number(hash);
    if (mode == "--list" || mode == "--some")
      std::fputs(line(group + " " + name, hash).c_str(), stdout);
  };
  hash_conformance(report, Sample(every));
  hash_single_calls(report);
  if (mode != "--some") hash_golden_chains(report);
  hash_random_chains(report, Sample(every));
  if (mode == "--some") return 0;

  std::string text;
  for (const auto& [group, hash] : groups) text += line(group, hash.value());
  std::fputs(text.c_str(), stdout);
  if (mode == "--list") return 0;
  if (mode == "--update") return std::ofstream(kFile) << text ? 0 : 1;
  if (text == read(kFile)) return 0;
  std::fprintf(stderr,
               "outputs_hash: strict results are not those of %s:\n%s"
               "compare the output of --list with that of a tree that has these hashes; if the "
               "change is meant, --update writes the file\n",
               kFile.c_str(), read(kFile).c_str());
  return 1;
}

}  // namespace
}  // namespace tenon::test

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const bool some = mode == "--some";
  const uint64_t every = some && argc == 3 ? std::strtoul(argv[2], nullptr, 10) : 1;
  const bool known = mode.empty() || mode == "--list" || mode == "--update" || some;
  if (!known || argc > (some ? 3 : 2) || (some && argc < 3) || every == 0) {
    std::fprintf(stderr, "outputs_hash: takes nothing, --list, --update or --some N\n");
    return 2;
  }
  return tenon::test::run(mode, every);
}
