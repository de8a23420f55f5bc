// A command as data: its name, its options, and the function that runs it. NAME.cpp defines `extern
// const Command kNameCommand`, and src/cli/CMakeLists.txt lists NAME.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

namespace tenon::cli {

// The exit codes for scripts. no_device: nothing ran because the machine does not have the device.
enum Exit : int { ok = 0, failed = 1, usage = 2, no_device = 3 };

// One option. main.cpp passes it to CLI11. No other file includes CLI11, which takes ten seconds to
// compile.
struct Option {
  using Value =
      std::variant<bool*, int*, int64_t*, uint64_t*, float*, double*, std::string*,
                   std::optional<int64_t>*, std::optional<double>*, std::vector<std::string>*>;

  std::string name;  // "--rows"; "CHAIN" is a positional argument
  Value value;       // holds the default
  std::string about = {};
  std::vector<std::string> allowed = {};  // empty: any value
  std::optional<std::pair<int, int>> range = {};
  bool required = false;
  std::string default_text = {};  // shown in --help if the value does not show it
};

struct Command;

// The options of a command and its function. The values live as long as the process.
struct Bound {
  std::vector<Option> options = {};
  std::function<int()> run = {};  // returns the exit code
  std::vector<Command> parts = {};
};

struct Command {
  const char* name;
  const char* about;
  Bound (*bind)();
};

// All commands, in the order of --help.
std::span<const Command> commands();

}  // namespace tenon::cli
