// Reads the .npy format, versions 1 to 3. The header is untrusted: lengths, sizes and products are
// checked first.
#include <charconv>
#include <map>
#include <optional>

#include "cli/tensor_formats.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

struct NpyHeader {
  std::optional<std::string> descr;
  std::optional<bool> fortran;
  std::optional<std::vector<int64_t>> shape;
};

// Parses the Python dictionary of an npy header: three keys, with a string, a bool and a tuple.
class NpyParser {
 public:
  NpyParser(const std::string& file, std::string text) : file_(file), all_(std::move(text)) {}

  NpyHeader parse() {
    expect('{');
    while (!take('}')) {
      key();
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip();
    require(at_ == text_.size(), file_, ": the npy header goes on after its '}' with ", rest(),
            "; only spaces may follow, save the array again");
    const char* missing = !header_.descr     ? "descr"
                          : !header_.fortran ? "fortran_order"
                          : !header_.shape   ? "shape"
                                             : nullptr;
    require(missing == nullptr, file_, ": the npy header has no '", missing ? missing : "",
            "'; it needs descr, fortran_order and shape, save the array again");
    return header_;
  }

 private:
  [[noreturn]] void wrong(std::string_view expected) const {
    fail(Code::invalid_argument, file_, ": the npy header has ", rest(), " at byte ", at_,
         " where ", expected, " is expected; save the array again with numpy.save");
  }
  [[nodiscard]] std::string rest() const {
    return at_ < text_.size() ? str("'", clean(text_.substr(at_, 32), 24), "'") : "its end";
  }
  void skip() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string::npos)
      ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ == text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) wrong(str("'", std::string_view(&c, 1), "'"));
  }
  bool word(std::string_view w) {
    skip();
    if (text_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }

  std::string quoted(std::string_view what) {
    skip();
    const char quote = at_ < text_.size() ? text_[at_] : ' ';
    if (quote != '\'' && quote != '"') wrong(what);
    const size_t end = text_.find(quote, at_ + 1);
    if (end == std::string_view::npos) wrong(str(what, " with its closing quote"));
    std::string value(text_.substr(at_ + 1, end - at_ - 1));
    at_ = end + 1;
    return value;
  }

  template <class T>
  void set(std::optional<T>& field, std::string_view key, T value) {
    require(!field, file_, ": the npy header has '", key, "' twice; save the array again");
    field = std::move(value);
  }

  void key() {
    const std::string key = quoted("a quoted key");
    expect(':');
    skip();
    if (key == "descr") {
      require(at_ == text_.size() || text_[at_] != '[', file_,
              ": descr is a list, a structured array; save one field of floats, x['field']");
      set(header_.descr, key, quoted("the quoted dtype"));
    } else if (key == "fortran_order") {
      const bool yes = word("True");
      if (!yes && !word("False")) wrong("True or False");
      set(header_.fortran, key, yes);
    } else if (key == "shape") {
      set(header_.shape, key, tuple());
    } else {
      fail(Code::invalid_argument, file_, ": the npy header has the key '", clean(key, 24),
           "'; it has descr, fortran_order and shape alone, save the array again");
    }
  }

  std::vector<int64_t> tuple() {
    std::vector<int64_t> sizes;
    expect('(');
    bool comma = true;
    while (!take(')')) {
      if (!comma) wrong("',' or ')'");
      sizes.push_back(integer());
      comma = take(',');
    }
    if (sizes.size() == 1 && !comma) wrong("(n,), a tuple, in place of (n)");
    return sizes;
  }

  int64_t integer() {
    skip();
    int64_t value = 0;
    const char* begin = text_.data() + at_;
    const bool digit = at_ < text_.size() && *begin >= '0' && *begin <= '9';
    if (!digit) wrong("a size, a whole number of at least 0,");
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error != std::errc()) wrong("a size below 2^63");
    at_ += static_cast<size_t>(end - begin);
    if (at_ < text_.size() && text_[at_] == 'L') ++at_;  // Python 2 wrote 3L
    return value;
  }

  const std::string& file_;
  std::string all_;
  std::string_view text_ = all_;
  size_t at_ = 0;
  NpyHeader header_;
};

Stored npy_type(const std::string& file, const std::string& descr) {
  static const std::map<std::string_view, Stored> kTypes{
      {"<f2", Stored::f16},  {"<f4", Stored::f32},  {"<f8", Stored::f64},
      {"<V2", Stored::bf16}, {"|V2", Stored::bf16}, {"bfloat16", Stored::bf16}};
  const auto found = kTypes.find(descr);
  if (found != kTypes.end()) return found->second;
  require(
      !descr.starts_with('>'), file, ": descr '", clean(descr, 24),
      "' is big-endian; files are read little-endian, save x.astype(x.dtype.newbyteorder('<'))");
  fail(Code::invalid_argument, file, ": descr '", clean(descr, 24),
       "' is not read; it must be <f2, <f4, <f8 or bfloat16 (|V2), save x.astype('<f4')");
}

}  // namespace

TensorFile parse_npy(const std::string& file, std::shared_ptr<const Bytes> source) {
  const uint64_t size = source->size();
  const std::string head = read_text(*source, 0, std::min<uint64_t>(size, 12));
  require(size >= 10, file, " has ", size,
          " bytes; an npy file begins with at least 10, it is truncated, save it again");
  const int major = static_cast<unsigned char>(head[6]);
  const int minor = static_cast<unsigned char>(head[7]);
  require(major >= 1 && major <= 3 && minor == 0, file, " has npy version ", major, ".", minor,
          "; 1.0, 2.0 and 3.0 are read, save it again with numpy.save");
  const size_t start = major == 1 ? 10 : 12;
  require(size >= start, file, " has ", size, " bytes; npy version ", major, ".0 begins with ",
          start, ", it is truncated, save it again");
  const uint64_t length = little_endian(std::string_view(head).substr(8, start - 8));
  require(length <= kMostNpyHeader, file, ": the npy header is said to be ", length,
          " bytes long; at most ", kMostNpyHeader, " are read, the length is damaged");
  require(length <= size - start, file, ": the npy header is said to be ", length,
          " bytes long, but ", size - start,
          " follow; the file is truncated, copy or save it again");
  const NpyHeader header = NpyParser(file, read_text(*source, start, length)).parse();

  TensorFile result;
  result.is_npy = true;
  FileTensor t;
  t.name = file.substr(file.find_last_of('/') + 1);
  if (t.name.ends_with(".npy")) t.name.resize(t.name.size() - 4);
  t.type = npy_type(file, *header.descr);
  t.shape = *header.shape;
  t.fortran = *header.fortran && t.shape.size() > 1;
  const int64_t one = bytes_of(t.type);
  const auto want = static_cast<uint64_t>(count_elements(file, t.shape, one) * one);
  const uint64_t have = size - start - length;
  require(have >= want, file, ": its shape needs ", want, " bytes of data, but it holds ", have,
          "; the file is truncated, copy or save it again");
  require(have == want, file, " holds ", have - want,
          " bytes after its data; an npy file is one array, save each in a file of its own");
  t.matrix = fold(t.shape);
  t.bytes = std::move(source);
  t.offset = start + length;
  if (header.descr->ends_with("V2"))
    result.notes.push_back(str(file, ": ", *header.descr, " is read as bfloat16"));
  result.tensors.push_back(std::move(t));
  return result;
}

}  // namespace tenon::cli
