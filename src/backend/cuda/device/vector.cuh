// The vector map: a thread has 8 adjacent elements of a row, one or more times. All loads come
// first. Supports only whole, aligned vectors. If it reads a transposed tensor it is tall: the
// threads of a warp have adjacent rows, whose elements are adjacent in that tensor. Follows
// plain.cuh.

// Two values of a 16-bit or 8-bit format at once. Uses hardware conversions if they give the same
// bits.
template <class Format>
__device__ inline void tenon_decode_pair(TenonU32 codes, float& a, float& b) {
  constexpr TenonU32 mask = Format::bytes == 2 ? 0xffffu : 0xffu;
  a = Format::decode(codes & mask);
  b = Format::decode((codes >> (8 * Format::bytes)) & mask);
}
template <>
__device__ inline void tenon_decode_pair<tenon_bf16>(TenonU32 codes, float& a, float& b) {
  a = tenon_bits(codes << 16);
  b = tenon_bits(codes & 0xffff0000u);
}
template <class Format>
__device__ inline TenonU32 tenon_encode_pair(float a, float b) {
  return Format::encode(a) | Format::encode(b) << (8 * Format::bytes);
}
#if defined(__CUDA_ARCH__)
template <>
__device__ inline void tenon_decode_pair<tenon_f16>(TenonU32 codes, float& a, float& b) {
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}"
      : "=f"(a), "=f"(b)
      : "r"(codes));
}
template <>
__device__ inline TenonU32 tenon_encode_pair<tenon_bf16>(float a, float b) {
  TenonU32 codes;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(b), "f"(a));
  return codes;
}
template <>
__device__ inline TenonU32 tenon_encode_pair<tenon_f16>(float a, float b) {
  TenonU32 codes;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(codes) : "f"(b), "f"(a));
  return codes;
}
#if __CUDA_ARCH__ >= 890
template <>
__device__ inline void tenon_decode_pair<tenon_e4m3>(TenonU32 codes, float& a, float& b) {
  TenonU32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<TenonU16>(codes)));
  tenon_decode_pair<tenon_f16>(halves, a, b);
}
template <>
__device__ inline void tenon_decode_pair<tenon_e5m2>(TenonU32 codes, float& a, float& b) {
  TenonU32 halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<TenonU16>(codes)));
  tenon_decode_pair<tenon_f16>(halves, a, b);
}
template <>
__device__ inline TenonU32 tenon_encode_pair<tenon_e4m3>(float a, float b) {
  TenonU16 codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
  return codes;
}
template <>
__device__ inline TenonU32 tenon_encode_pair<tenon_e5m2>(float a, float b) {
  TenonU16 codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(b), "f"(a));
  return codes;
}
#endif
#endif

// The element index of an access in 32 bits. The host has added the offset to the data pointer.
// Columns are contiguous or in blocks.
__device__ inline TenonU32 tenon_blocks8(const TenonAccess& a, TenonU32 column) {
  const TenonU32 size = static_cast<TenonU32>(a.block);
  const TenonU32 block = column / size;
  return block * static_cast<TenonU32>(a.block_stride) + (column - block * size);
}
__device__ inline TenonI64 tenon_tile8(const TenonAccess& a, TenonU32 row, TenonU32 column) {
  return static_cast<TenonI64>(tenon_wide(row, static_cast<TenonU32>(a.stride), column));
}
__device__ inline TenonI64 tenon_tile8_blocks(const TenonAccess& a, TenonU32 row, TenonU32 column) {
  return tenon_tile8(a, row, tenon_blocks8(a, column));
}
__device__ inline TenonI64 tenon_row8(const TenonAccess&, TenonU32, TenonU32 column) {
  return column;
}
__device__ inline TenonI64 tenon_row8_blocks(const TenonAccess& a, TenonU32, TenonU32 column) {
  return tenon_blocks8(a, column);
}

// As tenon_single_scale, but reads an aligned value that no thread of the kernel writes.
template <class Encoder, class Arguments>
__device__ inline TenonScale tenon_tensor_scale(const Arguments& a) {
  if (!Encoder::kScaled) return {1.0f, 0};
  const float given = __ldg(reinterpret_cast<const float*>(a.place[Encoder::kPlace + 5].data));
  return Encoder::kGiven ? tenon_scale_given(given)
                         : tenon_scale_of<Encoder>(__float_as_uint(given) & 0x7fffffffu);
}

struct alignas(16) TenonWords4 {
  TenonU32 w[4];
};
struct alignas(8) TenonWords2 {
  TenonU32 w[2];
};

