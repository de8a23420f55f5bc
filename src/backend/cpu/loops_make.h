// The inner loops, written once. Each instruction set compiles them with its own tag and flags.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstring>
#include <utility>

#include "backend/cpu/fp8_make.h"
#include "backend/cpu/loops.h"
#include "backend/cpu/random_make.h"
#include "core/philox.h"
#include "core/scaling.h"
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

  // Elements apart from each other are moved in groups of so many, to convert them with vectors.
  static constexpr size_t kPart = 64;

  template <DType d>
  [[gnu::noinline]] static void load_loop(float* __restrict out, const void* from, int64_t stride,
                                          size_t n) {
    const auto* __restrict p = static_cast<const Element<d>*>(from);
    if (stride == 1) {
      for (size_t i = 0; i < n; ++i) out[i] = decode<d>(p[i].code);
      return;
    }
    Storage<d> part[kPart];
    for (size_t i = 0; i < n; i += kPart) {
      const size_t count = kPart < n - i ? kPart : n - i;
      for (size_t j = 0; j < count; ++j) part[j] = p[static_cast<int64_t>(i + j) * stride].code;
      for (size_t j = 0; j < count; ++j) out[i + j] = decode<d>(part[j]);
    }
  }

  template <DType d>
  [[gnu::noinline]] static void store_loop(void* to, int64_t stride, const float* __restrict from,
                                           size_t n) {
    auto* __restrict p = static_cast<Element<d>*>(to);
    if (stride == 1) {
      for (size_t i = 0; i < n; ++i) p[i].code = static_cast<Storage<d>>(encode<d>(from[i]));
      return;
    }
    Storage<d> part[kPart];
    for (size_t i = 0; i < n; i += kPart) {
      const size_t count = kPart < n - i ? kPart : n - i;
      for (size_t j = 0; j < count; ++j) part[j] = static_cast<Storage<d>>(encode<d>(from[i + j]));
      for (size_t j = 0; j < count; ++j) p[static_cast<int64_t>(i + j) * stride].code = part[j];
    }
  }

  static constexpr size_t kLineBytes = 64;

  static void stream_line(void* to, const void* line) {
#if defined(__AVX512F__)
    _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(line));
#elif defined(__AVX2__)
    for (int i = 0; i < 2; ++i)
      _mm256_stream_si256(static_cast<__m256i*>(to) + i,
                          _mm256_loadu_si256(static_cast<const __m256i*>(line) + i));
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
  // Element i has the scale *scale(i). `each`: every element has its own.
  template <DType d, bool each, class Scale>
  [[gnu::always_inline]] static void encode_run(Element<d>* __restrict to,
                                                const float* __restrict from, size_t n, Scale scale,
                                                [[maybe_unused]] bool stream) {
    size_t i = 0;
#if defined(__AVX2__)
    if constexpr (d == DType::e4m3 || d == DType::e5m2) {
      using Codes = Fp8<tag, d>;
      const bool lines = stream && reinterpret_cast<uintptr_t>(to) % Codes::kStep == 0;
      for (; i + Codes::kStep <= n; i += Codes::kStep)
        Codes::store(
            to + i, from + i,
            [&](size_t k) __attribute__((always_inline)) {
              return each ? Codes::W::load(scale(i + k)) : Codes::W::all(*scale(i + k));
            },
            lines);
    }
#endif
    for (; i < n; ++i)
      to[i].code = static_cast<Storage<d>>(encode<d>((V(from[i]) * V(*scale(i))).v));
  }

  template <DType d>
  [[gnu::noinline]] static void store_scaled_loop(void* to, const float* __restrict from, size_t n,
                                                  float scale, bool stream) {
    encode_run<d, false>(
        static_cast<Element<d>*>(to), from, n, [&](size_t) { return &scale; }, stream);
  }

  template <DType d>
  [[gnu::noinline]] static void store_scales_loop(void* to, const float* __restrict from, size_t n,
                                                  const float* __restrict scales, bool stream) {
    encode_run<d, true>(
        static_cast<Element<d>*>(to), from, n, [&](size_t i) { return scales + i; }, stream);
  }

  [[gnu::noinline]] static void add(float* sum, const float* a, const float* b, size_t n) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) sum[i] = a[i] + b[i];
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

  // f(begin, n, block) for each block. The width of whole blocks is a constant in each copy of f.
  template <class F>
  [[gnu::always_inline]] static void for_blocks(size_t n, size_t width, F f) {
    size_t block = 0;
    if (width == 32)
      for (; (block + 1) * 32 <= n; ++block) f(block * 32, 32, block);
    else
      for (; (block + 1) * 128 <= n; ++block) f(block * 128, 128, block);
    for (size_t i = block * width; i < n; i += width, ++block)
      f(i, width < n - i ? width : n - i, block);
  }

  [[gnu::noinline]] static void block_max(uint32_t* __restrict most, const float* __restrict in,
                                          size_t n, size_t width) {
    for_blocks(n, width, [&](size_t begin, size_t count, size_t block) {
      uint32_t largest = 0;
      for (size_t i = 0; i < count; ++i) {
        const uint32_t b = __builtin_bit_cast(uint32_t, in[begin + i]) & kMagnitude;
        largest = b > largest ? b : largest;
      }
      most[block] = largest;
    });
  }

  template <DType d>
  [[gnu::noinline]] static void store_blocks_loop(void* to, const float* __restrict from, size_t n,
                                                  size_t width, const float* __restrict scales,
                                                  bool stream) {
    auto* p = static_cast<Element<d>*>(to);
    if (width == 32)
      return encode_run<d, false>(
          p, from, n, [&](size_t i) { return scales + i / 32; }, stream);
    encode_run<d, false>(
        p, from, n, [&](size_t i) { return scales + i / 128; }, stream);
  }

