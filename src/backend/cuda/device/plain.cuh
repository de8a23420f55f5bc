// Kernels for any step, one kernel per store. A thread computes its values from the loads, again in
// every kernel. Only sums and totals are in memory between kernels. Follows map.cuh.

__device__ inline TenonI64 tenon_thread() {
  return static_cast<TenonI64>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline TenonI64 tenon_threads() { return static_cast<TenonI64>(gridDim.x) * blockDim.x; }
__device__ inline TenonI64 tenon_least(TenonI64 a, TenonI64 b) { return a < b ? a : b; }

template <int bytes>
__device__ inline void tenon_put(TenonU8* to, TenonU32 code) {
  for (int i = 0; i < bytes; ++i) to[i] = static_cast<TenonU8>(code >> (8 * i));
}

__device__ inline TenonI64 tenon_tile_transposed(const TenonAccess& a, TenonI64 row,
                                                 TenonI64 column) {
  return tenon_mapped(a, column) * a.stride + row;
}

// The index of scale (i, j). Swizzled scales are tiles of 128 lines x 4 blocks, `tiles` per row.
template <bool transposed, bool swizzled, bool rowwise>
__device__ inline TenonI64 tenon_scale_at(TenonI64 i, TenonI64 j, TenonI64 stride, TenonI64 tiles) {
  if (!swizzled) return transposed ? j * stride + i : i * stride + j;
  const TenonI64 line = rowwise ? i : j;
  const TenonI64 block = rowwise ? j : i;
  return (line / 128 * tiles + block / 4) * 512 + line % 32 * 16 + line % 128 / 32 * 4 + block % 4;
}

template <int block_rows, int block_cols, bool transposed, bool swizzled, bool rowwise>
__device__ inline TenonI64 tenon_block(const TenonAccess& a, TenonI64 row, TenonI64 column) {
  return tenon_scale_at<transposed, swizzled, rowwise>(
      row / block_rows, tenon_mapped(a, column) / block_cols, a.stride, a.tiles);
}

__device__ inline void tenon_philox_round(TenonU32 (&c)[4], TenonU32 k0, TenonU32 k1) {
  const TenonU64 a = tenon_wide(0xD2511F53u, c[0]);
  const TenonU64 b = tenon_wide(0xCD9E8D57u, c[2]);
  const TenonU32 first = static_cast<TenonU32>(b >> 32) ^ c[1] ^ k0;
  const TenonU32 third = static_cast<TenonU32>(a >> 32) ^ c[3] ^ k1;
  c[0] = first;
  c[1] = static_cast<TenonU32>(b);
  c[2] = third;
  c[3] = static_cast<TenonU32>(a);
}

// The block of the random stream that holds value i. The state is seed, offset, row0, col0,
// columns.
__device__ inline void tenon_philox(const TenonU64* state, TenonU64 i, TenonU32 ordinal,
                                    TenonU32 (&c)[4]) {
  const TenonU64 high = state[1] + ordinal;
  c[0] = static_cast<TenonU32>(i >> 3);
  c[1] = static_cast<TenonU32>(i >> 35);
  c[2] = static_cast<TenonU32>(high);
  c[3] = static_cast<TenonU32>(high >> 32);
  TenonU32 k0 = static_cast<TenonU32>(state[0]);
  TenonU32 k1 = static_cast<TenonU32>(state[0] >> 32);
  for (int r = 0; r < 10; ++r, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) tenon_philox_round(c, k0, k1);
}

// 16 bits of the random stream as a value.
__device__ inline float tenon_random(const TenonU64* state, TenonI64 row, TenonI64 column,
                                     TenonU32 ordinal) {
  const TenonU64 i =
      (state[2] + static_cast<TenonU64>(row)) * state[4] + state[3] + static_cast<TenonU64>(column);
  TenonU32 c[4];
  tenon_philox(state, i, ordinal, c);
  const TenonU32 word = c[(i & 7) >> 1];
  return static_cast<float>(static_cast<int>(i & 1 ? word >> 16 : word & 0xffffu));
}

// Body is printed for each step: kLoads, kRoots, load, compute, store.
template <class Body, int root, class Arguments>
__device__ inline float tenon_value(const Arguments& a, TenonI64 row, TenonI64 column) {
  float in[Body::kLoads + 1];
  float out[Body::kRoots];
  Body::load(a.at, a.random, row, column, in);
  Body::compute(in, out);
  return out[root];
}

// The adjacent-pair tree sum of f(0) … f(n-1), n >= 1. An odd last value moves up unchanged.
template <class F>
__device__ inline float tenon_tree(TenonI64 n, const F& f) {
  float stack[64];
  int top = 0;
  for (TenonI64 i = 0; i < n; ++i) {
    float v = f(i);
    for (TenonI64 level = i + 1; level % 2 == 0; level /= 2) v = stack[--top] + v;
    stack[top++] = v;
  }
  float v = stack[--top];
  while (top > 0) v = stack[--top] + v;
  return v;
}

template <class Body, int root, class Arguments>
struct TenonRowOf {
  const Arguments& a;
  TenonI64 row, first;
  __device__ float operator()(TenonI64 i) const {
    return tenon_value<Body, root>(a, row, first + i);
  }
};
template <class Body, int root, class Arguments>
struct TenonColumnOf {
  const Arguments& a;
  TenonI64 column, first;
  __device__ float operator()(TenonI64 i) const {
    return tenon_value<Body, root>(a, first + i, column);
  }
};
// The sum of 32 rows in sequence, as one summand.
template <class Body, int root, class Arguments>
struct TenonOrderedColumnOf {
  const Arguments& a;
  TenonI64 column, first, rows;
  __device__ float operator()(TenonI64 i) const {
    const TenonI64 begin = first + 32 * i;
    const TenonI64 end = tenon_least(begin + 32, first + rows);
    float sum = tenon_value<Body, root>(a, begin, column);
    for (TenonI64 r = begin + 1; r < end; ++r) sum = sum + tenon_value<Body, root>(a, r, column);
    return sum;
  }
};
template <class Body, int root, class Arguments>
struct TenonElementOf {
  const Arguments& a;
  TenonI64 first;
  __device__ float operator()(TenonI64 i) const {
    const TenonI64 row = tenon_divide(first + i, a.cols);
    return tenon_value<Body, root>(a, row, first + i - row * a.cols);
  }
};
struct TenonPartialOf {
  const float* from;
  TenonI64 stride;
  __device__ float operator()(TenonI64 i) const { return from[i * stride]; }
};

// Stores elements. This is the last kernel, because a result may overwrite an input.
template <class Body, class Arguments>
__device__ inline void tenon_tiles(const Arguments& a) {
  const TenonI64 count = a.rows * a.cols;
  for (TenonI64 i = tenon_thread(); i < count; i += tenon_threads()) {
    const TenonI64 row = tenon_divide(i, a.cols);
    const TenonI64 column = i - row * a.cols;
    float in[Body::kLoads + 1];
    float out[Body::kRoots];
    Body::load(a.at, a.random, row, column, in);
    Body::compute(in, out);
    Body::store(a.at + Body::kLoads, row, column, out);
  }
}

// One value per row: a tree over the columns, one warp per row. Each lane has an aligned part.
template <class Body, int root, class Arguments>
__device__ inline float tenon_row_tree(const Arguments& a, TenonI64 row) {
  const TenonI64 lane = threadIdx.x;
  TenonI64 part = 1;
  while (32 * part < a.cols) part *= 2;
  const TenonI64 begin = lane * part;
  float sum = 0.0f;
  if (begin < a.cols)
    sum = tenon_tree(tenon_least(part, a.cols - begin),
                     TenonRowOf<Body, root, Arguments>{a, row, begin});
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_down_sync(0xffffffffu, sum, step);
    if (lane % (2 * step) == 0 && (lane + step) * part < a.cols) sum = sum + other;
  }
  return sum;  // valid in lane 0
}

