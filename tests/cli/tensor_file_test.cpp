// Tests of tensor files: all supported dtypes and layouts, and all invalid files.
#include "cli/tensor_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <ctime>
#include <memory>

#include "support/support.h"

namespace tenon::test {
namespace {

using cli::parse_tensor_file;
using cli::Stored;
using cli::TensorFile;

std::string little(uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}

template <class T>
std::string raw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

std::string npy(const std::string& header, const std::string& data, int major = 1) {
  const int length = major == 1 ? 2 : 4;
  return std::string("\x93NUMPY") + static_cast<char>(major) + '\0' +
         little(header.size(), length) + header + data;
}

std::string dictionary(const std::string& descr, const std::string& shape, bool fortran = false) {
  return "{'descr': '" + descr + "', 'fortran_order': " + (fortran ? "True" : "False") +
         ", 'shape': " + shape + ", }      \n";
}

std::string safetensors(const std::string& header, const std::string& data) {
  return little(header.size(), 8) + header + data;
}

// The bytes at an odd address, in memory of exactly their size, so that sanitizers detect reads
// past the end.
class Copy {
 public:
  explicit Copy(const std::string& bytes) : memory_(new std::byte[bytes.size() + 1]) {
    std::memcpy(memory_.get() + 1, bytes.data(), bytes.size());
    bytes_ = {memory_.get() + 1, bytes.size()};
  }
  [[nodiscard]] std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::span<const std::byte> bytes_;
};

// All elements, read tile by tile.
std::vector<float> values(const cli::FileTensor& t, int64_t tile_rows, int64_t tile_cols) {
  std::vector<float> all(static_cast<size_t>(t.elements()));
  std::vector<float> buffer;
  for (int64_t r = 0; r < t.matrix.rows; r += tile_rows)
    for (int64_t c = 0; c < t.matrix.cols; c += tile_cols) {
      const cli::Tile tile{r, std::min(tile_rows, t.matrix.rows - r), c,
                           std::min(tile_cols, t.matrix.cols - c)};
      const View v = t.tile(tile, buffer);
      EXPECT_EQ(v.rows, tile.rows);
      EXPECT_EQ(v.cols, tile.cols);
      const size_t size = v.dtype == DType::f32 ? 4 : 2;
      for (int64_t i = 0; i < v.rows; ++i)
        for (int64_t j = 0; j < v.cols; ++j) {
          uint32_t code = 0;
          std::memcpy(&code, static_cast<const char*>(v.data) + (i * v.stride + j) * size, size);
          all[static_cast<size_t>((r + i) * t.matrix.cols + c + j)] = decode_ref(v.dtype, code);
        }
    }
  return all;
}

const std::vector<float> kValues{0.5F, -1.0F, 2.0F, 0.0F, -0.25F, 96.0F};

// kValues in a stored format.
std::string stored(Stored type) {
  if (type == Stored::f32) return raw(kValues);
  if (type == Stored::f64) return raw(std::vector<double>(kValues.begin(), kValues.end()));
  std::vector<uint16_t> codes;
  for (const float v : kValues)
    codes.push_back(
        static_cast<uint16_t>(encode_ref(type == Stored::f16 ? DType::f16 : DType::bf16, v)));
  return raw(codes);
}

TEST(TensorFile, NpyOfEveryTypeAndVersion) {
  const std::vector<std::pair<std::string, Stored>> types{
      {"<f2", Stored::f16},  {"<f4", Stored::f32},  {"<f8", Stored::f64},
      {"<V2", Stored::bf16}, {"|V2", Stored::bf16}, {"bfloat16", Stored::bf16}};
  for (const auto& [descr, type] : types)
    for (const int major : {1, 2, 3}) {
      const Copy copy(npy(dictionary(descr, "(1, 2, 3)"), stored(type), major));
      const TensorFile f = parse_tensor_file("dir/w.npy", copy.bytes());
      ASSERT_EQ(f.tensors.size(), 1U);
      EXPECT_EQ(f.tensors[0].name, "w");
      EXPECT_EQ(f.tensors[0].type, type) << descr;
      EXPECT_EQ(f.tensors[0].matrix, (Shape{2, 3}));
      EXPECT_EQ(values(f.tensors[0], 1, 2), kValues) << descr << " version " << major;
      EXPECT_EQ(f.notes.size(), descr.ends_with("V2") ? 1U : 0U);
    }
}

TEST(TensorFile, ShapesFoldIntoRows) {
  const auto shape = [](const std::string& text, size_t elements) {
    const Copy copy(npy(dictionary("<f4", text), std::string(4 * elements, '\0')));
    return parse_tensor_file("w.npy", copy.bytes()).tensors[0].matrix;
  };
  EXPECT_EQ(shape("()", 1), (Shape{1, 1}));
  EXPECT_EQ(shape("(7,)", 7), (Shape{1, 7}));
  EXPECT_EQ(shape("(2L, 3L)", 6), (Shape{2, 3}));
  EXPECT_EQ(shape("(4, 0)", 0), (Shape{4, 0}));
  EXPECT_EQ(shape("(0, 1152921504606846)", 0).rows, 0);
  EXPECT_EQ(shape("( 2,3 ,\t5 , )", 30), (Shape{6, 5}));
}

TEST(TensorFile, FortranOrder) {
  const std::vector<int64_t> sizes{3, 4, 5, 21};
  std::vector<float> c_order(3 * 4 * 5 * 21);
  std::vector<double> file(c_order.size());
  size_t n = 0;
  for (int64_t i = 0; i < 3; ++i)
    for (int64_t j = 0; j < 4; ++j)
      for (int64_t k = 0; k < 5; ++k)
        for (int64_t l = 0; l < 21; ++l, ++n) {
          c_order[n] = static_cast<float>(n);
          file[static_cast<size_t>(i + 3 * (j + 4 * (k + 5 * l)))] = static_cast<double>(n);
        }
  const Copy wide(npy(dictionary("<f8", "(3, 4, 5, 21)", true), raw(file)));
  EXPECT_EQ(values(parse_tensor_file("w.npy", wide.bytes()).tensors[0], 7, 20), c_order);
  const std::vector<float> narrow(file.begin(), file.end());
  const Copy f32(npy(dictionary("<f4", "(3, 4, 5, 21)", true), raw(narrow)));
  EXPECT_EQ(values(parse_tensor_file("w.npy", f32.bytes()).tensors[0], 60, 21), c_order);
}

TEST(TensorFile, Safetensors) {
  const std::string data = stored(Stored::f16) + stored(Stored::f64) + "ints" +
                           stored(Stored::bf16) + "8" + stored(Stored::f32);
  const Copy copy(safetensors(
      R"({"__metadata__":{"format":"pt"},"z":{"dtype":"F16","shape":[6],"data_offsets":[0,12]},
          "y":{"dtype":"F64","shape":[2,3],"data_offsets":[12,60]},
          "ids":{"dtype":"I32","shape":[1],"data_offsets":[60,64]},
          "x\u0000<&":{"dtype":"BF16","shape":[3,1,2],"data_offsets":[64,76]},
          "q":{"dtype":"F8_E4M3","shape":[],"data_offsets":[76,77]},
          "a":{"dtype":"F32","shape":[6,1],"data_offsets":[77,101]},
          "none":{"dtype":"F32","shape":[0],"data_offsets":[101,101]}}   )",
      data));
  const TensorFile f = parse_tensor_file("m.safetensors", copy.bytes());
  ASSERT_EQ(f.tensors.size(), 5U);
  const char* names[] = {"z", "y", "x", "a", "none"};
  const Shape shapes[] = {{1, 6}, {2, 3}, {3, 2}, {6, 1}, {1, 0}};
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(f.tensors[i].name.substr(0, 4), i == 2 ? std::string("x\0<&", 4) : names[i]);
    EXPECT_EQ(f.tensors[i].matrix, shapes[i]);
    EXPECT_EQ(values(f.tensors[i], 2, 2), i == 4 ? std::vector<float>{} : kValues);
  }
  EXPECT_EQ(f.notes, (std::vector<std::string>{"m.safetensors: 1 tensor of F8_E4M3 left out",
                                               "m.safetensors: 1 tensor of I32 left out"}));
}

