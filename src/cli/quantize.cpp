// `tenon quantize`: reports the effect of a recipe on the tensors of a file.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/measure.h"
#include "cli/output_file.h"
#include "cli/picture.h"
#include "cli/tensor_file.h"
#include "support/progress.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

namespace {

struct QuantizeArgs {
  std::string file, recipe, tensor, svg;
  float eps = 0, scale = 0;
  bool exact_scales = false, columnwise = false, json = false;
};

constexpr size_t kMostPanels = 16;

void note(const std::string& text) { fmt::print(stderr, "tenon: note: {}\n", text); }

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t n : shape) text += str(text.empty() ? "" : ", ", n);
  return "[" + text + "]";
}

// The tensor with that name. If there is none, all tensors whose names contain it.
std::vector<FileTensor> select(const TensorFile& file, const QuantizeArgs& args) {
  const std::string name = clean(args.file, 200);
  require(!file.tensors.empty(), name,
          " has no tensor of f16, bf16, f32 or f64; give a file that holds floats");
  if (args.tensor.empty()) return file.tensors;
  std::vector<FileTensor> exact;
  std::vector<FileTensor> within;
  for (const FileTensor& t : file.tensors) {
    if (t.name == args.tensor) exact.push_back(t);
    if (t.name.find(args.tensor) != std::string::npos) within.push_back(t);
  }
  if (!exact.empty()) return exact;
  constexpr size_t kListed = 8;
  std::string names;
  for (size_t i = 0; i < std::min(kListed, file.tensors.size()); ++i)
    names += str(i ? ", " : "", clean(file.tensors[i].name, 40));
  if (file.tensors.size() > kListed) names += str(" and ", file.tensors.size() - kListed, " more");
  require(!within.empty(), name, " has no float tensor whose name contains '",
          clean(args.tensor, 60), "'; it has ", names);
  return within;
}

nlohmann::ordered_json as_json(const std::string& file, const FileTensor& t, const Census& before,
                               const Outcome& o) {
  const auto share = [&](int64_t n) {
    return before.elements ? static_cast<double>(n) / static_cast<double>(before.elements) : 0.0;
  };
  const Format& f = o.trial.format;
  nlohmann::ordered_json j;
  j["file"] = file;
  j["tensor"] = t.name;
  j["dtype"] = name_of(t.type);
  j["shape"] = t.shape;
  j["rows"] = t.matrix.rows;
  j["cols"] = t.matrix.cols;
  j["recipe"] = o.trial.name;
  j["format"] = info(f.dtype).name;
  j["mode"] = info(f.scaling).name;
  j["orientation"] = o.trial.orientation == Orientation::rowwise ? "rowwise" : "columnwise";
  j["power_of_two"] = f.powers();
  j["eps"] = f.eps;
  if (f.scaling == Scaling::delayed) j["scale"] = o.trial.scale;
  j["elements"] = before.elements;
  j["zeros"] = before.zeros;
  j["amax"] = before.amax;
  j["finite_amax"] = before.finite_amax;
  j["relative_rms"] = o.relative_rms;
  j["snr_db"] = o.snr_db;
  j["max_abs_error"] = o.max_error;
  j["worst_relative_error"] = o.worst_relative;
  j["saturated"] = o.saturated;
  j["saturated_share"] = share(o.saturated);
  j["flushed"] = o.flushed;
  j["flushed_share"] = share(o.flushed);
  j["nonfinite"] = o.nonfinite;
  j["spoiled"] = o.spoiled;
  j["bytes_before"] = o.bytes_before;
  j["bytes_after"] = o.bytes_after;
  j["scales"] = o.scales;
  j["distinct_scales"] = o.distinct_scales;
  j["scale_inv_exponents"] = nullptr;
  if (o.least_scale > 0) j["scale_inv_exponents"] = {o.least_exponent(), o.most_exponent()};
  return j;
}

std::string scales_text(const Outcome& o) {
  std::string text =
      o.scales == 1 ? "1" : fmt::format("{}, {} distinct", o.scales, o.distinct_scales);
  if (o.least_scale == 0) return text;
  const int least = o.least_exponent();
  const int most = o.most_exponent();
  text += fmt::format(", 2^{}", least);
  if (least != most) text += fmt::format("..2^{}", most);
  return text;
}

std::string bytes_text(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 10000 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kUnits[unit]);
}

void print_heading(const std::string& file, size_t tensors, bool columnwise) {
  fmt::print("{}: {} tensor{}, {}\n\n", file, tensors, tensors == 1 ? "" : "s",
             columnwise ? "columnwise" : "rowwise");
  fmt::print("{:<20}{:>10}{:>9}{:>11}{:>11}{:>11}{:>10}{:>12}  {:<32}{}\n", "", "rel. RMS",
             "SNR dB", "max error", "worst rel.", "saturated", "flushed", "non-finite", "bytes",
             "scales (scale_inv)");
}

