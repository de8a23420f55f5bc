// The body of a step as CUDA text: loads, formulas and stores of elements.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "backend/cuda/device/arguments.h"
#include "core/few.h"
#include "step/backend.h"

namespace tenon::cuda {

inline constexpr size_t kArgumentBytes = 4096;  // limit that every driver supports

TenonAccess access(const View& view, const ColumnMap& columns);
// The access of a load. The caller sets the address of a product or a total.
TenonAccess load_access(const Load& l, const RunArgs& args);

using Places = Few<TenonPlace, 8>;
TenonPlace place(const View& v);

// The state of random loads in the type of kernels.
const TenonU64* random_state(const RunArgs& args);

// `using Arguments = ...;` for a head of device/arguments.h.
std::string arguments_text(std::string_view head, size_t accesses, size_t places);

// The places of an encoder: its outputs, then its multiplier or amax with the columns of the
// tensor.
inline constexpr size_t kEncoderPlaces = Encoder::outputs + 1;
std::array<TenonPlace, kEncoderPlaces> encoder_places(const Encoder& e, const RunArgs& args);
// `struct ScalingN`: the properties of the format of encoder N that device/plain.cuh uses.
std::string scaling_text(const Step& step, size_t number);

// Whether memory holds the transpose of the operand.
bool lies_turned(const Matrix& m);

// The template arguments of tenon_block for the scales of an encoded input.
std::string block_arguments(const Load& l);

const char* flag(bool b);
std::string format(DType d);  // tenon_bf16

// `in[i] = …;` for each load. Uses at[i], random, row and column.
std::string load_lines(const Step& step);
// `tenon_store…;` for each store of elements. Uses at[i], row, column and out[i].
std::string store_lines(const Step& step);
// The formulas, from in to out: values of the stores, then the totals.
std::string compute_lines(const Step& step);

std::string indented(const std::string& lines);

}  // namespace tenon::cuda
