// Lowers ops that run outside the library's kernels: opaque ops of the caller, and collectives.
#include <array>
#include <utility>

#include "lower/stage.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// Calls f. Puts the op's name in front of the message of an error that f throws.
template <class F>
void guarded(const std::string& name, F f) {
  try {
    f();
  } catch (const Error& e) {
    fail(e.code(), name, ": ", e.what());
  } catch (const std::exception& e) {
    fail(Code::runtime, name, ": ", e.what());
  } catch (...) {
    fail(Code::runtime, name, ": it threw something that is no std::exception");
  }
}

// Such an op reads and writes whole plain tensors, so it ends the open step.
class OutsideStage : public Stage {
 protected:
  using Body = std::function<void(const RunArgs&)>;

  OutsideStage(Planner& planner, OpState& op, std::string_view maker)
      : Stage(planner, op), maker_(maker) {
    planner_.data().whole.push_back({op.name, op.out_rows});
  }

  // The value in memory, named after the op.
  const StoredTensor& taken(Flow& flow, const char* what) {
    return flow.materialise(op_.name + what, Role::workspace, Operand(planner_.request().dtype));
  }

  // Adds the step that computes the value.
  void given(Flow& flow, Pass pass, const std::vector<const StoredTensor*>& in, Body body) {
    const bool forward = pass == Pass::forward;
    const StoredTensor& out = planner_.tensor(
        op_.name + (forward ? ".out" : ".dx"), Role::workspace, Operand(planner_.request().dtype),
        forward ? op_.out_cols : op_.cols, forward ? op_.out_rows : op_.rows);
    PlanStep s;
    s.step.name = op_.name + (forward ? "" : ".bwd");
    s.step.graph = std::make_shared<Graph>();
    s.step.cols = out.cols;
    s.chosen.maker = maker_;
    s.rows = op_.rows;
    s.ops = {op_.index};
    for (const StoredTensor* p : in) s.in.push_back(data_view(*p));
    s.out = {data_view(out)};
    s.writes = {{out.name, out.operand}};
    s.opaque = [name = op_.name, body = std::move(body)](const RunArgs& args) {
      guarded(name, [&] { body(args); });
    };
    planner_.steps(pass).push_back(std::move(s));
    flow.begin(out);
  }

 private:
  std::string_view maker_;
};

class OpaqueStage final : public OutsideStage {
 public:
  OpaqueStage(Planner& planner, OpState& op, const OpaqueOp& own)
      : OutsideStage(planner, op, "opaque"), own_(own) {}
  // An opaque op may have parameters that the library does not know. Its backward pass always runs.
  [[nodiscard]] bool trains() const override { return static_cast<bool>(own_.backward); }

  void forward(Flow& flow) override {
    x_ = &taken(flow, ".in");
    given(flow, Pass::forward, {x_},
          [own = own_](const RunArgs& a) { own.forward(a.rows, a.in[0], a.out[0]); });
  }

  void backward(Flow& flow, bool) override {
    require(static_cast<bool>(own_.backward), op_.name,
            ": it has no backward; give one, or plan the forward pass alone");
    const StoredTensor& dy = taken(flow, ".dy");
    given(flow, Pass::backward, {x_, &dy},
          [own = own_](const RunArgs& a) { own.backward(a.rows, a.in[0], a.in[1], a.out[0]); });
  }

 private:
  OpaqueOp own_;
  const StoredTensor* x_ = nullptr;
};

using Exchange = void (Collectives::*)(const View& in, const View& out, void* stream);

// Indexed by Exchanged::Kind.
constexpr std::array<Exchange, 4> kExchanges{
    nullptr, &Collectives::all_reduce, &Collectives::all_gather, &Collectives::reduce_scatter};

class ExchangedStage final : public OutsideStage {
 public:
  ExchangedStage(Planner& planner, OpState& op, const Exchanged& e)
      : OutsideStage(planner, op, "collective"), e_(e) {}

  void forward(Flow& flow) override { exchange(flow, Pass::forward, ".in", e_.forward); }
  void backward(Flow& flow, bool needs_input) override {
    if (needs_input) exchange(flow, Pass::backward, ".dy", e_.backward);
  }

 private:
  void exchange(Flow& flow, Pass pass, const char* what, Exchanged::Kind kind) {
    const Exchange f = kExchanges[static_cast<size_t>(kind)];
    if (!f) return;
    const StoredTensor& in = taken(flow, what);
    given(flow, pass, {&in}, [group = planner_.request().collectives, f](const RunArgs& a) {
      (*group.*f)(a.in[0], a.out[0], a.stream);
    });
  }
  Exchanged e_;
};

}  // namespace

std::unique_ptr<Stage> make_stage(Planner& planner, OpState& op, const Exchanged& e) {
  return std::make_unique<ExchangedStage>(planner, op, e);
}

std::unique_ptr<Stage> make_opaque(Planner& planner, OpState& op, const OpaqueOp& own) {
  require(static_cast<bool>(own.forward), op.name, ": it has no forward; give one");
  return std::make_unique<OpaqueStage>(planner, op, own);
}

}  // namespace tenon
