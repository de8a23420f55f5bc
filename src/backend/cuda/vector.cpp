// Prints the body for eight elements per thread, and checks which calls it can run.
#include "backend/cuda/vector.h"

#include <algorithm>
#include <bit>

#include "backend/cuda/eight.h"
#include "backend/cuda/skeletons.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr const char* kEntry = "tenon_vector_kernel";
constexpr const char* kClear = "tenon_vector_clear";

// floor(v ÷ d) is v·magic >> (31 + shift) for every 31-bit v: magic·d exceeds that power of two by
// at most 2^shift.
TenonVectorHead divided_by(uint32_t d) {
  const auto shift = static_cast<uint32_t>(std::bit_width(d - 1));
  const auto magic = static_cast<uint32_t>((uint64_t{1} << (31 + shift)) / d + 1);
  return {.divisor = d, .magic = magic, .shift = shift};
}

// Whether the step reads a transposed tensor.
bool tall(const Step& step) { return std::ranges::any_of(step.loads, &Load::transposed); }

// Whether rows are contiguous and the column of an element does not matter.
bool dense(const Step& step, std::span<const TenonAccess> at) {
  for (size_t i = 0; i < step.loads.size(); ++i) {
    const Load& l = step.loads[i];
    const bool tile = l.from == Load::From::tile;
    if (tile ? at[i].stride != step.cols || !l.columns.contiguous()
             : l.from != Load::From::scalar && l.from != Load::From::parameter)
      return false;
  }
  return true;
}

}  // namespace

// Rules for the launch size:
// - With one or two loads and a short formula: as many threads as the registers allow.
// - One-byte inputs or results, and random numbers: two vectors per thread. Random rounds depend on
//   each other.
// - Transposed inputs: two adjacent vectors, so that a thread writes whole sectors.
// - Amax-only kernels use a small persistent grid: their tail dominates.
// - Strict polynomials without a division (a call): more threads, because each line depends on the
//   line before it.
VectorProgram::Size VectorProgram::size_of(const Step& step, const std::string& formula) {
  constexpr int64_t kPolynomial = 20;  // lines of the shortest transcendental function
  if (tall(step)) return {128, 2, 8, false};
  const int64_t bytes = held_bytes(step);
  const int64_t lines = std::ranges::count(formula, '\n');
  const bool native = step.effective_precision() == Precision::native;
  const auto one_byte = [](const Encoder& e) { return info(e.format.dtype).bytes == 1; };
  const bool narrow = std::ranges::any_of(step.encoders, one_byte);
  if (!native && lines >= kPolynomial && formula.find(" / ") == std::string::npos) {
    if (bytes <= (narrow ? 2 : 4)) return {128, 2, 12, false};
    return {128, 1, narrow || bytes <= 4 ? 16U : 12U, false};
  }
  const bool few = bytes <= 4 && native && lines < kLongFormula;
  if (few && stores_to(step, Store::To::amax).size() == step.stores.size())
    return {1024, 2, 2, true};
  if (narrow) return {128, 2, !few ? 8U : bytes <= 2 ? 16U : 12U, false};
  if (few && bytes == 1) return {128, 2, 16, false};
  const auto random = [](const Load& l) { return l.from == Load::From::random; };
  if (few && bytes <= 2 && std::ranges::any_of(step.loads, random)) return {128, 2, 12, false};
  return {256, 1, few ? 8U : 4U, false};
}

std::string VectorProgram::refusal(const Step& step) {
  if (!step.is_map()) return str("the vector map has no ", step.head_name(), " head");
  for (const Load& l : step.loads)
    if (l.transposed && !l.columns.contiguous())
      return "the vector map reads adjacent columns of transposed tensors";
  for (const Store& s : step.stores)
    if (s.to != Store::To::tile && s.to != Store::To::amax && s.to != Store::To::encoded)
      return str("the vector map has no ", kStoreNames[static_cast<size_t>(s.to)]);
  for (const Encoder& e : step.encoders) {
    if (e.columnwise) return "the vector map writes no columnwise encoding";
    if (!e.format.blocks(Orientation::rowwise).single())
      return "the vector map finds no scales of blocks";
    if (e.counts) return "the vector map counts nothing";
  }
  if (step.stores.empty()) return "the vector map has nothing to store";
  if (argument_bytes(step, sizeof(TenonVectorHead)) > kArgumentBytes)
    return str(step.loads.size() + step.stores.size(), " loads and stores are too many");
  return "";
}

