// Trains a small gated-MLP language model as one plan, on a text that is embedded in the program.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>

#include "examples/model.h"
#include "support/session.h"
#include "tenon/tenon.hpp"

namespace demo {

extern const char kDemoText[];

namespace {

using tenon::Chain, tenon::Pass, tenon::PlanRequest, tenon::Role, tenon::support::Unfused;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The learning rate. It decreases linearly to a tenth over the run.
double rate(int64_t step, int64_t steps) {
  return 4e-3 * (1 - 0.9 * static_cast<double>(step) / static_cast<double>(steps));
}

struct Losses {
  double first = 0, last = 0;  // loss of the first step; mean loss of the last tenth of the steps
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

// Times forward and backward on one batch, with the runners alternating. Returns medians in
// milliseconds.
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
      if (round >= 0) all[k].push_back(1e3 * seconds_since(start));  // the first round is a warmup
    }
  for (auto& list : all) std::ranges::sort(list);
  return {all[0][kRounds / 2], all[1][kRounds / 2]};
}

// Wraps the lines of the sample between words.
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

struct Arguments {
  int steps = 200;
  std::string dtype = "f32", recipe = "none";
  uint64_t seed = 1;
};

// The state that all parts of the demonstration share.
struct Setup {
  explicit Setup(const Arguments& given) : args(given) {
    request.recipe = tenon::recipe(args.recipe);
    request.dtype = *tenon::dtype_named(args.dtype);
    request.cols = shape.width();
    // fp32 gradients for every dtype, because the optimiser needs them.
    request.parameter_grads.assign(Plan::build(chain, request).with(Role::param).size(),
                                   {.wanted = true, .dtype = DType::f32});
  }

  Arguments args;
  Corpus corpus{kDemoText};
  ModelShape shape;
  Chain chain = tenon::parse_chain(chain_of(shape, corpus));
  PlanRequest request;
};

void introduce(const Setup& s, const Model& model) {
  fmt::print("A gated-MLP language model learns {} characters of English, {} of them different.\n",
             s.corpus.codes.size(), s.corpus.vocabulary());
  fmt::print(
      "{} characters of context, {} parameters, {} rows a step; {}, recipe {}, seed {}, {} "
      "threads.\nBetween embeddings and scores it is one plan:\n  {}\n\n",
      s.shape.context, model.parameters(), s.shape.batch, s.args.dtype, s.args.recipe, s.args.seed,
      tenon::threads(), tenon::print_chain(s.chain));
}

void write_text(const Setup& s, const Model& model, const Session& trained) {
  constexpr int kLetters = 320;
  const std::string start = "A joiner who makes";
  PlanRequest evaluation = s.request;
  evaluation.training = evaluation.backward = false;
  Session one(Plan::build(s.chain, evaluation), 1);
  fmt::print("\nWhat it writes after \"{}\", one row at a time and without dropout:\n  {}\n", start,
             wrapped(model.continued(start, one, trained, kLetters)));
}

void compare_times(const Setup& s, Model& model, Session& fused) {
  Unfused apart(s.chain, s.request, s.shape.batch);
  const auto [together, one_by_one] = times(model, {&fused, &apart});
  fmt::print(
      "\nFused against one op at a time, same weights and data, forward and backward:\n"
      "  {:.2f} ms a step fused, {:.2f} ms op by op: {:.2f} times\n",
      together, one_by_one, one_by_one / together);
}

// Runs the same training fused and op by op, with eager rounding. Every bit must be equal.
bool trains_to_the_same_bits(const Setup& s) {
  constexpr int64_t kSteps = 10;
  PlanRequest request = s.request;
  request.options = {.precision = tenon::Precision::strict, .rounding = tenon::Rounding::eager};
  Session fused(Plan::build(s.chain, request), s.shape.batch);
  Unfused apart(s.chain, request, s.shape.batch);
  Model first(s.shape, s.corpus, fused.plan(), s.args.seed);
  Model second = first;
  first.begin(fused);
  second.begin(apart);
  bool equal = true;
  for (int64_t i = 1; i <= kSteps; ++i) {
    const double loss = first.step(fused, i, rate(i, kSteps));
    equal = loss == second.step(apart, i, rate(i, kSteps)) && equal;
  }
  fmt::print("  strict and eager: the losses of {} steps are {}\n", kSteps,
             equal ? "the same bit for bit" : "NOT THE SAME");
  return equal;
}

// True if the loss decreased and both ways of training agree.
bool run(const Arguments& args) {
  const Setup s(args);
  const Plan plan = Plan::build(s.chain, s.request);
  Session fused(plan, s.shape.batch);
  Model model(s.shape, s.corpus, plan, args.seed);
  model.begin(fused);
  introduce(s, model);
  const Losses losses = train(model, fused, s.shape, args.steps);
  const bool fell = losses.last < losses.first;
  fmt::print("\nloss {:.4f} -> {:.4f}: it {}\n", losses.first, losses.last,
             fell ? "fell" : "DID NOT FALL");
  write_text(s, model, fused);
  fmt::print("\nThe plan:\n{}", plan.describe(s.shape.batch));
  compare_times(s, model, fused);
  return trains_to_the_same_bits(s) && fell;
}

}  // namespace
}  // namespace demo

// Exit codes: 0 success, 1 the demonstration failed, 2 wrong usage.
int main(int argc, char** argv) {
  demo::Arguments args;
  CLI::App app{"Trains a small language model as one plan, and times it fused and op by op",
               "demo"};
  app.add_option("--steps", args.steps, "of training")
      ->check(CLI::Range(2, 1000000))
      ->capture_default_str();
  app.add_option("--dtype", args.dtype, "of activations and parameters")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  app.add_option("--recipe", args.recipe, "none, delayed, current, mxfp8 or block")
      ->capture_default_str();
  app.add_option("--seed", args.seed, "of parameters and data")->capture_default_str();
  try {
    app.parse(argc, argv);
    return demo::run(args) ? 0 : 1;
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : 2;
  } catch (const tenon::Error& e) {
    fmt::print(stderr, "demo: {}\n", e.what());
    return e.code() == tenon::Code::invalid_argument ? 2 : 1;
  }
}