// Eight values: one vector of 16 bytes, two of them, or one of 8.
template <class Format>
struct TenonEight {
  __device__ static void load(const TenonU8* from, float (&v)[8]) {
    if (Format::bytes == 4) {
      for (int half = 0; half < 2; ++half) {
        const TenonWords4 x = reinterpret_cast<const TenonWords4*>(from)[half];
        for (int i = 0; i < 4; ++i) v[4 * half + i] = tenon_bits(x.w[i]);
      }
    } else if (Format::bytes == 2) {
      const TenonWords4 x = *reinterpret_cast<const TenonWords4*>(from);
      for (int i = 0; i < 4; ++i) tenon_decode_pair<Format>(x.w[i], v[2 * i], v[2 * i + 1]);
    } else {
      const TenonWords2 x = *reinterpret_cast<const TenonWords2*>(from);
      for (int i = 0; i < 2; ++i) {
        tenon_decode_pair<Format>(x.w[i], v[4 * i], v[4 * i + 1]);
        tenon_decode_pair<Format>(x.w[i] >> 16, v[4 * i + 2], v[4 * i + 3]);
      }
    }
  }
  __device__ static void store(TenonU8* to, const float (&v)[8]) {
    if (Format::bytes == 4) {
      for (int half = 0; half < 2; ++half) {
        TenonWords4 x;
        for (int i = 0; i < 4; ++i) x.w[i] = __float_as_uint(v[4 * half + i]);
        reinterpret_cast<TenonWords4*>(to)[half] = x;
      }
    } else if (Format::bytes == 2) {
      TenonWords4 x;
      for (int i = 0; i < 4; ++i) x.w[i] = tenon_encode_pair<Format>(v[2 * i], v[2 * i + 1]);
      *reinterpret_cast<TenonWords4*>(to) = x;
    } else {
      TenonWords2 x;
      for (int i = 0; i < 2; ++i)
        x.w[i] = tenon_encode_pair<Format>(v[4 * i], v[4 * i + 1]) |
                 tenon_encode_pair<Format>(v[4 * i + 2], v[4 * i + 3]) << 16;
      *reinterpret_cast<TenonWords2*>(to) = x;
    }
  }
};

// Eight codes of one byte as two words.
template <class Format>
__device__ inline TenonWords2 tenon_codes8(const float (&v)[8]) {
  TenonWords2 x;
  TenonEight<Format>::store(reinterpret_cast<TenonU8*>(&x), v);
  return x;
}

template <class Format>
__device__ inline void tenon_load8(const TenonAccess& a, TenonI64 element, float (&v)[8]) {
  TenonEight<Format>::load(a.data + element * Format::bytes, v);
}
// Eight columns of a row of a transposed tensor.
template <class Format>
__device__ inline void tenon_turned8(const TenonAccess& a, TenonU32 row, TenonU32 column,
                                     float (&v)[8]) {
  const TenonU32 stride = static_cast<TenonU32>(a.stride);
  const TenonU32 first = static_cast<TenonU32>(a.offset) + column;
  for (int e = 0; e < 8; ++e)
    v[e] = tenon_load<Format>(a, static_cast<TenonI64>(tenon_wide(first + e, stride, row)));
}
template <class Format>
__device__ inline void tenon_store8(const TenonAccess& a, TenonI64 element, const float (&v)[8]) {
  TenonEight<Format>::store(a.data + element * Format::bytes, v);
}
__device__ inline void tenon_spread8(float value, float (&v)[8]) {
  for (int i = 0; i < 8; ++i) v[i] = value;
}

// The scales of eight adjacent elements. They share one, or each column has its own.
template <class Scale, int rows, int cols, bool transposed, bool swizzled, bool rowwise,
          bool contiguous>
__device__ inline void tenon_block8(const TenonAccess& a, TenonU32 row, TenonU32 column,
                                    float (&v)[8]) {
  static_assert(cols % 8 == 0 || (cols == 1 && !transposed), "eight scales are one vector");
  // In 32 bits: 64-bit divisions cost more than the load.
  const auto at = [&](TenonU32 c) -> TenonI64 {
    const TenonU32 i = row / rows;
    const TenonU32 j =
        (static_cast<TenonU32>(a.offset) + (contiguous ? c : tenon_blocks8(a, c))) / cols;
    if (swizzled) return tenon_scale_at<transposed, swizzled, rowwise>(i, j, a.stride, a.tiles);
    const TenonU32 stride = static_cast<TenonU32>(a.stride);
    return static_cast<TenonI64>(transposed ? tenon_wide(j, stride, i) : tenon_wide(i, stride, j));
  };
  if (cols % 8 == 0)
    tenon_spread8(tenon_load<Scale>(a, at(column)), v);
  else if (!swizzled)
    tenon_load8<Scale>(a, at(column), v);
  else
    for (int e = 0; e < 8; ++e) v[e] = tenon_load<Scale>(a, at(column + e));
}