TEST(TensorFile, BadNpy) {
  const std::string good = dictionary("<f4", "(2, 3)");
  const std::string data = stored(Stored::f32);
  const auto refused = [](const std::string& bytes, std::initializer_list<std::string_view> parts) {
    const Copy copy(bytes);
    expect_error([&] { parse_tensor_file("w.npy", copy.bytes()); }, Code::invalid_argument, parts);
    expect_error([&] { parse_tensor_file("w.npy", copy.bytes()); }, Code::invalid_argument,
                 {"w.npy"});
  };
  const auto header = [&](const std::string& text, std::string_view part) {
    refused(npy(text, data), {part});
  };
  refused("", {"is empty"});
  refused("\x93NUM", {"does not begin with"});
  refused("\x93NUMPY\x01", {"7 bytes", "truncated"});
  refused(std::string("\x93NUMPY\x02\0\x10\0", 10), {"begins with 12"});
  refused("PK\x03\x04rest", {"zip archive"});
  refused(npy(good, data, 4), {"version 4.0", "1.0, 2.0 and 3.0"});
  refused(npy(good, data).replace(7, 1, "\x01"), {"version 1.1"});
  refused(npy(good, data).substr(0, 40), {"bytes long, but 30 follow"});
  refused(npy(good, data).replace(8, 2, "\xff\xff"), {"65535 bytes long"});
  refused(npy(good, data, 2).replace(8, 4, "\xff\xff\xff\xff"), {"4294967295", "at most"});
  refused(npy(good, data.substr(0, 23)), {"needs 24 bytes", "holds 23"});
  refused(npy(good, data + "!"), {"1 bytes after its data"});
  header("", "its end");
  header("[1, 2]", "'{' is expected");
  header("{'descr': '<f4', 'shape': (2, 3)}", "no 'fortran_order'");
  header("{'fortran_order': False, 'shape': (2, 3)}", "no 'descr'");
  header("{'descr': '<f4', 'fortran_order': False}", "no 'shape'");
  header(good + "{}", "goes on after its '}'");
  header("{'descr': '<f4', 'descr': '<f4', ", "'descr' twice");
  header("{'descr': '<f4', 'fortran_order': 1, ", "True or False");
  header("{'descr': '<f4', 'extra': 1, ", "the key 'extra'");
  header("{'descr': '<f4", "closing quote");
  header("{'descr': [('a', '<f4')], ", "structured array");
  header("{'descr' '<f4'}", "':' is expected");
  header("{'descr': '<f4' 'shape': (2, 3)}", "'}' is expected");
  header(dictionary(">f4", "(2, 3)"), "big-endian");
  header(dictionary("<i4", "(2, 3)"), "'<i4' is not read");
  header(dictionary("|O", "(2, 3)"), "'|O' is not read");
  header(dictionary("<f4\x1b[31m", "(2, 3)"), "is not read");
  header(dictionary("<f4", "(-2, 3)"), "whole number");
  header(dictionary("<f4", "(2.0, 3)"), "',' or ')'");
  header(dictionary("<f4", "(6)"), "a tuple");
  header(dictionary("<f4", "(,)"), "whole number");
  header(dictionary("<f4", "(2, 3"), "whole number");
  header(dictionary("<f4", "6"), "'(' is expected");
  header(dictionary("<f4", "(99999999999999999999,)"), "below 2^63");
  header(dictionary("<f4", "(4294967296, 4294967296)"), "2^60 bytes");
  header(dictionary("<f4", "(4294967296, 0, 4294967296)"), "2^60 bytes");
  header(dictionary("<f4", "(9223372036854775807, 2)"), "2^60 bytes");
  std::string many = "(";
  for (int i = 0; i < 65; ++i) many += "1, ";
  header(dictionary("<f4", many + ")"), "65 dimensions");
}

