// Allocates the memory of plans, and runs ops one by one.
#include "support/session.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "backend/cuda/driver.h"
#include "lower/alone.h"
#include "tenon/error.h"
#include "tenon/tenon.hpp"

namespace tenon::support {

namespace {

constexpr std::align_val_t kAlignment{64};

// Memory that the host accesses. CUDA kernels can access it (slowly) if it is pinned.
std::shared_ptr<void> allocate(std::string_view what, int64_t bytes, Device device) {
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  if (device == Device::cuda) {
    auto pinned = std::make_shared<cuda::PinnedBuffer>(size);
    return {pinned, pinned->data()};
  }
  try {
    return {::operator new(size, kAlignment), [](void* p) { ::operator delete(p, kAlignment); }};
  } catch (const std::bad_alloc&) {
    fail(Code::runtime, "there is no memory for ", what, ", ", bytes,
         " bytes; give fewer rows or smaller ops");
  }
}

// The dtype of the codes that the multiplier in a buffer is for. The codes of an output have
// another name than their scale.
DType format_scaled_by(const PlanData& d, int buffer) {
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const PlanStep& s : d.steps(pass))
      for (const Encoder& e : s.step.encoders)
        if (info(e.format.scaling).scale_given && s.in[e.scale].buffer == buffer)
          return e.format.dtype;
  return DType::e4m3;  // no step encodes with it
}

}  // namespace

void* Runner::at(std::string_view name) const {
  void* const found = find(name);
  require(found != nullptr, "the chain has no tensor '", name, "'");
  return found;
}

Session::Session(Plan plan, int64_t rows)
    : plan_(std::move(plan)),
      rows_(rows),
      workspace_(allocate("the workspace", plan_.workspace_bytes(rows), device())) {
  constexpr size_t kHistory = 16;
  plan_.check_rows(rows);
  const std::vector<Buffer>& buffers = plan_.buffers();
  for (size_t i = 0; i < buffers.size(); ++i) {
    const Buffer& b = buffers[i];
    const bool own = b.role != Role::workspace;
    memory_.push_back(own ? allocate(b.name, b.bytes(rows), device()) : nullptr);
    addresses_.push_back(memory_.back().get());
    numbers_.emplace(b.name, i);
    if (own) std::memset(addresses_.back(), 0, static_cast<size_t>(b.bytes(rows)));
  }
  for (size_t i = 0; i < buffers.size(); ++i) addresses_[i] = addresses_[plan_.owner(i)];
  for (const auto& [name, number] : numbers_) {
    constexpr std::string_view kScale = ".scale";
    if (buffers[number].role != Role::state || !name.ends_with(kScale)) continue;
    const std::string of = name.substr(0, name.size() - kScale.size());
    Delayed d{.amax = static_cast<float*>(at(of + ".amax")),
              .scale = static_cast<float*>(at(name)),
              .history = std::vector<float>(kHistory)};
    *d.scale = 1;
    d.dtype = format_scaled_by(data_of(plan_), static_cast<int>(number));
    delayed_.push_back(std::move(d));
  }
}

void Session::run(Pass pass, bool weights_changed) {
  plan_.run(pass, rows_, addresses_, workspace_.get(), {.weights_changed = weights_changed});
  if (device() != Device::cuda) return;
  const cuda::CurrentContext context;
  cuda::check(cuda::driver().context_synchronize(), "waiting for a plan");
}

Device Session::device() const { return data_of(plan_).request.options.device; }

void* Session::find(std::string_view name) const {
  const auto it = numbers_.find(name);
  return it == numbers_.end() ? nullptr : addresses_[it->second];
}

void Session::lend(std::string_view name, void* memory) {
  const auto it = numbers_.find(name);
  require(it != numbers_.end(), "the chain has no tensor '", name, "'");
  for (size_t i = 0; i < addresses_.size(); ++i)
    if (plan_.owner(i) == plan_.owner(it->second)) addresses_[i] = memory;
  memory_[it->second].reset();
}

const Buffer& Session::buffer(std::string_view name) const {
  return plan_.buffers()[numbers_.find(name)->second];
}