// The address of a vector in the row `more` rows below `row`.
template <int bytes>
__device__ inline TenonU8* tenon_below8(const TenonAccess& a, TenonU32 row, TenonU32 column,
                                        int more) {
  const TenonU32 stride = static_cast<TenonU32>(a.stride) * bytes;
  return a.data + tenon_wide(row, stride, static_cast<TenonU64>(column) * bytes) +
         static_cast<TenonU64>(stride) * more;
}

// Eight elements in memory format, so that the early loads of all rows use few registers.
template <int bytes>
struct TenonRaw {
  TenonWords4 w[bytes == 4 ? 2 : 1];
  __device__ void load(const TenonU8* from) {
    for (int i = 0; i < (bytes == 4 ? 2 : 1); ++i)
      w[i] = reinterpret_cast<const TenonWords4*>(from)[i];
  }
};
template <>
struct TenonRaw<1> {
  TenonWords2 w[1];
  __device__ void load(const TenonU8* from) { w[0] = *reinterpret_cast<const TenonWords2*>(from); }
};
template <class Format>
__device__ inline void tenon_unpack8(const TenonRaw<Format::bytes>& raw, float (&v)[8]) {
  TenonEight<Format>::load(reinterpret_cast<const TenonU8*>(raw.w), v);
}

// Two of eight bf16 values as one word, to compare two at a time.
__device__ inline TenonU32 tenon_pair(const float (&v)[8], int i) {
  return __float_as_uint(v[2 * i]) >> 16 | (__float_as_uint(v[2 * i + 1]) & 0xffff0000u);
}
__device__ inline TenonU32 tenon_twice(float c) { return (__float_as_uint(c) >> 16) * 0x10001u; }
template <bool least>
__device__ inline void tenon_clamp8(float (&v)[8], float c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  for (int i = 0; i < 4; ++i) {
    TenonU32 w = tenon_pair(v, i);
    if (least)
      asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(w) : "r"(tenon_twice(c)));
    else
      asm("min.NaN.bf16x2 %0, %0, %1;" : "+r"(w) : "r"(tenon_twice(c)));
    tenon_decode_pair<tenon_bf16>(w, v[2 * i], v[2 * i + 1]);
  }
#else
  for (int e = 0; e < 8; ++e) v[e] = least ? tenon_max(v[e], c) : tenon_min(v[e], c);
#endif
}
__device__ inline void tenon_min8(float (&v)[8], float c) { tenon_clamp8<false>(v, c); }
__device__ inline void tenon_max8(float (&v)[8], float c) { tenon_clamp8<true>(v, c); }
// Sets v to 0 where x < c.
__device__ inline void tenon_zero8(float (&v)[8], const float (&x)[8], float c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  for (int i = 0; i < 4; ++i) {
    TenonU32 keep;
    asm("set.geu.u32.bf16x2 %0, %1, %2;" : "=r"(keep) : "r"(tenon_pair(x, i)), "r"(tenon_twice(c)));
    tenon_decode_pair<tenon_bf16>(tenon_pair(v, i) & keep, v[2 * i], v[2 * i + 1]);
  }
#else
  for (int e = 0; e < 8; ++e) v[e] = x[e] < c ? 0.0f : v[e];
#endif
}

// 16 bits as a value: the mantissa of 2^23 + bits, minus 2^23.
__device__ inline float tenon_sixteen(TenonU32 bits) {
  return tenon_bits(0x4b000000u | bits) - 8388608.0f;
}

// Moves half words down by k.
template <int words>
__device__ inline void tenon_shift_halves(TenonU32 (&w)[words], TenonU32 k) {
#pragma unroll
  for (int by = 2; by >= 1; --by)
    for (int i = 0; i + by < words; ++i) w[i] = (k & (2u * by)) != 0 ? w[i + by] : w[i];
  for (int i = 0; i + 1 < words; ++i) w[i] = (k & 1) != 0 ? w[i] >> 16 | w[i + 1] << 16 : w[i];
}

