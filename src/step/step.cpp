// Properties of a step: keys, sizes, precision and its text form.
#include "step/step.h"

#include <algorithm>

#include "expr/evaluate.h"
#include "expr/order.h"
#include "tenon/error.h"

namespace tenon {

namespace {

std::string text(const ColumnMap& m) {
  if (m == ColumnMap{}) return "";
  return str("[", m.block, "/", m.stride, "+", m.offset, "]");
}

std::string text(const Format& f) {
  std::string out = str(":", info(f.scaling).name);
  if (f.eps != 0) out += str(":eps=", f.eps);
  if (f.scaling != Scaling::none && f.powers() != info(f.scaling).power_of_two)
    out += f.powers() ? ":pow2" : ":exact";
  if (f.swizzled) out += ":swizzled";
  return out;
}

std::string text(const Load& l) {
  std::string out = str(kLoadNames[static_cast<size_t>(l.from)], l.arg);
  const bool rounded = l.from == Load::From::product && l.dtype != DType::f32;
  if (rounded || reads_view(l) || l.from == Load::From::parameter)
    out += str(":", info(l.dtype).name);
  if (l.from == Load::From::block)
    out += text(l.format) + (l.orientation == Orientation::rowwise ? ":row" : ":col");
  return out + (l.transposed ? "^T" : "") + text(l.columns);
}

std::string text(const Store& s) {
  return str(kStoreNames[static_cast<size_t>(s.to)], s.arg, ":", info(s.dtype).name,
             text(s.columns), s.join ? "+" : "", s.ordered ? ":ordered" : "");
}

std::string text(const Encoder& e) {
  const bool reads = info(e.format.scaling).reads_scale;
  return str("encoder", e.out, ":", info(e.format.dtype).name, text(e.format), ":",
             e.rowwise ? "row" : "", e.columnwise ? "col" : "", e.counts ? ":health" : "", "[",
             e.cols, "]", reads ? str("<", e.scale) : "");
}

std::string text(const Matrix& m) {
  return str("in", m.arg, ":", info(m.format.dtype).name,
             m.format.scaling == Scaling::none ? "" : text(m.format),
             m.orientation == Orientation::rowwise ? "" : ":col", m.transposed ? "^T" : "");
}

std::string text(const Gemm& g) {
  return str(text(g.a), "*", text(g.b), "[", g.inner, "x", g.cols, g.fast ? ":fast" : "", "]");
}

// Bytes of the codes and scales of a tensor with `rows` rows.
int64_t encoded_bytes(const Format& f, int64_t rows, int64_t cols, Orientation o) {
  int64_t total = rows * cols * info(f.dtype).bytes;
  if (f.scaling != Scaling::none) {
    const Shape s = f.scale_shape(rows, cols, o);
    total += s.rows * s.cols * info(info(f.scaling).scale).bytes;
  }
  return total;
}

// Replaces node numbers in the head. `image` has no new number for nodes that were removed.
void renumber(Head& head, const std::vector<uint32_t>& image) {
  const auto each = [&](auto& norm) {
    for (uint32_t& t : norm.totals) t = image[t];
    for (auto& nodes : norm.norms)
      for (uint32_t* node : nodes_of(nodes))
        if (*node != kNoNode) *node = image[*node];
  };
  if (auto* norm = std::get_if<Norm>(&head)) each(*norm);
  if (auto* grad = std::get_if<NormGrad>(&head)) each(*grad);
}

}  // namespace

void Step::drop_unused_loads() {
  const std::vector<uint32_t> nodes = order(*graph, roots());
  std::vector<uint32_t> image(graph->size(), kNoNode);
  std::vector<bool> used(loads.size(), false);
  for (const uint32_t id : nodes) {
    image[id] = id;
    if ((*graph)[id].word == Word::load) used[(*graph)[id].slot] = true;
  }
  if (std::ranges::find(used, false) != used.end()) {
    std::vector<Load> kept;
    std::vector<uint32_t> slot(used.size(), 0);
    for (size_t i = 0; i < used.size(); ++i) {
      if (!used[i]) continue;
      slot[i] = static_cast<uint32_t>(kept.size());
      kept.push_back(loads[i]);
    }
    auto copy = std::make_shared<Graph>();
    for (const uint32_t id : nodes) {
      Node n = (*graph)[id];
      if (n.word == Word::load) n.slot = slot[n.slot];
      for (int i = 0; i < n.arity(); ++i) n.in[i] = image[n.in[i]];
      image[id] = copy->intern(n).id();
    }
    for (Store& s : stores) s.value = image[s.value];
    loads = std::move(kept);
    graph = std::move(copy);
  }
  renumber(head, image);
}

std::span<const uint32_t> Step::totals() const {
  if (const Norm* n = norm()) return n->totals;
  if (const NormGrad* n = norm_grad()) return n->totals;
  return {};
}

std::vector<uint32_t> Step::roots() const {
  std::vector<uint32_t> ids;
  for (const Store& s : stores) ids.push_back(s.value);
  ids.insert(ids.end(), totals().begin(), totals().end());
  return ids;
}

// An fp32 column sum makes the whole step strict: native fp32 results are strict, and the other
// results share the summands. An accumulated gradient is summed in fp32 and then added, so this
// also holds for 16-bit gradients.
Precision Step::effective_precision() const {
  for (const Store& s : stores)
    if (s.to != Store::To::amax && s.dtype == DType::f32) return Precision::strict;
  return precision;
}

bool Step::strict_bits() const {
  return precision == Precision::strict ||
         (effective_precision() == Precision::strict && !encoders.empty());
}

double Step::native_error() const {
  if (effective_precision() == Precision::strict) return 0;
  // A step that stores only an amax allows the error of e4m3.
  double least = tenon::native_error(DType::e4m3);
  for (const Store& s : stores)
    if (s.to != Store::To::amax) least = std::min(least, tenon::native_error(s.dtype));
  return least;
}

int64_t Step::flops(int64_t given) const {
  const Gemm* const g = gemm();
  if (!g) return 0;
  return 2 * body_rows(given) * g->cols * g->inner_for(given);
}

int64_t Step::bytes(int64_t given) const {
  const int64_t rows = body_rows(given);
  int64_t total = 0;
  if (const Gemm* const g = gemm()) {
    const int64_t inner = g->inner_for(given);
    const auto matrix = [&](const Matrix& m, int64_t r, int64_t c) {
      if (m.transposed) std::swap(r, c);
      total += encoded_bytes(m.format, r, c, m.orientation);
    };
    matrix(g->a, rows, inner);
    matrix(g->b, inner, g->cols);
  }
  const auto scales = [&](const Format& f, int64_t columns, Orientation o) {
    const Shape s = f.scale_shape(rows, columns, o);
    return s.rows * s.cols * info(info(f.scaling).scale).bytes;
  };
  for (const Load& l : loads) {
    switch (l.from) {
      case Load::From::tile:
        total += rows * cols * info(l.dtype).bytes;
        break;
      case Load::From::row:
        total += cols * info(l.dtype).bytes;
        break;
      case Load::From::column:
        total += rows * info(l.dtype).bytes;
        break;
      case Load::From::block:
        total += scales(l.format, cols, l.orientation);
        break;
      case Load::From::scalar:
      case Load::From::parameter:
        total += info(l.dtype).bytes;
        break;
      case Load::From::random:
      case Load::From::product:
      case Load::From::total:
        break;  // computed, not read
    }
  }
  for (const Store& s : stores) {
    const int64_t count = s.to == Store::To::tile         ? rows * cols
                          : s.to == Store::To::column_sum ? cols
                          : s.to == Store::To::row_sum    ? rows
                          : s.to == Store::To::column     ? rows
                          : s.to == Store::To::encoded    ? 0
                                                          : 1;
    total += count * info(s.dtype).bytes;
  }
  for (const Encoder& e : encoders) {
    for (const Orientation o : kOrientations)
      if (e.has(o)) total += encoded_bytes(e.format, rows, e.cols, o);
    // The multiplier or the amax.
    if (info(e.format.scaling).reads_scale) total += info(DType::f32).bytes;
  }
  return total;
}

std::string Step::key() const {
  std::string out;
  out.reserve(512);  // longer than most keys
  const auto add = [&](const auto&... parts) { append_to(out, parts...); };
  add(cols, precision == Precision::strict ? " strict" : " native");
  if (rows) add(" rows=", rows);
  if (dtype != DType::f32) add(" chain=", info(dtype).name);
  if (gemm()) add(" ", text(*gemm()));
  for (const Load& l : loads) add(" ", text(l));
  add(" |");
  std::vector<size_t> position(graph->size());
  size_t count = 0;
  for (const uint32_t id : order(*graph, roots())) {
    const Node& n = (*graph)[id];
    position[id] = count++;
    add(" ", info(n.word).name);
    if (n.word == Word::constant) add("#", __builtin_bit_cast(uint32_t, n.value));
    if (n.word == Word::load) add("@", n.slot);
    if (n.detail) add(":", static_cast<int>(n.detail));
    for (int i = 0; i < n.arity(); ++i) add(",", position[n.in[i]]);
  }
  add(" |");
  for (const Store& s : stores) add(" ", position[s.value], ">", text(s));
  for (const uint32_t t : totals()) add(" ", position[t], ">total");
  const auto each = [&](const auto& norm) {
    for (const auto& nodes : norm.norms) {
      add(" ", head_name(), static_cast<int>(nodes.kind));
      for (const uint32_t* node : nodes_of(nodes))
        *node == kNoNode ? add(",-") : add(",", position[*node]);
    }
  };
  if (norm()) each(*norm());
  if (norm_grad()) each(*norm_grad());
  for (const Encoder& e : encoders) add(" ", text(e));
  return out;
}

std::string Step::describe() const {
  std::string out = str(head_name(), " ", name, " cols=", cols, " |");
  if (gemm()) out += str(" ", text(*gemm()), " |");
  for (const Load& l : loads) out += " " + text(l);
  size_t words = 0;
  for (const uint32_t id : order(*graph, roots())) words += (*graph)[id].arity() > 0;
  out += str(" | ", words, " words ",
             effective_precision() == Precision::strict ? "strict" : "native", " |");
  for (const Store& s : stores) out += " " + text(s);
  for (const Encoder& e : encoders) out += " " + text(e);
  return out;
}

std::set<uint32_t> input_views(const Step& step) {
  std::set<uint32_t> args;
  if (const Gemm* const g = step.gemm())
    for (const Matrix* m : {&g->a, &g->b}) args.insert({m->arg, m->arg + 1});
  for (const Load& l : step.loads)
    if (reads_view(l)) args.insert(l.arg);
  for (const Encoder& e : step.encoders)
    if (info(e.format.scaling).reads_scale) args.insert(e.scale);
  return args;
}

std::set<uint32_t> output_views(const Step& step) {
  std::set<uint32_t> args;
  for (const Store& s : step.stores)
    if (s.to != Store::To::encoded) args.insert(s.arg);
  for (const Encoder& e : step.encoders)
    for (uint32_t i = 0; i < Encoder::outputs; ++i) args.insert(e.out + i);
  return args;
}

}  // namespace tenon
