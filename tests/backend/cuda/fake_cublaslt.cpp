// A fake cuBLASLt on host memory. It computes the product in float64 from its descriptors, and
// returns an error for calls that the real library would not accept.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kInvalid = 7, kNotSupported = 15;
constexpr int kF32 = 0, kF16 = 2, kBF16 = 14, kE4M3 = 28, kE5M2 = 29;
constexpr int kOneScale = 0, k1x128 = 4, k128x128 = 5;
constexpr uint64_t kNoKernel = 77;  // a row count without a kernel

struct Descriptor {
  int32_t transa = 0, transb = 0;
  uint32_t epilogue = 1;
  const void* bias = nullptr;
  const float* scale[2] = {};  // of a and b
  int32_t mode[2] = {};
};
struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t ld;
};
struct Preference {
  uint64_t workspace = 0;
  uint32_t reductions = 7;
  uint32_t alignment[4] = {256, 256, 256, 256};
};
// The data of the heuristic. The product must match it.
struct Algorithm {
  uint64_t rows, cols;
  uint32_t alignment[4];
  uint64_t rest[4];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};
static_assert(sizeof(Algorithm) == 64 && sizeof(Heuristic) == 96);

constexpr size_t kWorkspace = 4096;

// An FP8 code with `mantissa` bits after the exponent.
double decoded(uint8_t code, int mantissa, int bias) {
  const int exponent = (code & 0x7f) >> mantissa, fraction = code & ((1 << mantissa) - 1);
  const double value = exponent ? std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
                                : std::ldexp(fraction, 1 - bias - mantissa);
  return code & 0x80 ? -value : value;
}

double read(const void* data, int type, int64_t at) {
  if (type == kE4M3) return decoded(static_cast<const uint8_t*>(data)[at], 3, 7);
  if (type == kE5M2) return decoded(static_cast<const uint8_t*>(data)[at], 2, 15);
  if (type == kF32) return static_cast<const float*>(data)[at];
  if (type == kF16) return static_cast<const _Float16*>(data)[at];
  const uint32_t bits = uint32_t{static_cast<const uint16_t*>(data)[at]} << 16;
  return __builtin_bit_cast(float, bits);
}

