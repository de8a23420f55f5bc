// A list without heap memory while it is short, for lists that every call creates.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <span>
#include <type_traits>
#include <vector>

namespace tenon {

template <class T, size_t N>
requires std::is_trivially_copyable_v<T>
class Few {
 public:
  Few() {}  // unused elements stay uninitialised
  Few(std::initializer_list<T> list) : Few() { append(std::span(list)); }
  Few(const Few& other) : Few() { append({other.data(), other.size()}); }
  Few& operator=(const Few&) = delete;

  void push_back(const T& value) { emplace_back(value); }
  template <class... Parts>
  void emplace_back(const Parts&... parts) {
    if (size_ >= N) return append_more(std::span(std::initializer_list<T>{T{parts...}}));
    new (place_ + size_ * sizeof(T)) T{parts...};
    ++size_;
  }
  void append(std::span<const T> list) {
    if (size_ + list.size() > N) return append_more(list);
    std::uninitialized_copy(list.begin(), list.end(), reinterpret_cast<T*>(place_) + size_);
    size_ += list.size();
  }

  [[nodiscard]] size_t size() const { return size_; }
  [[nodiscard]] bool empty() const { return size_ == 0; }
  [[nodiscard]] T* data() { return more_.empty() ? reinterpret_cast<T*>(place_) : more_.data(); }
  [[nodiscard]] const T* data() const { return const_cast<Few*>(this)->data(); }
  [[nodiscard]] T* begin() { return data(); }
  [[nodiscard]] T* end() { return data() + size_; }
  [[nodiscard]] const T* begin() const { return data(); }
  [[nodiscard]] const T* end() const { return data() + size_; }
  [[nodiscard]] T& operator[](size_t i) { return data()[i]; }
  [[nodiscard]] const T& operator[](size_t i) const { return data()[i]; }

 private:
  [[gnu::noinline]] void append_more(std::span<const T> list) {
    if (more_.empty()) more_.assign(begin(), end());
    more_.insert(more_.end(), list.begin(), list.end());
    size_ = more_.size();
  }

  size_t size_ = 0;
  std::vector<T> more_;  // all elements if there are more than N
  alignas(T) std::byte place_[N * sizeof(T)];
};

}  // namespace tenon
