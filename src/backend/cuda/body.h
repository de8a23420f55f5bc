// The body of a step as CUDA text: loads, formulas and stores of elements.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/few.h"
#include "step/backend.h"

namespace tenon::cuda {

// Same layout as TenonAccess in device/map.cuh.
struct Access {
  void* data = nullptr;
  int64_t stride = 0;
  int64_t block = 1, block_stride = 1, offset = 0;
  int64_t tiles = 0;  // tiles of swizzled scales per row
  float value = 0;
};
static_assert(sizeof(Access) == 56);

inline constexpr size_t kArgumentBytes = 4096;  // limit that every driver supports

Access access(const View& view, const ColumnMap& columns);
// The access of a load. The caller sets the address of a product or a total.
Access load_access(const Load& l, const RunArgs& args);

// Same layout as TenonPlace in device/plain.cuh.
struct Place {
  void* data = nullptr;
  int64_t stride = 0, rows = 0, cols = 0;
};
using Places = Few<Place, 8>;
Place place(const View& v);

// The first members of TenonPlainArguments in device/plain.cuh.
struct PlainHead {
  int64_t rows = 0, cols = 0, inner = 0;
  const uint64_t* random = nullptr;
  void* from = nullptr;
  void* to = nullptr;
  int64_t count = 0;
};

// The places of an encoder: its outputs, then its multiplier or amax with the columns of the
// tensor.
inline constexpr size_t kEncoderPlaces = Encoder::outputs + 1;
std::array<Place, kEncoderPlaces> encoder_places(const Encoder& e, const RunArgs& args);
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