template <class Body, int root, class Arguments>
__device__ inline void tenon_totals(const Arguments& a) {
  for (TenonI64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float sum = tenon_row_tree<Body, root>(a, row);
    if (threadIdx.x == 0) a.to[row] = sum;
  }
}
template <class Body, int root, class Format, class Arguments>
__device__ inline void tenon_row_sums(const Arguments& a) {
  const TenonAccess& to = a.at[Body::kLoads + root];
  for (TenonI64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const float sum = tenon_row_tree<Body, root>(a, row);
    if (threadIdx.x == 0) tenon_store<Format>(to, row * to.stride, sum);
  }
}
template <class Body, int root, class Format, class Arguments>
__device__ inline void tenon_columns(const Arguments& a) {
  const TenonAccess& to = a.at[Body::kLoads + root];
  for (TenonI64 row = tenon_thread(); row < a.rows; row += tenon_threads())
    tenon_store<Format>(to, row * to.stride, tenon_value<Body, root>(a, row, 0));
}

// Sums over rows: parts of 128 rows, then the sum of the parts.
template <class Body, int root, bool ordered, class Arguments>
__device__ inline void tenon_column_parts(const Arguments& a) {
  for (TenonI64 i = tenon_thread(); i < a.count; i += tenon_threads()) {
    const TenonI64 block = tenon_divide(i, a.cols);
    const TenonI64 column = i - block * a.cols;
    const TenonI64 first = block * 128;
    const TenonI64 rows = tenon_least(128, a.rows - first);
    a.to[i] = ordered
                  ? tenon_tree((rows + 31) / 32,
                               TenonOrderedColumnOf<Body, root, Arguments>{a, column, first, rows})
                  : tenon_tree(rows, TenonColumnOf<Body, root, Arguments>{a, column, first});
  }
}
template <class Body, int root, class Format, class Arguments>
__device__ inline void tenon_column_sums(const Arguments& a) {
  const TenonAccess& to = a.at[Body::kLoads + root];
  for (TenonI64 column = tenon_thread(); column < a.cols; column += tenon_threads()) {
    const float sum =
        a.count == 0 ? 0.0f : tenon_tree(a.count, TenonPartialOf{a.from + column, a.cols});
    tenon_store<Format>(to, tenon_mapped(to, column), sum);
  }
}

