// A plan with its own memory, and the same chain in float64, op by op.
#pragma once

#include <map>

#include "core/philox.h"
#include "support/support.h"
#include "tenon/plan.h"

namespace tenon::test {

using Numbers = std::vector<double>;

class Session {
 public:
  Session(std::string_view chain, const PlanRequest& request, int64_t rows)
      : plan(Plan::build(chain, request)),
        rows_(rows),
        workspace_(static_cast<size_t>(plan.workspace_bytes(rows)) + 64, 0xA5) {
    for (const Buffer& b : plan.buffers())
      memory_.emplace_back(static_cast<size_t>(b.bytes(rows)) + 64, uint8_t{0xA5});
    for (size_t i = 0; i < plan.buffers().size(); ++i) {
      const Buffer& b = plan.buffers()[i];
      if (b.role == Role::state) std::fill(memory_[i].begin(), memory_[i].end(), 0);
      if (b.role == Role::state && b.name.ends_with(".scale")) set(b.name, {8.0});
    }
  }

  [[nodiscard]] size_t number(std::string_view name) const {
    for (size_t i = 0; i < plan.buffers().size(); ++i)
      if (plan.buffers()[i].name == name) return i;
    ADD_FAILURE() << "no buffer " << name << " in\n" << plan.describe(rows_);
    return 0;
  }
  [[nodiscard]] bool has(std::string_view name) const {
    for (const Buffer& b : plan.buffers())
      if (b.name == name) return true;
    return false;
  }
  void* data(size_t i) { return aligned(memory_[plan.owner(i)]); }
  void set(std::string_view name, const Numbers& values) {
    const size_t i = number(name);
    const DType d = plan.buffers()[i].dtype;
    ASSERT_EQ(static_cast<int64_t>(values.size()) * info(d).bytes, plan.buffers()[i].bytes(rows_))
        << name;
    for (size_t k = 0; k < values.size(); ++k) {
      const uint32_t code = encode_ref(d, static_cast<float>(values[k]));
      std::memcpy(static_cast<char*>(data(i)) + k * size(d), &code, size(d));
    }
  }
  [[nodiscard]] Numbers get(std::string_view name) {
    const size_t i = number(name);
    const DType d = plan.buffers()[i].dtype;
    Numbers values(static_cast<size_t>(plan.buffers()[i].bytes(rows_) / info(d).bytes));
    for (size_t k = 0; k < values.size(); ++k) {
      uint32_t code = 0;
      std::memcpy(&code, static_cast<char*>(data(i)) + k * size(d), size(d));
      values[k] = decode_ref(d, code);
    }
    return values;
  }
  void random(uint64_t seed) {
    const std::array<uint64_t, 5> state{seed, 3, 0, 0, static_cast<uint64_t>(64)};
    std::memcpy(data(number("rng")), state.data(), sizeof state);
  }
  void run(Pass pass, const PlanRun& how = {}) {
    std::vector<void*> addresses;
    for (size_t i = 0; i < memory_.size(); ++i) addresses.push_back(data(i));
    plan.run(pass, rows_, addresses, aligned(workspace_), how);
  }
  // The bytes of all gradients.
  [[nodiscard]] std::map<std::string, std::vector<uint8_t>> gradients() {
    std::map<std::string, std::vector<uint8_t>> all;
    for (size_t i = 0; i < plan.buffers().size(); ++i) {
      const Buffer& b = plan.buffers()[i];
      if (b.role != Role::grad) continue;
      const auto* const from = static_cast<uint8_t*>(data(i));
      all[b.name] = {from, from + b.bytes(rows_)};
    }
    return all;
  }

  Plan plan;

 private:
  static size_t size(DType d) { return static_cast<size_t>(info(d).bytes); }
  static void* aligned(std::vector<uint8_t>& m) {
    const auto a = reinterpret_cast<uintptr_t>(m.data());
    return m.data() + (64 - a % 64) % 64;
  }
  int64_t rows_;
  std::vector<std::vector<uint8_t>> memory_;
  std::vector<uint8_t> workspace_;
};

inline Numbers normal(size_t n, uint64_t seed, double scale = 1) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> distribution(0, scale);
  Numbers v(n);
  for (double& x : v) x = distribution(engine);
  return v;
}

