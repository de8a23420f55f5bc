// Rows to columns, and one heuristic a shape.
#include "backend/cuda/cublaslt.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <mutex>

#include "backend/cuda/body.h"
#include "core/lock.h"
#include "step/split.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

// Constants of cublasLt.h, cublas_api.h and library_types.h.
constexpr int kInvalidValue = 7, kNotSupported = 15;
constexpr int kCompute32F = 68;  // fp32 sums; TF32 has another constant
constexpr int kReal32F = 0, kReal16F = 2, kReal16BF = 14;
constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8;
constexpr uint32_t kEpilogueBias = 4;
constexpr int kMaxWorkspace = 1, kReductionMask = 3, kAlignmentA = 5;  // then b, c, d
constexpr uint32_t kReduceInComputeType = 2;  // other modes round partial sums to the result type

constexpr uintptr_t kBiasAlignment = 16;  // its epilogues read whole vectors
constexpr size_t kMostChoices = 4096;

int type_of(DType d) { return d == DType::f32 ? kReal32F : d == DType::f16 ? kReal16F : kReal16BF; }

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
  return missing;
}

uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (address == 0) return kLtAlignment;
  return uint32_t{1} << std::min(std::countr_zero(address), std::countr_zero(kLtAlignment));
}

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
  template <class T>
  void set(int attribute, T value) {
    check_lt(lt_, lt_.descriptor_set(descriptor, attribute, &value, sizeof value),
             "describing a product");
  }

  const Lt& lt_;
};

