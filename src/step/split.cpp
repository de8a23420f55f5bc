// Splits a step in two: the second step reads the result of the first from memory.
#include "step/split.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "step/operand.h"

namespace tenon {

namespace {

constexpr int64_t kColumns = 8;  // row stride is a multiple of this, for vector loads

// The first number after all views.
uint32_t after(const std::set<uint32_t>& views) { return views.empty() ? 0 : *views.rbegin() + 1; }

// Replaces the additions to the tile `arg` by the tile itself, which holds the sums.
void read_sum(Step& step, uint32_t arg) {
  const Graph& from = *step.graph;
  auto graph = std::make_shared<Graph>();
  std::vector<uint32_t> image;
  const auto is_sum = [&](uint32_t id) {
    if (from[id].word != Word::load) return false;
    const Load& l = step.loads[from[id].slot];
    return l.from == Load::From::tile && l.arg == arg;
  };
  for (uint32_t id = 0; id < from.size(); ++id) {
    Node n = from[id];
    if (n.word == Word::add && (is_sum(n.in[0]) || is_sum(n.in[1]))) {
      image.push_back(image[is_sum(n.in[0]) ? n.in[0] : n.in[1]]);
      continue;
    }
    for (int i = 0; i < n.arity(); ++i)
      n.in[static_cast<size_t>(i)] = image[n.in[static_cast<size_t>(i)]];
    image.push_back(graph->intern(n).id());
  }
  for (Store& s : step.stores) s.value = image[s.value];
  step.graph = std::move(graph);
  step.drop_unused_loads();
}

}  // namespace

const Load* stored_sum(const Step& step) {
  const Graph& graph = *step.graph;
  const auto load = [&](uint32_t id, Load::From from) -> const Load* {
    if (graph[id].word != Word::load) return nullptr;
    const Load& l = step.loads[graph[id].slot];
    return l.from == from ? &l : nullptr;
  };
  std::vector<bool> used(graph.size());
  for (const uint32_t root : step.roots()) {
    if (load(root, Load::From::product)) return nullptr;
    used[root] = true;
  }
  const Load* added = nullptr;
  bool stored = false;
  for (uint32_t id = graph.size(); id-- > 0;) {
    const Node& n = graph[id];
    for (int i = 0; i < n.arity() && used[id]; ++i) {
      used[n.in[static_cast<size_t>(i)]] = true;
      const Load* const product = load(n.in[static_cast<size_t>(i)], Load::From::product);
      if (!product) continue;
      const Load* const row =
          n.word == Word::add ? load(n.in[static_cast<size_t>(1 - i)], Load::From::row) : nullptr;
      if (!row || row->columns != product->columns) return nullptr;
      if (added && (added->arg != row->arg || added->dtype != row->dtype)) return nullptr;
      added = row;
      stored = stored || std::ranges::any_of(step.stores, [&](const Store& s) {
                 const Node& value = graph[s.value];
                 const bool rounded = value.word == Word::round && value.dtype() == s.dtype;
                 return s.to == Store::To::tile && (rounded ? value.in[0] : s.value) == id;
               });
    }
  }
  return stored ? added : nullptr;
}

Split split_after_product(const Step& step, bool (*holds)(const Step& step, DType dtype),
                          const Load* added) {
  const int64_t cols = step.gemm()->cols;
  Split s{.first = step,
          .second = step,
          .what = "product",
          .suffix = ".product",
          .out = after(output_views(step)),
          .in = after(input_views(step)),
          .stride = rup(cols, kColumns)};
  // A product is never rounded before a result in f32.
  if (step.effective_precision() == Precision::native && holds(step, step.dtype))
    s.dtype = step.dtype;
  auto graph = std::make_shared<Graph>();
  s.first.loads = {{.from = Load::From::product}};
  Expr value = graph->load(0);
  if (added) {
    s.first.loads.push_back({.from = Load::From::row, .arg = added->arg, .dtype = added->dtype});
    value = value + graph->load(1);
  }
  s.first.stores = {{.arg = s.out, .dtype = s.dtype, .value = value.id()}};
  s.first.graph = std::move(graph);
  s.first.encoders.clear();
  s.first.cols = cols;
  s.second.head = Map{};
  s.second.rows = 0;
  for (Load& l : s.second.loads)
    if (l.from == Load::From::product)
      l = {.from = Load::From::tile, .arg = s.in, .dtype = s.dtype, .columns = l.columns};
  if (added) read_sum(s.second, s.in);
  return s;
}

bool is_bare_product(const Step& step) {
  if (!step.gemm() || step.stores.size() != 1 || !step.encoders.empty()) return false;
  const Store& s = step.stores[0];
  const Graph& graph = *step.graph;
  const Node* value = &graph[s.value];
  if (value->word == Word::round && value->dtype() == s.dtype) value = &graph[value->in[0]];
  if (s.to != Store::To::tile || value->word != Word::load) return false;
  const Load& l = step.loads[value->slot];
  return l.from == Load::From::product && l.columns.contiguous() && l.columns.offset == 0 &&
         step.cols == step.gemm()->cols;
}

Step with_rounded_product(const Step& step, DType dtype) {
  Step made = step;
  for (Load& l : made.loads)
    if (l.from == Load::From::product) l.dtype = dtype;
  return made;
}

Shape operand_shape(const Step& step, Matrix Gemm::*operand) {
  const Gemm& g = *step.gemm();
  Shape s = operand == &Gemm::a ? Shape{step.rows, g.inner} : Shape{g.inner, g.cols};
  if ((g.*operand).transposed) std::swap(s.rows, s.cols);
  return s;
}

Split split_before_product(const Step& step, Matrix Gemm::*operand, DType dtype) {
  const Matrix& m = step.gemm()->*operand;
  const auto [rows, cols] = operand_shape(step, operand);
  assert(cols > 0);
  Split s{.first = step,
          .second = step,
          .what = "decoded operand",
          .suffix = operand == &Gemm::a ? ".a" : ".b",
          .out = after(output_views(step)),
          .in = after(input_views(step)),
          .stride = rup(cols, kColumns),
          .dtype = dtype,
          .decodes = true};
  auto graph = std::make_shared<Graph>();
  s.first.head = Map{};
  s.first.rows = rows;
  s.first.cols = cols;
  s.first.encoders.clear();
  Operand tensor;
  tensor.format = m.format;
  tensor.rowwise = m.orientation == Orientation::rowwise;
  tensor.columnwise = !tensor.rowwise;
  const OperandLoads loads = loads_of(tensor, m.arg, {});
  s.first.loads = {loads.codes};
  Expr value = graph->load(0);
  if (loads.scale) {
    s.first.loads.push_back(*loads.scale);
    value = value * graph->load(1);
  }
  s.first.stores = {{.arg = s.out, .dtype = dtype, .value = graph->id(value)}};
  s.first.graph = std::move(graph);
  auto& product = std::get<Gemm>(s.second.head);
  product.fast = false;  // only products of two tensors of codes have faster sums
  product.*operand = {.arg = s.in, .format = {.dtype = dtype}, .transposed = m.transposed};
  return s;
}

std::optional<std::pair<Step, Step>> split_results(const Step& step) {
  if (!step.is_map() || step.encoders.empty()) return std::nullopt;
  const auto last = static_cast<uint32_t>(step.encoders.size() - 1);
  std::set<uint32_t> encoded;  // values
  for (const Store& s : step.stores)
    if (s.to == Store::To::encoded && s.arg == last) encoded.insert(s.value);
  const auto in_second = [&](const Store& s) {
    return s.to == Store::To::encoded ? s.arg == last
                                      : s.to == Store::To::amax && encoded.contains(s.value);
  };
  Step first = step, second = step;
  std::erase_if(first.stores, in_second);
  std::erase_if(second.stores, [&](const Store& s) { return !in_second(s); });
  if (first.stores.empty() || second.stores.empty()) return std::nullopt;
  first.encoders.pop_back();
  second.encoders = {step.encoders[last]};
  for (Store& s : second.stores)
    if (s.to == Store::To::encoded) s.arg = 0;
  for (Step* half : {&first, &second}) {
    // What follows must not depend on which of the two steps computes it.
    half->precision = step.effective_precision();
    half->drop_unused_loads();
  }
  return std::pair{std::move(first), std::move(second)};
}

Split split_after_totals(const Step& step) {
  Split s{.first = step,
          .second = step,
          .what = "total",
          .suffix = ".totals",
          .out = after(output_views(step)),
          .in = after(input_views(step)),
          .count = static_cast<uint32_t>(step.totals().size()),
          .stride = 1};
  // What follows from a total must not depend on which of the two steps computes it.
  s.first.precision = s.second.precision = step.effective_precision();
  const auto is_column = [](const Store& store) { return store.to == Store::To::column; };
  std::erase_if(s.first.stores, [&](const Store& store) { return !is_column(store); });
  std::erase_if(s.second.stores, is_column);
  s.first.encoders.clear();
  s.second.head = Map{};
  for (uint32_t id = 0; id < step.graph->size(); ++id) {
    const Node& n = (*step.graph)[id];
    if (n.word != Word::load || step.loads[n.slot].from != Load::From::total) continue;
    Load& l = s.second.loads[n.slot];
    s.first.stores.push_back(
        {.to = Store::To::column, .arg = s.out + step.loads[n.slot].arg, .value = id});
    l = {.from = Load::From::column, .arg = s.in + step.loads[n.slot].arg};
  }
  s.first.drop_unused_loads();
  s.second.drop_unused_loads();
  return s;
}

}  // namespace tenon