void write(void* data, int type, int64_t at, double v) {
  const auto f = static_cast<float>(v);
  if (type == kF32) static_cast<float*>(data)[at] = f;
  if (type == kF16) static_cast<_Float16*>(data)[at] = static_cast<_Float16>(v);
  if (type != kBF16) return;
  const auto bits = __builtin_bit_cast(uint32_t, f);
  static_cast<uint16_t*>(data)[at] =
      static_cast<uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

bool fits(const Descriptor& t, const Layout& a, const Layout& b, const Layout& c, const Layout& d) {
  const uint64_t m = t.transa ? a.cols : a.rows, k = t.transa ? a.rows : a.cols;
  const uint64_t inner = t.transb ? b.cols : b.rows, n = t.transb ? b.rows : b.cols;
  for (const Layout* l : {&a, &b, &c, &d})
    if (l->rows == 0 || l->cols == 0 || l->ld < static_cast<int64_t>(l->rows)) return false;
  return inner == k && d.rows == m && d.cols == n && c.rows == m && c.cols == n;
}
bool is_code(const Layout& l) { return l.type == kE4M3 || l.type == kE5M2; }

// The scale of element k of a line of an operand: one, or one for 1x128 or 128x128 elements.
double scale_at(const Descriptor& t, int side, int64_t line, int64_t k, int64_t lines,
                int64_t inner) {
  const float* const scale = t.scale[side];
  if (!scale) return 1;
  if (t.mode[side] == kOneScale) return *scale;
  if (t.mode[side] == k1x128) return scale[k / 128 * ((lines + 3) / 4 * 4) + line];
  return scale[line / 128 * (((inner + 127) / 128 + 3) / 4 * 4) + k / 128];
}

// Both factors have the same type, and the result has this type or fp32. Or both are FP8 with the
// inner dimension contiguous.
bool supported(const Descriptor& t, const Layout& a, const Layout& b, const Layout& c,
               const Layout& d) {
  if (c.type != d.type) return false;
  if (!is_code(a) || !is_code(b)) return a.type == b.type && (d.type == a.type || d.type == kF32);
  if (a.type == kE5M2 && b.type == kE5M2) return false;
  const bool one = t.mode[0] == kOneScale && t.mode[1] == kOneScale;
  const bool blocks = t.mode[1] == k1x128 && (t.mode[0] == k1x128 || t.mode[0] == k128x128);
  if (t.epilogue == 4 && d.type == kF32) return false;
  return t.transa && !t.transb && (one || blocks) && !is_code(d) && a.rows % 16 == 0 &&
         a.ld % 16 == 0 && b.ld % 16 == 0;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT size_t cublasLtGetVersion() { return 130102; }
EXPORT const char* cublasLtGetStatusString(int status) {
  return status == kInvalid ? "invalid value" : "some status";
}
EXPORT int cublasLtCreate(void** handle) {
  static int one;
  *handle = &one;
  return 0;
}
EXPORT int cublasLtDestroy(void*) { return 0; }

EXPORT int cublasLtMatmulDescCreate(Descriptor** d, int compute, int scale) {
  if (compute != 68 || scale != kF32) return kInvalid;
  *d = new Descriptor;
  return 0;
}
EXPORT int cublasLtMatmulDescDestroy(Descriptor* d) {
  delete d;
  return 0;
}
EXPORT int cublasLtMatmulDescSetAttribute(Descriptor* d, int attribute, const void* value,
                                          size_t bytes) {
  const auto set = [&](auto& to) {
    if (bytes != sizeof to) return kInvalid;
    std::memcpy(&to, value, bytes);
    return 0;
  };
  if (attribute == 3) return set(d->transa);
  if (attribute == 4) return set(d->transb);
  if (attribute == 7) return set(d->epilogue);
  if (attribute == 17 || attribute == 18) return set(d->scale[attribute - 17]);
  if (attribute == 31 || attribute == 32) return set(d->mode[attribute - 31]);
  return attribute == 8 ? set(d->bias) : kInvalid;
}

EXPORT int cublasLtMatrixLayoutCreate(Layout** l, int type, uint64_t rows, uint64_t cols,
                                      int64_t ld) {
  *l = new Layout{type, rows, cols, ld};
  return 0;
}
EXPORT int cublasLtMatrixLayoutDestroy(Layout* l) {
  delete l;
  return 0;
}

EXPORT int cublasLtMatmulPreferenceCreate(Preference** p) {
  *p = new Preference;
  return 0;
}
EXPORT int cublasLtMatmulPreferenceDestroy(Preference* p) {
  delete p;
  return 0;
}
EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* p, int attribute, const void* value,
                                                size_t bytes) {
  const auto set = [&](auto& to) {
    if (bytes != sizeof to) return kInvalid;
    std::memcpy(&to, value, bytes);
    return 0;
  };
  if (attribute == 1) return set(p->workspace);
  if (attribute == 3) return set(p->reductions);
  return attribute >= 5 && attribute <= 8 ? set(p->alignment[attribute - 5]) : kInvalid;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, const Descriptor* t, const Layout* a,
                                          const Layout* b, const Layout* c, const Layout* d,
                                          const Preference* p, int most, Heuristic* results,
                                          int* found) {
  *found = 0;
  if (most < 1 || !fits(*t, *a, *b, *c, *d) || p->reductions != 2) return kInvalid;
  if (!supported(*t, *a, *b, *c, *d)) return kNotSupported;
  if (d->cols == kNoKernel || p->workspace < kWorkspace) return kNotSupported;
  *results = {};
  results->algorithm = {d->rows, d->cols, {}, {}};
  std::memcpy(results->algorithm.alignment, p->alignment, sizeof p->alignment);
  results->workspace = kWorkspace;
  *found = 1;
  return 0;
}

EXPORT int cublasLtMatmulAlgoCheck(void*, const Descriptor*, const Layout*, const Layout*,
                                   const Layout*, const Layout*, const Algorithm*, Heuristic*) {
  return kNotSupported;
}

EXPORT int cublasLtMatmul(void*, const Descriptor* t, const float* alpha, const void* a,
                          const Layout* la, const void* b, const Layout* lb, const float* beta,
                          const void* c, const Layout* lc, void* d, const Layout* ld,
                          const Algorithm* algorithm, void* workspace, size_t bytes, void*) {
  if (!fits(*t, *la, *lb, *lc, *ld) || !supported(*t, *la, *lb, *lc, *ld)) return kInvalid;
  if (algorithm->rows != ld->rows || algorithm->cols != ld->cols) return kInvalid;
  if (bytes < kWorkspace || reinterpret_cast<uintptr_t>(workspace) % 256 != 0) return kInvalid;
  const void* const all[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i)
    if (reinterpret_cast<uintptr_t>(all[i]) % algorithm->alignment[i] != 0) return kInvalid;
  const bool biased = t->epilogue == 4;
  if (biased && (!t->bias || reinterpret_cast<uintptr_t>(t->bias) % 16 != 0)) return kInvalid;
  std::memset(workspace, 0x5a, kWorkspace);
  const auto k = static_cast<int64_t>(t->transa ? la->rows : la->cols);
  const auto at = [](const Layout& l, bool turned, int64_t r, int64_t column) {
    return turned ? column + r * l.ld : r + column * l.ld;
  };
  for (int64_t j = 0; j < static_cast<int64_t>(ld->cols); ++j)
    for (int64_t i = 0; i < static_cast<int64_t>(ld->rows); ++i) {
      double sum = 0;
      for (int64_t x = 0; x < k; ++x)
        sum += read(a, la->type, at(*la, t->transa, i, x)) *
               read(b, lb->type, at(*lb, t->transb, x, j)) *
               scale_at(*t, 0, i, x, static_cast<int64_t>(ld->rows), k) *
               scale_at(*t, 1, j, x, static_cast<int64_t>(ld->cols), k);
      sum *= *alpha;
      if (*beta != 0) sum += *beta * read(c, lc->type, at(*lc, false, i, j));
      if (biased) sum += read(t->bias, ld->type, i);
      write(d, ld->type, at(*ld, false, i, j), sum);
    }
  return 0;
}
