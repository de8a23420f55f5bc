// Short binary keys of forms: what a step depends on, faster to write than the step is to build.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

#include "ops/operand.h"

namespace tenon {

class KeyWriter {
 public:
  explicit KeyWriter(char op) { add(op); }

  template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) KeyWriter& add(T value) {
    if (used_ + sizeof value > piece_.size()) flush();
    std::memcpy(piece_.data() + used_, &value, sizeof value);
    used_ += sizeof value;
    return *this;
  }
  KeyWriter& add(const std::string& text) {
    flush();
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
  std::string finish() {
    flush();
    return std::move(text_);
  }

 private:
  void flush() {
    text_.reserve(text_.size() + piece_.size());  // who looks a step up adds to the key
    text_.append(piece_.data(), used_);
    used_ = 0;
  }

  std::string text_;
  std::array<char, 192> piece_;  // of the text, as most of it are single bytes
  size_t used_ = 0;
};

}  // namespace tenon
