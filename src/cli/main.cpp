// The main function of the `tenon` command.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <new>
#include <system_error>

#include "cli/command.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {
namespace {

using Runs = std::map<const CLI::App*, std::function<int()>>;

CLI::Option* add(CLI::App& app, const Option& o, bool* to) {
  return app.add_flag(o.name, *to, o.about);
}
template <class T>
CLI::Option* add(CLI::App& app, const Option& o, T* to) {
  CLI::Option* const made = app.add_option(o.name, *to, o.about);
  // A zero or empty value means that the option has no default to show.
  if constexpr (std::is_arithmetic_v<T> || std::is_same_v<T, std::string>)
    if (*to != T{}) made->capture_default_str();
  if (!o.default_text.empty()) made->default_str(o.default_text);
  return made;
}

void add(CLI::App& app, std::span<const Command> commands, Runs& runs) {
  for (const Command& c : commands) {
    CLI::App* const own = app.add_subcommand(c.name, c.about);
    const Bound bound = c.bind();
    for (const Option& o : bound.options) {
      CLI::Option* const made = std::visit([&](auto* to) { return add(*own, o, to); }, o.value);
      made->required(o.required);
      if (!o.allowed.empty()) made->check(CLI::IsMember(o.allowed));
      if (o.range) made->check(CLI::Range(o.range->first, o.range->second));
    }
    runs[own] = bound.run;
    if (!bound.parts.empty()) own->require_subcommand(1);
    add(*own, bound.parts, runs);
  }
}

int run(int argc, char** argv) {
  CLI::App app{"Tenon: fused transformer operations on CPU and CUDA", "tenon"};
  app.require_subcommand(1);
  app.footer(
      "Exit codes: 0 fine, 1 a check failed or the machine did, 2 wrong usage or input, "
      "3 no such device here.");
  app.set_version_flag("--version", version());
  Runs runs;
  add(app, commands(), runs);
  const auto known = [](std::string_view name) {
    return std::ranges::any_of(commands(), [&](const Command& c) { return c.name == name; });
  };
  if (argc > 1 && argv[1][0] != '-' && !known(argv[1])) {
    std::fprintf(stderr, "tenon: there is no command '%s'; see tenon --help\n", argv[1]);
    return usage;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? ok : usage;
  }
  const CLI::App* chosen = &app;
  while (!chosen->get_subcommands().empty()) chosen = chosen->get_subcommands().front();
  return runs.at(chosen)();
}

int unwritten(int error) {
  std::fprintf(stderr,
               "tenon: the standard output could not be written: %s; make room or send it "
               "elsewhere\n",
               std::strerror(error));
  return failed;
}

}  // namespace
}  // namespace tenon::cli

int main(int argc, char** argv) {
  using namespace tenon::cli;  // NOLINT: the command is the library's
  try {
    const int code = run(argc, argv);
    if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
    return unwritten(errno);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr,
                 "tenon: %s: its tensors are too large for the memory of this machine; give fewer "
                 "--rows or --cols, smaller ops or a smaller file\n",
                 argc > 1 ? argv[1] : "");
    return failed;
  } catch (const std::system_error& e) {  // fmt could not print
    return unwritten(e.code().value());
  } catch (const tenon::Error& e) {
    std::fprintf(stderr, "tenon: %s\n", e.what());
    return e.code() == tenon::Code::invalid_argument ? usage : failed;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tenon: %s\n", e.what());
    return failed;
  }
}
