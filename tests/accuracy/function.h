// A function under test, with its value and derivatives in one graph, and its calls through the
// public API.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "columns.h"
#include "exact.h"
#include "reference.h"
#include "tenon/tenon.hpp"

namespace tenon::accuracy {

// Precisions whose bounds are computed together.
enum Bound : size_t { kStrict, kNativeBf16, kNativeF16 };

inline constexpr int64_t kCols = 4096;
inline constexpr size_t kChunk = 16 * kCols;  // one library call, and the number of 16-bit codes

// Elements of one dtype. Outputs are poisoned, so that unwritten elements are detected.
class Elements {
 public:
  Elements() = default;
  Elements(DType dtype, size_t n)
      : dtype_(dtype), bytes_(n * static_cast<size_t>(info(dtype).bytes), 0xA5) {}

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] size_t size() const { return bytes_.size() / width(); }
  [[nodiscard]] size_t width() const { return static_cast<size_t>(info(dtype_).bytes); }
  [[nodiscard]] uint8_t* bytes() { return bytes_.data(); }
  [[nodiscard]] const uint8_t* bytes() const { return bytes_.data(); }
  [[nodiscard]] size_t byte_count() const { return bytes_.size(); }

  [[nodiscard]] uint32_t code(size_t i) const {
    uint32_t c = 0;
    std::memcpy(&c, bytes_.data() + i * width(), width());
    return c;
  }
  void set(size_t i, uint32_t code) { std::memcpy(bytes_.data() + i * width(), &code, width()); }
  void fill(float value) {
    visit(dtype_, [&](auto tag) {
      auto* codes = reinterpret_cast<Storage<tag()>*>(bytes_.data());
      std::fill_n(codes, size(), static_cast<Storage<tag()>>(encode<tag()>(value)));
    });
  }
  [[nodiscard]] std::vector<float> decoded() const {
    std::vector<float> values(size());
    visit(dtype_, [&](auto tag) {
      const auto* codes = reinterpret_cast<const Storage<tag()>*>(bytes_.data());
      for (size_t i = 0; i < values.size(); ++i) values[i] = decode<tag()>(codes[i]);
    });
    return values;
  }
  [[nodiscard]] View view(void* data) const {
    return matrix(data, dtype_, static_cast<int64_t>(size()) / kCols, kCols);
  }
  [[nodiscard]] View view() const { return view(const_cast<uint8_t*>(bytes_.data())); }

 private:
  DType dtype_ = DType::f32;
  std::vector<uint8_t> bytes_;
};

// Points of evaluation. b is empty for one input. The count is a multiple of kChunk.
struct Points {
  Elements a, b;
};

class Function {
 public:
  enum class Group : uint8_t { word, unary, gated };

  Function(Group group, const std::string& text);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] Group group() const { return group_; }
  [[nodiscard]] const Activation& activation() const { return f_; }
  [[nodiscard]] bool gated() const { return f_.inputs == 2; }
  // Roots: the value, then the derivative by each input.
  [[nodiscard]] size_t roots() const { return gated() ? 3 : 2; }
  [[nodiscard]] std::string root_name(size_t root) const;
  [[nodiscard]] const Graph& graph() const { return graph_; }
  [[nodiscard]] std::span<const uint32_t> root_ids() const { return root_ids_; }
  // Whether a root depends on the first input other than through a comparison.
  [[nodiscard]] bool depends_on_a(size_t root) const { return depends_on_a_[root]; }

  [[nodiscard]] const Exact& exact() const { return exact_; }                // three bounds
  [[nodiscard]] const Exact& strict_exact() const { return strict_exact_; }  // one bound
  [[nodiscard]] const Reference& reference() const { return reference_; }

  // The columns of the graph's loads for given inputs, with a gradient of 1 and the parameters.
  [[nodiscard]] std::vector<Column> columns(Column a, Column b) const;

  // The value and derivatives on the CPU, one Elements per root.
  [[nodiscard]] std::vector<Elements> run(const Points& at, DType output,
                                          Precision precision) const;

  // fp32 values at which the exact value or a derivative is zero or changes its sign, or at which a
  // comparison in the lowered graph changes. Along input `which`, with the other input at `other`.
  [[nodiscard]] std::vector<float> special_points(int which, float other) const;

 private:
  Group group_;
  std::string name_;
  Activation f_;
  std::vector<uint32_t> root_ids_;  // before graph_, whose initialiser fills it
  Graph graph_;
  std::vector<bool> depends_on_a_;
  std::vector<float> parameters_;
  Exact exact_, strict_exact_;
  Reference reference_;
};

// Every formula function, activation and gated activation.
std::vector<Function> all_functions();

}  // namespace tenon::accuracy
