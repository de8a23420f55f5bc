// Plans and runs chains on the CPU, forward and backward, with both roundings and every recipe and
// keep.
#include "outputs/chains.h"

#include <array>
#include <cstring>
#include <memory>

#include "outputs/hash.h"
#include "support/golden_plans.h"
#include "tenon/error.h"

namespace tenon::test {
namespace {

constexpr std::array kRecipes{"none", "delayed", "current", "mxfp8", "block"};

View view(const Buffer& b, int64_t rows, void* data) {
  const int64_t n = b.rows(rows);
  return b.rows_inside ? matrix(data, b.dtype, b.cols, n) : matrix(data, b.dtype, n, b.cols);
}

// Fills an input of a run. Values depend on the role of the buffer and its index in that role.
void give(const ChainCase& c, const Buffer& b, const View& v, uint64_t seed) {
  Draw draw(seed);
  if (b.random) {
    if (b.role != Role::rng) return;
    const std::array<uint64_t, 5> state{draw(), draw.below(1000), draw.below(7), draw.below(7),
                                        1024 + draw.below(7)};
    std::memcpy(v.data, state.data(), sizeof state);
    return;
  }
  switch (b.role) {
    case Role::param: {
      int halvings = 0;  // a weight is about 1/√in
      while (v.rows > 1 && (int64_t{1} << 2 * halvings) < v.cols) ++halvings;
      return fill(v, [&] { return ordinary(draw) * power_of_two(-halvings); });
    }
    case Role::input:
    case Role::extra_in:
      return fill(v, [&] { return c.specials ? sometimes_special(draw) : ordinary(draw); });
    case Role::grad:  // initial value of an accumulated gradient
      return fill(v, [&] { return ordinary(draw); });
    case Role::state:
      if (b.name.ends_with(".scale"))
        fill(v, [&] { return power_of_two(static_cast<int>(draw.below(6)) - 2); });
      if (b.name.ends_with(".amax"))
        fill(v, [&] { return power_of_two(static_cast<int>(draw.below(6)) - 4); });
      return;
    default:
      return;
  }
}

// Separate hashes of results, state and saved tensors. Saved tensors may change when results do
// not.
struct Hashes {
  Hash results, state, saved;