// Rounds values to the dtype in which they are stored.
inline Numbers rounded(Numbers v, DType d) {
  for (double& x : v) x = rounded_ref(d, static_cast<float>(x));
  return v;
}

// Fills inputs, parameters and extra tensors. Values depend only on the buffer's name, so plans
// with other buffers get the same values.
inline void fill(Session& s, std::map<std::string, Numbers>& given) {
  for (const Buffer& b : s.plan.buffers()) {
    uint64_t seed = 17;
    for (const char c : b.name) seed = seed * 31 + static_cast<unsigned char>(c);
    if (b.random) {
      if (b.role == Role::rng) s.random(11);
      continue;
    }
    if (b.role != Role::param && b.role != Role::extra_in && b.role != Role::input) continue;
    const auto n = s.get(b.name).size();
    const double scale =
        b.name.ends_with(".weight") ? 1 / std::sqrt(static_cast<double>(b.cols)) : 1;
    given[b.name] = rounded(normal(n, seed, scale), b.dtype);
    s.set(b.name, given[b.name]);
  }
}

// Root mean square of the difference, relative to that of the exact values.
inline double distance(const Numbers& got, const Numbers& exact) {
  if (got.size() != exact.size()) return kInf;
  double d = 0, n = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    d += std::pow(got[i] - exact[i], 2);
    n += std::pow(exact[i], 2);
  }
  return n == 0 ? std::sqrt(d) : std::sqrt(d / n);
}

// Forward and backward pass of a chain in float64. Parameters and extra tensors are given by name.
class Chain64 {
 public:
  Chain64(std::string_view text, int64_t rows, int64_t cols, std::map<std::string, Numbers> given)
      : chain_(parse_chain(text)), rows_(rows), cols_(cols), given_(std::move(given)) {}

  Numbers forward(Numbers x) {
    widths_.clear();
    inputs_.clear();
    size_t extra = 0, extra_out = 0;
    uint64_t dropout = 0;
    for (size_t i = 0; i < chain_.size(); ++i) {
      const Op& op = chain_[i];
      widths_.push_back(cols_);
      inputs_.push_back(x);
      const std::string name = op.label.empty() ? op.name + std::to_string(i) : op.label;
      if (op.name == "linear") {
        const Numbers& w = given_.at(name + ".weight");
        const auto out = static_cast<int64_t>(std::get<double>(op.arguments.back().value));
        Numbers y(static_cast<size_t>(rows_ * out), 0.0);
        for (int64_t r = 0; r < rows_; ++r)
          for (int64_t o = 0; o < out; ++o)
            for (int64_t k = 0; k < cols_; ++k)
              y[idx(r, o, out)] += x[idx(r, k, cols_)] * w[idx(o, k, cols_)];
        x = y;
        cols_ = out;
      } else if (op.name == "bias") {
        for_all(x, [&](double& v, size_t c) { v += given_.at(name + ".bias")[c]; });
      } else if (op.name == "scale") {
        for_all(x, [&](double& v, size_t) { v *= number(op); });
      } else if (op.name == "add") {
        const Numbers& other = op.reads.empty() ? given_.at("extra" + std::to_string(extra++))
                                                : channels_.at(op.reads[0]);
        for (size_t k = 0; k < x.size(); ++k) x[k] += other[k];
      } else if (op.name == "make_extra_output") {
        (op.writes.empty() ? extra_outputs["extra_out" + std::to_string(extra_out++)]
                           : channels_[op.writes[0]]) = x;
      } else if (op.name == "dropout") {
        mask_.push_back(draw(number(op), x.size(), dropout++));
        for (size_t k = 0; k < x.size(); ++k) x[k] *= mask_.back()[k];
      } else if (op.name == "rmsnorm" || op.name == "layernorm" || op.name == "l2norm") {
        x = norm(op, name, x);
      } else if (op.name == "reshape") {
        const auto to = static_cast<int64_t>(number(op));
        rows_ = rows_ * cols_ / to;
        cols_ = to;
      } else if (op.name != "identity" && op.name != "quantize" && op.name != "all_reduce" &&
                 op.name != "all_gather" && op.name != "reduce_scatter") {
        const bool column = op.name == "act" && known(op).scaled;
        x = act(op, column ? "extra" + std::to_string(extra++) : "", x, nullptr, nullptr);
      }
    }
    return x;
  }