// The sum of all elements: parts of 256 elements, then parts of 256 parts, and so on.
template <class Body, int root, class Arguments>
__device__ inline void tenon_sum_parts(const Arguments& a) {
  const TenonI64 elements = a.rows * a.cols;
  for (TenonI64 i = tenon_thread(); i < a.count; i += tenon_threads())
    a.to[i] = tenon_tree(tenon_least(256, elements - 256 * i),
                         TenonElementOf<Body, root, Arguments>{a, 256 * i});
}
template <class Arguments>
__device__ inline void tenon_sum_more(const Arguments& a) {
  const TenonI64 parts = (a.count + 255) / 256;
  for (TenonI64 i = tenon_thread(); i < parts; i += tenon_threads())
    a.to[i] = tenon_tree(tenon_least(256, a.count - 256 * i), TenonPartialOf{a.from + 256 * i, 1});
}
template <class Body, int root, class Format, class Arguments>
__device__ inline void tenon_sum_end(const Arguments& a) {
  if (tenon_thread() == 0)
    tenon_store<Format>(a.at[Body::kLoads + root], 0, a.count == 0 ? 0.0f : a.from[0]);
}

// The integer maximum of the bits of |v|. A NaN is larger than every value.
template <class Body, int root, class Arguments>
__device__ inline void tenon_amax_parts(const Arguments& a) {
  const TenonI64 count = a.rows * a.cols;
  TenonU32 most = 0;
  for (TenonI64 i = tenon_thread(); i < count; i += tenon_threads()) {
    const TenonI64 row = tenon_divide(i, a.cols);
    const float v = tenon_value<Body, root>(a, row, i - row * a.cols);
    const TenonU32 bits = __float_as_uint(v) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  TenonU32* const all = reinterpret_cast<TenonU32*>(a.to);
  if (most > *all) atomicMax(all, most);
}
template <class Body, int root, bool join, class Arguments>
__device__ inline void tenon_amax_end(const Arguments& a) {
  if (tenon_thread() != 0) return;
  const TenonAccess& to = a.at[Body::kLoads + root];
  TenonU32 most = *reinterpret_cast<const TenonU32*>(a.from);
  const TenonU32 held = join ? __float_as_uint(tenon_read<tenon_f32>(to.data)) & 0x7fffffffu : 0;
  tenon_put<4>(to.data, held > most ? held : most);
}

template <class Arguments>
__device__ inline void tenon_clear(const Arguments& a) {
  for (TenonI64 i = tenon_thread(); i < a.count; i += tenon_threads()) a.to[i] = 0.0f;
}

// Encoder is printed. Its constants come from the format.

// Maps a column of the tensor to a column of the step, if this store writes it.
__device__ inline bool tenon_unmapped(const TenonAccess& to, TenonI64 cols, TenonI64 column,
                                      TenonI64& step) {
  const TenonI64 from = column - to.offset;
  const TenonI64 block = from < 0 ? 0 : tenon_divide(from, to.block_stride);
  const TenonI64 inside = from - block * to.block_stride;
  step = block * to.block + inside;
  return from >= 0 && inside < to.block && step < cols;
}

struct TenonScale {
  float multiplier;
  TenonU32 inverse;  // code of scale_inv
};

__device__ inline TenonScale tenon_scale_given(float multiplier) {
  return {multiplier, __float_as_uint(1.0f / multiplier)};
}

template <class Encoder>
__device__ inline TenonScale tenon_scale_of(TenonU32 amax_bits) {
  if (Encoder::kE8M0) {
    const TenonU32 e = tenon_e8m0::encode(tenon_bits(amax_bits) * Encoder::inverse_most());
    if (e == 0xff) return {tenon_bits(0x7fc00000u), e};
    return {tenon_bits(e == 254 ? 0x00400000u : (254 - e) << 23), e};
  }
  float amax = tenon_bits(amax_bits);
  if (amax < Encoder::eps()) amax = Encoder::eps();
  if (amax == 0.0f || __float_as_uint(amax) >= 0x7f800000u) return tenon_scale_given(1.0f);
  float scale = Encoder::most() / amax;
  if (scale > tenon_bits(0x7f7fffffu)) scale = tenon_bits(0x7f7fffffu);
  if (Encoder::kPowers) scale = tenon_bits(__float_as_uint(scale) & 0x7f800000u);
  return tenon_scale_given(scale);
}

// The scale of a tensor with a single scale. The last place holds its multiplier or amax.
template <class Encoder, class Arguments>
__device__ inline TenonScale tenon_single_scale(const Arguments& a) {
  if (!Encoder::kScaled) return {1.0f, 0};
  const float given = tenon_read<tenon_f32>(a.place[Encoder::kPlace + 5].data);
  return Encoder::kGiven ? tenon_scale_given(given)
                         : tenon_scale_of<Encoder>(__float_as_uint(given) & 0x7fffffffu);
}

// Counts: saturated, flushed to zero, not finite.
struct TenonHealth {
  TenonU64 counts[3];
};
template <class Encoder>
__device__ inline void tenon_count(TenonHealth& h, float v, float scaled) {
  const TenonU32 bits = __float_as_uint(v) & 0x7fffffffu;
  const TenonU32 code = __float_as_uint(scaled) & 0x7fffffffu;
  const bool finite = bits < 0x7f800000u;
  h.counts[0] += finite && code > __float_as_uint(Encoder::saturation()) && code <= 0x7f800000u;
  h.counts[1] += finite && bits != 0 && code <= __float_as_uint(Encoder::least());
  h.counts[2] += !finite;
}
template <class Arguments>
__device__ inline void tenon_add_health(const Arguments& a, const TenonHealth& h) {
  TenonU64* const all = reinterpret_cast<TenonU64*>(a.to);
  for (int i = 0; i < 3; ++i)
    if (h.counts[i] != 0) atomicAdd(all + i, h.counts[i]);
}

template <class Encoder, bool turned, class Arguments>
__device__ inline void tenon_encode_one(const Arguments& a, const TenonPlace& data, TenonI64 row,
                                        TenonI64 column, float v, float multiplier,
                                        TenonHealth& h) {
  using Format = typename Encoder::Format;
  const float scaled = v * multiplier;
  const TenonI64 at = turned ? column * data.stride + row : row * data.stride + column;
  tenon_put<Format::bytes>(data.data + at * Format::bytes, Format::encode(scaled));
  tenon_count<Encoder>(h, v, scaled);
}

// One scale for the whole tensor.
template <class Body, class Encoder, bool rowwise, bool turned, bool counts, class Arguments>
__device__ inline void tenon_encode_elements(const Arguments& a) {
  const TenonPlace& data = a.place[Encoder::kPlace + (rowwise ? 0 : 2)];
  const TenonI64 cols = a.place[Encoder::kPlace + 5].cols;
  const TenonI64 count = a.rows * cols;
  const float multiplier = tenon_single_scale<Encoder>(a).multiplier;
  TenonHealth h = {};
  for (TenonI64 i = tenon_thread(); i < count; i += tenon_threads()) {
    const TenonI64 row = tenon_divide(i, cols);
    const TenonI64 column = i - row * cols;
    const float v = Encoder::value(a, row, column);
    tenon_encode_one<Encoder, turned>(a, data, row, column, v, multiplier, h);
  }
  if (counts) tenon_add_health(a, h);
}

// One scale per block, one warp per block.
template <class Body, class Encoder, bool rowwise, bool turned, bool counts, int block_rows,
          int block_cols, bool scales_turned, class Arguments>
__device__ inline void tenon_encode_blocks(const Arguments& a) {
  const TenonPlace& data = a.place[Encoder::kPlace + (rowwise ? 0 : 2)];
  const TenonPlace& scales = a.place[Encoder::kPlace + (rowwise ? 1 : 3)];
  const TenonI64 cols = a.place[Encoder::kPlace + 5].cols;
  const TenonI64 across = (cols + block_cols - 1) / block_cols;
  const TenonI64 blocks = (a.rows + block_rows - 1) / block_rows * across;
  TenonHealth h = {};
  for (TenonI64 b = blockIdx.x; b < blocks; b += gridDim.x) {
    const TenonI64 i = b / across;
    const TenonI64 j = b - i * across;
    const TenonI64 row = i * block_rows;
    const TenonI64 column = j * block_cols;
    TenonU32 most = 0;
    for (int e = threadIdx.x; e < block_rows * block_cols; e += 32) {
      const TenonI64 r = row + e / block_cols;
      const TenonI64 c = column + e % block_cols;
      if (r >= a.rows || c >= cols) continue;
      const TenonU32 bits = __float_as_uint(Encoder::value(a, r, c)) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    for (int step = 16; step > 0; step /= 2) {
      const TenonU32 other = __shfl_xor_sync(0xffffffffu, most, step);
      most = other > most ? other : most;
    }
    const TenonScale scale = tenon_scale_of<Encoder>(most);
    if (threadIdx.x == 0) {
      using Format = typename Encoder::Scale;
      const TenonI64 tiles = (rowwise ? scales.cols : scales.rows) / 4;
      const TenonI64 at =
          tenon_scale_at<scales_turned, Encoder::kSwizzled, rowwise>(i, j, scales.stride, tiles);
      tenon_put<Format::bytes>(scales.data + at * Format::bytes, scale.inverse);
    }
    for (int e = threadIdx.x; e < block_rows * block_cols; e += 32) {
      const TenonI64 r = row + e / block_cols;
      const TenonI64 c = column + e % block_cols;
      if (r >= a.rows || c >= cols) continue;
      const float v = Encoder::value(a, r, c);
      tenon_encode_one<Encoder, turned>(a, data, r, c, v, scale.multiplier, h);
    }
  }
  if (counts) tenon_add_health(a, h);
}

// Finishes one orientation: sets padding to 0 and writes a single scale once.
template <class Encoder, bool rowwise, int block_rows, int block_cols, bool scales_turned,
          class Arguments>
__device__ inline void tenon_encode_end(const Arguments& a) {
  using Format = typename Encoder::Scale;
  const TenonPlace& scales = a.place[Encoder::kPlace + (rowwise ? 1 : 3)];
  if (block_rows == 0) {
    if (tenon_thread() == 0)
      tenon_put<Format::bytes>(scales.data, tenon_single_scale<Encoder>(a).inverse);
    return;
  }
  const TenonI64 cols = a.place[Encoder::kPlace + 5].cols;
  const TenonI64 used_rows = (a.rows + block_rows - 1) / (block_rows > 0 ? block_rows : 1);
  const TenonI64 used_cols = (cols + block_cols - 1) / (block_cols > 0 ? block_cols : 1);
  const TenonI64 across = scales_turned ? scales.rows : scales.cols;
  const TenonI64 count = scales.rows * scales.cols;
  const TenonI64 tiles = (rowwise ? scales.cols : scales.rows) / 4;
  for (TenonI64 n = tenon_thread(); n < count; n += tenon_threads()) {
    const TenonI64 i = n / across;
    const TenonI64 j = n - i * across;
    if (i < used_rows && j < used_cols) continue;
    const TenonI64 at =
        tenon_scale_at<scales_turned, Encoder::kSwizzled, rowwise>(i, j, scales.stride, tiles);
    tenon_put<Format::bytes>(scales.data + at * Format::bytes, 0);
  }
}
template <class Encoder, class Arguments>
__device__ inline void tenon_health_end(const Arguments& a) {
  if (tenon_thread() != 0) return;
  const TenonU64* const all = reinterpret_cast<const TenonU64*>(a.from);
  for (int i = 0; i < 3; ++i)
    tenon_put<4>(a.place[Encoder::kPlace + 4].data + 4 * i,
                 __float_as_uint(static_cast<float>(all[i])));
}

// Decodes element (lane, k) of an operand. Applies block scales. Side is printed for a and for b.
template <class Side, class Arguments>
__device__ inline float tenon_operand(const Arguments& a, TenonI64 lane, TenonI64 k) {
  using Format = typename Side::Format;
  using Scale = typename Side::Scale;
  const TenonPlace& data = a.place[Side::kPlace];
  const TenonI64 row = Side::kFirst ? k : lane;
  const TenonI64 column = Side::kFirst ? lane : k;
  const TenonI64 at = Side::kTurned ? column * data.stride + row : row * data.stride + column;
  const float v = tenon_read<Format>(data.data + at * Format::bytes);
  if (Side::kBlockRows == 0) return v;
  const TenonPlace& scales = a.place[Side::kPlace + 1];
  const TenonI64 tiles = (Side::kRowwise ? scales.cols : scales.rows) / 4;
  const TenonI64 s = tenon_scale_at<Side::kScalesTurned, Side::kSwizzled, Side::kRowwise>(
      row / (Side::kBlockRows > 0 ? Side::kBlockRows : 1),
      column / (Side::kBlockCols > 0 ? Side::kBlockCols : 1), scales.stride, tiles);
  return v * tenon_read<Scale>(scales.data + s * Scale::bytes);
}
template <class Side, class Arguments>
__device__ inline float tenon_operand_scale(const Arguments& a) {
  return Side::kSingle ? tenon_read<tenon_f32>(a.place[Side::kPlace + 1].data) : 1.0f;
}

// Tiles of 64 x 64; a thread has 4 x 4. Blocks of 256 in k are summed by fused multiply-adds from 0
// and then added in order, as on the CPU. The step has one store and no formula.
template <class A, class B, class Format, int kStore, class Arguments>
__device__ inline void tenon_product_tiles(const Arguments& a) {
  constexpr int kTile = 64, kDepth = 16, kOwn = 4;
  __shared__ float left[kDepth][kTile + 1];
  __shared__ float right[kDepth][kTile + 1];
  const TenonI64 cols = a.cols;
  const TenonI64 across = (cols + kTile - 1) / kTile;
  const TenonI64 tiles = (a.rows + kTile - 1) / kTile * across;
  const int x = threadIdx.x % 16 * kOwn;
  const int y = threadIdx.x / 16 * kOwn;
  const float scale_a = tenon_operand_scale<A>(a);
  const float scale_b = tenon_operand_scale<B>(a);
  for (TenonI64 t = blockIdx.x; t < tiles; t += gridDim.x) {
    const TenonI64 row = t / across * kTile;
    const TenonI64 column = (t - t / across * across) * kTile;
    float sum[kOwn][kOwn] = {};
    float block[kOwn][kOwn] = {};
    for (TenonI64 k = 0; k < a.inner; k += kDepth) {
      for (int e = threadIdx.x; e < kTile * kDepth; e += 256) {
        const int d = e % kDepth;
        const int lane = e / kDepth;
        const bool inside = k + d < a.inner;
        left[d][lane] =
            inside && row + lane < a.rows ? tenon_operand<A>(a, row + lane, k + d) : 0.0f;
        right[d][lane] =
            inside && column + lane < cols ? tenon_operand<B>(a, column + lane, k + d) : 0.0f;
      }
      __syncthreads();
      const int depth = static_cast<int>(tenon_least(kDepth, a.inner - k));
      for (int d = 0; d < depth; ++d)
        for (int i = 0; i < kOwn; ++i)
          for (int j = 0; j < kOwn; ++j)
            block[i][j] = tenon_fma(left[d][y + i], right[d][x + j], block[i][j]);
      __syncthreads();
      const TenonI64 done = k + depth;
      if (done % 256 != 0 && done != a.inner) continue;
      for (int i = 0; i < kOwn; ++i)
        for (int j = 0; j < kOwn; ++j) {
          sum[i][j] = done <= 256 ? block[i][j] : sum[i][j] + block[i][j];
          block[i][j] = 0.0f;
        }
    }
    for (int i = 0; i < kOwn; ++i)
      for (int j = 0; j < kOwn; ++j)
        if (row + y + i < a.rows && column + x + j < cols) {
          float v = sum[i][j];
          if (scale_a != 1.0f) v = v * scale_a;
          if (scale_b != 1.0f) v = v * scale_b;
          const TenonAccess& to = a.at[kStore];
          tenon_store<Format>(to, tenon_tile(to, row + y + i, column + x + j), v);
        }
  }
}