#if defined(__AVX2__)
  template <DType d>
  [[gnu::noinline]] static void round_run(uint16_t* __restrict to, const float* __restrict from,
                                          size_t n) {
    using Codes = Fp8<tag, d>;
    for (size_t i = 0; i + Codes::kStep <= n; i += Codes::kStep) Codes::round(to + i, from + i);
  }

  template <DType d>
  [[gnu::noinline]] static bool offsets(uint16_t* __restrict to,
                                        const uint32_t* __restrict inverses,
                                        const uint32_t* __restrict most, size_t n, size_t width) {
    using Codes = Fp8<tag, d>;
    constexpr size_t kHalf = Codes::kHalf, kLane = 4;
    uint32_t missing = 0;
    for (size_t i = 0; i < n; ++i) missing |= Codes::has_offset(inverses[i], most[i]) ? 0U : 1U;
    if (missing != 0) return false;
    if (width == 32) {
      for (size_t i = 0; i < n; ++i) to[i] = Codes::offset(inverses[i]);
      return true;
    }
    // In the order of pack().
    for (size_t i = 0; i + kHalf <= n; i += kHalf)
      for (size_t k = 0; k < kHalf; k += 2 * kLane)
        for (size_t j = 0; j < kLane; ++j) {
          to[i + k + j] = Codes::offset(inverses[i + k / 2 + j]);
          to[i + k + kLane + j] = Codes::offset(inverses[i + kHalf / 2 + k / 2 + j]);
        }
    return true;
  }

  template <DType d>
  [[gnu::noinline]] static void store_rounded(void* to, const uint16_t* rounded,
                                              const uint16_t* __restrict offsets,
                                              const float* __restrict from,
                                              const float* __restrict scales, size_t n,
                                              size_t width, bool stream) {
    const auto run = [&](auto each) __attribute__((always_inline)) {
      using Codes = Fp8<tag, d>;
      using W = typename Codes::W;
      auto* const p = static_cast<Element<d>*>(to);
      const bool lines = stream && reinterpret_cast<uintptr_t>(to) % Codes::kStep == 0;
      const auto subtracted = [&](size_t i) __attribute__((always_inline)) {
        return each() ? W::load16(offsets + i) : W::all16(offsets[i / 32]);
      };
      const auto scale = [&](size_t i) __attribute__((always_inline)) {
        return each() ? W::load(scales + i) : W::all(scales[i / 32]);
      };
      size_t i = 0;
      for (; i + Codes::kStep <= n; i += Codes::kStep)
        if (!Codes::store_rounded(
                p + i, rounded + i, [&](size_t k) { return subtracted(i + k); }, lines))
          Codes::store(
              p + i, from + i, [&](size_t k) { return scale(i + k); }, lines);
      for (; i < n; ++i)
        p[i].code =
            static_cast<Storage<d>>(encode<d>((V(from[i]) * V(scales[each() ? i : i / 32])).v));
    };
    width == 32 ? run(std::false_type()) : run(std::true_type());
  }
#endif

  template <DType d>
  static constexpr RoundedLoops rounded_loops() {
#if defined(__AVX2__)
    if constexpr (d == DType::e4m3 || d == DType::e5m2)
      return {round_run<d>, offsets<d>, store_rounded<d>};
#endif
    return {};
  }

  [[gnu::noinline]] static void scales(const Format& f, const uint32_t* __restrict most, size_t n,
                                       float* __restrict multiplier, uint32_t* __restrict inverse) {
    const auto each = [&](auto rule) __attribute__((always_inline)) {
      for (size_t i = 0; i < n; ++i) {
        const Scale scale = rule(most[i]);
        multiplier[i] = scale.multiplier;
        inverse[i] = scale.inverse;
      }
    };
    const DType dtype = f.dtype;
    if (info(f.scaling).scale == DType::e8m0)
      return each([dtype](uint32_t m) { return scale_e8m0(m, dtype); });
    const float eps = f.eps;
    const bool powers = f.powers();
    each([=](uint32_t m) { return scale_fp32(m, dtype, eps, powers); });
  }

  [[gnu::noinline]] static void stream_bytes(void* to, const void* from, size_t n) {
    auto* out = static_cast<uint8_t*>(to);
    const auto* in = static_cast<const uint8_t*>(from);
    const size_t head = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
    if (n < head + kLineBytes) return (void)std::memcpy(to, from, n);
    std::memcpy(out, in, head);
    size_t i = head;
    for (; i + kLineBytes <= n; i += kLineBytes) stream_line(out + i, in + i);
    std::memcpy(out + i, in + i, n - i);
  }

  // Vectors of bytes whose 16-byte lanes are interleaved separately.