  // Returns the gradient of the input. Those of parameters and extra inputs are in `grads`.
  Numbers backward(Numbers g, const std::map<std::string, Numbers>& extra_out_grads = {}) {
    size_t extra = 0, extra_out = 0;
    for (const Op& op : chain_) {
      extra += (op.name == "add" && op.reads.empty()) || (op.name == "act" && known(op).scaled);
      extra_out += op.name == "make_extra_output" && op.writes.empty();
    }
    std::map<std::string, Numbers> channel_grads;
    for (size_t i = chain_.size(); i-- > 0;) {
      const Op& op = chain_[i];
      const int64_t out = cols_;
      const std::string name = op.label.empty() ? op.name + std::to_string(i) : op.label;
      const Numbers& x = inputs_[i];
      if (op.name == "linear") {
        const Numbers& w = given_.at(name + ".weight");
        cols_ = widths_[i];
        Numbers dw(w.size(), 0.0), dx(x.size(), 0.0);
        for (int64_t r = 0; r < rows_; ++r)
          for (int64_t o = 0; o < out; ++o)
            for (int64_t k = 0; k < cols_; ++k) {
              dw[idx(o, k, cols_)] += g[idx(r, o, out)] * x[idx(r, k, cols_)];
              dx[idx(r, k, cols_)] += g[idx(r, o, out)] * w[idx(o, k, cols_)];
            }
        grads["d" + name + ".weight"] = dw;
        g = dx;
      } else if (op.name == "bias") {
        Numbers& d = grads["d" + name + ".bias"];
        d.assign(static_cast<size_t>(cols_), 0.0);
        for_all(g, [&](double& v, size_t c) { d[c] += v; });
      } else if (op.name == "scale") {
        for_all(g, [&](double& v, size_t) { v *= number(op); });
      } else if (op.name == "add") {
        if (op.reads.empty())
          grads["dextra" + std::to_string(--extra)] = g;
        else
          add_to(channel_grads[op.reads[0]], g);
      } else if (op.name == "make_extra_output") {
        // Not given if nothing before the op has a gradient.
        const auto it = extra_out_grads.find("dextra_out" + std::to_string(extra_out - 1));
        if (op.writes.empty()) --extra_out;
        if (op.writes.empty() && it != extra_out_grads.end())
          add_to(g, it->second);
        else if (!op.writes.empty())
          add_to(g, channel_grads[op.writes[0]]);
      } else if (op.name == "dropout") {
        for (size_t k = 0; k < g.size(); ++k) g[k] *= mask_.back()[k];
        mask_.pop_back();
      } else if (op.name == "rmsnorm" || op.name == "layernorm" || op.name == "l2norm") {
        g = norm_backward(op, name, x, g);
      } else if (op.name == "reshape") {
        rows_ = rows_ * cols_ / widths_[i];
        cols_ = widths_[i];
      } else if (op.name != "identity" && op.name != "quantize" && op.name != "all_reduce" &&
                 op.name != "all_gather" && op.name != "reduce_scatter") {
        Numbers dx(x.size());
        const bool column = op.name == "act" && known(op).scaled;
        act(op, column ? "extra" + std::to_string(--extra) : "", x, &g, &dx);
        g = dx;
        cols_ = widths_[i];
      }
    }
    return g;
  }

  std::map<std::string, Numbers> grads, extra_outputs;

