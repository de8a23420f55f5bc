// Computes the memory sizes of a plan and runs it.
#include <algorithm>
#include <array>
#include <limits>

#include "choice/backends.h"
#include "core/fp_mode.h"
#include "lower/data.h"
#include "runtime/execute.h"
#include "runtime/views.h"
#include "tenon/error.h"

namespace tenon {

namespace {

constexpr int64_t kSlotAlignment = kAligned;

// Workspace of the device's kernels. CPU kernels allocate their own memory.
int64_t kernel_bytes(const PlanData& d, const WorkspaceKey& key) {
  const int64_t rows = key.rows;
  if (d.request.options.device == Device::cpu) return 0;
  size_t most = 0;
  std::vector<View> in, out;
  for (const PlanStep& s : d.steps(key.pass)) {
    if (!s.chosen.kernel) continue;
    if (!key.aligned) {
      most = std::max(most, s.chosen.kernel->workspace(s.rows(rows)));
      continue;
    }
    // Addresses with a larger alignment than required, or outputs in place of inputs, may select
    // other kernels.
    for (int64_t alignment = kCallAligned; alignment <= kAligned; alignment *= 2)
      for (const bool apart : {true, false})
        most = std::max(most, s.chosen.kernel->workspace_for(
                                  imagined_call(d, s, rows, alignment, apart, in, out)));
  }
  return static_cast<int64_t>(most);
}

Workspace make_workspace(const PlanData& d, const WorkspaceKey& key) {
  std::vector<int64_t> size(static_cast<size_t>(d.slots), 0);
  for (size_t b = 0; b < d.buffers.size() && !key.separate; ++b) {
    const int slot = d.slot_of[b];
    const bool used = slot != kNoBuffer && (slot < d.forward_slots) == (key.pass == Pass::forward);
    if (!used || (key.overwrite_saved && d.saved_for[b] != kNoBuffer)) continue;
    int64_t& s = size[static_cast<size_t>(slot)];
    s = std::max(s, rup(d.buffers[b].bytes(key.rows), kSlotAlignment));
  }
  Workspace p;
  for (const int64_t s : size) {
    p.slots.push_back(p.kernels);
    p.kernels += s;
  }
  const int64_t more = kernel_bytes(d, key);
  if (more > 0) p.kernels = rup(p.kernels, kWorkspaceLine);
  p.bytes = p.kernels + more;
  return p;
}

WorkspaceKey key_of(Pass pass, int64_t rows, const PlanRun& how) {
  return {pass, rows, how.overwrite_saved && pass == Pass::backward, how.aligned, how.separate};
}

// Cached: kernels take time to compute the size of their workspace.
std::shared_ptr<const Workspace> workspace_of(const PlanData& d, const WorkspaceKey& key) {
  constexpr size_t kMost = 64;
  // A small plan on the CPU has no workspace, so it needs no lock.
  static const auto& kNone = *new std::shared_ptr<const Workspace>(new Workspace);
  if (d.slots == 0 && d.request.options.device == Device::cpu) return kNone;
  {
    const std::lock_guard lock(d.known->lock);
    if (const auto found = d.known->workspaces.find(key); found != d.known->workspaces.end())
      return found->second;
  }
  auto made = std::make_shared<const Workspace>(make_workspace(d, key));
  const std::lock_guard lock(d.known->lock);
  if (d.known->workspaces.size() >= kMost) d.known->workspaces.clear();
  d.known->workspaces.emplace(key, made);
  return made;
}

void check_pass(const PlanData& d, Pass pass) {
  require(pass == Pass::forward || d.has_backward, "plan: it has no backward pass, since ",
          d.request.backward ? "no gradient is wanted; ask for one"
                             : "it was planned for the forward pass alone; plan both");
}

[[noreturn]] void too_large(const Buffer& b, int64_t rows) {
  fail(Code::invalid_argument, "plan: with '", b.name, "' of ", b.cols,
       " columns its tensors have more than ", kMostBytes,
       " bytes, the most that a plan may have, ",
       rows ? str("at ", rows, " rows; give fewer rows or columns")
            : "without any rows; give fewer columns");
}

}  // namespace

int64_t Buffer::bytes(int64_t call_rows) const {
  const int64_t one = random ? static_cast<int64_t>(sizeof(uint64_t)) : info(dtype).bytes;
  std::optional<int64_t> all = product({call_rows, rows.mul}, kMostBytes);
  if (all) all = product({rows(call_rows), cols, one}, kMostBytes);
  if (!all) too_large(*this, call_rows);
  return *all;
}

const std::vector<Buffer>& Plan::buffers() const { return data_->buffers; }

std::vector<size_t> Plan::with(Role role) const {
  std::vector<size_t> list;
  for (size_t i = 0; i < data_->buffers.size(); ++i)
    if (data_->buffers[i].role == role) list.push_back(i);
  return list;
}

int64_t Plan::workspace_bytes(int64_t rows) const {
  const int64_t forward = workspace_bytes(rows, Pass::forward);
  if (!data_->has_backward) return forward;
  return std::max(forward, workspace_bytes(rows, Pass::backward));
}

int64_t Plan::workspace_bytes(int64_t rows, Pass pass, const PlanRun& run) const {
  check_rows(rows);
  check_pass(*data_, pass);
  return workspace_of(*data_, key_of(pass, rows, run))->bytes;
}

int64_t Plan::saved_bytes(int64_t rows) const {
  check_rows(rows);
  int64_t total = 0;
  for (const Buffer& b : data_->buffers)
    if (b.role == Role::saved) total += b.bytes(rows);
  return total;
}

void Plan::check_rows(int64_t rows) const {
  require(rows >= 0, "plan: ", rows, " rows; there must be none or more");
  for (const auto& [op, f] : data_->whole) {
    const std::optional<int64_t> many = product({rows, f.mul}, kMostBytes);
    require(many.has_value(), op, ": of ", rows, " rows it makes ", rows, "*", f.mul, "/", f.div,
            "; the first product must be at most ", kMostBytes, ": give fewer rows");
    require(*many % f.div == 0, op, ": of ", rows, " rows it makes ", rows, "*", f.mul, "/", f.div,
            ", which is not whole: give a multiple of ", f.div);
  }
  int64_t total = 0;
  for (const Buffer& b : data_->buffers)
    if ((total += b.bytes(rows)) > kMostBytes) too_large(b, rows);
  // The operations of a product can exceed the limit even if the bytes of its tensors do not.
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : data_->steps(pass)) {
      const Gemm* const g = s.step.gemm();
      if (!g) continue;
      const int64_t m = s.rows(rows), most = std::numeric_limits<int64_t>::max();
      require(product({s.step.body_rows(m), g->cols, g->inner_for(m), 2}, most).has_value(),
              "plan: ", s.step.name, " has more than ", most, " operations at ", rows,
              " rows; give fewer rows or columns");
    }
}

