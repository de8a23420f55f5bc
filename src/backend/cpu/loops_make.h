// The inner loops, written once. Each instruction set compiles them with its own tag and flags.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstring>
#include <utility>

#include "backend/cpu/loops.h"
#include "core/philox.h"
#include "expr/lane.h"
#include "expr/word.h"

namespace tenon::cpu {

template <class tag>
struct LoopMaker {
  using V = Lane<tag>;

  // One loop per word. The compiler vectorises each loop alone, so a slow word slows only itself.
  template <Word w, class Sequences>
  [[gnu::noinline]] static void word_loop(float* __restrict out, const float* const* in, size_t n) {
    constexpr int kArity = info(w).arity;
    const float* __restrict a = in[0];
    if constexpr (kArity == 1) {
      for (size_t i = 0; i < n; ++i) out[i] = word<w, Sequences>(V(a[i]), V(), V()).v;
    } else if constexpr (kArity == 2) {
      const float* __restrict b = in[1];
      for (size_t i = 0; i < n; ++i) out[i] = word<w, Sequences>(V(a[i]), V(b[i]), V()).v;
    } else if constexpr (w == Word::fma) {
      const float* __restrict b = in[1];
      const float* __restrict c = in[2];
      for (size_t i = 0; i < n; ++i) out[i] = fma(V(a[i]), V(b[i]), V(c[i])).v;
    }
  }

  template <Rel rel>
  [[gnu::noinline]] static void select_loop(float* __restrict out, const float* const* in,
                                            size_t n) {
    const float* __restrict a = in[0];
    const float* __restrict b = in[1];
    const float* __restrict c = in[2];
    const float* __restrict d = in[3];
    for (size_t i = 0; i < n; ++i) {
      const float then = c[i];
      const float otherwise = d[i];
      out[i] = compare<rel>(V(a[i]), V(b[i])) ? then : otherwise;
    }
  }

  template <DType d>
  [[gnu::noinline]] static void round_loop(float* __restrict out, const float* const* in,
                                           size_t n) {
    const float* __restrict a = in[0];
    for (size_t i = 0; i < n; ++i) out[i] = rounded_to<d>(a[i]);
  }

  // Elements at any address: the packed type has no alignment requirement.
  template <DType d>
  struct [[gnu::packed]] Element {
    Storage<d> code;
  };

  template <DType d>
  [[gnu::noinline]] static void load_loop(float* __restrict out, const void* from, int64_t stride,
                                          size_t n) {
    const auto* __restrict p = static_cast<const Element<d>*>(from);
    if (stride == 1)
      for (size_t i = 0; i < n; ++i) out[i] = decode<d>(p[i].code);
    else
      for (size_t i = 0; i < n; ++i) out[i] = decode<d>(p[static_cast<int64_t>(i) * stride].code);
  }

  template <DType d>
  [[gnu::noinline]] static void store_loop(void* to, int64_t stride, const float* __restrict from,
                                           size_t n) {
    auto* __restrict p = static_cast<Element<d>*>(to);
    if (stride == 1)
      for (size_t i = 0; i < n; ++i) p[i].code = static_cast<Storage<d>>(encode<d>(from[i]));
    else
      for (size_t i = 0; i < n; ++i)
        p[static_cast<int64_t>(i) * stride].code = static_cast<Storage<d>>(encode<d>(from[i]));
  }

  static constexpr size_t kLineBytes = 64;

  static void stream_line(void* to, const void* line) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_load_si512(line));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i)
      _mm256_stream_si256(static_cast<__m256i*>(to) + i,
                          _mm256_load_si256(static_cast<const __m256i*>(line) + i));
#else
    std::memcpy(to, line, kLineBytes);
