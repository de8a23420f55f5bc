// A command as data: its name, its options, and what runs it.
//
// NAME.cpp defines `extern const Command kNameCommand`, and src/cli/CMakeLists.txt lists NAME.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace tenon::cli {

// What scripts see: no_device means that nothing ran because the device is not here.
enum Exit : int { ok = 0, failed = 1, usage = 2, no_device = 3 };

// One option. CLI11 reads it (main.cpp); no other file includes CLI11, which takes ten seconds.
struct Option {
  using Value =
      std::variant<bool*, int*, int64_t*, uint64_t*, float*, double*, std::string*,
                   std::optional<int64_t>*, std::optional<double>*, std::vector<std::string>*>;

  std::string name;  // "--rows"; "CHAIN" is a positional argument
  Value value;       // holds the default
  std::string about = {};
  std::vector<std::string> allowed = {};  // empty: anything
  std::optional<std::pair<int, int>> range = {};
  bool required = false;
  std::string default_text = {};  // in --help, where the value does not show it
};

struct Command;

// What a command reads and runs; the values live as long as the process.
struct Bound {
  std::vector<Option> options = {};
  std::function<int()> run = {};  // gives the exit code
  std::vector<Command> parts = {};
};

struct Command {
  const char* name;
  const char* about;
  Bound (*bind)();
};

// All of them, in the order of --help.
std::span<const Command> commands();

}  // namespace tenon::cli
