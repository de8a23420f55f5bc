// Compares products with bodies with oneDNN's matmul, in alternating rounds: GFLOP/s and ratios.
#include <cmath>

#include "bench/products.h"
#include "bench/rounds.h"
#include "runtime/execute.h"
#include "tenon/tenon.hpp"
#ifdef TENON_ONEDNN
#include "bench/onednn.h"
#endif

namespace {

using namespace tenon;         // NOLINT: a benchmark of the library
using namespace tenon::bench;  // NOLINT

bool is(const ProductCase& p, std::string_view body) { return p.body == body; }

#ifdef TENON_ONEDNN
// The same product with oneDNN, with post-ops if oneDNN has them. It has none for a gated body.
std::function<void()> by_onednn(const ProductCase& p, char* a, char* b, char* bias, char* c,
                                bool packed) {
  using namespace dnnl;
  engine& cpu = ::onednn::cpu();
  stream& queue = ::onednn::queue();
  const auto type = ::onednn::type(p.dtype);
  const auto tag = p.transposed(1) ? memory::format_tag::ba : memory::format_tag::ab;
  const memory::desc source({p.m, p.k}, type, memory::format_tag::ab);
  const memory::desc plain({p.k, p.n}, type, tag);
  const memory::desc weights({p.k, p.n}, type, packed ? memory::format_tag::any : tag);
  const memory::desc row({1, p.n}, type, memory::format_tag::ab);
  const memory::desc result({p.m, p.n}, type, memory::format_tag::ab);
  primitive_attr attributes;
  if (is(p, "bias+gelu")) {
    post_ops ops;
    ops.append_eltwise(1.0F, algorithm::eltwise_gelu_tanh, 0, 0);
    attributes.set_post_ops(ops);
  }
  const auto d = is(p, "bias+gelu") ? matmul::desc(source, weights, row, result)
                                    : matmul::desc(source, weights, result);
  const matmul::primitive_desc pd(d, attributes, cpu);
  memory given(plain, cpu, b);
  memory laid = given;
  if (pd.weights_desc() != plain) {
    laid = memory(pd.weights_desc(), cpu);
    reorder(given, laid).execute(queue, given, laid);
    queue.wait();
  }
  std::unordered_map<int, memory> args{{DNNL_ARG_SRC, memory(source, cpu, a)},
                                       {DNNL_ARG_WEIGHTS, laid},
                                       {DNNL_ARG_DST, memory(result, cpu, c)}};
  if (is(p, "bias+gelu")) args.emplace(DNNL_ARG_BIAS, memory(row, cpu, bias));
  return [kernel = matmul(pd), args, &queue] {
    kernel.execute(queue, args);
    queue.wait();
  };
}
#endif

void measure(benchmark::State& state, const ProductCase& p) {
  std::vector<char> a = uniform_codes(p.dtype, p.m * p.k, 1);
  // The products of these weights have variance 1, roughly as in a trained layer.
  const float most = 3 / std::sqrt(static_cast<float>(p.k));
  std::vector<char> b = uniform_codes(p.dtype, p.k * p.n, 2, most);
  std::vector<char> bias = uniform_codes(p.dtype, p.n, 3);
  std::vector<char> c(static_cast<size_t>(p.m * p.n * info(p.dtype).bytes));
  std::vector<char> other(c.size());
  const std::vector<View> in{
      matrix(a.data(), p.dtype, p.m, p.k),
      {},
      p.transposed(1) ? matrix(b.data(), p.dtype, p.n, p.k) : matrix(b.data(), p.dtype, p.k, p.n),
      {},
      matrix(bias.data(), p.dtype, 1, p.n)};
  const auto by_tenon = [&](const ProductCase& which, std::vector<char>& to) {
    const Step step = make_product(which).step;
    const std::vector<View> out{matrix(to.data(), p.dtype, p.m, step.cols)};
    return [&in, &p, step, out] {
      execute(step, {.rows = p.m, .in = in, .out = out, .parameters = {}}, {});
    };
  };
  NamedCalls calls{{"tenon", by_tenon(p, c)}};
#ifdef TENON_ONEDNN
  calls.emplace_back("onednn", by_onednn(p, a.data(), b.data(), bias.data(), other.data(), false));
  calls.emplace_back("onednn_packed",
                     by_onednn(p, a.data(), b.data(), bias.data(), other.data(), true));
#endif
  ProductCase bare = p;
  bare.body = "plain";
  if (!is(p, "plain")) calls.emplace_back("plain", by_tenon(bare, other));
  const auto times = rounds(state, calls);
  for (size_t i = 0; i < calls.size(); ++i)
    state.counters[calls[i].first] = 1e-9 * p.flops() / median(times[i]);
}

}  // namespace

int main(int argc, char** argv) {
#ifdef TENON_ONEDNN
  onednn::prepare();
#endif
  for (const ProductCase& p : cpu_products())
    benchmark::RegisterBenchmark(str(info(p.dtype).name, " ", p.name()).c_str(), measure, p)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(p.m < 512 ? 40 : 12);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