 private:
  static size_t idx(int64_t r, int64_t c, int64_t cols) {
    return static_cast<size_t>(r * cols + c);
  }
  static double number(const Op& op) { return std::get<double>(op.arguments.at(0).value); }
  static double named(const Op& op, std::string_view name, double otherwise) {
    for (const OpArgument& a : op.arguments)
      if (a.name == name) return std::get<double>(a.value);
    return otherwise;
  }
  static std::string text_of(const Op& op, std::string_view name) {
    for (const OpArgument& a : op.arguments)
      if (a.name == name) return std::get<std::string>(a.value);
    return {};
  }
  // The factor of a norm.
  [[nodiscard]] double gamma(const Op& op, const std::string& name, int64_t c) const {
    if (op.name == "l2norm") return 1;
    const double one = text_of(op, "zero_centered_gamma") == "true" ? 1 : 0;
    return given_.at(name + ".gamma")[static_cast<size_t>(c)] + one;
  }
  static void add_to(Numbers& to, const Numbers& from) {
    if (to.empty()) to.assign(from.size(), 0.0);
    for (size_t k = 0; k < from.size(); ++k) to[k] += from[k];
  }
  template <class F>
  void for_all(Numbers& x, F f) {
    for (size_t k = 0; k < x.size(); ++k) f(x[k], k % static_cast<size_t>(cols_));
  }
  Numbers draw(double p, size_t n, uint64_t ordinal) const {
    const double t = std::nearbyint(65536 * p);
    Numbers m(n);
    for (size_t k = 0; k < n; ++k) {
      const uint64_t i = k / static_cast<size_t>(cols_) * 64 + k % static_cast<size_t>(cols_);
      const uint32_t word = philox(11, i / 8, 3 + ordinal).w[i % 8 / 2];
      const double u = i % 2 ? word >> 16 : word & 0xffffU;
      m[k] = u >= t ? static_cast<double>(static_cast<float>(65536 / (65536 - t))) : 0.0;
    }
    return m;
  }
  Numbers norm(const Op& op, const std::string& name, const Numbers& x) {
    Numbers y(x.size());
    for (int64_t r = 0; r < rows_; ++r) {
      const auto [m, s] = statistics(op, x, r);
      for (int64_t c = 0; c < cols_; ++c) {
        double v = (x[idx(r, c, cols_)] - m) * s * gamma(op, name, c);
        if (op.name == "layernorm") v += given_.at(name + ".beta")[static_cast<size_t>(c)];
        y[idx(r, c, cols_)] = v;
      }
    }
    return y;
  }
  std::pair<double, double> statistics(const Op& op, const Numbers& x, int64_t r) const {
    double m = 0, v = 0;
    const auto n = static_cast<double>(cols_);
    if (op.name == "layernorm")
      for (int64_t c = 0; c < cols_; ++c) m += x[idx(r, c, cols_)] / n;
    for (int64_t c = 0; c < cols_; ++c) v += std::pow(x[idx(r, c, cols_)] - m, 2);
    if (op.name != "l2norm") v /= n;
    return {m, 1 / std::sqrt(v + named(op, "eps", op.name == "l2norm" ? 1e-6 : 1e-5))};
  }
  Numbers norm_backward(const Op& op, const std::string& name, const Numbers& x, const Numbers& g) {
    Numbers dx(x.size());
    Numbers& dgamma = grads["d" + name + ".gamma"];
    Numbers& dbeta = grads["d" + name + ".beta"];
    dgamma.assign(static_cast<size_t>(cols_), 0.0);
    dbeta = dgamma;
    const auto n = static_cast<double>(cols_);
    for (int64_t r = 0; r < rows_; ++r) {
      const auto [m, s] = statistics(op, x, r);
      double t1 = 0, t2 = 0;
      const auto w = [&](int64_t c) { return g[idx(r, c, cols_)] * gamma(op, name, c); };
      const auto hat = [&, m = m, s = s](int64_t c) { return (x[idx(r, c, cols_)] - m) * s; };
      for (int64_t c = 0; c < cols_; ++c) {
        t1 += w(c);
        t2 += w(c) * hat(c);
        dgamma[static_cast<size_t>(c)] += g[idx(r, c, cols_)] * hat(c);
        dbeta[static_cast<size_t>(c)] += g[idx(r, c, cols_)];
      }
      const double k = op.name == "l2norm" ? 1 : n;
      for (int64_t c = 0; c < cols_; ++c)
        dx[idx(r, c, cols_)] = s * (w(c) - (op.name == "layernorm" ? t1 / n : 0) - hat(c) * t2 / k);
    }
    return dx;
  }

