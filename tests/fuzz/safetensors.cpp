// Fuzzer of .safetensors files, for libFuzzer, or a seeded run with TENON_FUZZ_MAIN.
#include <cstdint>

#include "fuzz/files.h"
#include "fuzz/support.h"

namespace {

using namespace tenon;        // NOLINT: a test program
using namespace tenon::test;  // NOLINT: a test program

// A file that is read and written again must read as the same.
void write_again(const cli::TensorFile& file) {
  std::vector<std::string> data;
  std::vector<cli::TensorToWrite> tensors;
  std::vector<const cli::FileTensor*> from;
  for (const cli::FileTensor& t : file.tensors)
    if (is_small(t) && t.type != cli::Stored::f64) from.push_back(&t);
  for (const cli::FileTensor* t : from) data.push_back(read_tiles(*t, 7, 9));
  for (size_t i = 0; i < from.size(); ++i)
    tensors.push_back(
        {from[i]->name, from[i]->type, from[i]->shape, std::as_bytes(std::span(data[i]))});
  if (tensors.empty()) return;
  const std::string text = cli::safetensors_file(tensors);
  const std::optional<cli::TensorFile> back = read_file("m.safetensors", text);
  check_file(back && back->tensors.size() == from.size(), "what was written is not read");
  for (const cli::FileTensor& t : back->tensors) {
    const auto same = [&](const cli::FileTensor* f) { return f->name == t.name; };
    const auto found = std::ranges::find_if(from, same);
    check_file(found != from.end() && (*found)->type == t.type && (*found)->shape == t.shape,
               "another tensor was written");
    check_file(read_tiles(t, 2, 2) == data[static_cast<size_t>(found - from.begin())],
               "other bytes were written");
  }
}

bool through_safetensors(std::string_view bytes) {
  if (!through_file("m.safetensors", bytes)) return false;
  if (const auto file = read_file("m.safetensors", bytes)) write_again(*file);
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  through_safetensors({reinterpret_cast<const char*>(data), size});
  return 0;
}

namespace {

constexpr std::string_view kBytes = "{}[],:\"0129-.eE\\u F32truenull\n\0\xff";
struct Type {
  const char* name;
  size_t bytes;
};
constexpr std::array<Type, 8> kTypes{{{"F32", 4},
                                      {"F16", 2},
                                      {"BF16", 2},
                                      {"F64", 8},
                                      {"I64", 8},
                                      {"F8_E4M3", 1},
                                      {"BOOL", 1},
                                      {"F4", 1}}};
constexpr std::array<const char*, 5> kNames{"w", "layer.0.weight", "\\u00e9", "", "a\\\"b"};
constexpr std::array<const char*, 6> kMetadata{
    R"("__metadata__":{},)",
    R"("__metadata__":{"format":"pt"},)",
    "",
    "",
    "",
    R"("__metadata__":{"deep":[[[{"a":[1.5,null,true]}]]]},)"};

std::string example(Generator& r) {
  std::string header = "{" + pick(r, kMetadata);
  size_t at = 0;
  const size_t count = below(r, 4);
  for (size_t i = 0; i < count; ++i) {
    const Type type = kTypes[below(r, kTypes.size())];
    size_t bytes = type.bytes;
    std::string shape;
    for (size_t n = below(r, 4); n > 0; --n) {
      const size_t size = below(r, 8) == 0 ? 0 : 1 + below(r, 6);
      bytes *= size;
      shape += (shape.empty() ? "" : ",") + std::to_string(size);
    }
    header += (i ? ",\"" : "\"") + pick(r, kNames) + std::to_string(i) + "\":{\"dtype\":\"" +
              type.name + "\",\"shape\":[" + shape + "],\"data_offsets\":[" + std::to_string(at) +
              "," + std::to_string(at + bytes) + "]}";
    at += bytes;
  }
  if (count == 0 && header.ends_with(',')) header.pop_back();
  header += "}";
  // Mutations of only the header keep its length valid, so that they reach the JSON parser.
  if (below(r, 4) == 0) header = mutated(r, header, kBytes);
  std::string text;
  for (size_t i = 0; i < 8; ++i) text += static_cast<char>(header.size() >> (8 * i) & 0xff);
  text += header;
  for (size_t i = 0; i < at; ++i) text += static_cast<char>(below(r, 256));
  return below(r, 8) == 0 ? mutated(r, text, kBytes) : text;
}

}  // namespace

#if defined(TENON_FUZZ_MAIN)

int main(int argc, char** argv) {
  return seeded_run("files", argc, argv, example, through_safetensors);
}

#else

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  return mutate_or_make(data, size, most, seed, example);
}

#endif
