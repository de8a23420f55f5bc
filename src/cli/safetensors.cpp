// Reads the .safetensors format. Offsets must cover the data without gaps, as the format requires.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <unordered_set>

#include "cli/tensor_formats.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

using Json = nlohmann::json;

struct Known {
  int64_t size;
  std::optional<Stored> type;
};

const std::map<std::string_view, Known>& safetensors_types() {
  static const std::map<std::string_view, Known> kTypes{
      {"F16", {2, Stored::f16}}, {"BF16", {2, Stored::bf16}},
      {"F32", {4, Stored::f32}}, {"F64", {8, Stored::f64}},
      {"BOOL", {1, {}}},         {"U8", {1, {}}},
      {"I8", {1, {}}},           {"F8_E4M3", {1, {}}},
      {"F8_E5M2", {1, {}}},      {"F8_E8M0", {1, {}}},
      {"U16", {2, {}}},          {"I16", {2, {}}},
      {"U32", {4, {}}},          {"I32", {4, {}}},
      {"U64", {8, {}}},          {"I64", {8, {}}},
      {"C64", {8, {}}}};
  return kTypes;
}

// The header entry of one tensor.
struct Entry {
  std::string name;
  bool is_object = false;
  std::optional<std::string> dtype;
  std::optional<std::vector<uint64_t>> shape, offsets;
};

// Reads the header with a SAX parser. It builds no tree, so depth and counts cost no more than
// their limits. Keys must be unique: a file with a duplicate key is ambiguous.
class HeaderReader final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  std::vector<Entry> entries;
  std::string error;  // set if the text is not valid JSON

  bool null() override { return value("null"); }
  bool boolean(bool v) override { return value(v ? "true" : "false"); }
  bool number_integer(number_integer_t v) override { return value(std::to_string(v)); }
  bool number_unsigned(number_unsigned_t v) override {
    if (!list_) return value(std::to_string(v));
    check(v <= static_cast<uint64_t>(kMostBytes), std::to_string(v));
    if (list_->size() == kMostDimensions)
      fail(Code::invalid_argument, where(), " has more than ", kMostDimensions, " numbers in '",
           key_, "'; at most ", kMostDimensions, " are read, reshape it");
    list_->push_back(v);
    return true;
  }
  bool number_float(number_float_t /*v*/, const string_t& text) override { return value(text); }
  bool string(string_t& v) override {
    if (depth() == 2 && key_ == "dtype" && in_tensor()) {
      entries.back().dtype = std::move(v);
      return true;
    }
    return list_ ? value(Json(v).dump(-1, ' ', true)) : true;
  }
  bool binary(binary_t& /*v*/) override { return false; }  // JSON has no binary values

  bool start_object(size_t /*count*/) override {
    if (depth() == 1 && in_tensor()) entries.back().is_object = true;
    value("{");
    open();
    return true;
  }
  bool key(string_t& v) override {
    require(keys_.back().insert(v).second, file_, ": the safetensors header has the key '",
            clean(v), "' twice; names are unique, save it again");
    if (depth() == 1) {
      metadata_ = v == "__metadata__";
      if (!metadata_) {
        require(entries.size() < kMostTensors, file_, " has more than ", kMostTensors,
                " tensors; at most ", kMostTensors, " are read, save it as several files");
        entries.emplace_back().name = v;
      }
    } else if (depth() == 2) {
      key_ = std::move(v);
    }
    return true;
  }
  bool end_object() override {
    keys_.pop_back();
    return true;
  }
  bool start_array(size_t /*count*/) override {
    const bool ours = depth() == 2 && in_tensor() && (key_ == "shape" || key_ == "data_offsets");
    if (!ours) value("[");
    open();
    if (!ours) return true;
    auto& field = key_ == "shape" ? entries.back().shape : entries.back().offsets;
    list_ = &field.emplace();
    return true;
  }
  bool end_array() override {
    list_ = nullptr;
    return end_object();
  }
  bool parse_error(size_t /*at*/, const std::string& /*token*/,
                   const nlohmann::detail::exception& e) override {
    error = e.what();
    return false;
  }

 private:
  [[nodiscard]] size_t depth() const { return keys_.size(); }
  [[nodiscard]] bool in_tensor() const { return !metadata_ && !entries.empty(); }
  [[nodiscard]] std::string where() const {
    return str(file_, ": tensor '", clean(entries.back().name), "'");
  }
  void open() {
    require(depth() < kMostDepth, file_, ": the safetensors header is nested more than ",
            kMostDepth, " deep; at most ", kMostDepth, " are read, the header is damaged");
    keys_.emplace_back();
  }
  void check(bool holds, const std::string& text) const {
    if (holds) return;
    fail(Code::invalid_argument, where(), " has ", clean(text, 24), " in '", key_,
         "'; it must be a whole number from 0 to 2^60, the header is damaged");
  }
  // Ignores a value. Throws if the value is in a list of numbers.
  bool value(const std::string& text) {
    check(!list_, text);
    return true;
  }

  const std::string& file_;
  std::vector<std::unordered_set<std::string>> keys_;  // keys of each open object; empty for arrays
  std::string key_;                                    // the last key of a tensor
  std::vector<uint64_t>* list_ = nullptr;              // destination of numbers
  bool metadata_ = false;
};

std::vector<Entry> read_header(const std::string& file, const std::string& text) {
  HeaderReader reader(file);
  if (!Json::sax_parse(text, &reader))
    fail(Code::invalid_argument, file,
         ": the safetensors header is not JSON: ", clean(reader.error, 160),
         "; the file is damaged, copy or save it again");
  return std::move(reader.entries);
}