#if defined(__AVX512BW__)
  using Bytes = __m512i;
  static Bytes low(Bytes a, Bytes b) { return _mm512_unpacklo_epi8(a, b); }
  static Bytes high(Bytes a, Bytes b) { return _mm512_unpackhi_epi8(a, b); }
#elif defined(__AVX2__)
  using Bytes = __m256i;
  static Bytes low(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
  static Bytes high(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
#elif defined(__x86_64__)
  using Bytes = __m128i;
  static Bytes low(Bytes a, Bytes b) { return _mm_unpacklo_epi8(a, b); }
  static Bytes high(Bytes a, Bytes b) { return _mm_unpackhi_epi8(a, b); }
#else
  struct Bytes {
    uint8_t v[16];
  };
  static Bytes half(const Bytes& a, const Bytes& b, int first) {
    Bytes r;
    for (int i = 0; i < 8; ++i) r.v[2 * i] = a.v[first + i], r.v[2 * i + 1] = b.v[first + i];
    return r;
  }
  static Bytes low(const Bytes& a, const Bytes& b) { return half(a, b, 0); }
  static Bytes high(const Bytes& a, const Bytes& b) { return half(a, b, 8); }
#endif

  static constexpr int64_t kSide = 64;  // of a tile: its columns are whole lines

  // Four stages that interleave row i with row i + 8 transpose 16 rows of 16 bytes.
  static void transpose_tile(uint8_t* to, const uint8_t* from, int64_t stride) {
    constexpr int64_t kLanes = sizeof(Bytes) / 16;
    for (int64_t row = 0; row < kSide; row += 16)
      for (int64_t column = 0; column < kSide; column += 16 * kLanes) {
        Bytes a[16], b[16];
        for (int i = 0; i < 16; ++i)
          std::memcpy(&a[i], from + (row + i) * stride + column, sizeof(Bytes));
        const auto stage = [](Bytes * out, const Bytes* in) __attribute__((always_inline)) {
          for (int i = 0; i < 8; ++i) {
            out[2 * i] = low(in[i], in[i + 8]);
            out[2 * i + 1] = high(in[i], in[i + 8]);
          }
        };
        stage(b, a), stage(a, b), stage(b, a), stage(a, b);
        for (int64_t i = 0; i < 16; ++i)
          for (int64_t lane = 0; lane < kLanes; ++lane)
            std::memcpy(to + (column + 16 * lane + i) * kSide + row,
                        reinterpret_cast<const uint8_t*>(&a[i]) + 16 * lane, 16);
      }
  }

  [[gnu::noinline]] static void transpose_bytes(uint8_t* to, int64_t to_stride, const uint8_t* from,
                                                int64_t from_stride, int64_t rows, int64_t cols,
                                                bool stream) {
    const bool lines = stream && reinterpret_cast<uintptr_t>(to) % kLineBytes == 0 &&
                       to_stride % static_cast<int64_t>(kLineBytes) == 0;
    const int64_t whole_rows = rows / kSide * kSide;
    const int64_t whole_cols = cols / kSide * kSide;
    for (int64_t c = 0; c < whole_cols; c += kSide)
      for (int64_t r = 0; r < whole_rows; r += kSide) {
        alignas(kLineBytes) uint8_t tile[kSide * kSide];
        transpose_tile(tile, from + r * from_stride + c, from_stride);
        for (int64_t i = 0; i < kSide; ++i) {
          uint8_t* line = to + (c + i) * to_stride + r;
          if (lines)
            stream_line(line, tile + i * kSide);
          else
            std::memcpy(line, tile + i * kSide, kSide);
        }
      }
    for (int64_t c = 0; c < cols; ++c)
      for (int64_t r = c < whole_cols ? whole_rows : 0; r < rows; ++r)
        to[c * to_stride + r] = from[r * from_stride + c];
  }

  [[gnu::noinline]] static void random(float* __restrict out, uint64_t key, uint64_t first,
                                       uint64_t high, size_t blocks) {
    size_t i = 0;
#if defined(__AVX2__)
    constexpr size_t kCount = Counters<tag>::kCount;
    for (; i + kCount <= blocks; i += kCount) store_draws<tag>(out + 8 * i, key, first + i, high);
#endif
    for (; i < blocks; ++i) {
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
            .store_blocks = {store_blocks_loop<static_cast<DType>(d)>...},
            .rounded = {rounded_loops<static_cast<DType>(d)>()...},
            .add = add,
            .add_pairs = add_pairs,
            .max_bits = max_bits,
            .max_bits_into = max_bits_into,
            .block_max = block_max,
            .scales = scales,
            .stream_bytes = stream_bytes,
            .transpose_bytes = transpose_bytes,
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
