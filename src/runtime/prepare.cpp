// Runs each step of a plan once on scratch memory, so that later runs compile and time nothing.
#include <algorithm>

#include "choice/backends.h"
#include "runtime/execute.h"
#include "runtime/views.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// The places of the buffers of one step in the scratch memory, then of its workspace.
class Places {
 public:
  Places(const PlanData& d, const PlanStep& s, int64_t rows) {
    for (const auto* list : {&s.in, &s.out})
      for (const BufferView& v : *list) add(d, v.buffer, rows);
    add(d, s.random, rows);
    workspace_ = bytes_;
    // CPU steps take scratch memory of their thread.
    if (d.request.options.device != Device::cpu)
      bytes_ += static_cast<int64_t>(s.chosen.kernel->workspace(s.rows(rows)));
  }

  [[nodiscard]] int64_t workspace() const { return workspace_; }
  [[nodiscard]] int64_t bytes() const { return bytes_; }
  [[nodiscard]] int64_t at(int buffer) const {
    return std::ranges::find(list_, buffer, &Place::buffer)->at;
  }

 private:
  struct Place {
    int buffer;
    int64_t at;
  };
  void add(const PlanData& d, int buffer, int64_t rows) {
    if (buffer == kNoBuffer || std::ranges::find(list_, buffer, &Place::buffer) != list_.end())
      return;
    list_.push_back({buffer, bytes_});
    bytes_ += rup(d.buffers[static_cast<size_t>(buffer)].bytes(rows), kAligned);
  }

  std::vector<Place> list_;
  int64_t workspace_ = 0, bytes_ = 0;
};

// The bytes from an address to the next multiple of kAligned.
int64_t padding(const void* memory) {
  const auto at = static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory));
  return rup(at, kAligned) - at;
}

template <class F>
void for_steps(const PlanData& d, int64_t rows, const F& f) {
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : d.steps(pass))
      if (!s.opaque) f(s, Places(d, s, rows));
}

constexpr int64_t kRandomBytes = 2 * kAligned;  // a state, and what is drawn from it

}  // namespace

int64_t Plan::prepare_bytes(int64_t rows) const {
  check_rows(rows);
  int64_t most = data_->rng == kNoBuffer ? 0 : kRandomBytes;
  for_steps(*data_, rows,
            [&](const PlanStep&, const Places& p) { most = std::max(most, p.bytes()); });
  return most;
}

void Plan::prepare(int64_t rows, void* memory, void* stream) const {
  const PlanData& d = *data_;
  require(d.request.target.empty(), "plan: it was made for the target '", d.request.target,
          "', to be described; plan without a target to prepare runs here");
  const auto size = static_cast<size_t>(prepare_bytes(rows));
  if (size == 0) return;
  const Backend& backend = backend_for(d.request.options.device);
  require(padding(memory) == 0, "plan: the memory for prepare is ", padding(memory),
          " bytes before a multiple of ", kAligned, "; it must begin at one");
  struct Lent {
    const Backend& backend;
    void* memory;
    void* stream;
    bool own;
    ~Lent() {
      if (own) backend.give(memory, stream);
    }
  };
  // The backend's memory may be less aligned.
  const Lent lent{backend, memory ? memory : backend.take(size + kAligned, stream), stream,
                  !memory};
  if (!lent.memory && d.request.options.device == Device::null) return;  // it runs nothing
  require(lent.memory, "plan: no memory for prepare, which needs ", size, " bytes; free some");
  auto* const begin = static_cast<std::byte*>(lent.memory) + padding(lent.memory);
  backend.fill(begin, size, stream);
  if (d.rng != kNoBuffer)
    backend.draw(reinterpret_cast<uint64_t*>(begin), reinterpret_cast<uint64_t*>(begin + kAligned),
                 0, stream);
  Options options = d.request.options;
  options.stream = stream;
  std::vector<View> in, out;
  for_steps(d, rows, [&](const PlanStep& s, const Places& places) {
    backend.fill(begin, size, stream);  // the time of a product depends on its numbers
    const auto address = [&](int buffer) -> void* { return begin + places.at(buffer); };
    fill(d, s.in, rows, address, in);
    fill(d, s.out, rows, address, out);
    RunArgs args{
        .rows = s.rows(rows), .in = in, .out = out, .parameters = s.parameters, .scratch = true};
    if (s.random != kNoBuffer) args.random = static_cast<const uint64_t*>(address(s.random));
    args.workspace = begin + places.workspace();
    execute(s.step, s.chosen, args, options);
  });
}

}  // namespace tenon
