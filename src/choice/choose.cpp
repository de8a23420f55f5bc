// Tries the makers in order, and caches kernels.
#include "choice/choose.h"

#include <algorithm>
#include <optional>

#include "choice/backends.h"
#include "core/fp_mode.h"
#include "core/memo.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr size_t kMaxKernels = 4096;  // a kernel holds a few kilobytes

Memo<Chosen>& kernels() {
  // Never freed: other threads may outlive static objects.
  static auto& made = *new Memo<Chosen>(kMaxKernels);
  return made;
}

size_t aligned(size_t bytes) {
  return static_cast<size_t>(rup(static_cast<int64_t>(bytes), kWorkspaceLine));
}

Way way_of(const Maker& maker, Attempt attempt, const Target& target) {
  Way way{.maker = maker.name};
  if (auto* kernel = std::get_if<std::shared_ptr<const Kernel>>(&attempt)) {
    way.kernel = std::move(*kernel);
    way.least_rows = way.kernel->least_rows();
    way.fits_all = way.kernel->fits_all();
  } else if (auto* split = std::get_if<Split>(&attempt)) {
    Chosen first = kernel_for(split->first, target);
    Chosen second = kernel_for(split->second, target);
    way.halves = std::make_shared<const Way::Halves>(
        Way::Halves{std::move(*split), std::move(first.kernel), std::move(second.kernel)});
  }
  return way;
}

Chosen make(const Step& step, const Target& target) {
  const Backend& backend = backend_for(target.device);
  std::vector<Way> ways;
  std::vector<Choice::Refused> refused;
  size_t before = 0;  // refusals before the first way
  for (const Maker& maker : backend.makers) {
    Attempt attempt = maker.make(step, target);
    // A Split counts as a refusal if all makers refuse one of its steps.
    std::optional<Way> way;
    if (!std::holds_alternative<Refusal>(attempt)) try {
        way = way_of(maker, std::move(attempt), target);
      } catch (const Error& e) {
        if (e.code() != Code::unsupported) throw;
        attempt = Refusal{e.what()};
      }
    if (!way) {
      Refusal& refusal = std::get<Refusal>(attempt);
      // Two makers of one name may give the same reason. It is kept once.
      const bool again = !refused.empty() && refused.back().maker == maker.name &&
                         refused.back().refusal.why == refusal.why;
      if (!again) refused.push_back({maker.name, std::move(refusal)});
      if (ways.empty()) before = refused.size();
      continue;
    }
    ways.push_back(*std::move(way));
    if (ways.back().fits_all && ways.back().least_rows == 0) {
      refused.resize(before);  // later refusals matter only if no way takes every call
      const std::string_view name = ways.front().maker;
      return {std::make_shared<const Choice>(step, backend, std::move(ways), std::move(refused)),
              name};
    }
  }
  std::string reasons;
  for (const Choice::Refused& r : refused)
    if (!r.refusal.silent)
      reasons += str(reasons.empty() ? "" : "; ", r.maker, ": ", r.refusal.why);
  fail(Code::unsupported, step.name, " on ", backend.name, ": ", reasons,
       ". Run it on the cpu device");
}

}  // namespace

size_t Way::Halves::buffer_bytes(int64_t rows) const {
  const int64_t elements = split.count * split.stride * between(rows);
  return aligned(static_cast<size_t>(elements * info(split.dtype).bytes));
}

void Choice::each_half(const Way::Halves& halves, const RunArgs& call, const Half& f) const {
  const Split& split = halves.split;
  const int64_t rows = halves.between(call.rows);
  std::vector<View> in(call.in.begin(), call.in.end()), out(call.out.begin(), call.out.end());
  in.resize(std::max<size_t>(in.size(), split.in + split.count));
  out.resize(std::max<size_t>(out.size(), split.out + split.count));
  auto* const memory = static_cast<std::byte*>(call.workspace);
  const int64_t bytes = rows * split.stride * info(split.dtype).bytes;
  for (uint32_t i = 0; i < split.count; ++i)
    in[split.in + i] = out[split.out + i] =
        matrix(memory ? memory + i * bytes : nullptr, split.dtype, rows, split.stride);
  RunArgs args = call;
  args.in = in;
  args.out = out;
  if (memory) args.workspace = memory + halves.buffer_bytes(call.rows);
  args.rows = halves.rows(split.first, call.rows);
  f(*halves.first, args);
  args.rows = halves.rows(split.second, call.rows);
  f(*halves.second, args);
}

