// The encoding of a tensor of a call: everything about the tensor that a step depends on.
#pragma once

#include <optional>

#include "step/step.h"
#include "tenon/format.h"

namespace tenon {

struct Operand {
  Format format;
  bool rowwise = true, columnwise = false, counts = false;

  Operand() = default;
  Operand(DType plain) : format{.dtype = plain} {}  // NOLINT: a plain matrix is its dtype
  explicit Operand(const Tensor& t)
      : format(t.format),
        rowwise(t.rowwise.data.given()),
        columnwise(t.columnwise.data.given()),
        counts(t.health.given()) {}

  [[nodiscard]] bool plain() const { return format.scaling == Scaling::none && !columnwise; }
  // `eager` rounds to this dtype between ops. Encoded tensors represent fp32 numbers.
  [[nodiscard]] DType chain() const { return info(format.dtype).plain ? format.dtype : DType::f32; }
  [[nodiscard]] Orientation read() const {
    return rowwise ? Orientation::rowwise : Orientation::columnwise;
  }
};

// The consecutive views of an operand, in the order that a step uses.
enum OperandIn : uint32_t { in_data, in_scale_inv, operand_inputs };
constexpr uint32_t operand_outputs = 5;  // the same number as Encoder::Out

// The loads of an element of an operand whose views start at `arg`: the code, and its scale.
struct OperandLoads {
  Load codes;
  std::optional<Load> scale = {};
};
OperandLoads loads_of(const Operand& o, uint32_t arg, const ColumnMap& columns);

}  // namespace tenon
