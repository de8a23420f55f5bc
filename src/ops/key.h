// Short binary keys of forms: what a step depends on, faster to write than the step is to build.
#pragma once

#include <optional>
#include <string>
#include <type_traits>

#include "ops/operand.h"

namespace tenon {

class KeyWriter {
 public:
  explicit KeyWriter(char op) : text_(1, op) { text_.reserve(192); }

  template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) KeyWriter& add(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  KeyWriter& add(const std::string& text) {
    text_ += text;
    return add(text.size());
  }
  KeyWriter& add(const Operand& o) {
    add(o.format.dtype).add(o.format.scaling).add(o.format.eps).add(o.format.powers());
    return add(o.format.swizzled).add(o.rowwise).add(o.columnwise).add(o.counts);
  }
  template <class T>
  KeyWriter& add(const std::optional<T>& o) {
    add(o.has_value());
    return o ? add(*o) : *this;
  }
  std::string finish() { return std::move(text_); }

 private:
  std::string text_;
};

}  // namespace tenon