  // Values from the table of textbook formulas. Derivatives are fourth-order differences.
  struct Known {
    const Row* row = nullptr;
    bool scaled = false;
  };
  static Known known(const Op& op) {
    std::string text = op.name;
    Known k;
    if (op.name == "act") {
      text = std::get<std::string>(op.arguments.at(0).value);
      k.scaled = text.starts_with("scaled(");
      if (k.scaled) text = text.substr(7, text.size() - 8);
    } else {
      Op bare{.name = op.name};
      for (const OpArgument& a : op.arguments)
        if (a.name != "layout" && a.name != "keep") bare.arguments.push_back(a);
      text = print_chain(std::span(&bare, 1));
    }
    for (const Row& r : test::rows()) {
      std::string name = r.act;
      if (op.name != "act") std::erase(name, ' ');
      if (name == text) k.row = &r;
    }
    EXPECT_NE(k.row, nullptr) << "no reference for " << text;
    return k;
  }
  // The column of the 2H-wide tensor for column c of half `half`.
  static int64_t half_column(const Op& op, int64_t h, int half, int64_t c) {
    const std::string layout = text_of(op, "layout");
    if (layout == "swapped") return gated_column(Gate::swapped, h, half, c);
    if (!layout.starts_with("interleaved(")) return gated_column(Gate::stacked, h, half, c);
    const int64_t k = std::stoll(layout.substr(12));
    return c / k * 2 * k + half * k + c % k;
  }
  Numbers act(const Op& op, const std::string& extra, const Numbers& x, const Numbers* g,
              Numbers* dx) {
    const auto [row, scaled] = known(op);
    if (!row) return x;
    const Hand& f = row->f;
    const auto slope = [](auto of, Real v) {
      const Real h = 1e-7L;  // much smaller than the distance of any input to a kink
      return static_cast<double>((8 * (of(v + h) - of(v - h)) - (of(v + 2 * h) - of(v - 2 * h))) /
                                 (12 * h));
    };
    const bool gated = row->inputs == 2;
    const int64_t h = gated && !g ? cols_ / 2 : cols_;
    const int64_t width = gated ? 2 * h : h;
    Numbers y(static_cast<size_t>(rows_ * h));
    Numbers ds(static_cast<size_t>(rows_), 0.0);
    for (int64_t r = 0; r < rows_; ++r)
      for (int64_t c = 0; c < h; ++c) {
        const size_t ia = idx(r, gated ? half_column(op, h, 0, c) : c, width);
        const size_t ib = gated ? idx(r, half_column(op, h, 1, c), width) : ia;
        const Real a = x[ia], b = x[ib];
        const double s = scaled ? given_.at(extra)[static_cast<size_t>(r)] : 1;
        const auto value = static_cast<double>(f(a, b));
        y[idx(r, c, h)] = value * s;
        if (!dx) continue;
        const double grad = (*g)[idx(r, c, h)];
        ds[static_cast<size_t>(r)] += grad * value;
        (*dx)[ia] = grad * s * slope([&](Real v) { return f(v, b); }, a);
        if (gated) (*dx)[ib] = grad * s * slope([&](Real v) { return f(a, v); }, b);
      }
    if (g && scaled) grads["d" + extra] = ds;
    if (!g) cols_ = h;
    return y;
  }

  Chain chain_;
  int64_t rows_, cols_;
  std::map<std::string, Numbers> given_, channels_;
  std::vector<int64_t> widths_;
  std::vector<Numbers> inputs_;
  std::vector<Numbers> mask_;
};

}  // namespace tenon::test
