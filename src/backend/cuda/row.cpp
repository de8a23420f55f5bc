// Prints the body for whole rows.
#include "backend/cuda/row.h"

#include <algorithm>
#include <bit>

#include "backend/cuda/eight.h"
#include "backend/cuda/plain.h"
#include "tenon/error.h"

namespace tenon::cuda {

extern const char kRowSkeleton[];  // embedded by the build

namespace {

constexpr int64_t kMostVectors = 8;
constexpr int64_t kMostThreads = 512;
constexpr int64_t kSumRows = 32;  // the order of gamma's and beta's gradients
constexpr unsigned kSumThreads = 256;
constexpr const char* kEntry = "tenon_row_kernel";

std::string sum_entry(size_t i) { return str("tenon_row_sum_", i); }

// Four to eight vectors a thread, as far as a row has them: a row's latency is then hidden by the
// other blocks of a multiprocessor.
unsigned threads_of(int64_t cols) {
  const int64_t vectors = cdiv(cols, kEight);
  const auto least = static_cast<uint64_t>(std::max<int64_t>(1, cdiv(vectors, kMostVectors)));
  return static_cast<unsigned>(
      std::clamp<int64_t>(static_cast<int64_t>(std::bit_ceil(least)), 32, kMostThreads));
}

}  // namespace

std::string RowProgram::refusal(const Step& step) {
  if (step.gemm) return "the row map has no product";
  if (step.totals.empty() && stores_to(step, Store::To::column).empty())
    return "the row map is for totals of rows";
  if (step.cols > kMostVectors * kMostThreads * kEight)
    return str("the row map keeps at most ", kMostVectors * kMostThreads * kEight, " columns");
  for (const Load& l : step.loads)
    if (l.from == Load::From::block || l.transposed)
      return str("the row map does not read ",
                 l.transposed ? "transposed tensors" : "scales of blocks");
  for (const Store& s : step.stores) {
    const bool sum = s.to == Store::To::column_sum && s.ordered;
    if (s.to != Store::To::tile && s.to != Store::To::column && !sum)
      return str("the row map has no ", kStoreNames[static_cast<size_t>(s.to)]);
  }
  if (!step.encoders.empty()) return "the row map writes plain numbers only";
  const size_t bytes =
      sizeof(PlainHead) + (step.loads.size() + step.stores.size()) * sizeof(Access) + sizeof(Place);
  if (bytes > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

RowProgram::RowProgram(const Step& step) : step_(step) {
  entries_ = {kEntry};
  TileBody t = tile_body(step);
  std::string columns, sum;
  size_t sums = 0;
  for (size_t k = 0; k < step.stores.size(); ++k) {
    const Store& s = step.stores[k];
    const std::string to = str("a.at[kLoads + ", k, "]");
    if (s.to == Store::To::column)
      columns += str("tenon_store<", format(s.dtype), ">(", to, ", row * ", to, ".stride, out[", k,
                     "][0]);\n");
    if (s.to == Store::To::column_sum) {
      const std::string at = str("sums[", sums++, "][n][e]");
      sum += str("for (int e = 0; e < 8; ++e) ", at, " = first ? out[", k, "][e] : ", at, " + out[",
                 k, "][e];\n");
    }
  }
  std::string unpack;
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    if (l.from == Load::From::total)
      unpack += str("tenon_spread8(totals[", l.arg, "], in[", i, "]);\n");
    else
      unpack += load_eight(step, i, l.from == Load::From::tile ? str("raw.r", i) : "");
  }
  const int64_t vectors = cdiv(cdiv(step.cols, kEight), threads_of(step.cols));
  const char* const where = "TenonI64 row, TenonI64 column";
  text_ = str(
      tile_skeletons(), kRowSkeleton, "\nusing Arguments = TenonPlainArguments<",
      step.loads.size() + step.stores.size(),
      ", 1>;\nstruct Body {\n  static constexpr int kLoads = ", step.loads.size(),
      ", kStores = ", step.stores.size(), ", kRoots = ", step.stores.size() + step.totals.size(),
      ", kTotals = ", step.totals.size(), ", kSums = ", sums, ";\n  struct Raw {\n", t.raw,
      "  };\n  __device__ static void fetch(const TenonAccess* at, ", where, ", Raw& raw) {\n",
      indented(t.fetch),
      "  }\n  __device__ static void unpack(const TenonAccess* at, const TenonU64* random, ", where,
      ", const Raw& raw, const float* totals, float (*in)[8]) {\n", indented(unpack),
      "  }\n  __device__ static void compute(const float* in, float* out) {\n",
      indented(compute_lines(step)), "  }\n  __device__ static void store(const Arguments& a, ",
      where, ", const float (&out)[kRoots][8]) {\n", indented(t.store),
      "  }\n  __device__ static void columns(const Arguments& a, TenonI64 row, const float "
      "(&out)[kRoots][8]) {\n",
      indented(columns),
      "  }\n  template <int vectors>\n  __device__ static void sum(const float (&out)[kRoots][8], "
      "bool "
      "first, int n, float (*sums)[vectors][8]) {\n",
      indented(sum), "  }\n};\nextern \"C\" __launch_bounds__(", threads_of(step.cols),
      ") __global__ void ", kEntry,
      "(const __grid_constant__ Arguments a) {\n  tenon_row_map<Body, ", vectors, ">(a);\n}\n");
  size_t i = 0;
  for (const size_t k : stores_to(step, Store::To::column_sum)) {
    entries_.push_back(sum_entry(i++));
    text_ += str("extern \"C\" __global__ void ", entries_.back(),
                 "(const __grid_constant__ Arguments a) {\n  tenon_column_sums<Body, ", k, ", ",
                 format(step.stores[k].dtype), ">(a);\n}\n");
  }
}

bool RowProgram::fits(const RunArgs& args) const {
  return args.rows > 0 && step_.cols > 0 && aligned_eights(step_, args);
}

size_t RowProgram::workspace(int64_t rows) const {
  const size_t sums = stores_to(step_, Store::To::column_sum).size();
  return sums * static_cast<size_t>(cdiv(rows, kSumRows) * step_.cols) * sizeof(float);
}

std::vector<Launch> RowProgram::launches(const RunArgs& args) const {
  const std::vector<Access> at = accesses_of(step_, args);
  const Place none;
  std::vector<Launch> list;
  const auto launch = [&](const std::string& entry, int64_t blocks, unsigned threads,
                          const PlainHead& head) {
    list.push_back(launch_of(entry, blocks, threads, head, at, std::span(&none, 1)));
  };
  const size_t sums = stores_to(step_, Store::To::column_sum).size();
  const int64_t blocks = sums > 0 ? cdiv(args.rows, kSumRows) : args.rows;
  PlainHead head{.rows = args.rows, .cols = step_.cols, .random = args.random};
  head.to = args.workspace;
  launch(kEntry, blocks, threads_of(step_.cols), head);
  head.count = blocks;
  for (size_t i = 0; i < sums; ++i) {
    head.from = static_cast<float*>(args.workspace) + static_cast<int64_t>(i) * blocks * step_.cols;
    launch(sum_entry(i), cdiv(step_.cols, kSumThreads), kSumThreads, head);
  }
  return list;
}

Attempt make_row(const Step& step) {
  if (std::string why = RowProgram::refusal(step); !why.empty()) return Refusal{std::move(why)};
  const Attempt other = make_plain(step);
  if (std::holds_alternative<Refusal>(other)) return other;
  return kernel_of(step.name, std::make_unique<RowProgram>(step),
                   std::get<std::shared_ptr<const Kernel>>(other));
}

}  // namespace tenon::cuda