void Session::update_scales() {
  for (Delayed& d : delayed_) {
    d.history[0] = *d.amax;
    const auto length = static_cast<int64_t>(d.history.size());
    update({.history = matrix(d.history.data(), DType::f32, length, 1),
            .scale = matrix(d.scale, DType::f32, 1, 1),
            .dtype = d.dtype});
    *d.amax = d.history[0];
  }
}

Unfused::Unfused(const Chain& chain, PlanRequest request, int64_t rows) {
  std::map<std::string, void*> channels;
  std::vector<std::string> given(chain.size()), made(chain.size());  // extra tensors of the caller
  size_t extras = 0, extra_outs = 0;
  OpsAlone alone(chain, request);
  int64_t cols = request.cols;
  for (size_t i = 0; i < chain.size(); ++i) {
    auto [op, own] = alone.next(cols);
    if (op.label.empty()) op.label = str(op.name, i);  // parameter names as in the chain
    One& one = ops_.emplace_back();
    one.session = std::make_unique<Session>(Plan::build(std::span(&op, 1), own), rows);
    Session& s = *one.session;
    if (i > 0) s.lend("x", ops_[i - 1].session->at("y"));
    if (s.find("extra0") && chain[i].reads.empty())
      extras_[given[i] = str("extra", extras++)] = s.at("extra0");
    else if (s.find("extra0"))
      s.lend("extra0", channels.at(chain[i].reads[0]));
    if (s.find("extra_out0") && chain[i].writes.empty())
      extras_[made[i] = str("extra_out", extra_outs++)] = s.at("extra_out0");
    else if (s.find("extra_out0"))
      channels[chain[i].writes[0]] = s.at("extra_out0");
    const Buffer& y = s.buffer("y");
    rows = y.rows(rows);
    cols = y.cols;
  }
  if (request.backward) connect_backward(chain, request, given, made);
}

// From the last op to the first: a gradient may be dy itself, so the memory of dy comes first.
void Unfused::connect_backward(const Chain& chain, PlanRequest request,
                               const std::vector<std::string>& given,
                               const std::vector<std::string>& made) {
  request = {.dtype = request.dtype, .backward = false, .options = request.options};
  std::map<std::string, std::vector<void*>> gradients;  // of channels, last reader first
  for (size_t i = chain.size(); i-- > 0;) {
    One& one = ops_[i];
    Session& s = *one.session;
    if (i + 1 < chain.size()) s.lend("dy", ops_[i + 1].session->at("dx"));
    if (!made[i].empty()) extras_["d" + made[i]] = s.at("dextra_out0");
    if (!chain[i].writes.empty()) {
      const std::vector<void*>& all = gradients.at(chain[i].writes[0]);
      void* sum = all[0];
      for (size_t k = 1; k < all.size(); ++k) {
        request.cols = s.buffer("y").cols;
        Session& add = one.sums.emplace_back(Plan::build("add", request), s.rows());
        add.lend("x", sum);
        add.lend("extra0", all[k]);
        sum = add.at("y");
      }
      s.lend("dextra_out0", sum);
    }
    if (!given[i].empty()) extras_["d" + given[i]] = s.at("dextra0");
    if (!chain[i].reads.empty()) gradients[chain[i].reads[0]].push_back(s.at("dextra0"));
  }
}

void Unfused::run(Pass pass, bool weights_changed) {
  if (pass == Pass::forward) {
    for (One& one : ops_) {
      if (void* const state = one.session->find("rng")) {
        std::memcpy(state, random_.data(), sizeof random_);
        ++random_[1];
      }
      one.session->run(pass, weights_changed);
    }
    return;
  }
  for (size_t i = ops_.size(); i-- > 0;) {
    for (Session& s : ops_[i].sums) s.run(Pass::forward);
    ops_[i].session->run(pass, weights_changed);
  }
}

void* Unfused::find(std::string_view name) const {
  if (name == "rng") return random_.data();
  if (name == "x" || name == "dx") return ops_.front().session->find(name);
  if (name == "y" || name == "dy") return ops_.back().session->find(name);
  if (const auto it = extras_.find(name); it != extras_.end()) return it->second;
  if (name.find('.') == std::string_view::npos) return nullptr;
  for (const One& one : ops_)
    if (void* const found = one.session->find(name)) return found;
  return nullptr;
}

void Unfused::update_scales() {
  for (One& one : ops_) one.session->update_scales();
}

}  // namespace tenon::support
