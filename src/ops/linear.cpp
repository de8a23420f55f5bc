// linear(in,out): y = x·Wᵀ.
#include <cmath>

#include "ops/op.h"
#include "tenon/error.h"

namespace tenon {

namespace {

using Stored = Run64::Stored;

// Expected magnitude of a sum of n products.
double size_of(int64_t n, const Matrix64& a, const Matrix64& b) {
  return std::sqrt(static_cast<double>(n)) * root_mean_square(a) * root_mean_square(b);
}

void forward64(const OpCall& /*call*/, Run64& r) {
  const Matrix64& w = r.parameter(0);
  r.kept = r.value;
  r.sums(w.cols, size_of(w.cols, r.value, w));
  r.value = r.product(r.stored(r.value, Stored::input), transposed(r.stored(w, Stored::weight)));
}

void backward64(const OpCall& /*call*/, Run64& r) {
  const Matrix64& w = r.parameter(0);
  const Matrix64 dy = r.stored(r.value, Stored::gradient);
  r.give_gradient(0, r.product(transposed(dy), r.stored(r.kept, Stored::input)), dy.rows,
                  size_of(dy.rows, dy, r.kept));
  r.sums(w.rows, size_of(w.rows, dy, w));
  r.value = r.product(dy, r.stored(w, Stored::weight));
}

}  // namespace

OpSchema linear_op() {
  return {
      .name = "linear",
      .summary = "y = x·Wᵀ, W is [out, in]",
      .arguments = {columns("in"),
                    count("out", "it has no width; write linear(in,out) or linear(out=n)"),
                    recipe_argument(), accumulate_argument()},
      .parameters = {{.name = "weight",
                      .rows = "out",
                      .initial =
                          [](const OpCall& call) {
                            // A uniform distribution with this bound keeps one third of the
                            // variance, for every width.
                            const float bound = 1 / std::sqrt(static_cast<float>(call.cols));
                            return Initial{-bound, bound};
                          }}},
      .same_columns = false,
      .output = [](const OpCall& call) -> OutputShape { return {call.arguments.count("out")}; },
      .forward =
          [](const OpCall& call) {
            const std::string how = call.arguments.text("accumulate").value_or("precise");
            require(how == "precise" || how == "fast", call.arguments.who(), ": accumulate is '",
                    how, "'; it must be precise or fast");
            return std::vector<Extension>{Multiplied{.fast = how == "fast"}};
          },
      .float64 = {.forward = forward64, .backward = backward64},
  };
}

}  // namespace tenon