struct Range {
  uint64_t begin = 0, end = 0;
  std::string name;
};

// Adds one entry of the header. Returns the name of its dtype if the tensor is skipped.
std::optional<std::string> add_tensor(const std::string& file, const Entry& entry,
                                      const std::shared_ptr<const Bytes>& bytes, uint64_t start,
                                      Range& range, TensorFile& result) {
  constexpr std::string_view kRule =
      "every tensor has dtype, shape and data_offsets, save it again";
  const uint64_t data = bytes->size() - start;
  const std::string where = str(file, ": tensor '", clean(entry.name), "'");
  require(entry.is_object, where, " is not a JSON object; ", kRule);
  require(entry.dtype.has_value(), where, " has no text 'dtype'; ", kRule);
  require(entry.shape.has_value(), where, " has no list 'shape'; ", kRule);
  require(entry.offsets.has_value(), where, " has no list 'data_offsets'; ", kRule);
  const std::vector<uint64_t>& offsets = *entry.offsets;
  require(offsets.size() == 2, where, " has ", offsets.size(),
          " data_offsets; it needs a begin and an end, save it again");
  range = {offsets[0], offsets[1], entry.name};
  require(range.begin <= range.end, where, " begins at ", range.begin, " and ends at ", range.end,
          "; the end must not come first, the header is damaged");
  require(range.end <= data, where, " ends at ", range.end, ", but the file has ", data,
          " bytes of data; it is truncated, copy or save it again");
  FileTensor t;
  t.name = entry.name;
  t.shape.assign(entry.shape->begin(), entry.shape->end());
  const std::string& type = *entry.dtype;
  const auto known = safetensors_types().find(type);
  const bool sized = known != safetensors_types().end();
  const int64_t size = sized ? known->second.size : 1;
  const int64_t want = count_elements(where, t.shape, size) * size;
  require(!sized || static_cast<uint64_t>(want) == range.end - range.begin, where, " of ", type,
          " has ", range.end - range.begin, " bytes, but its shape needs ", want,
          "; the header is damaged, save it again");
  if (!sized || !known->second.type) return clean(type, 16);
  t.type = *known->second.type;
  t.matrix = fold(t.shape);
  t.bytes = bytes;
  t.offset = start + range.begin;
  result.tensors.push_back(std::move(t));
  return std::nullopt;
}

}  // namespace

TensorFile parse_safetensors(const std::string& file, std::shared_ptr<const Bytes> bytes) {
  const uint64_t size = bytes->size();
  require(size >= 8, file, " has ", size,
          " bytes; a safetensors file begins with 8, it is truncated, copy or save it again");
  const uint64_t length = little_endian(read_text(*bytes, 0, 8));
  require(length <= kMostHeader, file, ": the safetensors header is said to be ", length,
          " bytes long; at most ", kMostHeader,
          " are read, the file is damaged or of another kind");
  require(length <= size - 8, file, ": the safetensors header is said to be ", length,
          " bytes long, but ", size - 8, " follow; the file is truncated, copy or save it again");
  const std::string text = read_text(*bytes, 8, length);
  require(
      text.starts_with('{'), file,
      ": the safetensors header does not begin with '{'; the file is damaged or of another kind");
  const uint64_t start = 8 + length;

  TensorFile result;
  std::vector<Range> ranges;
  std::map<std::string, int> skipped;
  for (const Entry& entry : read_header(file, text)) {
    Range range;
    if (const auto type = add_tensor(file, entry, bytes, start, range, result)) {
      ++skipped[*type];
      result.left_out.push_back(entry.name);
    }
    ranges.push_back(std::move(range));
  }
  std::ranges::sort(ranges, {}, [](const Range& r) { return std::tie(r.begin, r.end, r.name); });
  uint64_t at = 0;
  for (const Range& r : ranges) {
    require(r.begin == at, file, ": tensor '", clean(r.name), "' begins at ", r.begin,
            ", but the one before ends at ", at,
            "; tensors lie side by side, the header is damaged, save it again");
    at = r.end;
  }
  require(at == size - start, file, " holds ", size - start - at,
          " bytes after its last tensor; the file is damaged, copy or save it again");
  std::ranges::sort(result.tensors, {},
                    [](const FileTensor& t) { return std::tie(t.offset, t.name); });
  for (const auto& [type, count] : skipped)
    result.notes.push_back(
        str(file, ": ", count, count == 1 ? " tensor of " : " tensors of ", type, " left out"));
  return result;
}

std::string safetensors_file(std::span<const TensorToWrite> tensors) {
  nlohmann::ordered_json header;
  size_t at = 0;
  for (const TensorToWrite& t : tensors) {
    const auto type = std::ranges::find_if(
        safetensors_types(), [&](const auto& known) { return known.second.type == t.type; });
    header[t.name] = {
        {"dtype", type->first}, {"shape", t.shape}, {"data_offsets", {at, at + t.data.size()}}};
    at += t.data.size();
  }
  std::string text = header.dump();
  text.append(static_cast<size_t>(rup(static_cast<int64_t>(text.size()), 8)) - text.size(), ' ');
  const uint64_t length = text.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  file.reserve(file.size() + text.size() + at);
  file += text;
  for (const TensorToWrite& t : tensors)
    file.append(reinterpret_cast<const char*>(t.data.data()), t.data.size());
  return file;
}

}  // namespace tenon::cli
