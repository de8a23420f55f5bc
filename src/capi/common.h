// Shared helpers of the C ABI: check structs and texts, convert exceptions to codes.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <string>

#include "tenon/dtype.h"
#include "tenon/error.h"
#include "tenon/format.h"
#include "tenon/options.h"
#include "tenon/tenon.h"
#include "tenon/view.h"

namespace tenon::capi {

// A static buffer: it is valid if memory is exhausted and after the thread's objects were
// destroyed.
inline constexpr size_t kErrorBytes = 4096;
inline thread_local constinit char last_error[kErrorBytes] = {};

inline void set_error(const char* message) noexcept {
  const size_t n = std::min(std::strlen(message), kErrorBytes - 1);
  std::memcpy(last_error, message, n);
  last_error[n] = '\0';
  if (n < std::strlen(message)) std::memcpy(last_error + n - 3, "...", 3);
}

// Converts every exception to a code. No exception leaves the library.
template <class F>
int guarded(F f) noexcept {
  try {
    last_error[0] = '\0';
    f();
    return TENON_OK;
  } catch (const tenon::Error& e) {
    set_error(e.what());
    return static_cast<int>(e.code());
  } catch (const std::bad_alloc&) {
    set_error("tenon: out of memory; free some, or give fewer rows or columns");
  } catch (const std::exception& e) {
    set_error(e.what());
  } catch (...) {
    set_error("tenon: an exception of an unknown type");
  }
  return TENON_RUNTIME;
}

inline std::string_view text(const char* value, const char* function, const char* name) {
  require(value != nullptr, function, ": ", name, " is NULL; pass a zero-terminated text");
  return value;
}

// A caller with a newer header passes a larger struct. The fields that this library does not know
// must be zero.
template <class T>
T sized(const T* given, const char* function, const char* type) {
  T result{};
  if (!given) return result;
  constexpr size_t kMost = 4096;
  require(given->size >= sizeof(T) && given->size <= kMost, function, ": the struct's size is ",
          given->size, "; set it to sizeof(", type, ")");
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  require(std::all_of(bytes + sizeof(T), bytes + given->size, [](auto b) { return b == 0; }),
          function, ": ", type, " has fields that this library does not know; use its own header");
  std::memcpy(&result, given, sizeof(T));
  return result;
}

template <class E>
E chosen(int32_t value, size_t count, const char* function, const char* name) {
  require(value >= 0 && static_cast<size_t>(value) < count, function, ": ", name, " = ", value,
          "; it must be 0 to ", count - 1);
  return static_cast<E>(value);
}

inline tenon::Options options(const tenon_options* given, const char* function) {
  const tenon_options o = sized(given, function, "tenon_options");
  return {.precision = chosen<tenon::Precision>(o.precision, 2, function, "precision"),
          .rounding = chosen<tenon::Rounding>(o.rounding, 2, function, "rounding"),
          .device = chosen<tenon::Device>(o.device, 2, function, "device"),
          .stream = o.stream,
          .allocate = o.allocate,
          .user = o.user};
}

// tenon_power_of_two as an option of a format.
inline std::optional<bool> power_of_two(int32_t number, const char* function,
                                        const std::string& name) {
  require(number >= TENON_MODE_DEFAULT && number <= TENON_EXACT_SCALE, function, ": ", name,
          " has power_of_two = ", number, "; it must be 0, 1 or 2");
  if (number == TENON_MODE_DEFAULT) return std::nullopt;
  return number == TENON_POWER_OF_TWO;
}

inline tenon::Scaling scaling(const char* name, const char* function) {
  if (const auto found = tenon::scaling_named(name ? name : "none")) return *found;
  std::string known;
  for (const tenon::ScalingInfo& mode : tenon::kScalings)
    known.append(known.empty() ? "" : ", ").append(mode.name);
  tenon::fail(tenon::Code::invalid_argument, function, ": the scaling '", name,
              "' is not known; use one of ", known);
}

// Copies text to the caller's buffer: at most `capacity` bytes, with the final zero.
inline void give(const std::string& text, char* buffer, size_t capacity, size_t* size) {
  if (size) *size = text.size() + 1;
  if (!buffer || capacity == 0) return;
  const size_t n = std::min(text.size(), capacity - 1);
  std::memcpy(buffer, text.data(), n);
  buffer[n] = '\0';
}

// Copies structs to the caller's list: at most `capacity` of them. make(i) returns item i.
template <class T, class F>
void give(size_t n, T* list, size_t capacity, size_t* count, F make) {
  if (count) *count = n;
  for (size_t i = 0; list && i < std::min(n, capacity); ++i) list[i] = make(i);
}

}  // namespace tenon::capi
