// Fuzzer of .npy files, for libFuzzer, or a seeded run with TENON_FUZZ_MAIN.
#include <cstdint>

#include "fuzz/files.h"
#include "fuzz/support.h"

namespace {

bool through_npy(std::string_view bytes) { return tenon::test::through_file("w.npy", bytes); }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  through_npy({reinterpret_cast<const char*>(data), size});
  return 0;
}

namespace {

using namespace tenon::test;  // NOLINT: a test program

constexpr std::string_view kBytes = "{}()[],:'\"0129-L<>|=fV TrueFalse\n\0\x93\xff";
constexpr std::array<const char*, 7> kTypes{"<f2", "<f4", "<f8", "|V2", "<V2", "bfloat16", ">f4"};

// Random sizes and their product.
std::string shape(Generator& r, size_t& elements) {
  std::string text = "(";
  for (size_t n = below(r, 5); n > 0; --n) {
    const size_t size = below(r, 8) == 0 ? 0 : 1 + below(r, 6);
    elements *= size;
    text += std::to_string(size) + (below(r, 8) ? ", " : "L,");
  }
  return text + ")";
}

std::string example(Generator& r) {
  size_t elements = 1;
  const std::string type = pick(r, kTypes);
  const std::string header = "{'descr': '" + type +
                             "', 'fortran_order': " + (below(r, 2) ? "True" : "False") +
                             ", 'shape': " + shape(r, elements) + ", }\n";
  const size_t major = 1 + below(r, 3);
  std::string text = std::string("\x93NUMPY") + static_cast<char>(major) + '\0';
  for (size_t i = 0; i < (major == 1 ? 2 : 4); ++i)
    text += static_cast<char>(header.size() >> (8 * i) & 0xff);
  text += header;
  const size_t bytes = type.ends_with("f4") ? 4 : type.ends_with("f8") ? 8 : 2;
  for (size_t i = 0; i < elements * bytes; ++i) text += static_cast<char>(below(r, 256));
  return below(r, 4) == 0 ? mutated(r, text, kBytes) : text;
}

}  // namespace

#if defined(TENON_FUZZ_MAIN)

int main(int argc, char** argv) { return seeded_run("arrays", argc, argv, example, through_npy); }

#else

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t most, unsigned seed) {
  return mutate_or_make(data, size, most, seed, example);
}

#endif
