// The .safetensors format. Offsets must tile the data without holes, as the format has it.
#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <tuple>

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

// nlohmann keeps the last of equal keys; a file that has them means two things at once.
Json parse_json(const std::string& file, std::string_view text) {
  std::map<int, std::set<std::string>> keys;
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys[depth + 1].clear();
    if (event == Json::parse_event_t::key)
      require(keys[depth].insert(value.get<std::string>()).second, file,
              ": the safetensors header has the key '", clean(value.get<std::string>()),
              "' twice; names are unique, save it again");
    return true;
  };
  try {
    return Json::parse(text, check);
  } catch (const Json::exception& e) {
    fail(Code::invalid_argument, file,
         ": the safetensors header is not JSON: ", clean(e.what(), 160),
         "; the file is damaged, copy or save it again");
  }
}

struct Range {
  uint64_t begin = 0, end = 0;
  std::string name;
};

std::vector<uint64_t> numbers(const std::string& where, const Json& entry, const char* key) {
  const auto found = entry.find(key);
  require(found != entry.end() && found->is_array(), where, " has no list '", key,
          "'; every tensor has dtype, shape and data_offsets, save it again");
  std::vector<uint64_t> result;
  for (const Json& n : *found) {
    require(n.is_number_unsigned() && n.get<uint64_t>() <= static_cast<uint64_t>(kMostBytes), where,
            " has ", clean(n.dump(-1, ' ', true), 24), " in '", key,
            "'; it must be a whole number from 0 to 2^60, the header is damaged");
    result.push_back(n.get<uint64_t>());
  }
  return result;
}

// One entry of the header; gives its type's name where the tensor is left out.
std::optional<std::string> parse_entry(const std::string& file, const std::string& name,
                                       const Json& entry, std::string_view data, Range& range,
                                       TensorFile& result) {
  const std::string where = str(file, ": tensor '", clean(name), "'");
  require(entry.is_object(), where,
          " is not a JSON object; every tensor has dtype, shape and data_offsets, save it again");
  const auto dtype = entry.find("dtype");
  require(dtype != entry.end() && dtype->is_string(), where,
          " has no text 'dtype'; every tensor has dtype, shape and data_offsets, save it again");
  StoredTensor t;
  t.name = name;
  for (const uint64_t n : numbers(where, entry, "shape"))
    t.shape.push_back(static_cast<int64_t>(n));
  const std::vector<uint64_t> offsets = numbers(where, entry, "data_offsets");
  require(offsets.size() == 2, where, " has ", offsets.size(),
          " data_offsets; it needs a begin and an end, save it again");
  range = {offsets[0], offsets[1], name};
  require(range.begin <= range.end, where, " begins at ", range.begin, " and ends at ", range.end,
          "; the end must not come first, the header is damaged");
  require(range.end <= data.size(), where, " ends at ", range.end, ", but the file has ",
          data.size(), " bytes of data; it is truncated, copy or save it again");
  const auto type = dtype->get<std::string>();
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
  t.data = reinterpret_cast<const std::byte*>(data.data()) + range.begin;
  result.tensors.push_back(std::move(t));
  return std::nullopt;
}

}  // namespace

TensorFile parse_safetensors(const std::string& file, std::string_view bytes) {
  constexpr uint64_t kMostHeader = 100'000'000;  // the format's own limit
  require(bytes.size() >= 8, file, " has ", bytes.size(),
          " bytes; a safetensors file begins with 8, it is truncated, copy or save it again");
  const uint64_t length = little_endian(bytes.substr(0, 8));
  require(length <= kMostHeader, file, ": the safetensors header is said to be ", length,
          " bytes long; at most ", kMostHeader,
          " are read, the file is damaged or of another kind");
  require(length <= bytes.size() - 8, file, ": the safetensors header is said to be ", length,
          " bytes long, but ", bytes.size() - 8,
          " follow; the file is truncated, copy or save it again");
  const std::string_view text = bytes.substr(8, length);
  require(
      text.starts_with('{'), file,
      ": the safetensors header does not begin with '{'; the file is damaged or of another kind");
  const Json header = parse_json(file, text);
  const std::string_view data = bytes.substr(8 + length);

  TensorFile result;
  std::vector<Range> ranges;
  std::map<std::string, int> skipped;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    Range range;
    if (const auto type = parse_entry(file, name, entry, data, range, result)) {
      ++skipped[*type];
      result.left_out.push_back(name);
    }
    ranges.push_back(std::move(range));
  }
  std::ranges::sort(ranges, {}, [](const Range& r) { return std::tuple(r.begin, r.end, r.name); });
  uint64_t at = 0;
  for (const Range& r : ranges) {
    require(r.begin == at, file, ": tensor '", clean(r.name), "' begins at ", r.begin,
            ", but the one before ends at ", at,
            "; tensors lie side by side, the header is damaged, save it again");
    at = r.end;
  }
  require(at == data.size(), file, " holds ", data.size() - at,
          " bytes after its last tensor; the file is damaged, copy or save it again");
  std::ranges::stable_sort(result.tensors, {}, &StoredTensor::data);
  for (const auto& [type, count] : skipped)
    result.notes.push_back(
        str(file, ": ", count, count == 1 ? " tensor of " : " tensors of ", type, " left out"));
  return result;
}

std::string safetensors_file(std::span<const StoredTensor> tensors) {
  nlohmann::ordered_json header;
  int64_t at = 0;
  for (const StoredTensor& t : tensors) {
    const int64_t bytes = t.elements() * bytes_of(t.type);
    const auto type = std::ranges::find_if(
        safetensors_types(), [&](const auto& known) { return known.second.type == t.type; });
    header[t.name] = {
        {"dtype", type->first}, {"shape", t.shape}, {"data_offsets", {at, at + bytes}}};
    at += bytes;
  }
  std::string text = header.dump();
  text.append(static_cast<size_t>(rup(static_cast<int64_t>(text.size()), 8)) - text.size(), ' ');
  const uint64_t length = text.size();
  std::string file(reinterpret_cast<const char*>(&length), sizeof length);
  file += text;
  for (const StoredTensor& t : tensors)
    file.append(reinterpret_cast<const char*>(t.data),
                static_cast<size_t>(t.elements() * bytes_of(t.type)));
  return file;
}

}  // namespace tenon::cli
