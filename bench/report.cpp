// Prints the tables and the JSON file of `tenon bench`.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "bench/bench.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::bench {

namespace {

// In the unit of the report.
double rate(const BenchReport& report, const BenchResult& r) {
  return r.terabytes * (report.on_gpu ? 1 : 1e3);
}
const char* unit(const BenchReport& report) { return report.on_gpu ? "TB/s" : "GB/s"; }

std::string shape_text(const Shape& s) { return str(s.rows, "x", s.cols); }

// "gelu bwd dbias": everything except the encoding of the result.
std::string row_of(const BenchCase& c) {
  std::string text = str(c.op, c.backward ? " bwd" : " fwd", c.dbias ? " dbias" : "");
  if (c.pass) text += *c.pass == 0 ? " amax-pass" : " encode-pass";
  return text;
}

// Rows and columns keep the order of the cases.
class Pivot {
 public:
  void add(const std::string& row, const std::string& column, std::string cell) {
    note(rows_, row);
    note(columns_, column);
    cells_[{row, column}] = std::move(cell);
  }
  void print(const std::string& title) const {
    if (rows_.empty()) return;
    fmt::print("{:<26}", title);
    for (const std::string& c : columns_) fmt::print(" {:>15}", c);
    fmt::print("\n");
    for (const std::string& r : rows_) {
      std::string line = fmt::format("{:<26}", r);
      for (const std::string& c : columns_) {
        const auto cell = cells_.find({r, c});
        line += fmt::format(" {:>15}", cell == cells_.end() ? "" : cell->second);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      fmt::print("{}\n", line);
    }
  }

 private:
  static void note(std::vector<std::string>& list, const std::string& text) {
    if (std::ranges::find(list, text) == list.end()) list.push_back(text);
  }
  std::vector<std::string> rows_, columns_;
  std::map<std::pair<std::string, std::string>, std::string> cells_;
};

// The share in percent and the rate, with a mark if the kernel uses local memory.
std::string cell_of(const BenchReport& report, const BenchResult& r) {
  if (!r.error.empty()) return "failed";
  return fmt::format("{:.1f} {:.2f}{}", 100 * r.share, rate(report, r), r.local_bytes ? "*" : "");
}

void print_pivots(const BenchReport& report) {
  std::vector<Shape> shapes;
  for (const BenchResult& r : report.results)
    if (std::ranges::find(shapes, r.shape) == shapes.end()) shapes.push_back(r.shape);
  for (const Shape& s : shapes) {
    Pivot plain;
    std::map<bool, Pivot> quantised;  // by presence of a columnwise encoding
    for (const BenchResult& r : report.results) {
      if (!(r.shape == s)) continue;
      if (r.c.out.scaling == Scaling::none)
        plain.add(str(r.c.op, r.c.bias || r.c.dbias ? " bias" : ""), r.c.backward ? "bwd" : "fwd",
                  cell_of(report, r));
      else
        quantised[r.c.columnwise].add(row_of(r.c), std::string(info(r.c.out.scaling).name),
                                      cell_of(report, r));
    }
    fmt::print("\n{}: share of the ceiling in %, {}{}\n", shape_text(s), unit(report),
               report.on_gpu ? "; * has local memory" : "");
    plain.print("plain");
    quantised[false].print("rowwise");
    quantised[true].print("row and column");
  }
}

nlohmann::ordered_json json_of(const BenchNumber& n) {
  return {{"what", n.what}, {"value", n.value}, {"unit", n.unit}};
}

nlohmann::ordered_json json_of(const std::vector<BenchResult::Peer>& peers) {
  auto all = nlohmann::ordered_json::object();
  for (const BenchResult::Peer& p : peers)
    all[p.name] = {{"time_us", p.microseconds},
                   {"speedup", p.speedup.median},
                   {"speedup_lo", p.speedup.low},
                   {"speedup_hi", p.speedup.high},
                   {"version", p.version}};
  return all;
}

nlohmann::ordered_json json_of(const BenchReport& report, const BenchResult& r) {
  nlohmann::ordered_json j{{"case", r.c.name()},
                           {"op", r.c.op},
                           {"direction", r.c.backward ? "bwd" : "fwd"},
                           {"dtype", info(r.c.out.dtype).name},
                           {"scaling", info(r.c.out.scaling).name},
                           {"columnwise", r.c.columnwise},
                           {"dbias", r.c.dbias},
                           {"rows", r.shape.rows},
                           {"cols", r.shape.cols},
                           {"mix", r.mix},
                           {"us", r.microseconds},
                           {"ceiling_us", r.ceiling_microseconds},
                           {"cached_us", r.cached_microseconds},
                           {"tbps", r.terabytes},
                           {"share", r.share},
                           {"share_lo", r.share_lo},
                           {"share_hi", r.share_hi},
                           {"maker", r.makers},
                           {"peers", json_of(r.peers)},
                           {"error", r.error}};
  if (report.on_gpu)
    j.update({{"kernel", r.kernel},
              {"kernels", r.kernels},
              {"threads", r.threads},
              {"registers", r.registers},
              {"local_bytes", r.local_bytes}});
  return j;
}

// The share at which the instructions alone would run: what a case with data in the cache reaches.
std::string cached_text(const BenchReport& report, const BenchResult& r) {
  if (report.on_gpu) return "";
  if (r.cached_microseconds == 0) return fmt::format("{:>7}", "");
  return fmt::format(" {:>6.1f}", 100 * r.ceiling_microseconds / r.cached_microseconds);
}

// "  onednn 3.20 [3.15, 3.31]" for each peer.
std::string peers_text(const BenchResult& r) {
  std::string text;
  for (const BenchResult::Peer& p : r.peers)
    text += fmt::format("  {} {:.2f} [{:.2f}, {:.2f}]", p.name, p.speedup.median, p.speedup.low,
                        p.speedup.high);
  return text;
}

// Geometric means of the speedups over each peer.
void print_peers(const BenchReport& report) {
  std::map<std::string, std::vector<double>> logarithms;
  for (const BenchResult& r : report.results)
    for (const BenchResult::Peer& p : r.peers)
      logarithms[p.name + " " + p.version].push_back(std::log(p.speedup.median));
  for (const auto& [name, all] : logarithms) {
    double sum = 0;
    for (const double l : all) sum += l;
    const auto count = static_cast<double>(all.size());
    fmt::print("\nspeedup over {}: {:.2f} (geometric mean of {} cases)\n", name,
               std::exp(sum / count), all.size());
  }
}

// "2:0, 4:1+1" as "2r0w 4r2w".
std::string read_and_written(const BenchResult& r) {
  std::string text;
  for (const Mix& m : r.mixes)
    text += str(text.empty() ? "" : " ", m.read, "r", m.write + m.columnwise, "w");
  return text;
}

// The machine-readable line of a case.
std::string line_of(const BenchArgs& args, const BenchResult& r) {
  const double bytes = static_cast<double>(r.bytes);
  const auto gigabytes = [&](double us) { return us > 0 ? bytes / us * 1e-3 : 0; };
  nlohmann::ordered_json j{{"case", r.c.name()},
                           {"rows", r.shape.rows},
                           {"cols", r.shape.cols},
                           {"device", args.device},
                           {"threads", args.device == "cuda" ? r.threads : threads()},
                           {"precision", args.precision},
                           {"maker", r.makers},
                           {"bytes", r.bytes},
                           {"time_us", r.microseconds},
                           {"gbps", gigabytes(r.microseconds)},
                           {"ceiling_gbps", gigabytes(r.ceiling_microseconds)},
                           {"mix", read_and_written(r)},
                           {"share", r.share},
                           {"share_lo", r.share_lo},
                           {"share_hi", r.share_hi},
                           {"rounds", args.shots},
                           {"cached_us", r.cached_microseconds},
                           {"checked", r.checked},
                           {"peers", json_of(r.peers)}};
  if (!r.error.empty()) j["error"] = r.error;
  return j.dump();
}

}  // namespace

std::string report_json(const BenchArgs& args, const BenchReport& report) {
  nlohmann::ordered_json all{{"tenon", version()},
                             {"device", report.device},
                             {"dtype", args.dtype},
                             {"precision", args.precision},
                             {"shots", args.shots}};
  for (const BenchResult& r : report.results) all["cases"].push_back(json_of(report, r));
  for (const BenchNumber& n : report.ceilings) all["ceilings"].push_back(json_of(n));
  for (const BenchNumber& n : report.costs) all["costs"].push_back(json_of(n));
  return all.dump(1) + "\n";
}

void print_head(const BenchArgs& args, const BenchReport& report) {
  if (args.json) return;
  fmt::print("{}; {} in, {}, medians of {} shots\n", report.device, args.dtype, args.precision,
             args.shots);
  fmt::print("{:<52} {:<10} {:>8} {:>6} {:>6}{}  {}{}\n", "case", "mix", "us", unit(report),
             "share", report.on_gpu ? "" : " cached",
             report.on_gpu ? fmt::format("{:>4} {:>5} {:>4}  ", "regs", "local", "thr") : "",
             "maker");
}

void print_case(const BenchArgs& args, const BenchReport& report, const BenchResult& r) {
  if (args.json)
    fmt::print("{}\n", line_of(args, r));
  else if (r.error.empty())
    fmt::print("{:<52} {:<10} {:>8.1f} {:>6.2f} {:>6.1f}{}  {}{}{}\n", r.c.name(), r.mix,
               r.microseconds, rate(report, r), 100 * r.share, cached_text(report, r),
               report.on_gpu
                   ? fmt::format("{:>4} {:>5} {:>4}  ", r.registers, r.local_bytes, r.threads)
                   : "",
               r.makers, peers_text(r));
  else
    fmt::print("{:<52} {}\n", r.c.name(), r.error);
  std::fflush(stdout);
}

void print_summary(const BenchArgs& args, const BenchReport& report) {
  if (args.json) return;
  if (!report.ceilings.empty()) fmt::print("\n");
  for (const BenchNumber& n : report.ceilings)
    fmt::print("ceiling {:<48} {:>7.2f} {}\n", n.what, n.value, n.unit);
  print_pivots(report);
  print_peers(report);
  if (!report.costs.empty()) fmt::print("\n");
  for (const BenchNumber& n : report.costs)
    fmt::print("{:<56} {:>9.3f} {}\n", n.what, n.value, n.unit);
}

}  // namespace tenon::bench
