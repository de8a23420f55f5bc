// Matches the body of a step against the epilogues of cuBLASLt, and makes the kernels.
#include "backend/cuda/lt_form.h"

#include <algorithm>

#include "backend/cuda/body.h"
#include "backend/cuda/lt_tune.h"
#include "step/split.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr uintptr_t kVector = 16;  // bytes; required alignment of a bias and of block scales

// A row-major view with rows of `cols` elements, as a column-major matrix.
LtMatrix column_major(const View& v, int64_t rows, int64_t cols, int64_t offset = 0) {
  return {static_cast<std::byte*>(v.data) + offset * info(v.dtype).bytes, v.dtype, cols, rows,
          std::max(v.stride, cols)};
}

bool has_codes(const Matrix& m) { return info(m.format.dtype).bytes == 1; }

// The scale mode of cuBLASLt for codes that it multiplies.
LtScales scales_of(const Matrix& m) {
  if (m.format.blocks(m.orientation).single()) return LtScales::one;
  if (m.format.scaling == Scaling::block1x128) return LtScales::of_1x128;
  if (m.format.scaling == Scaling::block128x128) return LtScales::of_128x128;
  return LtScales::of_1x32;
}

// Whether the blocks of an MXFP8 operand are along the inner dimension of the product. `rows`: the
// inner dimension is that of the tensor's rows.
bool along_inner(const Matrix& m, bool rows) {
  return m.format.scaling != Scaling::mxfp8 || (m.orientation == Orientation::columnwise) == rows;
}

std::string codes_refusal(const Gemm& g, const Target& target) {
  std::string why = target.codes_refusal(g.a.format, g.b.format);
  if (why.empty() && !(along_inner(g.a, g.a.transposed) && along_inner(g.b, !g.b.transposed)))
    why = "the scales of an MXFP8 operand are not along the inner dimension";
  if (why.empty() && target.fp8_inner_contiguous() && (lies_turned(g.a) || !lies_turned(g.b)))
    why = str("FP8 products on ", target.name, " need the inner dimension of both contiguous");
  return why;
}

class LtKernel final : public Kernel {
 public:
  LtKernel(const Step& step, bool here) : form_(step), here_(here) {}

  // Refuses an empty sum. Without a device the products that the library documents as supported
  // count as such.
  [[nodiscard]] bool fits(const RunArgs& call) const override {
    constexpr int64_t kCodesTogether = 16;
    const std::optional<LtProduct> product = form_.whole(call);
    const int64_t inner = form_.inner(call.rows);
    if (!product || inner == 0) return false;
    if (is_empty(*product)) return true;
    if (!here_) return info(product->a.dtype).bytes > 1 || inner % kCodesTogether == 0;
    const CurrentContext context;
    const Lt& lt = cublaslt().lt;
    return choose(lt, handle_in(lt, context.id()), context.id(), least_aligned(*product)).found;
  }
  [[nodiscard]] bool fits_all() const override { return false; }
  [[nodiscard]] const Step* computes() const override { return &form_.computed(); }

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
    const auto stream = static_cast<Stream>(args.stream);
    const StreamMemory own(args.workspace ? 0 : kLtWorkspace, stream);
    void* const memory = args.workspace ? aligned(args.workspace) : own.data();
    LtChoice choice = choose(lt, handle, context.id(), product);
    if (!choice.found) choice = choose(lt, handle, context.id(), least_aligned(product));
    if (choice.found && !choice.tuned && args.tune)
      choice = tuned(lt, handle, context, choice, product, form_.varies(), memory, args);
    if (!choice.found || !multiply(lt, handle, choice, product, memory, stream))
      fail(Code::runtime, "cublaslt: it has no kernel for a product that it had one for; ",
           "TENON_CUBLASLT=none does without cuBLASLt");
  }

 private:
  // The product with the smallest alignment of its matrices for all of them. What decides about a
  // call is then one number, and a plan can state the workspace for it.
  static LtProduct least_aligned(LtProduct p) {
    uint32_t least = kLtAlignment;
    for (const void* data :
         {static_cast<const void*>(p.a.data), static_cast<const void*>(p.b.data),
          static_cast<const void*>(p.c.data), static_cast<const void*>(p.d.data)})
      least = std::min(least, alignment(data));
    for (LtMatrix* m : {&p.a, &p.b, &p.c, &p.d}) {
      if (!m->data) continue;
      // Whole elements, if the matrix itself has them.
      const auto element = static_cast<uint32_t>(info(m->dtype).bytes);
      const uint32_t own = std::max(least, std::min(element, alignment(m->data)));
      m->data = reinterpret_cast<void*>(uintptr_t{own});
    }
    return p;
  }
  static bool is_empty(const LtProduct& p) { return p.d.rows == 0 || p.d.cols == 0; }
  static void* aligned(void* p) {
    const auto address = reinterpret_cast<uintptr_t>(p);
    return static_cast<std::byte*>(p) + (kLtAlignment - address % kLtAlignment) % kLtAlignment;
  }

  LtForm form_;
  bool here_;  // the target is this machine
};