VectorProgram::VectorProgram(const Step& step) : step_(step) {
  entries_ = {kEntry};
  const EightLines formula = eight_lines(step);
  singles_ = formula.singles;
  size_ = size_of(step, formula.ready + formula.lines);
  const Size size = size_;
  std::string scalings, loads;
  for (size_t e = 0; e < step.encoders.size(); ++e) scalings += scaling_text(step, e);
  for (size_t i = 0; i < step.loads.size(); ++i) loads += load_eight(step, i);
  loads += single_lines(step, formula.singles) + formula.ready;
  text_ = str(
      vector_skeletons(), scalings,
      arguments_text("TenonVectorHead",
                     step.loads.size() + formula.singles.count() + step.stores.size(),
                     step.encoders.size() * kEncoderPlaces),
      "struct Body {\n  static constexpr int kLoads = ",
      step.loads.size() + formula.singles.count(), ", kStores = ", step.stores.size(),
      ", kAmax = ", stores_to(step, Store::To::amax).size(), ", kEncoders = ", step.encoders.size(),
      ";\n  __device__ static void load(const TenonAccess* at, const TenonU64* random, "
      "TenonU32 row, TenonU32 column, float (*in)[8]) {\n",
      indented(loads), "  }\n  __device__ static void compute(const float* in, float* out) {\n",
      indented(formula.lines),
      "  }\n  __device__ static void store(const Arguments& a, TenonU32 row, TenonU32 "
      "column, const float (&out)[kStores][8], const float* multiplier, TenonU32* most) {\n",
      indented(store_eight(step)),
      "  }\n  __device__ static void start(const Arguments& a, TenonU32* before, float* "
      "multiplier) {\n",
      indented(start_lines(step) + multiplier_lines(step)),
      "  }\n  __device__ static void finish(const Arguments& a, const TenonU32* most, const "
      "TenonU32* before) {\n",
      indented(finish_lines(step, true)), "  }\n};\nextern \"C\" __launch_bounds__(", size.threads,
      ", ", size.blocks, ") __global__ void ", kEntry,
      "(const __grid_constant__ Arguments a) {\n  tenon_vectors<Body, ", size.vectors, ", ",
      flag(size.walks), ", ", flag(tall(step)), ">(a);\n}\n");
  const std::string clear = clear_lines(step);
  if (clear.empty()) return;
  entries_.emplace_back(kClear);
  text_ += str("extern \"C\" __global__ void ", kClear, "(const __grid_constant__ Arguments a) {\n",
               indented(clear), "}\n");
}

bool VectorProgram::fits(const RunArgs& args) const {
  // Threads after the last vector also need a 32-bit index.
  const int64_t all = args.rows * (step_.cols / kEight);
  return all > 0 && all <= INT32_MAX && suits_eights(step_, singles_, args);
}

std::vector<Launch> VectorProgram::launches(const RunArgs& args) const {
  Accesses at = accesses_of(step_, singles_, args);
  auto vectors = static_cast<uint32_t>(step_.cols / kEight);
  const uint32_t all = static_cast<uint32_t>(args.rows) * vectors;
  if (size_.walks && dense(step_, at)) {
    vectors = 1;
    for (TenonAccess& a : at) a.stride = kEight;
  }
  const auto rows = static_cast<uint32_t>(args.rows);
  TenonVectorHead head = divided_by(tall(step_) ? rows : vectors);
  head.all = tall(step_) ? rows * static_cast<uint32_t>(cdiv(vectors, size_.vectors)) : all;
  head.across = vectors;
  head.random = random_state(args);
  Places places;
  for (const Encoder& e : step_.encoders)
    for (const TenonPlace& p : encoder_places(e, args)) places.push_back(p);
  const int64_t of_block = int64_t{size_.threads} * (tall(step_) ? 1 : size_.vectors);
  Launch l = launch_of(number(kEntry), cdiv(head.all, of_block), size_.threads, head, at, places);
  if (size_.walks) l.per_multiprocessor = size_.blocks;
  std::vector<Launch> list;
  if (entries_.size() > 1) {
    list.push_back(l);
    list[0].entry = number(kClear);
    list[0].per_multiprocessor = 0;
    list[0].blocks = list[0].threads = 1;
  }
  list.push_back(std::move(l));
  return list;
}

Attempt make_vector(const Step& step, const Target& /*target*/) {
  if (std::string why = VectorProgram::refusal(step); !why.empty())
    return Refusal{std::move(why), !step.is_map()};
  return kernel_of(step.name, std::make_unique<VectorProgram>(step));
}

}  // namespace tenon::cuda