void Plan::run(Pass pass, int64_t rows, std::span<void* const> memory, void* workspace,
               const PlanRun& how) const {
  const PlanData& d = *data_;
  require(d.request.target.empty(), "plan: it was made for the target '", d.request.target,
          "', to be described; plan without a target to run it here");
  check_rows(rows);
  check_pass(d, pass);
  require(memory.size() == d.buffers.size(), "plan: ", memory.size(), " addresses; it has ",
          d.buffers.size(), " buffers");
  for (size_t b = 0; b < d.buffers.size(); ++b) {
    if (d.same_as[b] == kNoBuffer || !memory[b]) continue;
    const size_t of = owner(b);
    require(memory[b] == memory[of], "plan: '", d.buffers[b].name, "' is '", d.buffers[of].name,
            "' itself; give both the same address, or none for '", d.buffers[b].name, "'");
  }
  for (size_t b = 0; b < d.buffers.size() && how.aligned; ++b)
    require(reinterpret_cast<uintptr_t>(memory[b]) % kCallAligned == 0, "plan: the address of '",
            d.buffers[b].name, "' is not a multiple of ", kCallAligned,
            ", as an aligned run needs; run without `aligned` and with its larger workspace");
  const std::vector<PlanStep>& steps = d.steps(pass);
  const size_t end_step = std::min(how.end_step, steps.size());
  require(how.first_step <= end_step, "plan: the run begins at step ", how.first_step,
          " and ends at step ", how.end_step, "; the pass has ", steps.size());
  const WorkspaceKey key = key_of(pass, rows, how);
  const std::shared_ptr<const Workspace> kept = workspace_of(d, key);
  const Workspace& parts = *kept;
  const int64_t bytes = parts.bytes;
  require(workspace || bytes == 0, "plan: no workspace; it needs ", bytes, " bytes");
  const auto at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(workspace));
  require(d.request.options.device != Device::cuda || at % kWorkspaceAlignment == 0,
          "plan: the workspace is ", at % kWorkspaceAlignment, " bytes beyond a multiple of ",
          kWorkspaceAlignment, "; on cuda it must begin at one");
  const auto address = [&](int buffer) -> void* {
    const auto b = static_cast<size_t>(buffer);
    if (d.slot_of[b] == kNoBuffer || how.separate) return memory[b];
    if (key.overwrite_saved && d.saved_for[b] != kNoBuffer)
      return memory[static_cast<size_t>(d.saved_for[b])];
    return static_cast<char*>(workspace) + parts.slots[static_cast<size_t>(d.slot_of[b])];
  };
  const auto needed = [&](int buffer, const std::string& by) {
    const Buffer& b = d.buffers[static_cast<size_t>(buffer)];
    void* const data = address(buffer);
    require(data || b.bytes(rows) == 0, "plan: no address for '", b.name, "', which ", by,
            " needs");
    return data;
  };
  Options options = d.request.options;
  options.stream = how.stream;
  options.allocate = how.allocate;
  options.user = how.user;
  if (d.rng != kNoBuffer && pass == Pass::forward && how.first_step == 0)
    backend_for(options.device)
        .draw(static_cast<uint64_t*>(needed(d.rng, "dropout")),
              static_cast<uint64_t*>(needed(d.saved_rng, "dropout")),
              static_cast<uint64_t>(d.dropouts), how.stream);
  std::vector<View> in, out;
  for (const PlanStep& s : std::span(steps).subspan(how.first_step, end_step - how.first_step)) {
    if (s.weights && !how.weights_changed) continue;
    const auto given = [&](int buffer) { return needed(buffer, s.step.name); };
    fill(d, s.in, rows, given, in);
    fill(d, s.out, rows, given, out);
    RunArgs args{.rows = s.rows(rows), .in = in, .out = out, .parameters = s.parameters};
    if (s.random != kNoBuffer)
      args.random = static_cast<const uint64_t*>(needed(s.random, s.step.name));
    args.stream = how.stream;
    args.tune = how.tune;
    if (workspace) args.workspace = static_cast<char*>(workspace) + parts.kernels;
    if (s.opaque)
      s.opaque(args);
    else
      execute(s.step, s.chosen, args, options);
  }
}

}  // namespace tenon
