// A cache by key. It drops all entries when it is full.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "core/lock.h"

namespace tenon {

// Guarded by library_lock(). Entries belong to one `meaning`, a number that grows when keys may
// change their meaning. A newer meaning drops all older entries.
template <class Value>
class Memo {
 public:
  explicit Memo(size_t most) : most_(most) {}

  [[nodiscard]] std::optional<Value> find(std::string_view key, uint64_t meaning = 0) const {
    const std::lock_guard guard(library_lock());
    if (meaning != meaning_) return std::nullopt;
    const auto it = table_.find(key);
    return it == table_.end() ? std::nullopt : std::optional(it->second);
  }

  // If several threads make the same value, the first one is kept and serves all.
  Value keep(std::string_view key, const Value& made, uint64_t meaning = 0) {
    Table dropped;  // destroyed after unlock: host destructors may call the library
    const std::lock_guard guard(library_lock());
    if (meaning < meaning_) return made;
    if (meaning > meaning_ || table_.size() >= most_) dropped.swap(table_);
    meaning_ = meaning;
    return table_.try_emplace(std::string(key), made).first->second;
  }

 private:
  // Finds keys that are not std::string.
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Table = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

  size_t most_;
  uint64_t meaning_ = 0;
  Table table_;
};

}  // namespace tenon
