// The rules for tensors that may be encoded, and their views in the order of a step.
#pragma once

#include <string_view>

#include "api/validate.h"
#include "tenon/format.h"

namespace tenon {

struct NamedTensor {
  std::string_view name;
  const Tensor& tensor;
};

// Checks a tensor that is read, or that is written with the shape `rows` x `cols`.
void check_input(std::string_view op, const NamedTensor& t);
void check_output(std::string_view op, const NamedTensor& t, int64_t rows, int64_t cols,
                  std::string_view rule);
void check_tensor_shape(std::string_view op, const NamedTensor& t, int64_t rows, int64_t cols,
                        std::string_view rule);

// Appends all views of a tensor that is read or written, for the overlap check.
void append_inputs(NamedList& list, const NamedTensor& t);
void append_outputs(NamedList& inputs, NamedList& outputs, const NamedTensor& t);

// Fills the views in the order of OperandIn and of Encoder::Out.
void place_input(const Tensor& t, View* views);
void place_output(const Tensor& t, View* views);

// True if the amax of a written tensor must be found before the tensor can be encoded.
bool finds_amax(const Tensor& t);

}  // namespace tenon
