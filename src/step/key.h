// Short binary cache keys. Writing a key is faster than building the step that it identifies.
#pragma once

#include <optional>
#include <string_view>
#include <type_traits>

#include "core/few.h"
#include "step/operand.h"

namespace tenon {

class Key {
 public:
  explicit Key(char op) { add(op); }

  template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>) Key& add(T value) {
    bytes_.append({reinterpret_cast<const char*>(&value), sizeof value});
    return *this;
  }
  Key& add(std::string_view text) {
    bytes_.append(std::span<const char>(text));
    return add(text.size());
  }
  Key& add(const Operand& o) {
    add(o.format.dtype).add(o.format.scaling).add(o.format.eps);
    return flags(o.format.powers(), o.format.swizzled, o.rowwise, o.columnwise, o.counts);
  }
  // Packs up to seven flags in one byte.
  template <class... Flags>
  Key& flags(Flags... all) {
    unsigned bits = 1;
    ((bits = 2 * bits + all), ...);
    return add(static_cast<uint8_t>(bits));
  }
  template <class T>
  Key& add(const std::optional<T>& o) {
    add(o.has_value());
    return o ? add(*o) : *this;
  }
  [[nodiscard]] std::string_view text() const { return {bytes_.data(), bytes_.size()}; }

 private:
  Few<char, 192> bytes_;
};

}  // namespace tenon