// One block of the random stream if the vector is aligned to it, else two adjacent blocks. No
// thread of the kernel writes the state, so it is read once for all rows.
__device__ inline void tenon_random8(const TenonU64* from, TenonI64 row, TenonI64 column,
                                     TenonU32 ordinal, float (&v)[8]) {
  TenonU64 state[5];
  for (int k = 0; k < 5; ++k) state[k] = __ldg(from + k);
  const TenonU64 i =
      (state[2] + static_cast<TenonU64>(row)) * state[4] + state[3] + static_cast<TenonU64>(column);
  TenonU32 c[4];
  tenon_philox(state, i, ordinal, c);
  if (i % 8 != 0) {
    TenonU32 next[4];
    tenon_philox(state, i + 8, ordinal, next);
    TenonU32 w[8] = {c[0], c[1], c[2], c[3], next[0], next[1], next[2], next[3]};
    tenon_shift_halves(w, static_cast<TenonU32>(i % 8));
    for (int k = 0; k < 4; ++k) c[k] = w[k];
  }
  for (int k = 0; k < 4; ++k) {
    v[2 * k] = tenon_sixteen(c[k] & 0xffffu);
    v[2 * k + 1] = tenon_sixteen(c[k] >> 16);
  }
}

// The quotient of an index by the divisor of the head.
template <class Arguments>
__device__ inline TenonU32 tenon_quotient(const Arguments& a, TenonU32 v) {
  return static_cast<TenonU32>(tenon_wide(v + v, a.magic) >> 32) >> a.shift;
}

__device__ inline TenonU32 tenon_warp_most(TenonU32 most) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, most);
#else
  for (int step = 16; step > 0; step /= 2) {
    const TenonU32 other = __shfl_xor_sync(0xffffffffu, most, step);
    most = other > most ? other : most;
  }
  return most;
#endif
}

// Joins the integer maximum of a warp into the slot. The earlier value of the slot avoids most
// writes.
__device__ inline void tenon_join_amax(TenonU8* slot, TenonU32 most, TenonU32 before) {
  most = tenon_warp_most(most);
  if (threadIdx.x % 32 == 0 && most > before) atomicMax(reinterpret_cast<TenonU32*>(slot), most);
}

// Body is printed: kLoads, kStores, kAmax, kEncoders (their number), start (reads slots and
// scales), load, compute, store, finish. The kVectors of a thread are one block width apart, or
// adjacent if `tall`. `walks`: thread blocks loop over the rest of the call. `flat`: a row is one
// vector.
template <class Body, int kVectors, bool walks, bool flat, bool tall, class Arguments>
__device__ inline void tenon_vectors_of(const Arguments& a) {
  TenonU32 before[Body::kAmax + 1];
  TenonU32 most[Body::kAmax + 1] = {};
  float multiplier[Body::kEncoders + 1];
  const TenonU32 width = (tall ? 1 : kVectors) * blockDim.x;
  TenonU32 first = blockIdx.x * width + threadIdx.x;
  do {
    float in[kVectors][Body::kLoads + 1][8];
    TenonU32 rows[kVectors], columns[kVectors];
    bool inside[kVectors];
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      const TenonU32 index = first + (tall ? 0 : n * blockDim.x);
      inside[n] = index < a.all;
      const TenonU32 v = inside[n] ? index : 0;
      const TenonU32 quotient = flat ? v : tenon_quotient(a, v);
      rows[n] = tall ? v - quotient * a.divisor : quotient;
      columns[n] = flat ? 0 : tall ? quotient * kVectors + n : v - quotient * a.divisor;
      if (tall && columns[n] >= a.across) {
        inside[n] = false;
        columns[n] = 0;
      }
      columns[n] *= 8;
      Body::load(a.at, a.random, rows[n], columns[n], in[n]);
    }
    if (!walks) Body::start(a, before, multiplier);
#pragma unroll
    for (int n = 0; n < kVectors; ++n) {
      // The branch keeps all loads before the first use. A walk has no branch, so its vectors
      // overlap.
      if (!walks && !inside[n]) continue;
      float out[Body::kStores][8];
      for (int e = 0; e < 8; ++e) {
        float x[Body::kLoads + 1];
        float y[Body::kStores];
        for (int i = 0; i < Body::kLoads; ++i) x[i] = in[n][i][e];
        Body::compute(x, y);
        for (int i = 0; i < Body::kStores; ++i) out[i][e] = y[i];
      }
      if (inside[n]) Body::store(a, rows[n], columns[n], out, multiplier, most);
    }
    first += gridDim.x * width;
  } while (walks && first - threadIdx.x < a.all);
  if (walks) Body::start(a, before, multiplier);
  Body::finish(a, most, before);
}
// A walk is limited by instructions, not by memory, so it has a path without divisions.
template <class Body, int kVectors, bool walks, bool tall, class Arguments>
__device__ inline void tenon_vectors(const Arguments& a) {
  if (walks && !tall && a.divisor == 1)
    tenon_vectors_of<Body, kVectors, walks, true, false>(a);
  else
    tenon_vectors_of<Body, kVectors, walks && !tall, false, tall>(a);
}