  Hash* of(Role role) {
    switch (role) {
      case Role::output:
      case Role::extra_out:
      case Role::grad:
      case Role::rng:
        return &results;
      case Role::state:
        return &state;
      case Role::saved:
        return &saved;
      default:
        return nullptr;
    }
  }
};

// The code of an Error, or ok.
template <class Call>
uint64_t code_of(Call call) {
  try {
    call();
    return static_cast<uint64_t>(Code::ok);
  } catch (const Error& e) {
    return static_cast<uint64_t>(e.code());
  }
}

void hash_written(const Plan& plan, int64_t rows, std::span<void* const> memory, Hashes& hashes) {
  for (size_t r = 0; r < kRoles.size(); ++r) {
    Hash* const hash = hashes.of(static_cast<Role>(r));
    if (!hash) continue;
    uint64_t number = 0;
    for (const size_t i : plan.with(static_cast<Role>(r))) {
      hash->text(kRoles[r]);
      hash->number(number++);
      const Buffer& b = plan.buffers()[i];
      if (!b.random) {
        hash->elements(view(b, rows, memory[i]));
        continue;
      }
      std::array<uint64_t, 5> state{};
      std::memcpy(state.data(), memory[i], sizeof state);
      for (const uint64_t n : state) hash->number(n);
    }
  }
}

void run(const ChainCase& c, int64_t rows, uint64_t seed, Hashes& hashes) {
  const Plan plan = Plan::build(c.chain, c.request);
  plan.check_rows(rows);
  std::vector<Memory> blocks;
  std::vector<void*> memory;
  std::array<uint64_t, kRoles.size()> numbers{};
  for (const Buffer& b : plan.buffers()) {
    if (b.role == Role::workspace) {
      memory.push_back(nullptr);
      continue;
    }
    memory.push_back(blocks.emplace_back(b.bytes(rows)).data());
    const auto role = static_cast<size_t>(b.role);
    give(c, b, view(b, rows, memory.back()), seed + numbers[role]++ * kRoles.size() + role);
  }
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = memory[plan.owner(i)];
  const Memory workspace(plan.workspace_bytes(rows));
  for (const Pass pass : {Pass::forward, Pass::backward})
    hashes.results.number(code_of([&] { plan.run(pass, rows, memory, workspace.data()); }));
  hash_written(plan, rows, memory, hashes);
}

// For an invalid chain, the hash is its error code.
void hash_rows(const std::string& group, const ChainCase& c, const Report& report) {
  for (const int64_t rows : c.rows) {
    Hash seed;
    seed.text(c.chain);
    seed.number(static_cast<uint64_t>(rows));
    Hashes hashes;
    const uint64_t code = code_of([&] { run(c, rows, seed.value(), hashes); });
    hashes.results.number(code);
    const std::string name = str(c.name, " rows=", rows, code ? " refused" : "");
    report(group, name, hashes.results.value());
    report(group + ".state", name, hashes.state.value());
    report(group + ".saved", name, hashes.saved.value());
  }
}

void hash_all_ways(const std::string& group, ChainCase c, bool e4m3, const Report& report,
                   Sample& sample) {
  const std::string name = c.name;
  PlanRequest& r = c.request;
  r.options.precision = Precision::strict;
  r.output_encoded = false;  // tests/lower/plan_encoded_test.cpp compares encoded outputs
  for (const char* recipe_name : kRecipes)
    for (const Keep keep : {Keep::input, Keep::fp8, Keep::recompute})
      for (const Rounding rounding : {Rounding::once, Rounding::eager}) {
        r.recipe = recipe(recipe_name, e4m3);
        r.keep = keep;
        r.options.rounding = rounding;
        c.name =
            str(name, " ", info(r.dtype).name, " ", recipe_name, " ",
                kKeeps[static_cast<size_t>(keep)], " ", kRoundings[static_cast<size_t>(rounding)]);
        if (sample()) hash_rows(group, c, report);
      }
}

size_t parameters(const Chain& chain) {
  size_t count = 0;
  for (const Op& op : chain)
    count += op.name == "layernorm"
                 ? 2
                 : op.name == "linear" || op.name == "bias" || op.name == "rmsnorm";
  return count;
}

// y = 2·x and dx = 2·dy. Both are exact.
void twice(const View& from, const View& to) {
  for (int64_t r = 0; r < from.rows; ++r)
    for (int64_t c = 0; c < from.cols; ++c) {
      const auto size = static_cast<size_t>(info(from.dtype).bytes);
      const auto at = [&](const View& v) {
        return static_cast<char*>(v.data) + static_cast<size_t>(r * v.stride + c) * size;
      };
      uint32_t code = 0;
      std::memcpy(&code, at(from), size);
      code = encode(to.dtype, 2 * decode(from.dtype, code));
      std::memcpy(at(to), &code, size);
    }
}

void hash_initial(const ChainCase& c, const Report& report) {
  const Plan plan = Plan::build(c.chain, c.request);
  Hash hash;
  for (const size_t i : plan.with(Role::param)) {
    const Buffer& b = plan.buffers()[i];
    const Memory memory(b.bytes(1));
    plan.initialise(i, 42, memory.data());
    hash.elements(view(b, 1, memory.data()));
  }
  report("golden-chains.initial", str(c.name, " ", info(c.request.dtype).name), hash.value());
}

}  // namespace

void hash_golden_chains(const Report& report) {
  Sample all(1);
  uint64_t number = 0;
  // Every chain is hashed with every `keep`.
  for (const Golden& g : kGoldenPlans)
    if (g.keep == Keep::input)
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        ChainCase c{g.file, g.chain, request_of(g, Device::cpu), {1, 37, 130}};
        if (g.cols > 256) c.rows = {130};  // its weights take most of the time
        const Chain chain = parse_chain(g.chain);
        c.request.dtype = dtype;
        c.specials = c.chain.find("linear") == std::string::npos;
        if (number++ % 2 == 1)
          c.request.parameter_grads.assign(parameters(chain),
                                           {.dtype = DType::f32, .accumulate = true});
        hash_all_ways("golden-chains", c, false, report, all);
        hash_initial(c, report);
      }
}

void hash_random_chains(const Report& report, Sample sample) {
  constexpr size_t kChains = 600;
  constexpr uint64_t kSeed = 18;
  uint64_t number = 0;
  for (ChainCase& c : random_chains(kChains, kSeed)) {
    const auto forward = [](int64_t, const View& x, const View& y) { twice(x, y); };
    const auto backward = [](int64_t, const View&, const View& dy, const View& dx) {
      twice(dy, dx);
    };
    if (c.chain.find("twice") != std::string::npos)
      c.request.opaque["twice"] = {.forward = forward, .backward = backward};
    hash_all_ways("random-chains", c, number++ % 4 == 0, report, sample);
  }
}

}  // namespace tenon::test
