// Ops that run outside of our kernels: the caller's own, and exchanges among ranks.
#include <utility>

#include "lower/stage_parts.h"
#include "tenon/error.h"

namespace tenon {

namespace {

// What is thrown inside, with the op's name before it.
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

// Reads and writes whole plain tensors, so it cuts the chain.
class Outside : public Stage {
 public:
  [[nodiscard]] int64_t out_cols() const override { return after_cols_; }
  [[nodiscard]] Factor out_rows() const override { return after_; }

 protected:
  using Body = std::function<void(const RunArgs&)>;

  Outside(const StageContext& c, std::string_view maker, int64_t cols, Factor rows)
      : Stage(c),
        planner_(c.planner),
        name_(c.planner.op_name(c.index)),
        maker_(maker),
        after_cols_(cols),
        after_(rows) {
    planner_.data().whole.push_back({name_, rows});
  }

  // The value in memory, under the op's name.
  const Place& taken(Flow& flow, const char* what) {
    return flow.materialise(name_ + what, Role::workspace, Operand(planner_.request().dtype));
  }

  // A step that makes the value.
  void given(Flow& flow, Pass pass, const std::vector<const Place*>& in, Body body) {
    const bool forward = pass == Pass::forward;
    const Place& out = planner_.place(name_ + (forward ? ".out" : ".dx"), Role::workspace,
                                      Operand(planner_.request().dtype),
                                      forward ? after_cols_ : cols_, forward ? after_ : rows_);
    const auto slot = [](const Place& p) {
      return Slot{Slot::Form::data,     p.row_data, p.operand.format,
                  Orientation::rowwise, p.cols,     p.rows};
    };
    PlanStep s;
    s.step.name = name_ + (forward ? "" : ".bwd");
    s.step.graph = std::make_shared<Graph>();
    s.step.cols = out.cols;
    s.chosen.maker = maker_;
    s.rows = rows_;
    s.ops = {index_};
    for (const Place* p : in) {
      s.in.push_back(slot(*p));
      s.reads.push_back(p->name);
    }
    s.out = {slot(out)};
    s.writes = {{out.name, out.operand}};
    s.opaque = [name = name_, body = std::move(body)](const RunArgs& args) {
      guarded(name, [&] { body(args); });
    };
    planner_.steps(pass).push_back(std::move(s));
    flow.begin(out);
  }

  Planner& planner_;
  std::string name_;

 private:
  std::string_view maker_;
  int64_t after_cols_;
  Factor after_;
};

class Opaque final : public Outside {
 public:
  Opaque(const StageContext& c, const OpaqueOp& op)
      : Outside(c, "opaque", op.cols ? op.cols : c.cols,
                c.rows.times(op.rows_mul, op.rows_div, c.planner.op_name(c.index))),
        op_(op) {}
  // Whether it has parameters of its own is not known, so its backward always runs.
  [[nodiscard]] bool trains() const override { return static_cast<bool>(op_.backward); }

  void forward(Flow& flow) override {
    x_ = &taken(flow, ".in");
    given(flow, Pass::forward, {x_},
          [op = op_](const RunArgs& a) { op.forward(a.rows, a.in[0], a.out[0]); });
  }

  void backward(Flow& flow, bool) override {
    require(static_cast<bool>(op_.backward), name_,
            ": it has no backward; give one, or plan the forward pass alone");
    const Place& dy = taken(flow, ".dy");
    given(flow, Pass::backward, {x_, &dy},
          [op = op_](const RunArgs& a) { op.backward(a.rows, a.in[0], a.in[1], a.out[0]); });
  }

 private:
  OpaqueOp op_;
  const Place* x_ = nullptr;
};

using Exchange = void (Collectives::*)(const View& in, const View& out, void* stream);

// Of one rank it is the value itself, which stays lazy.
class Collective final : public Outside {
 public:
  Collective(const StageContext& c, Exchange forward, Exchange backward, Factor rows)
      : Outside(c, "collective", c.cols, rows),
        one_(ranks(c) == 1),
        forward_(forward),
        backward_(backward) {}

  void forward(Flow& flow) override { exchange(flow, Pass::forward, ".in", forward_); }
  void backward(Flow& flow, bool needs_input) override {
    if (needs_input) exchange(flow, Pass::backward, ".dy", backward_);
  }
  // How many ranks there are.
  static int64_t ranks(const StageContext& c) {
    const auto& group = c.planner.request().collectives;
    if (!group) return 1;
    const int64_t n = group->ranks();
    require(n > 0, c.planner.op_name(c.index), ": its group has ", n, " ranks; it needs one");
    return n;
  }

 private:
  void exchange(Flow& flow, Pass pass, const char* what, Exchange f) {
    if (one_ || !f) return;
    const Place& in = taken(flow, what);
    given(flow, pass, {&in}, [group = planner_.request().collectives, f](const RunArgs& a) {
      (*group.*f)(a.in[0], a.out[0], a.stream);
    });
  }
  bool one_;
  Exchange forward_, backward_;
};

}  // namespace

std::unique_ptr<Stage> make_opaque(const StageContext& c, const OpaqueOp& op) {
  const std::string who = c.planner.op_name(c.index);
  require(op.rows_mul > 0 && op.rows_div > 0, who, ": the row factor is ", op.rows_mul, "/",
          op.rows_div, "; both must be positive");
  require(op.cols >= 0 && op.cols <= kMostCols, who, ": cols is ", op.cols,
          "; it must be from 0, which keeps those of its input, to ", kMostCols);
  require(static_cast<bool>(op.forward), who, ": it has no forward; give one");
  return std::make_unique<Opaque>(c, op);
}

// What follows a sum over ranks is the same on all of them, and so is its gradient: that of one
// rank's summand is the sum's own.
std::unique_ptr<Stage> make_all_reduce(const StageContext& c, const Arguments&) {
  return std::make_unique<Collective>(c, &Collectives::all_reduce, nullptr, c.rows);
}
std::unique_ptr<Stage> make_all_gather(const StageContext& c, const Arguments&) {
  return std::make_unique<Collective>(
      c, &Collectives::all_gather, &Collectives::reduce_scatter,
      c.rows.times(Collective::ranks(c), 1, c.planner.op_name(c.index)));
}
std::unique_ptr<Stage> make_reduce_scatter(const StageContext& c, const Arguments&) {
  return std::make_unique<Collective>(
      c, &Collectives::reduce_scatter, &Collectives::all_gather,
      c.rows.times(1, Collective::ranks(c), c.planner.op_name(c.index)));
}

}  // namespace tenon