void Choice::each(const RunArgs& call, const Part& f) const {
  const Way& w = way(call);
  if (w.kernel)
    f(w.kernel->computes() ? *w.kernel->computes() : step_, *w.kernel, call);
  else
    each_half(*w.halves, call,
              [&](const Choice& half, const RunArgs& args) { half.each(args, f); });
}

size_t Choice::workspace_for(const RunArgs& call) const {
  const Way& w = way(call);
  if (w.kernel) return w.kernel->workspace(call.rows);
  size_t after = 0;
  each_half(*w.halves, call, [&](const Choice& half, const RunArgs& args) {
    after = std::max(after, half.workspace_for(args));
  });
  return w.halves->buffer_bytes(call.rows) + after;
}

size_t Choice::workspace(int64_t rows) const {
  size_t most = 0;
  for (const Way& w : ways_) {
    if (w.kernel) {
      most = std::max(most, w.kernel->workspace(rows));
      continue;
    }
    const Way::Halves& h = *w.halves;
    const size_t after = std::max(h.first->workspace(h.rows(h.split.first, rows)),
                                  h.second->workspace(h.rows(h.split.second, rows)));
    most = std::max(most, h.buffer_bytes(rows) + after);
  }
  return most;
}

void Choice::prepare() const {
  const Way& w = ways_.front();
  if (w.kernel) return w.kernel->prepare();
  w.halves->first->prepare();
  w.halves->second->prepare();
}

void Choice::prepare_for(const RunArgs& call) const {
  each(call, [](const Step&, const Kernel& k, const RunArgs& args) { k.prepare_for(args); });
}

std::vector<std::string> Choice::texts() const {
  std::vector<std::string> all;
  const auto add = [&](const Kernel& k) {
    for (std::string& text : k.texts())
      if (std::ranges::find(all, text) == all.end()) all.push_back(std::move(text));
  };
  for (const Way& w : ways_) {
    if (w.kernel) {
      add(*w.kernel);
    } else {
      add(*w.halves->first);
      add(*w.halves->second);
    }
  }
  return all;
}

std::vector<std::string> Choice::texts_for(const RunArgs& call) const {
  std::vector<std::string> all;
  each(call, [&](const Step&, const Kernel& k, const RunArgs& args) {
    for (std::string& text : k.texts_for(args)) all.push_back(std::move(text));
  });
  return all;
}

void Choice::run(const RunArgs& call) const {
  const Way& w = way(call);
  if (w.kernel) return w.kernel->run(call);
  const auto go = [](const Choice& half, const RunArgs& args) { half.run(args); };
  if (call.workspace) return each_half(*w.halves, call, go);
  RunArgs args = call;
  args.workspace = backend_.take(workspace(call.rows), call.stream);
  try {
    each_half(*w.halves, args, go);
  } catch (...) {
    backend_.give(args.workspace, call.stream);
    throw;
  }
  backend_.give(args.workspace, call.stream);
}

Chosen kernel_for(const Step& step, const Target& target) {
  const FpMode ieee;  // makers fold constants
  const std::string key = str(reinterpret_cast<uintptr_t>(&target), " ", step.key());
  if (std::optional<Chosen> found = kernels().find(key)) return *std::move(found);
  return kernels().keep(key, make(step, target));
}

Chosen kernel_for(const Step& step, Device device) {
  return kernel_for(step, backend_for(device).here());
}

}  // namespace tenon
