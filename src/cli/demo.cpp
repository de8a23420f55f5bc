// `tenon demo`: trains a small gated-MLP language model as one plan on the text that it carries.
#include <fmt/core.h>

#include <algorithm>
#include <chrono>

#include "cli/commands.h"
#include "cli/model.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

extern const char kDemoText[];

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Falls to a tenth over the run.
double rate(int64_t step, int64_t steps) {
  return 4e-3 * (1 - 0.9 * static_cast<double>(step) / static_cast<double>(steps));
}

struct Losses {
  double first = 0, last = 0;  // of the first step; the mean of the last tenth
};

Losses train(Model& model, Runner& runner, const ModelShape& shape, int64_t steps) {
  const int64_t every = std::max<int64_t>(steps / 10, 1);
  Losses losses;
  double sum = 0;
  int64_t count = 0;
  auto start = Clock::now();
  fmt::print("{:>8} {:>9} {:>11}\n", "step", "loss", "tokens/s");
  for (int64_t i = 1; i <= steps; ++i) {
    sum += model.step(runner, i, rate(i, steps));
    ++count;
    if (i == 1) losses.first = sum;
    if (i != 1 && i % every != 0 && i != steps) continue;
    losses.last = sum / static_cast<double>(count);
    const double speed = static_cast<double>(count * shape.batch) / seconds_since(start);
    fmt::print("{:>8} {:>9.4f} {:>11.0f}\n", i, losses.last, speed);
    std::fflush(stdout);
    sum = 0;
    count = 0;
    start = Clock::now();
  }
  return losses;
}

// Forward and backward on one batch, turn by turn: medians in milliseconds.
std::array<double, 2> times(Model& model, std::array<Runner*, 2> runners) {
  constexpr int kRounds = 9;
  std::array<std::vector<double>, 2> all;
  for (Runner* r : runners) {
    model.begin(*r);
    model.forward(*r, 0);
  }
  for (int round = -1; round < kRounds; ++round)
    for (size_t k = 0; k < 2; ++k) {
      const auto start = Clock::now();
      runners[k]->run(Pass::forward);
      runners[k]->run(Pass::backward);
      if (round >= 0) all[k].push_back(1e3 * seconds_since(start));  // the first one warms up
    }
  for (auto& list : all) std::ranges::sort(list);
  return {all[0][kRounds / 2], all[1][kRounds / 2]};
}

// The sample's lines, cut between words.
std::string wrapped(std::string text) {
  constexpr size_t kWidth = 96;
  size_t begin = 0;
  for (size_t i = 0, space = 0; i < text.size(); ++i) {
    if (text[i] == ' ') space = i;
    if (text[i] == '\n') begin = i + 1;
    if (i - begin < kWidth || space <= begin) continue;
    text[space] = '\n';
    begin = space + 1;
  }
  for (size_t i = 0; (i = text.find('\n', i)) != std::string::npos; ++i)
    if (text[i + 1] != '\n') text.insert(i + 1, "  ");
  return text;
}

}  // namespace

int demo(const DemoArgs& args) {
  const Corpus corpus(kDemoText);
  const ModelShape shape;
  PlanRequest request;
  request.recipe = recipe(args.recipe);
  request.dtype = *dtype_named(args.dtype);
  const Chain chain = parse_chain(chain_of(shape, corpus));
  request.cols = shape.width();
  // fp32 gradients, whatever the dtype: what an optimiser wants.
  request.parameter_grads.assign(Plan::build(chain, request).with(Role::param).size(),
                                 {.wanted = true, .dtype = DType::f32});
  const Plan plan = Plan::build(chain, request);
  Session fused(plan, shape.batch);
  Model model(shape, corpus, plan, args.seed);
  model.begin(fused);

  fmt::print("A gated-MLP language model learns {} characters of English, {} of them different.\n",
             corpus.codes.size(), corpus.vocabulary());
  fmt::print(
      "{} characters of context, {} parameters, {} rows a step; {}, recipe {}, seed {}, {} "
      "threads.\nBetween embeddings and scores it is one plan:\n  {}\n\n",
      shape.context, model.parameters(), shape.batch, args.dtype, args.recipe, args.seed, threads(),
      print_chain(chain));
  const Losses losses = train(model, fused, shape, args.steps);
  const bool fell = losses.last < losses.first;
  fmt::print("\nloss {:.4f} -> {:.4f}: it {}\n", losses.first, losses.last,
             fell ? "fell" : "DID NOT FALL");

  const std::string start = "A joiner who makes";
  PlanRequest evaluation = request;
  evaluation.training = evaluation.backward = false;
  Session one(Plan::build(chain, evaluation), 1);
  fmt::print("\nWhat it writes behind \"{}\", one row at a time and without dropout:\n  {}\n",
             start, wrapped(model.continued(start, one, fused, 320)));

  fmt::print("\nThe plan:\n{}", plan.describe(shape.batch));

  Unfused apart(chain, request, shape.batch);
  const auto [together, one_by_one] = times(model, {&fused, &apart});
  fmt::print(
      "\nFused against one op at a time, same weights and data, forward and backward:\n"
      "  {:.2f} ms a step fused, {:.2f} ms op by op: {:.2f} times\n",
      together, one_by_one, one_by_one / together);

  // The same training by both, with every op's rounding in place: not a bit may differ.
  constexpr int64_t kSteps = 10;
  request.options = {.precision = Precision::strict, .rounding = Rounding::eager};
  Session strict_fused(Plan::build(chain, request), shape.batch);
  Unfused strict_apart(chain, request, shape.batch);
  bool equal = true;
  Model first(shape, corpus, strict_fused.plan(), args.seed);
  Model second = first;
  first.begin(strict_fused);
  second.begin(strict_apart);
  for (int64_t i = 1; i <= kSteps; ++i)
    equal = first.step(strict_fused, i, rate(i, kSteps)) ==
                second.step(strict_apart, i, rate(i, kSteps)) &&
            equal;
  fmt::print("  strict and eager: the losses of {} steps are {}\n", kSteps,
             equal ? "the same bit for bit" : "NOT THE SAME");
  return fell && equal ? ok : failed;
}

}  // namespace tenon::cli