void print_report(const Report& r) {
  const Census& b = r.before;
  std::string amax = fmt::format("{:.4g}", b.amax);
  if (!std::isfinite(b.amax)) amax += fmt::format(" (largest finite {:.4g})", b.finite_amax);
  fmt::print("{}  {} {}  amax {}  zeros {}  {}\n", r.name, r.shape, name_of(r.type), amax,
             percent(b.zeros, b.elements), spark_line(b));
  for (const Outcome& o : r.after) {
    const double ratio =
        o.bytes_after ? static_cast<double>(o.bytes_before) / static_cast<double>(o.bytes_after)
                      : 1.0;
    const std::string bytes = fmt::format("{} -> {} ({:.2f}x)", bytes_text(o.bytes_before),
                                          bytes_text(o.bytes_after), ratio);
    const bool compared = o.nonfinite + o.spoiled < b.elements;
    const std::string snr = !compared              ? "-"
                            : std::isinf(o.snr_db) ? "exact"
                                                   : fmt::format("{:.2f}", o.snr_db);
    fmt::print("  {:<18}{:>10.3g}{:>9}{:>11.3g}{:>11.3g}{:>11}{:>10}{:>12}  {:<32}{}\n",
               o.trial.name, o.relative_rms, snr, o.max_error, o.worst_relative,
               percent(o.saturated, b.elements), percent(o.flushed, b.elements), o.nonfinite, bytes,
               scales_text(o));
    if (o.spoiled > 0)
      fmt::print(
          "    {} finite, lost and not in the errors: beside a NaN, or rounded up to infinity\n",
          o.spoiled);
  }
}

std::vector<Trial> trials_of(const QuantizeArgs& args) {
  constexpr float kLeast = 0x1p-126F;  // for a smaller scale, 1/scale is not finite
  constexpr float kMost = std::numeric_limits<float>::max();
  require(args.scale == 0 || (args.scale >= kLeast && args.scale <= kMost), "quantize --scale ",
          args.scale, ": it must be a positive number of normal fp32 size");
  require(args.eps >= 0 && args.eps <= kMost, "quantize --eps ", args.eps,
          ": it must be finite and not negative");
  return parse_trials(args.recipe, {.eps = args.eps,
                                    .scale = args.scale,
                                    .exact_scales = args.exact_scales,
                                    .columnwise = args.columnwise});
}

int quantize(const QuantizeArgs& args) {
  const std::vector<Trial> trials = trials_of(args);
  if (!args.svg.empty()) require_other_file("quantize --svg", args.svg, args.file);
  const TensorFile file = parse_tensor_file(args.file, open_file(args.file));
  const std::vector<FileTensor> tensors = select(file, args);
  for (const std::string& text : file.notes) note(text);
  const std::string name = clean(args.file, 200);
  if (std::ranges::any_of(tensors, [](const auto& t) { return t.type == Stored::f64; }))
    note(name + ": f64 is rounded to f32 first, and errors are measured from there");
  if (!args.json) print_heading(name, tensors.size(), args.columnwise);

  std::vector<Report> drawn;
  support::Progress progress(tensors.size() * trials.size());
  for (const FileTensor& t : tensors) {
    Report r{clean(t.name), shape_text(t.shape), t.type, take_census(t), {}};
    for (const Trial& trial : trials) {
      r.after.push_back(apply(trial, t, r.before));
      progress.step(r.name);
      if (args.json) {
        progress.hide();
        const auto line = as_json(args.file, t, r.before, r.after.back());
        fmt::print("{}\n", line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
      }
    }
    progress.hide();
    if (!args.json) print_report(r);
    if (!args.json && tensors.size() == 1) fmt::print("\n{}", text_histogram(r));
    if (!args.svg.empty() && drawn.size() < kMostPanels) drawn.push_back(std::move(r));
  }
  if (args.svg.empty()) return ok;
  write_file("quantize --svg", args.svg, svg_picture(name, drawn));
  if (drawn.size() < tensors.size())
    note(str("the picture shows the first ", kMostPanels, " of ", tensors.size(),
             " tensors; choose with --tensor"));
  return ok;
}

}  // namespace

extern const Command kQuantizeCommand{
    "quantize", "what a recipe does to the tensors of an .npy or .safetensors file", []() -> Bound {
      static QuantizeArgs args;
      return {{{.name = "FILE", .value = &args.file, .required = true},
               {.name = "--recipe",
                .value = &args.recipe,
                .about = "[e4m3:|e5m2:]MODE; delayed, current, mxfp8, block1x128, block128x128, "
                         "all; several with commas",
                .required = true},
               {"--tensor", &args.tensor, "the tensor of this name, or all whose names contain it"},
               {"--eps", &args.eps, "current, block: the least amax"},
               {"--scale", &args.scale,
                "delayed: the multiplier (default: from the tensor's own amax, as a warm history "
                "gives it)"},
               {"--exact-scales", &args.exact_scales, "block: scales need not be powers of two"},
               {"--columnwise", &args.columnwise, "the columnwise encoding"},
               {"--json", &args.json, "one JSON object a line, tensor and recipe"},
               {"--svg", &args.svg, "write a picture to this file"}},
              [] { return quantize(args); }};
    }};

}  // namespace tenon::cli
