// Opens cuBLASLt, describes products to it, and caches the algorithm of each shape.
#include "backend/cuda/cublaslt.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <map>
#include <mutex>

#include "core/lock.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

// Constants of cublasLt.h, cublas_api.h and library_types.h.
constexpr int kInvalidValue = 7, kNotSupported = 15;
constexpr int kCompute32F = 68;  // fp32 sums; TF32 has another constant
constexpr int kReal32F = 0, kReal16F = 2, kReal16BF = 14, kReal8E4M3 = 28, kReal8E5M2 = 29;
constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8;
constexpr int kScalePointerA = 17, kScalePointerB = 18, kScaleModeA = 31, kScaleModeB = 32;
constexpr int kFastAccumulation = 25;
constexpr uint32_t kEpilogueBias = 4;
constexpr int kMaxWorkspace = 1, kReductionMask = 3, kAlignmentA = 5;  // then b, c, d
constexpr uint32_t kReduceInComputeType = 2;  // other modes round partial sums to the result type

constexpr size_t kMostChoices = 4096;

int type_of(DType d) {
  switch (d) {
    case DType::f32:
      return kReal32F;
    case DType::f16:
      return kReal16F;
    case DType::e4m3:
      return kReal8E4M3;
    case DType::e5m2:
      return kReal8E5M2;
    default:
      assert(d == DType::bf16);
      return kReal16BF;
  }
}

void check_lt(const Lt& lt, int status, const char* what) {
  if (status != 0)
    fail(Code::runtime, "cublaslt: ", what, ": ", lt.get_status_string(status),
         "; TENON_CUBLASLT=none does without cuBLASLt");
}

// Whether cuBLASLt accepted the product. A missing kernel is not an error.
bool taken(const Lt& lt, int status, const char* what) {
  if (status == kNotSupported || status == kInvalidValue) return false;
  check_lt(lt, status, what);
  return true;
}

// The name of the first function that the library lacks. Empty if it has all.
std::string resolve(const Library& library, Lt& lt) {
  std::string missing;
  const auto get = [&](auto*& function, const char* name) {
    if (!library.find(function, name) && missing.empty()) missing = name;
  };
  get(lt.get_version, "cublasLtGetVersion");
  get(lt.get_status_string, "cublasLtGetStatusString");
  get(lt.create, "cublasLtCreate");
  get(lt.destroy, "cublasLtDestroy");
  get(lt.descriptor_create, "cublasLtMatmulDescCreate");
  get(lt.descriptor_destroy, "cublasLtMatmulDescDestroy");
  get(lt.descriptor_set, "cublasLtMatmulDescSetAttribute");
  get(lt.layout_create, "cublasLtMatrixLayoutCreate");
  get(lt.layout_destroy, "cublasLtMatrixLayoutDestroy");
  get(lt.preference_create, "cublasLtMatmulPreferenceCreate");
  get(lt.preference_destroy, "cublasLtMatmulPreferenceDestroy");
  get(lt.preference_set, "cublasLtMatmulPreferenceSetAttribute");
  get(lt.get_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  get(lt.matmul, "cublasLtMatmul");
  get(lt.check, "cublasLtMatmulAlgoCheck");
  return missing;
}

}  // namespace

uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address == 0) return kLtAlignment;
  return uint32_t{1} << std::min(std::countr_zero(address), std::countr_zero(kLtAlignment));
}

