// `tenon plan`: what a chain becomes, as text, JSON or a page.
#include "tenon/plan.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>

#include "cli/commands.h"
#include "cli/tensor_file.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

// The command line has checked the name already.
template <class T, size_t n>
T named(const std::array<std::string_view, n>& names, const std::string& name) {
  return static_cast<T>(std::ranges::find(names, name) - names.begin());
}

std::string chain_text(const std::string& argument) {
  if (!argument.starts_with('@')) return argument;
  const std::string path = argument.substr(1);
  const std::string name = clean(path, 200);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  require(file != nullptr, "plan @", name, " cannot be opened: ", std::strerror(errno),
          "; give the path of a chain's text");
  // One byte more than a chain may have, so that the parser is the one who refuses it.
  std::string text(kMaxChainBytes + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  require(std::ferror(file.get()) == 0, "plan @", name, " cannot be read: ", std::strerror(errno),
          "; give the path of a chain's text");
  return text;
}

PlanRequest request_of(const PlanArgs& args) {
  constexpr int64_t kMost = 1LL << 32;  // sizes of tensors stay far from 2^63
  require(args.rows >= 1 && args.rows <= kMost, "plan --rows ", args.rows,
          ": it must be from 1 to ", kMost);
  require(args.cols >= 0 && args.cols <= kMost, "plan --cols ", args.cols,
          ": it must be from 1 to ", kMost);
  require(std::isfinite(args.gbps) && args.gbps >= 0, "plan --gbps ", args.gbps,
          ": it must be a positive number");
  require(std::isfinite(args.tflops) && args.tflops >= 0, "plan --tflops ", args.tflops,
          ": it must be a positive number");
  require(args.tflops == 0 || args.gbps > 0, "plan --tflops ", args.tflops,
          ": a floor needs a bandwidth too; add --gbps");
  PlanRequest r{.cols = args.cols,
                .recipe = recipe(args.recipe),
                .training = !args.eval,
                .backward = args.backward,
                .keep = named<Keep>(kKeeps, args.keep)};
  const auto* dtype = std::ranges::find(kDTypes, args.dtype, &DTypeInfo::name);
  r.dtype = static_cast<DType>(dtype - kDTypes.begin());
  r.options.precision = named<Precision>(kPrecisions, args.precision);
  r.options.rounding = named<Rounding>(kRoundings, args.rounding);
  r.options.device = named<Device>(kDevices, args.device);
  return r;
}

void write(const std::string& path, const std::string& text) {
  const std::string name = clean(path, 200);
  std::FILE* f = std::fopen(path.c_str(), "wb");
  require(f != nullptr, "plan -o ", name, " cannot be opened: ", std::strerror(errno),
          "; give a path that can be written");
  const bool written = std::fwrite(text.data(), 1, text.size(), f) == text.size();
  const bool closed = std::fclose(f) == 0;
  if (!written || !closed)
    fail(Code::runtime, "plan -o ", name, " could not be written: ", std::strerror(errno));
}

}  // namespace

int plan(const PlanArgs& args) {
  const PlanRequest request = request_of(args);
  const Plan made = Plan::build(parse_chain(chain_text(args.chain)), request);
  const Speed speed{.gbps = args.gbps, .gflops = 1e3 * args.tflops};
  const std::string text = args.format == "json"   ? made.json(args.rows, speed)
                           : args.format == "html" ? made.html(args.rows, speed)
                                                   : made.describe(args.rows, speed);
  if (args.output.empty())
    fmt::print("{}", text);
  else
    write(args.output, text);
  return ok;
}

}  // namespace tenon::cli