// The dtypes of a result: f32 or that of the operands. FP8 operands allow every plain dtype.
bool writes(const Step& step, DType dtype) {
  const DType type = step.gemm()->a.format.dtype;
  return dtype == DType::f32 || (info(type).bytes == 1 ? info(dtype).plain : dtype == type);
}

// The refusal of the operands. Empty if cuBLASLt multiplies them.
std::optional<Refusal> refused(const Step& step, const Target& target) {
  if (std::string why = LtForm::refusal(step, target); !why.empty())
    return Refusal{std::move(why), !step.gemm()};
  return std::nullopt;
}

}  // namespace

std::string LtForm::refusal(const Step& step, const Target& target) {
  if (!step.gemm()) return str("cuBLASLt has no ", step.head_name(), " head");
  if (target.cublaslt == 0)
    return str("there is no cuBLASLt on ", target.name,
               "; install nvidia-cublas (for CUDA 12 nvidia-cublas-cu12) or set TENON_CUBLASLT to "
               "the file libcublasLt.so.*");
  if (step.precision == Precision::strict) return "strict fixes the order of a product's additions";
  const Gemm& g = *step.gemm();
  if (has_codes(g.a) || has_codes(g.b)) return codes_refusal(g, target);
  if (g.a.format.dtype != g.b.format.dtype)
    return str("the matrices are ", info(g.a.format.dtype).name, " and ",
               info(g.b.format.dtype).name, "; cuBLASLt wants one type");
  return "";
}

LtForm::LtForm(const Step& step) : step_(step), computed_(step) {
  whole_ = find_whole();
  if (whole_ && (whole_->bias || whole_->held) && step.stores[0].dtype != DType::f32)
    computed_ = with_rounded_product(step, step.stores[0].dtype);
}

// Adds a term of the body's sum to `whole`. False if cuBLASLt cannot add it.
bool LtForm::add_term(const Node& node, const Store& to, Whole& whole, bool& product) const {
  const Graph& graph = *step_.graph;
  const auto load_of = [&](const Node& n) -> const Load* {
    return n.word == Word::load ? &step_.loads[n.slot] : nullptr;
  };
  const auto is_product = [](const Load* l) {
    return l && l->from == Load::From::product && l->columns.contiguous() && l->columns.offset == 0;
  };
  if (node.word == Word::add)
    return add_term(graph[node.in[0]], to, whole, product) &&
           add_term(graph[node.in[1]], to, whole, product);
  if (node.word == Word::mul) {
    for (const size_t side : {0U, 1U}) {
      const Load* const factor = load_of(graph[node.in[1 - side]]);
      if (product || !is_product(load_of(graph[node.in[side]])) || !factor) continue;
      if (factor->from != Load::From::parameter) continue;
      whole.factor = *factor;
      return product = true;
    }
    return false;
  }
  const Load* const l = load_of(node);
  if (!l) return false;
  if (is_product(l)) return !std::exchange(product, true);
  if (l->dtype != to.dtype || !l->columns.contiguous() || l->transposed) return false;
  std::optional<Load>* const term = l->from == Load::From::row    ? &whole.bias
                                    : l->from == Load::From::tile ? &whole.held
                                                                  : nullptr;
  if (!term || term->has_value()) return false;
  *term = *l;
  return true;
}