namespace {

// cuBLASLt needs a valid c even if nothing is added.
const LtMatrix& addend(const LtProduct& p) { return p.c.rows > 0 ? p.c : p.d; }

// A product as cuBLASLt objects.
class Description {
 public:
  Description(const Lt& lt, const LtProduct& p) : lt_(lt) {
    const LtMatrix* const matrices[] = {&p.a, &p.b, &addend(p), &p.d};
    check_lt(lt, lt.descriptor_create(&descriptor, kCompute32F, kReal32F), "describing a product");
    set(kTransA, int32_t{p.turn_a});
    set(kTransB, int32_t{p.turn_b});
    if (p.bias) {
      set(kEpilogue, kEpilogueBias);
      set(kBiasPointer, p.bias);
    }
    if (p.fast) set(kFastAccumulation, int8_t{1});
    scale(p.a, kScalePointerA, kScaleModeA);
    scale(p.b, kScalePointerB, kScaleModeB);
    for (size_t i = 0; i < layouts.size(); ++i) {
      const LtMatrix& m = *matrices[i];
      check_lt(lt,
               lt.layout_create(&layouts[i], type_of(m.dtype), static_cast<uint64_t>(m.rows),
                                static_cast<uint64_t>(m.cols), m.ld),
               "describing a matrix");
    }
  }
  ~Description() {
    for (const LtLayout l : layouts)
      if (l) lt_.layout_destroy(l);
    if (descriptor) lt_.descriptor_destroy(descriptor);
  }
  Description(const Description&) = delete;
  Description& operator=(const Description&) = delete;

  LtDescriptor descriptor = nullptr;
  std::array<LtLayout, 4> layouts{};  // a, b, c, d

 private:
  // Versions before 12.8 have no scale modes, only one scale per tensor.
  void scale(const LtMatrix& m, int pointer, int mode) {
    if (!m.scale) return;
    set(pointer, m.scale);
    if (m.scales != LtScales::one) set(mode, static_cast<int32_t>(m.scales));
  }
  template <class T>
  void set(int attribute, T value) {
    check_lt(lt_, lt_.descriptor_set(descriptor, attribute, &value, sizeof value),
             "describing a product");
  }

  const Lt& lt_;
};

// Everything that the choice of algorithm depends on.
using ChoiceKey = std::array<int64_t, 24>;
ChoiceKey key_of(uint64_t context, const LtProduct& p) {
  ChoiceKey key{};
  size_t n = 0;
  key[n++] = static_cast<int64_t>(context);
  key[n++] = p.turn_a + 2 * p.turn_b + 4 * (p.c.rows > 0) + 8 * p.fast;
  key[n++] = p.bias ? alignment(p.bias) : 0;
  key[n++] = p.d.rows;
  key[n++] = p.d.cols;
  key[n++] = p.turn_a ? p.a.rows : p.a.cols;
  for (const LtMatrix* m : {&p.a, &p.b, &addend(p), &p.d}) {
    key[n++] = type_of(m->dtype);
    key[n++] = m->ld;
    key[n++] = alignment(m->data);
    key[n++] = m->scale ? 1 + static_cast<int>(m->scales) : 0;
  }
  return key;
}

// Never destroyed: threads may still multiply while the process exits.
std::map<ChoiceKey, LtChoice>& choices() {
  static auto* const kChoices = new std::map<ChoiceKey, LtChoice>;
  return *kChoices;
}
std::map<uint64_t, LtHandle>& handles() {
  static auto* const kHandles = new std::map<uint64_t, LtHandle>;
  return *kHandles;
}

}  // namespace

LtHandle handle_in(const Lt& lt, uint64_t context) {
  {
    const std::lock_guard lock(library_lock());
    if (const auto found = handles().find(context); found != handles().end()) return found->second;
  }
  LtHandle handle = nullptr;
  check_lt(lt, lt.create(&handle), "starting cuBLASLt");
  std::unique_lock lock(library_lock());
  const auto [at, inserted] = handles().emplace(context, handle);
  const LtHandle result = at->second;
  lock.unlock();
  if (!inserted) lt.destroy(handle);  // another thread was faster
  return result;
}

LoadedLt load_lt(const Library& library) {
  constexpr size_t kOldest = 120000;
  LoadedLt l;
  if (!library) {
    l.why = str("no cuBLASLt (", library.why(),
                "); install nvidia-cublas (for CUDA 12 nvidia-cublas-cu12) or set TENON_CUBLASLT "
                "to the file libcublasLt.so.*");
    return l;
  }
  l.path = library.path_of("cublasLtGetVersion");
  const std::string missing = resolve(library, l.lt);
  const size_t version = l.lt.get_version ? l.lt.get_version() : 0;
  l.version = str(version / 10000, ".", version / 100 % 100, ".", version % 100);
  if (!missing.empty())
    l.why = str("cuBLASLt ", l.path, " has no ", missing, "; install cuBLAS 12 or newer");
  else if (version < kOldest)
    l.why = str("cuBLASLt ", l.path, " is version ", l.version, "; install cuBLAS 12 or newer");
  return l;
}

