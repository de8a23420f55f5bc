// The table of named targets.
#include "step/target.h"

#include <algorithm>
#include <array>
#include <span>

#include "tenon/error.h"

namespace tenon {

namespace {

constexpr int64_t kMiB = int64_t{1} << 20, kKiB = int64_t{1} << 10;

Target cpu(std::string_view isa, int threads, double gbps, double gflops) {
  return {.name = std::string(isa),
          .isa = isa,
          .processors = threads,
          .cache_bytes = 32 * kMiB,
          .bytes_per_second = gbps * 1e9,
          .flops_per_second = gflops * 1e9};
}

Target cuda(int sm, bool features, int multiprocessors, int64_t cache, int64_t shared, double tbps,
            double tflops) {
  return {.name = str("sm_", sm, features ? "a" : ""),
          .device = Device::cuda,
          .sm = sm,
          .sm_features = features,
          .processors = multiprocessors,
          .cache_bytes = cache,
          .shared_bytes = shared,
          .driver = 13000,
          .nvrtc = 1300,
          .cublaslt = 130100,
          .bytes_per_second = tbps * 1e12,
          .flops_per_second = tflops * 1e12};
}

std::span<const Target> table() {
  // CPUs: one server socket of that generation.
  static const auto& kTable = *new std::array{
      cpu("baseline", 8, 40, 200),
      cpu("avx2", 16, 80, 1000),
      cpu("avx512", 32, 150, 4000),
      cpu("avx512bf16", 32, 150, 8000),
      cpu("amx", 64, 300, 60000),
      cuda(80, false, 108, 40 * kMiB, 163 * kKiB, 2.0, 312),    // A100
      cuda(90, true, 132, 50 * kMiB, 227 * kKiB, 4.8, 989),     // H200
      cuda(100, true, 148, 126 * kMiB, 227 * kKiB, 8.0, 2250),  // B200
      cuda(120, true, 170, 96 * kMiB, 99 * kKiB, 1.79, 210),    // RTX 5090
  };
  return kTable;
}

std::string text(const Format& f) { return str(info(f.dtype).name, " ", info(f.scaling).name); }

}  // namespace

std::string Target::codes_refusal(const Format& a, const Format& b) const {
  constexpr int kBlocks = 120900;  // the first cuBLASLt with block scales
  if (!fp8_products()) return str("FP8 products need sm_89 or newer, and this is ", name);
  if (info(a.dtype).bytes != 1 || info(b.dtype).bytes != 1)
    return str("the matrices are ", text(a), " and ", text(b),
               "; cuBLASLt multiplies FP8 by FP8 only");
  if (a.dtype == DType::e5m2 && b.dtype == DType::e5m2)
    return "cuBLASLt multiplies no two matrices of e5m2";
  const auto single = [](const Format& f) { return f.blocks(Orientation::rowwise).single(); };
  const auto swizzled = [](const Format& f) { return f.scaling == Scaling::mxfp8 && f.swizzled; };
  if (single(a) && single(b)) return "";
  if (swizzled(a) && swizzled(b))
    return mxfp8_products() ? ""
                            : str("MXFP8 products need sm_100 and cuBLASLt 12.8; this is ", name);
  const bool blocks = a.scaling == Scaling::block1x128 &&
                      (b.scaling == a.scaling || b.scaling == Scaling::block128x128);
  if (!blocks) return str("products of ", text(a), " by ", text(b), " are not given to cuBLASLt");
  if (sm != 90 || cublaslt < kBlocks)
    return str("scales of blocks need sm_90 and cuBLASLt 12.9; this is ", name, " with ",
               cublaslt / 10000, ".", cublaslt / 100 % 100);
  return "";
}

bool is_target(std::string_view name) {
  return std::ranges::find(table(), name, &Target::name) != table().end();
}

const Target& named_target(std::string_view name) {
  const auto at = std::ranges::find(table(), name, &Target::name);
  if (at != table().end()) return *at;
  std::string names;
  for (const Target& t : table()) names += (names.empty() ? "" : ", ") + t.name;
  fail(Code::invalid_argument, "target: '", name, "' is not a target; use one of ", names);
}

}  // namespace tenon