std::optional<LtForm::Whole> LtForm::find_whole() const {
  if (step_.stores.size() != 1 || !step_.encoders.empty() || step_.cols != gemm().cols)
    return std::nullopt;
  const Store& s = step_.stores[0];
  const Graph& graph = *step_.graph;
  if (s.to != Store::To::tile || !s.columns.contiguous() || !writes(step_, s.dtype))
    return std::nullopt;
  const Node* value = &graph[s.value];
  if (value->word == Word::round && value->dtype() == s.dtype) value = &graph[value->in[0]];
  Whole whole;
  bool product = false;
  if (!add_term(*value, s, whole, product) || !product) return std::nullopt;
  // cuBLASLt takes only a bf16 bias for an FP8 product with an f32 result.
  if (whole.bias && s.dtype == DType::f32 && has_codes(gemm().a)) return std::nullopt;
  // With both, cuBLASLt rounds product + tensor to 16 bits before it adds the bias.
  if (whole.bias && whole.held && s.dtype != DType::f32) return std::nullopt;
  return whole;
}

char LtForm::varies() const { return gemm().inner ? 'm' : 'k'; }

// The transpose of the row-major result is column-major: bᵀ·aᵀ. Both operands are used as they are
// in memory.
LtProduct LtForm::operands(const RunArgs& args) const {
  const auto side = [&](const Matrix& m, int64_t r, int64_t c) {
    LtMatrix made =
        lies_turned(m) ? column_major(args.in[m.arg], c, r) : column_major(args.in[m.arg], r, c);
    if (m.format.scaling != Scaling::none) {
      made.scale = args.in[m.arg + 1].data;
      made.scales = scales_of(m);
    }
    return made;
  };
  LtProduct p;
  p.a = side(gemm().b, inner(args.rows), gemm().cols);
  p.b = side(gemm().a, rows(args.rows), inner(args.rows));
  p.turn_a = lies_turned(gemm().b);
  p.turn_b = lies_turned(gemm().a);
  p.fast = gemm().fast;
  return p;
}

std::optional<LtProduct> LtForm::whole(const RunArgs& args) const {
  if (!whole_) return std::nullopt;
  LtProduct p = operands(args);
  const Store& s = step_.stores[0];
  const auto suits = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % kVector == 0;
  };
  for (const LtMatrix* m : {&p.a, &p.b})
    if (m->scales != LtScales::one && !suits(m->scale)) return std::nullopt;
  p.d = column_major(args.out[s.arg], rows(args.rows), gemm().cols, s.columns.offset);
  if (const auto& l = whole_->held)
    p.c = column_major(args.in[l->arg], rows(args.rows), gemm().cols, l->columns.offset);
  if (const auto& l = whole_->bias) {
    p.bias = column_major(args.in[l->arg], 1, gemm().cols, l->columns.offset).data;
    if (!suits(p.bias)) return std::nullopt;
  }
  if (const auto& l = whole_->factor) p.factor = args.parameters[l->arg];
  return p;
}

bool multiplies(const Step& step, const Target& target) {
  return LtForm::refusal(step, target).empty();
}

Attempt make_cublaslt(const Step& step, const Target& target) {
  if (auto refusal = refused(step, target)) return *std::move(refusal);
  if (!LtForm(step).is_whole())
    return Refusal{"its products are scaled and add a bias or a tensor, and do nothing else"};
  return std::make_shared<const LtKernel>(step, target.here);
}

Attempt make_cublaslt_split(const Step& step, const Target& target) {
  if (auto refusal = refused(step, target)) return *std::move(refusal);
  const LtForm form(step);
  if (form.is_product()) return Refusal{"the step is a product already"};
  const Load* const added = form.is_whole() ? nullptr : stored_sum(step);
  if (added) {
    Split s = split_after_product(step, writes, added);
    if (LtForm(s.first).is_whole()) return s;
  }
  return split_after_product(step, writes);
}

}  // namespace tenon::cuda
