// A step's body as text: the loads, the formulas, the stores of elements, as every kernel reads
// them.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "core/few.h"
#include "step/backend.h"

namespace tenon::cuda {

// As TenonAccess in device/map.cuh.
struct Access {
  void* data = nullptr;
  int64_t stride = 0;
  int64_t block = 1, block_stride = 1, offset = 0;
  int64_t tiles = 0;  // of swizzled scales, in a row
  float value = 0;
};
static_assert(sizeof(Access) == 56);

inline constexpr size_t kArgumentBytes = 4096;  // what every driver takes

Access access(const View& view, const ColumnMap& columns);
// What a load reads; a product or a total lies where the caller says.
Access load_access(const Load& l, const RunArgs& args);

// As TenonPlace in device/plain.cuh.
struct Place {
  void* data = nullptr;
  int64_t stride = 0, rows = 0, cols = 0;
};
using Places = Few<Place, 8>;
Place place(const View& v);

// The head of TenonPlainArguments in device/plain.cuh.
struct PlainHead {
  int64_t rows = 0, cols = 0, inner = 0;
  const uint64_t* random = nullptr;
  void* from = nullptr;
  void* to = nullptr;
  int64_t count = 0;
};

// The places of an encoder: its outputs, then its multiplier or amax with the tensor's columns.
inline constexpr size_t kEncoderPlaces = Encoder::outputs + 1;
std::array<Place, kEncoderPlaces> encoder_places(const Encoder& e, const RunArgs& args);
// `struct ScalingN`: what device/plain.cuh must know of encoder N's format.
std::string scaling_text(const Step& step, size_t number);

// Whether the tensor's memory holds the transpose of what the product takes.
bool lies_turned(const Matrix& m);

const char* flag(bool b);
std::string format(DType d);  // tenon_bf16

// `in[i] = …;` for each load, from at[i], random, row and column.
std::string load_lines(const Step& step);
// `tenon_store…;` for each store of elements, to at[i], row and column, from out[i].
std::string store_lines(const Step& step);
// The formulas, from in to out: the stores' values, then the totals.
std::string compute_lines(const Step& step);

std::string indented(const std::string& lines);

}  // namespace tenon::cuda