#endif
  }

  template <DType d>
  [[gnu::noinline]] static void stream_loop(void* to, int64_t stride, const float* __restrict from,
                                            size_t n) {
    constexpr size_t kSize = sizeof(Storage<d>);
    constexpr size_t kLine = kLineBytes / kSize;
    const size_t over = reinterpret_cast<uintptr_t>(to) % kLineBytes;
    const size_t head = (kLineBytes - over) % kLineBytes / kSize;
    if (stride != 1 || over % kSize != 0 || n < head + kLine)
      return store_loop<d>(to, stride, from, n);
    store_loop<d>(to, 1, from, head);
    auto* p = static_cast<Storage<d>*>(to);
    size_t i = head;
    for (; i + kLine <= n; i += kLine) {
      alignas(kLineBytes) Storage<d> line[kLine];
      for (size_t j = 0; j < kLine; ++j) line[j] = static_cast<Storage<d>>(encode<d>(from[i + j]));
      stream_line(p + i, line);
    }
    store_loop<d>(p + i, 1, from + i, n - i);
  }

  // One multiplication in fp32, then one rounding, in the order that docs/scaling.md specifies.
  template <DType d>
  [[gnu::noinline]] static void store_scaled_loop(void* to, const float* __restrict from, size_t n,
                                                  float scale) {
    auto* __restrict p = static_cast<Element<d>*>(to);
    for (size_t i = 0; i < n; ++i)
      p[i].code = static_cast<Storage<d>>(encode<d>((V(from[i]) * V(scale)).v));
  }

  template <DType d>
  [[gnu::noinline]] static void store_scales_loop(void* to, const float* __restrict from, size_t n,
                                                  const float* __restrict scales) {
    auto* __restrict p = static_cast<Element<d>*>(to);
    for (size_t i = 0; i < n; ++i)
      p[i].code = static_cast<Storage<d>>(encode<d>((V(from[i]) * V(scales[i])).v));
  }

  [[gnu::noinline]] static void add_into(float* __restrict sum, const float* __restrict in,
                                         size_t n) {
    for (size_t i = 0; i < n; ++i) sum[i] = sum[i] + in[i];
  }

  [[gnu::noinline]] static void add_pairs(float* __restrict out, const float* __restrict in,
                                          size_t pairs) {
    for (size_t i = 0; i < pairs; ++i) out[i] = in[2 * i] + in[2 * i + 1];
  }

  [[gnu::noinline]] static uint32_t max_bits(const float* __restrict in, size_t n) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t b = __builtin_bit_cast(uint32_t, in[i]) & 0x7fffffffU;
      most = b > most ? b : most;
    }
    return most;
  }

  [[gnu::noinline]] static void max_bits_into(uint32_t* __restrict most, const float* __restrict in,
                                              size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const uint32_t b = __builtin_bit_cast(uint32_t, in[i]) & 0x7fffffffU;
      most[i] = b > most[i] ? b : most[i];
    }
  }

  [[gnu::noinline]] static void random(float* __restrict out, uint64_t key, uint64_t first,
                                       uint64_t high, size_t blocks) {
    for (size_t i = 0; i < blocks; ++i) {
      // Element indices wrap at 2^64, so block indices wrap at 2^61.
      const RandomWords r = philox(key, (first + i) & (~uint64_t{0} >> 3), high);
      for (size_t k = 0; k < 4; ++k) {
        out[8 * i + 2 * k] = static_cast<float>(static_cast<int32_t>(r.w[k] & 0xffffU));
        out[8 * i + 2 * k + 1] = static_cast<float>(static_cast<int32_t>(r.w[k] >> 16));
      }
    }
  }

  template <size_t... w, size_t... r, size_t... d>
  static constexpr Loops make(std::index_sequence<w...>, std::index_sequence<r...>,
                              std::index_sequence<d...>) {
    return {.strict = {word_loop<static_cast<Word>(w), words::Strict>...},
            .native = {word_loop<static_cast<Word>(w), words::Native>...},
            .select = {select_loop<static_cast<Rel>(r)>...},
            .round = {round_loop<static_cast<DType>(d)>...},
            .load = {load_loop<static_cast<DType>(d)>...},
            .store = {store_loop<static_cast<DType>(d)>...},
            .stream = {stream_loop<static_cast<DType>(d)>...},
            .store_scaled = {store_scaled_loop<static_cast<DType>(d)>...},
            .store_scales = {store_scales_loop<static_cast<DType>(d)>...},
            .add_into = add_into,
            .add_pairs = add_pairs,
            .max_bits = max_bits,
            .max_bits_into = max_bits_into,
            .random = random};
  }
};

template <class tag>
constexpr Loops make_loops() {
  return LoopMaker<tag>::make(std::make_index_sequence<kWords.size()>{},
                              std::make_index_sequence<kRels.size()>{},
                              std::make_index_sequence<kDTypes.size()>{});
}

}  // namespace tenon::cpu