const LoadedLt& cublaslt() {
  static const auto& kLoaded = *new LoadedLt(
      load_lt(Library::open_nvidia("libcublasLt.so", "TENON_CUBLASLT",
                                   [](const Library& found) { return load_lt(found).why; })));
  return kLoaded;
}

std::vector<LtChoice> heuristics(const Lt& lt, LtHandle handle, const LtProduct& p, int most) {
  // No preference forbids aligned loads, so misaligned elements are refused here.
  for (const LtMatrix* m : {&p.a, &p.b, &addend(p), &p.d})
    if (alignment(m->data) < static_cast<uint32_t>(info(m->dtype).bytes)) return {};
  const Description described(lt, p);
  LtPreference preference = nullptr;
  check_lt(lt, lt.preference_create(&preference), "describing a preference");
  int status = 0;
  const auto set = [&](int attribute, auto value) {
    if (status == 0) status = lt.preference_set(preference, attribute, &value, sizeof value);
  };
  set(kMaxWorkspace, uint64_t{kLtWorkspace});
  set(kReductionMask, kReduceInComputeType);
  int attribute = kAlignmentA;
  for (const void* data : {p.a.data, p.b.data, addend(p).data, p.d.data})
    set(attribute++, alignment(data));
  std::vector<LtHeuristic> best(static_cast<size_t>(most));
  int found = 0;
  const auto& [a, b, c, d] = described.layouts;
  if (status == 0)
    status = lt.get_heuristic(handle, described.descriptor, a, b, c, d, preference, most,
                              best.data(), &found);
  lt.preference_destroy(preference);
  if (!taken(lt, status, "choosing a kernel")) return {};
  std::vector<LtChoice> all;
  for (const LtHeuristic& h : std::span(best).first(static_cast<size_t>(found)))
    if (h.state == 0) all.push_back({true, h.algorithm, h.workspace});
  return all;
}

void remember(uint64_t context, const LtProduct& product, const LtChoice& choice) {
  const std::lock_guard lock(library_lock());
  if (choices().size() >= kMostChoices) choices().clear();
  choices()[key_of(context, product)] = choice;
}

LtChoice checked(const Lt& lt, LtHandle handle, const LtProduct& p, const LtAlgorithm& algorithm) {
  const Description described(lt, p);
  const auto& [a, b, c, d] = described.layouts;
  LtHeuristic result{};
  const int status = lt.check(handle, described.descriptor, a, b, c, d, &algorithm, &result);
  if (status != 0 || result.state != 0 || result.workspace > kLtWorkspace) return {};
  return {true, algorithm, result.workspace};
}

LtChoice choose(const Lt& lt, LtHandle handle, uint64_t context, const LtProduct& product) {
  const ChoiceKey key = key_of(context, product);
  {
    const std::lock_guard lock(library_lock());
    if (const auto found = choices().find(key); found != choices().end()) return found->second;
  }
  const std::vector<LtChoice> asked = heuristics(lt, handle, product, 1);
  const LtChoice choice = asked.empty() ? LtChoice{} : asked.front();
  remember(context, product, choice);
  return choice;
}

bool multiply(const Lt& lt, LtHandle handle, const LtChoice& choice, const LtProduct& p,
              void* workspace, Stream stream) {
  const Description described(lt, p);
  const auto& [a, b, c, d] = described.layouts;
  const float beta = p.c.rows > 0 ? 1 : 0;
  return taken(lt,
               lt.matmul(handle, described.descriptor, &p.factor, p.a.data, a, p.b.data, b, &beta,
                         addend(p).data, c, p.d.data, d, &choice.algorithm, workspace,
                         choice.workspace, stream),
               "multiplying");
}

}  // namespace tenon::cuda