// Everything that the choice of algorithm depends on.
using ChoiceKey = std::array<int64_t, 20>;
ChoiceKey key_of(uint64_t context, const LtProduct& p) {
  ChoiceKey key{};
  size_t n = 0;
  key[n++] = static_cast<int64_t>(context);
  key[n++] = p.turn_a + 2 * p.turn_b + 4 * (p.c.rows > 0);
  key[n++] = p.bias ? alignment(p.bias) : 0;
  key[n++] = p.d.rows;
  key[n++] = p.d.cols;
  key[n++] = p.turn_a ? p.a.rows : p.a.cols;
  for (const LtMatrix* m : {&p.a, &p.b, &addend(p), &p.d}) {
    key[n++] = type_of(m->dtype);
    key[n++] = m->ld;
    key[n++] = alignment(m->data);
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

// A row-major view with rows of `cols` elements, as a column-major matrix.
LtMatrix turned(const View& v, int64_t rows, int64_t cols, int64_t offset = 0) {
  return {static_cast<std::byte*>(v.data) + offset * info(v.dtype).bytes, v.dtype, cols, rows,
          std::max(v.stride, cols)};
}

size_t aligned(size_t bytes) { return (bytes + kLtAlignment - 1) / kLtAlignment * kLtAlignment; }
std::byte* aligned(void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  return static_cast<std::byte*>(p) + (aligned(address) - address);
}

class LtKernel final : public Kernel {
 public:
  explicit LtKernel(const Step& step) : form_(step) {}

  // A sum of nothing is no product. Without a device there is nobody to say what it has kernels
  // for.
  [[nodiscard]] bool fits(const RunArgs& call) const override {
    const std::optional<LtProduct> product = form_.whole(call);
    if (!product || form_.inner(call.rows) == 0) return false;
    if (is_empty(*product) || why_no_gpu()) return true;
    const CurrentContext context;
    const Lt& lt = cublaslt().lt;
    return choose(lt, handle_in(lt, context.id()), context.id(), *product).found;
  }
  [[nodiscard]] bool fits_all() const override { return false; }

  [[nodiscard]] size_t workspace(int64_t /*rows*/) const override {
    return kLtAlignment + kLtWorkspace;
  }

  void prepare() const override {
    const CurrentContext context;
    handle_in(cublaslt().lt, context.id());
  }

  void run(const RunArgs& args) const override {
    const LtProduct product = *form_.whole(args);
    if (is_empty(product)) return;
    const CurrentContext context;
    const Lt& lt = cublaslt().lt;
    const LtHandle handle = handle_in(lt, context.id());
    const LtChoice choice = choose(lt, handle, context.id(), product);
    const auto stream = static_cast<Stream>(args.stream);
    const StreamMemory own(args.workspace ? 0 : choice.workspace, stream);
    void* const memory = args.workspace ? aligned(args.workspace) : own.data();
    if (!choice.found || !multiply(lt, handle, choice, product, memory, stream))
      fail(Code::runtime, "cublaslt: it has no kernel for a product that it had one for; ",
           "TENON_CUBLASLT=none does without cuBLASLt");
  }

 private:
  static bool is_empty(const LtProduct& p) { return p.d.rows == 0 || p.d.cols == 0; }

  LtForm form_;
};

// What it writes: the type of the operands, or fp32.
bool writes(const Step& step, DType dtype) {
  return dtype == DType::f32 || dtype == step.gemm()->a.format.dtype;
}

}  // namespace

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

LtChoice choose(const Lt& lt, LtHandle handle, uint64_t context, const LtProduct& product) {
  const ChoiceKey key = key_of(context, product);
  {
    const std::lock_guard lock(library_lock());
    if (const auto found = choices().find(key); found != choices().end()) return found->second;
  }
  const std::vector<LtChoice> asked = heuristics(lt, handle, product, 1);
  const LtChoice choice = asked.empty() ? LtChoice{} : asked.front();
  const std::lock_guard lock(library_lock());
  if (choices().size() >= kMostChoices) choices().clear();
  choices().emplace(key, choice);
  return choice;
}

bool multiply(const Lt& lt, LtHandle handle, const LtChoice& choice, const LtProduct& p,
              void* workspace, Stream stream) {
  const Description described(lt, p);
  const auto& [a, b, c, d] = described.layouts;
  const float alpha = 1;
  const float beta = p.c.rows > 0 ? 1 : 0;
  return taken(lt,
               lt.matmul(handle, described.descriptor, &alpha, p.a.data, a, p.b.data, b, &beta,
                         addend(p).data, c, p.d.data, d, &choice.algorithm, workspace,
                         choice.workspace, stream),
               "multiplying");
}

std::string LtForm::refusal(const Step& step) {
  if (!step.gemm()) return str("cuBLASLt has no ", step.head_name(), " head");
  if (step.precision == Precision::strict) return "strict fixes the order of a product's additions";
  for (const Matrix* m : {&step.gemm()->a, &step.gemm()->b})
    if (m->format.scaling != Scaling::none || !info(m->format.dtype).plain)
      return str("a matrix is ", info(m->format.dtype).name, " ", info(m->format.scaling).name,
                 "; cuBLASLt is asked for f32, f16 and bf16 only");
  if (step.gemm()->a.format.dtype != step.gemm()->b.format.dtype)
    return str("the matrices are ", info(step.gemm()->a.format.dtype).name, " and ",
               info(step.gemm()->b.format.dtype).name, "; cuBLASLt wants one type");
  return "";
}

LtForm::LtForm(const Step& step) : step_(step) { whole_ = find_whole(); }

std::optional<LtForm::Whole> LtForm::find_whole() const {
  if (step_.stores.size() != 1 || step_.cols != gemm().cols) return std::nullopt;
  const Store& s = step_.stores[0];
  const DType type = gemm().a.format.dtype;
  if (s.to != Store::To::tile || !s.columns.contiguous() ||
      (s.dtype != type && s.dtype != DType::f32))
    return std::nullopt;
  const Graph& graph = *step_.graph;
  const Node* value = &graph[s.value];
  if (value->word == Word::round && value->dtype() == s.dtype) value = &graph[value->in[0]];
  const auto load_of = [&](const Node& n) -> const Load* {
    return n.word == Word::load ? &step_.loads[n.slot] : nullptr;
  };
  const auto is_product = [](const Load* l) {
    return l && l->from == Load::From::product && l->columns.contiguous() && l->columns.offset == 0;
  };
  if (is_product(load_of(*value))) return Whole{};
  // For a 16-bit result, the epilogue rounds the product before it adds. That would be a second
  // rounding.
  if (value->word != Word::add || s.dtype != DType::f32) return std::nullopt;
  for (const size_t side : {0U, 1U}) {
    const Load* const other = load_of(graph[value->in[1 - side]]);
    if (!is_product(load_of(graph[value->in[side]])) || !other) continue;
    if (other->dtype != s.dtype || !other->columns.contiguous() || other->transposed) continue;
    if (other->from == Load::From::row) return Whole{.bias = *other, .held = {}};
    if (other->from == Load::From::tile) return Whole{.bias = {}, .held = *other};
  }
  return std::nullopt;
}

// A row-major result is the transpose of a column-major one: bᵀ·aᵀ, with both operands as in
// memory.
LtProduct LtForm::operands(const RunArgs& args) const {
  const auto side = [&](const Matrix& m, int64_t r, int64_t c) {
    return lies_turned(m) ? turned(args.in[m.arg], c, r) : turned(args.in[m.arg], r, c);
  };
  LtProduct p;
  p.a = side(gemm().b, inner(args.rows), gemm().cols);
  p.b = side(gemm().a, rows(args.rows), inner(args.rows));
  p.turn_a = lies_turned(gemm().b);
  p.turn_b = lies_turned(gemm().a);
  return p;
}

std::optional<LtProduct> LtForm::whole(const RunArgs& args) const {
  if (!whole_) return std::nullopt;
  LtProduct p = operands(args);
  const Store& s = step_.stores[0];
  p.d = turned(args.out[s.arg], rows(args.rows), gemm().cols, s.columns.offset);
  if (const auto& l = whole_->held)
    p.c = turned(args.in[l->arg], rows(args.rows), gemm().cols, l->columns.offset);
  if (const auto& l = whole_->bias) {
    p.bias = turned(args.in[l->arg], 1, gemm().cols, l->columns.offset).data;
    if (reinterpret_cast<uintptr_t>(p.bias) % kBiasAlignment != 0) return std::nullopt;
  }
  return p;
}

bool multiplies(const Step& step, const Target& target) {
  return target.cublaslt > 0 && LtForm::refusal(step).empty();
}

namespace {

// Why it does not even multiply, or nothing if it does.
std::optional<Refusal> refused(const Step& step, const Target& target) {
  if (std::string why = LtForm::refusal(step); !why.empty())
    return Refusal{std::move(why), !step.gemm()};
  if (target.cublaslt == 0)
    return Refusal{str("there is no cuBLASLt on ", target.name,
                       "; install nvidia-cublas (for CUDA 12 nvidia-cublas-cu12) or set "
                       "TENON_CUBLASLT to the file libcublasLt.so.*")};
  return std::nullopt;
}

}  // namespace

Attempt make_cublaslt(const Step& step, const Target& target) {
  if (auto refusal = refused(step, target)) return *std::move(refusal);
  if (!LtForm(step).is_whole())
    return Refusal{"its products add a bias or a tensor in f32 and do nothing else"};
  return std::make_shared<const LtKernel>(step);
}

Attempt make_cublaslt_split(const Step& step, const Target& target) {
  if (auto refusal = refused(step, target)) return *std::move(refusal);
  if (LtForm(step).is_product()) return Refusal{"the step is a product already"};
  return split_after_product(step, writes);
}

}  // namespace tenon::cuda
