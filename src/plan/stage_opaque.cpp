// Ops of the caller's own.
#include "plan/stage_parts.h"
#include "tenon/error.h"

namespace tenon {

namespace {

class Opaque final : public Stage {
 public:
  Opaque(const StageContext& c, const OpaqueOp& op)
      : Stage(c), planner_(c.planner), op_(op), out_(op.cols ? op.cols : c.cols) {
    require(op.rows_mul > 0 && op.rows_div > 0, c.planner.op_name(c.index), ": the row factor is ",
            op.rows_mul, "/", op.rows_div, "; both must be positive");
    after_ = {c.rows.mul * op.rows_mul, c.rows.div * op.rows_div};
    planner_.data().factors.push_back(after_);
  }
  [[nodiscard]] int64_t out_cols() const override { return out_; }
  [[nodiscard]] Factor out_rows() const override { return after_; }
  // Whether it has parameters of its own is not known, so its backward always runs.
  [[nodiscard]] bool trains() const override { return static_cast<bool>(op_.backward); }

  void forward(Flow& flow) override {
    const Operand plain(planner_.request().dtype);
    const std::string name = planner_.op_name(index_);
    x_ = &flow.materialise(name + ".in", Role::workspace, plain);
    const Place& y = planner_.place(name + ".out", Role::workspace, plain, out_, after_);
    step(Pass::forward, {x_}, y, [op = op_, name](int64_t rows, auto in, auto out) {
      guarded(name, [&] { op.forward(rows, in[0], out[0]); });
    });
    flow.begin(y);
  }

  void backward(Flow& flow, bool) override {
    const Operand plain(planner_.request().dtype);
    const std::string name = planner_.op_name(index_);
    require(static_cast<bool>(op_.backward), name,
            ": it has no backward; give one, or plan the forward pass alone");
    const Place& dy = flow.materialise(name + ".dy", Role::workspace, plain);
    const Place& dx = planner_.place(name + ".dx", Role::workspace, plain, cols_, rows_);
    step(Pass::backward, {x_, &dy}, dx, [op = op_, name](int64_t rows, auto in, auto out) {
      guarded(name, [&] { op.backward(rows, in[0], in[1], out[0]); });
    });
    flow.begin(dx);
  }

 private:
  using Body = std::function<void(int64_t, std::span<const View>, std::span<const View>)>;

  void step(Pass pass, const std::vector<const Place*>& in, const Place& out, Body body) {
    const auto slot = [](const Place& p) {
      return Slot{Slot::Form::data,     p.row_data, p.operand.format,
                  Orientation::rowwise, p.cols,     p.rows};
    };
    PlanStep s;
    s.step.name = planner_.op_name(index_) + (pass == Pass::backward ? ".bwd" : "");
    s.step.graph = std::make_shared<Graph>();
    s.step.cols = out.cols;
    s.chosen.maker = "opaque";
    s.rows = rows_;
    s.ops = {index_};
    for (const Place* p : in) {
      s.in.push_back(slot(*p));
      s.reads.push_back(p->name);
    }
    s.out = {slot(out)};
    s.writes = {{out.name, out.operand}};
    s.opaque = std::move(body);
    planner_.steps(pass).push_back(std::move(s));
  }

  template <class F>
  static void guarded(const std::string& name, F f) {
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

  Planner& planner_;
  OpaqueOp op_;
  int64_t out_;
  Factor after_;
  const Place* x_ = nullptr;
};

}  // namespace

std::unique_ptr<Stage> make_opaque(const StageContext& c, const OpaqueOp& op) {
  return std::make_unique<Opaque>(c, op);
}

}  // namespace tenon