TEST(TensorFile, BadSafetensors) {
  const auto refused = [](const std::string& bytes, std::initializer_list<std::string_view> parts) {
    const Copy copy(bytes);
    for (const std::string_view part : parts)
      expect_error([&] { parse_tensor_file("m.safetensors", copy.bytes()); },
                   Code::invalid_argument, {part, "m.safetensors"});
  };
  const auto header = [&](const std::string& text, std::string_view part) {
    refused(safetensors(text, "12345678"), {part});
  };
  const auto entry = [&](const std::string& text, std::string_view part) {
    header("{\"w\":" + text + "}", part);
  };
  refused("1234567", {"7 bytes", "truncated"});
  refused(little(~0ULL, 8) + "{}", {"18446744073709551615", "at most 100000000"});
  refused(little(3, 8) + "{}", {"3 bytes long, but 2 follow"});
  header("", "begin with '{'");
  header("[]", "begin with '{'");
  header(" {}", "begin with '{'");
  header("{", "is not JSON");
  header("{}x", "is not JSON");
  header("{\"\xff\":1}", "is not JSON");
  header("{}", "8 bytes after its last tensor");
  entry("1e999", "is not JSON");
  entry("3", "not a JSON object");
  entry("{}", "no text 'dtype'");
  entry(R"({"dtype":4,"shape":[2],"data_offsets":[0,8]})", "no text 'dtype'");
  entry(R"({"dtype":"F32","data_offsets":[0,8]})", "no list 'shape'");
  entry(R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})", "no list 'shape'");
  entry(R"({"dtype":"F32","shape":[2]})", "no list 'data_offsets'");
  entry(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", "-2 in 'shape'");
  entry(R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})", "2.0 in 'shape'");
  entry(R"({"dtype":"F32","shape":["\u001b"],"data_offsets":[0,8]})", "in 'shape'");
  entry(R"({"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]})", "to 2^60");
  entry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,9]})", "has 3 data_offsets");
  entry(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})", "begins at 8 and ends at 0");
  entry(R"({"dtype":"F32","shape":[3],"data_offsets":[0,12]})", "ends at 12");
  entry(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", "its shape needs 12");
  entry(R"({"dtype":"I64","shape":[2],"data_offsets":[0,8]})", "its shape needs 16");
  entry(R"({"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]})", "2^60 bytes");
  entry(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})", "the one before ends at 0");
  entry(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})", "4 bytes after its last tensor");
  const std::string one = R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  header("{" + one + "," + one + "}", "'w' twice");
  header(R"({"a":{"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,8]}})", "'shape' twice");
  header("{" + one + R"(,"v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
         "begins at 4, but the one before ends at 8");
  const Copy other("plain text of no format");
  expect_error([&] { parse_tensor_file("notes.txt", other.bytes()); }, Code::invalid_argument,
               {"notes.txt", "neither .npy nor .safetensors"});
}

