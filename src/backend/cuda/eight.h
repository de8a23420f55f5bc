// Shared parts of the maps with eight adjacent elements per thread: texts and alignment checks.
#pragma once

#include <algorithm>

#include "backend/cuda/body.h"
#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

inline constexpr int64_t kEight = 8;
inline constexpr int64_t kLine = kTenonLine;

// The head of a call with tiles of `tile_rows` rows.
TenonTileHead tile_head(const Step& step, const RunArgs& args, int64_t tile_rows);

// Size of a kernel argument with a head of `head` bytes, without single values.
size_t argument_bytes(const Step& step, size_t head);

// Launches for `across` x `down` tiles. `down` may exceed the grid limit of one launch.
std::vector<Launch> launches_of_tiles(size_t entry, int64_t across, int64_t down, int64_t tile_rows,
                                      unsigned threads, TenonTileHead head,
                                      std::span<const TenonAccess> at,
                                      std::span<const TenonPlace> places);

// An element of a tile or a row, relative to the data of accesses_of().
std::string element_eight(std::string_view kind, const ColumnMap& columns, const std::string& at);
// Loads eight elements into in[i]. `raw` names the bytes of a tile that are already loaded, or is
// empty.
std::string load_eight(const Step& step, size_t i, const std::string& raw = "");
// Joins the largest magnitude of out[k] into most[slot].
std::string amax_eight(size_t k, size_t slot);
// The vector stores: elements, maxima, and codes scaled by multiplier[]. turn() gets the codes of
// columnwise encodings.
std::string store_eight(const Step& step);
// Sets multiplier[] for each encoder.
std::string multiplier_lines(const Step& step);
// scaled[8] = out[k] times the multiplier of encoder `number`.
std::string scale_eight(size_t k, uint32_t number);

// A formula of at least so many lines needs more registers.
inline constexpr int64_t kLongFormula = 50;
// A formula of at least so many lines may be compute-bound.
inline constexpr int64_t kManyLines = 30;
// Bytes per element that the tile loads hold in registers.
int64_t held_bytes(const Step& step);

// The formula: preparation of the loads of eight elements, then the lines for each element. `head`
// is the size of the head of the kernel argument.
EightLines eight_lines(const Step& step, size_t head = sizeof(TenonTileHead));
// Copies its single values into in[], after the loads.
std::string single_lines(const Step& step, const Singles& singles);

// Reads the current values of the maxima into before[], in their order.
std::string start_lines(const Step& step);
// The end of a kernel: stores maxima and single scales. `early`: start_lines has read the slots.
std::string finish_lines(const Step& step, bool early = false);
// Sets slots that no maximum joins to 0. Empty if there are none.
std::string clear_lines(const Step& step);

// Common parts of tile kernels: loads in two steps, stores of elements and maxima.
struct TileBody {
  std::string raw, fetch, unpack, store;
};
TileBody tile_body(const Step& step);
// The members of Body for these parts, with compute, start and finish.
std::string tile_members(const Step& step, const TileBody& t, const EightLines& formula,
                         const std::string& store_arguments);
// The address of the vector at `column` in the row `more` rows below `row`.
std::string below_eight(const ColumnMap& columns, int64_t bytes, const std::string& at,
                        const char* more = "more");

// Partial sums over the rows of tiles: the width of a strip (a cache line, or less if there are few
// strips), the memory, and the kernel that adds them with one block per strip (its lines and its
// launch).
int64_t partial_strip(const Step& step);
unsigned partial_threads(const Step& step, int64_t rows, int64_t tile_rows,
                         int64_t multiprocessors);
size_t partial_bytes(const Step& step, int64_t rows, int64_t tile_rows);
std::string partial_lines(const Step& step, int64_t tile_rows);
int64_t partial_blocks(const Step& step);

// The stores of one kind.
std::vector<size_t> stores_to(const Step& step, Store::To to);
// The stores whose encoder has a columnwise output, in the order of the planes of a tile.
std::vector<size_t> turned_stores(const Step& step);
// Returns the destination of `column` of the codes of `plane`.
std::string turned_lines(const Step& step);

using Accesses = Few<TenonAccess, 12>;
// Loads, single values, then stores. An encoded store uses the rowwise data of its encoder. For
// vectors, the data pointer includes the column offset.
Accesses accesses_of(const Step& step, const Singles& singles, const RunArgs& args);
// Whether every access of eight elements is one or two aligned vectors, and the parameters fit.
bool suits_eights(const Step& step, const Singles& singles, const RunArgs& args);
bool aligned(const TenonAccess& a, int64_t element_bytes, bool rows);

}  // namespace tenon::cuda
