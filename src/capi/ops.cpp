// The registry of ops over the C ABI.
#include <deque>

#include "capi/common.h"
#include "ops/op.h"

namespace {

using namespace tenon::capi;  // NOLINT: helpers of the C ABI's files

// One op with the arrays that its struct points to.
struct Row {
  explicit Row(const tenon::OpSchema& s) {
    for (const tenon::ArgumentSchema& a : s.arguments)
      arguments.push_back({a.name.c_str(), static_cast<int32_t>(a.kind), !a.missing.empty(),
                           a.value.value_or(0), a.least, a.most});
    for (const tenon::ParameterSchema& p : s.parameters)
      parameters.push_back({p.name.c_str(), p.rows.empty() ? nullptr : p.rows.c_str()});
    for (const tenon::ExtraSchema& e : s.extra_inputs)
      extras.push_back({e.name.c_str(), static_cast<int32_t>(e.kind)});
    op = {s.name.c_str(),   s.summary.c_str(), arguments.data(),
          arguments.size(), parameters.data(), parameters.size(),
          extras.data(),    extras.size(),     s.extra_outputs.size()};
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  std::vector<tenon_op_argument> arguments;
  std::vector<tenon_op_parameter> parameters;
  std::vector<tenon_op_extra> extras;
  tenon_op op{};
};

const std::deque<Row>& rows() {
  static const auto& all = *[] {
    auto* const list = new std::deque<Row>;
    for (const tenon::OpSchema& s : tenon::op_schemas()) list->emplace_back(s);
    return list;
  }();
  return all;
}

}  // namespace

int tenon_ops(tenon_op* list, size_t capacity, size_t* count) {
  return guarded(
      [&] { give(rows().size(), list, capacity, count, [](size_t i) { return rows()[i].op; }); });
}