// Depth and counts must not use stack, or quadratic time.
TEST(TensorFile, DeepHeaders) {
  const std::string open(200000, '['), close(200000, ']');
  const std::string rest = R"("dtype":"F32","data_offsets":[0,0])";
  const auto refused = [](const std::string& header, std::string_view part) {
    const Copy copy(safetensors(header, ""));
    expect_error([&] { parse_tensor_file("m.safetensors", copy.bytes()); }, Code::invalid_argument,
                 {"m.safetensors", part});
  };
  refused(R"({"w":{"shape":)" + open + close + "," + rest + "}}", "in 'shape'");
  refused(R"({"w":{"more":)" + open + close + "," + rest + "}}", "at most 16");
  refused(R"({"__metadata__":)" + open + close + "}", "at most 16");
  refused("{\"w\":" + open + close + "}", "at most 16");
  std::string objects;
  for (int i = 0; i < 200000; ++i) objects += "{\"a\":";
  refused("{\"w\":" + objects, "at most 16");
  std::string sizes = "1";
  for (int i = 0; i < 200000; ++i) sizes += ",1";
  refused(R"({"w":{"shape":[)" + sizes + "]," + rest + "}}", "more than 64 numbers");
}

TEST(TensorFile, ManyTensors) {
  constexpr int kMany = 200000;
  std::string header = "{";
  for (int i = 0; i < kMany; ++i)
    header += (i ? ",\"" : "\"") + std::to_string(i) +
              R"(":{"dtype":"F32","shape":[0],"data_offsets":[0,0]})";
  const Copy copy(safetensors(header + "}", ""));
  const std::clock_t start = std::clock();  // CPU time of this process, independent of other load
  EXPECT_EQ(parse_tensor_file("m.safetensors", copy.bytes()).tensors.size(), size_t{kMany});
  // About one second. Quadratic time would be minutes.
  EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 20);

  header = "{\"0\":{}";
  for (int i = 1; i <= 1 << 20; ++i) header += ",\"" + std::to_string(i) + "\":{}";
  const Copy more(safetensors(header + "}", ""));
  expect_error([&] { parse_tensor_file("m.safetensors", more.bytes()); }, Code::invalid_argument,
               {"m.safetensors", "more than 1048576 tensors", "several files"});
}

