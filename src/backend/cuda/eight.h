// What the maps of eight neighbouring elements a thread share: their texts and their alignment.
#pragma once

#include <algorithm>

#include "backend/cuda/body.h"
#include "backend/cuda/native.h"
#include "backend/cuda/program.h"

namespace tenon::cuda {

inline constexpr int64_t kEight = 8;
inline constexpr int64_t kLine = 32;  // of the cache, floats, as kTenonLine in device/tile.cuh

// The texts of device/*.cuh that vectors need, and those that tiles need.
std::string vector_skeletons();
std::string tile_skeletons();

// As the head of TenonTileArguments in device/tile.cuh.
struct TileHead {
  int64_t rows = 0, cols = 0;
  const uint64_t* random = nullptr;
  void* partial = nullptr;
  uint32_t last = 0, whole = 0;  // the last tiles' first row; rows in tiles that they fill
};
// Of a call whose tiles have so many rows.
TileHead tile_head(const Step& step, const RunArgs& args, int64_t tile_rows);

// A launch whose argument is the head, the accesses and the places, one behind the other.
template <class Head>
Launch launch_of(size_t entry, int64_t blocks, unsigned threads, const Head& head,
                 std::span<const Access> at, std::span<const Place> places) {
  Launch l;
  l.entry = entry;
  l.blocks = static_cast<unsigned>(blocks);
  l.threads = threads;
  l.arguments.append(std::as_bytes(std::span(&head, 1)));
  l.arguments.append(std::as_bytes(at));
  l.arguments.append(std::as_bytes(places));
  return l;
}

// The bytes of such an argument whose head has so many, without single numbers.
size_t argument_bytes(const Step& step, size_t head);

// Rows of so many tiles; `down` of them may be more than the blocks of one launch.
std::vector<Launch> launches_of_tiles(size_t entry, int64_t across, int64_t down, int64_t tile_rows,
                                      unsigned threads, TileHead head, std::span<const Access> at,
                                      std::span<const Place> places);

// The element of a tile or row, counted from the data of accesses_of().
std::string element_eight(std::string_view kind, const ColumnMap& columns, const std::string& at);
// One load of eight elements into in[i]; `raw` is where a tile's bytes are already, or empty.
std::string load_eight(const Step& step, size_t i, const std::string& raw = "");
// The largest magnitude of out[k] joins most[slot].
std::string amax_eight(size_t k, size_t slot);
// The stores of vectors: elements, maxima, and codes by multiplier[].
std::string store_eight(const Step& step);
// multiplier[] of each encoder.
std::string multiplier_lines(const Step& step);
// scaled[8] = out[k] times the multiplier of encoder `number`.
std::string scale_eight(size_t k, uint32_t number);

// Lines of a formula that need more registers than a short one.
inline constexpr int64_t kLongFormula = 50;
// Lines of a formula that may take longer than its memory.
inline constexpr int64_t kManyLines = 30;
// Bytes that the tile loads of an element hold in registers.
int64_t held_bytes(const Step& step);

// The formula: what to do with the loads of eight elements, then the lines for each of them. The
// head of its kernel's argument has so many bytes.
EightLines eight_lines(const Step& step, size_t head = sizeof(TileHead));
// Its single numbers into in[] behind the loads.
std::string single_lines(const Step& step, const Singles& singles);

// What the slots of maxima have: before[] in their order.
std::string start_lines(const Step& step);
// At the end of a kernel: maxima to their slots, single scales beside their data; `early` if the
// slots were read at its start.
std::string finish_lines(const Step& step, bool early = false);
// Slots that no maximum joins start from 0; empty where there is none.
std::string clear_lines(const Step& step);

// What tiles have in common: loads in two steps, elements and maxima stored.
struct TileBody {
  std::string raw, fetch, unpack, store;
};
TileBody tile_body(const Step& step);
// The members of Body that come from it, with compute, start and finish.
std::string tile_members(const Step& step, const TileBody& t, const EightLines& formula,
                         const std::string& store_arguments);
// The address of the vector in `column` of the row `more` rows below `row`.
std::string below_eight(const ColumnMap& columns, int64_t bytes, const std::string& at,
                        const char* more = "more");

// Sums over the rows of tiles: the memory for those, in strips of so many columns (a line, or
// less where there would be few strips), and the kernel that adds them, a block a strip: its lines
// and its launch.
int64_t partial_strip(const Step& step);
unsigned partial_threads(const Step& step, int64_t rows, int64_t tile_rows);
size_t partial_bytes(const Step& step, int64_t rows, int64_t tile_rows);
std::string partial_lines(const Step& step, int64_t tile_rows);
int64_t partial_blocks(const Step& step);

// The stores of one kind.
std::vector<size_t> stores_to(const Step& step, Store::To to);

using Accesses = Few<Access, 12>;
// Loads, single numbers, then stores; an encoded one has the encoder's rowwise data.
// Where vectors lie, the data begins at the offset.
Accesses accesses_of(const Step& step, const Singles& singles, const RunArgs& args);
// Whether every access of eight is one aligned vector, or two, and parameters suit the formula.
bool suits_eights(const Step& step, const Singles& singles, const RunArgs& args);
bool aligned(const Access& a, int64_t element_bytes, bool rows);

}  // namespace tenon::cuda