TEST(TensorFile, FilesThatCannotBeOpened) {
  expect_error([] { cli::open_file("no/such/file.npy"); }, Code::invalid_argument,
               {"no/such/file.npy", "cannot be opened"});
  expect_error([] { cli::open_file("/"); }, Code::invalid_argument, {"not a regular file"});
}

// Access to a mapping of a file that shrinks is a SIGBUS.
TEST(TensorFile, AFileThatShrinksIsAnError) {
  char path[] = "/tmp/tenon-shrinks-XXXXXX";
  const int fd = mkstemp(path);
  ASSERT_GE(fd, 0);
  const std::string data(size_t{1} << 20, '\0');
  for (const auto& [descr, fortran] : {std::pair("<f4", false), {"<f8", false}, {"<f2", true}}) {
    const int64_t rows = static_cast<int64_t>(data.size()) / 64 / (descr[2] - '0');
    const std::string file =
        npy(dictionary(descr, "(" + std::to_string(rows) + ", 64)", fortran), data);
    ASSERT_EQ(pwrite(fd, file.data(), file.size(), 0), static_cast<ssize_t>(file.size()));
    const TensorFile f = parse_tensor_file("w.npy", cli::open_file(path));
    std::vector<float> buffer;
    const cli::Tile tile{0, rows, 0, 64};
    EXPECT_EQ(f.tensors[0].tile(tile, buffer).rows, rows);
    ASSERT_EQ(ftruncate(fd, 4096), 0);
    expect_error([&] { (void)f.tensors[0].tile(tile, buffer); }, Code::runtime,
                 {path, "shrank while it was read", "run this again"});
  }
  close(fd);
  unlink(path);
}

TEST(TensorFile, NamesAreFitToPrint) {
  EXPECT_EQ(cli::clean("größe ∂ 𝛼"), "größe ∂ 𝛼");
  EXPECT_EQ(cli::clean(std::string("a\0b\x1b[31m\n\x7f", 10)), "a�b�[31m��");
  EXPECT_EQ(cli::clean("\xff\xc3(\xe2\x82"), "��(��");
  EXPECT_EQ(cli::clean("\xed\xa0\x80\xc0\xaf\xf4\x90\x80\x80"), "���������");
  EXPECT_EQ(cli::clean("\xe2\x80\xae\xef\xbf\xbf\xc2\x85"), "���");
  EXPECT_EQ(cli::clean("abcdef", 3), "abc…");
}

// Mutated headers are read or rejected with an Error, without access outside of the bytes.
TEST(TensorFile, Mutations) {
  const std::vector<std::string> seeds{
      npy(dictionary("<f4", "(2, 3)"), stored(Stored::f32)),
      npy(dictionary("<f8", "(3, 1, 2)", true), stored(Stored::f64), 2),
      safetensors(R"({"a":{"dtype":"F16","shape":[6],"data_offsets":[0,12]},)"
                  R"("b":{"dtype":"F32","shape":[2,3],"data_offsets":[12,36]}})",
                  stored(Stored::f16) + stored(Stored::f32))};
  const std::string alphabet = "{}[](),:'\"0129-.<>|fVFLTrue \\u\n";
  std::mt19937 random(20240607);
  const auto below = [&](size_t n) { return static_cast<size_t>(random()) % n; };
  int good = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = seeds[below(seeds.size())];
    for (size_t edits = 1 + below(3); edits > 0 && !bytes.empty(); --edits) {
      const size_t at = below(bytes.size());
      switch (below(5)) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes[at] = alphabet[below(alphabet.size())];
          break;
        case 2:
          bytes.insert(at, 1, alphabet[below(alphabet.size())]);
          break;
        case 3:
          bytes.erase(at, 1 + below(4));
          break;
        default:
          bytes.resize(at);
      }
    }
    const Copy copy(bytes);
    try {
      const TensorFile f = parse_tensor_file("m.safetensors", copy.bytes());
      for (const cli::FileTensor& t : f.tensors)
        if (t.matrix.cols > 0) values(t, 2, 3);
      ++good;
    } catch (const Error& e) {
      ASSERT_EQ(e.code(), Code::invalid_argument) << e.what();
    }
  }
  EXPECT_GT(good, 100);
}

}  // namespace
}  // namespace tenon::test
