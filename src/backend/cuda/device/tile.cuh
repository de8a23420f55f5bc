// The tiled map: tiles of 128 x 128, rowwise and columnwise outputs in one pass. A thread has 4
// rows x 8 columns: lane l of a half warp has columns 8l … 8l+7, half warp g has rows 4g … 4g+3.
// Follows sums.cuh.

// The first row of the tile of this thread block. Blocks start with the last rows: a partial tile
// takes longer and would delay the end of the kernel. Blocks after the tiles get a row outside the
// tensor.
template <int tile_rows, class Arguments>
__device__ inline TenonU32 tenon_first_row(const Arguments& a) {
  return a.last - blockIdx.y * tile_rows;
}

__device__ inline TenonU32 tenon_bytes(TenonU32 a, TenonU32 b, TenonU32 which) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, which);
#else
  TenonU32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const TenonU32 s = (which >> (4 * i)) & 7;
    out |= (((s < 4 ? a : b) >> (8 * (s % 4))) & 0xffu) << (8 * i);
  }
  return out;
#endif
}
// Word r holds row r of four columns. Afterwards word c holds column c of four rows.
__device__ inline void tenon_transpose_bytes(TenonU32 (&w)[4]) {
  const TenonU32 a = tenon_bytes(w[0], w[1], 0x5140u);  // 00 10 01 11
  const TenonU32 b = tenon_bytes(w[2], w[3], 0x5140u);
  const TenonU32 c = tenon_bytes(w[0], w[1], 0x7362u);  // 02 12 03 13
  const TenonU32 d = tenon_bytes(w[2], w[3], 0x7362u);
  w[0] = tenon_bytes(a, b, 0x5410u);
  w[1] = tenon_bytes(a, b, 0x7632u);
  w[2] = tenon_bytes(c, d, 0x5410u);
  w[3] = tenon_bytes(c, d, 0x7632u);
}

// The position of column c of a tile in a row of shared words: first the first four columns of all
// threads, then the last four. Neither the four words of a thread nor 32 neighbours have bank
// conflicts.
template <int columns>
__device__ inline int tenon_plane_word(int c) {
  const int half = c / 4 % 2;
  return half * (columns / 2) + ((c / 8 * 4) ^ (16 * half)) + c % 4;
}
// The column at a position.
template <int columns>
__device__ inline int tenon_plane_column(int word) {
  const int half = word / (columns / 2);
  return 2 * ((word % (columns / 2) / 4 * 4) ^ (16 * half)) + 4 * half + word % 4;
}
// Four words of lane l: columns 8l + 4·half … +3.
template <int columns>
__device__ inline TenonWords4* tenon_plane(void* words, int l, int half) {
  return static_cast<TenonWords4*>(words) + half * (columns / 8) + (l ^ (4 * half));
}

// The tree sum of the four rows of a thread: pairs, then the sum of the pairs. The sum of the first
// pair may wait in shared memory, in two slots of the thread.
template <bool kWaits>
struct TenonFour {
  float first[kWaits ? 1 : 8], pair[8];
  __device__ void add(const float (&v)[8], bool there, int row, TenonWords4* slots) {
    for (int half = 0; half < 2; ++half) {
      TenonWords4& slot = slots[half * blockDim.x + threadIdx.x];
      TenonWords4 w = {};
      if (kWaits && row % 2 != 0) w = slot;
      for (int i = 0; i < 4; ++i) {
        const int e = 4 * half + i;
        const float x = there ? v[e] : -0.0f;
        float held = kWaits ? tenon_bits(w.w[i]) : first[kWaits ? 0 : e];
        if (row < 2) held = row == 0 ? x : held + x;
        if (kWaits)
          w.w[i] = __float_as_uint(held);
        else
          first[kWaits ? 0 : e] = held;
        if (row == 2) pair[e] = x;
        if (row == 3) pair[e] = held + (pair[e] + x);
      }
      if (kWaits && row < 2) slot = w;
    }
  }
};

// As tenon_join_amax, but the lane that may write reads the slot, as late as possible.
__device__ inline void tenon_join_late(TenonU8* slot, TenonU32 most) {
  most = tenon_warp_most(most);
  TenonU32* const all = reinterpret_cast<TenonU32*>(slot);
  if (threadIdx.x % 32 == 0 && most > *all) atomicMax(all, most);
}

__device__ inline TenonU32 tenon_most(TenonU32 a, TenonU32 b) { return a > b ? a : b; }

// tenon_scale_of in fewer instructions, for the formats that allow it.
template <class Encoder>
__device__ inline TenonScale tenon_block_scale(TenonU32 amax) {
  if (Encoder::kE8M0) {
    const TenonU32 p = __float_as_uint(tenon_bits(amax) * Encoder::inverse_most());
    const bool none = p > 0x7f800000u;  // NaN
    // Rounds up to a power of two, at most 2^127.
    const TenonU32 sum = p + 0x7fffffu;
    const TenonU32 up = (sum < 0x7f7fffffu ? sum : 0x7f7fffffu) & 0x7f800000u;
    const TenonU32 power = p <= 0x400000u ? 0 : up;
    const TenonU32 multiplier = tenon_most(0x7f000000u - power, 0x00400000u);
    return {tenon_bits(none ? 0x7fc00000u : multiplier), none ? 0xff : power >> 23};
  }
  if (!Encoder::kPowers) return tenon_scale_of<Encoder>(amax);
  // The exponent of most / amax. The quotient is a power of two only if amax has the mantissa of
  // most.
  const TenonU32 most = __float_as_uint(Encoder::most());
  const TenonU32 eps = __float_as_uint(Encoder::eps());
  const TenonU32 m = amax < eps ? eps : amax;
  TenonU32 e = 127 + (most >> 23) - ((m + (0x7fffffu - (most & 0x7fffffu))) >> 23);
  if (e > 254) e = 254;
  if (m == 0 || m >= 0x7f800000u) e = 127;
  return {tenon_bits(e << 23), e == 254 ? 0x00400000u : (254 - e) << 23};
}

// Stores scale (i, j) in aligned memory.
template <class Encoder, bool rowwise, bool scales_turned, class Arguments>
__device__ inline void tenon_put_scale(const Arguments& a, TenonI64 i, TenonI64 j,
                                       TenonU32 inverse) {
  using Format = typename Encoder::Scale;
  const TenonPlace& scales = a.place[Encoder::kPlace + (rowwise ? 1 : 3)];
  const TenonI64 tiles = (rowwise ? scales.cols : scales.rows) / 4;
  const TenonI64 at =
      tenon_scale_at<scales_turned, Encoder::kSwizzled, rowwise>(i, j, scales.stride, tiles);
  if (Format::bytes == 4)
    reinterpret_cast<TenonU32*>(scales.data)[at] = inverse;
  else
    tenon_put<Format::bytes>(scales.data + at * Format::bytes, inverse);
}

// Stores the 4 x 8 codes of a thread to the columns of the tile in shared memory. Word g of a
// column holds rows 4g … 4g+3. The words of a column are permuted, so that neither side has bank
// conflicts.
__device__ inline void tenon_put_turned(TenonU32* turned, int e, TenonU32 word) {
  const int l = threadIdx.x % 16;
  const int g = threadIdx.x / 16;
  turned[(8 * l + e) * 32 + (g ^ (2 * l))] = word;
}
__device__ inline void tenon_turn(TenonU32* turned, const TenonWords2 (&codes)[4]) {
  for (int half = 0; half < 2; ++half) {
    TenonU32 w[4];
    for (int r = 0; r < 4; ++r) w[r] = codes[r].w[half];
    tenon_transpose_bytes(w);
    for (int i = 0; i < 4; ++i) tenon_put_turned(turned, 4 * half + i, w[i]);
  }
}

// Stores columns up to `end` from shared memory, 16 rows per lane: whole lines of 128 bytes.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_store_turned(const Arguments& a, const TenonU32* turned, int plane,
                                          TenonU32 row0, TenonU32 column0, TenonU32 end) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int part = lane % 8;
  for (int n = 0; n < 2; ++n) {
    const int own = 8 * warp + lane / 8 + 4 * n;
    const TenonWords4 x =
        *reinterpret_cast<const TenonWords4*>(turned + own * 32 + 4 * (part ^ (warp / 2)));
    TenonWords4 w;
    for (int i = 0; i < 4; ++i) w.w[i] = warp % 2 != 0 ? x.w[i ^ 2] : x.w[i];
    const TenonU32 to = row0 + 16 * part;
    if ((!Body::kWholeColumns && column0 + own >= end) || (!full && to >= a.rows)) continue;
    TenonU8* const data = Body::turned(a, plane, column0 + own) + to;
    if (full || to + 16 <= a.rows) {
      *reinterpret_cast<TenonWords4*>(data) = w;
    } else {
      // A select, not an index: an index would put the words into local memory.
#pragma unroll 1
      for (int i = 0; i < static_cast<int>(a.rows - to); ++i) {
        const TenonU32 low = i < 4 ? w.w[0] : w.w[1];
        const TenonU32 high = i < 12 ? w.w[2] : w.w[3];
        data[i] = static_cast<TenonU8>((i < 8 ? low : high) >> (8 * (i % 4)));
      }
    }
  }
}

// Writes the sums of a warp to its row of shared memory. Half warps with the same columns exchange
// four columns each. Then one thread per column, from `begin` on, adds the tree over the warps into
// the partial row of the tile row. That row has all columns of the first sum, then of the next sum.
template <int columns>
__device__ inline void tenon_begin_sum(float* partial, const float (&sum)[8]) {
  const int l = threadIdx.x % (columns / 8);
  TenonWords4 w;
  if (columns / 8 >= 32) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) w.w[i] = __float_as_uint(sum[4 * half + i]);
      *tenon_plane<columns>(partial, l, half) = w;
    }
    return;
  }
  const bool upper = threadIdx.x / 16 % 2 != 0;
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[4 + i], 16);
    w.w[i] = __float_as_uint((upper ? sum[4 + i] : sum[i]) + other);
  }
  *tenon_plane<columns>(partial, l, upper) = w;
}
template <class Body, int tile_rows, int warps, int columns, class Arguments>
__device__ inline void tenon_end_sum(const Arguments& a, const float (*partial)[columns], int begin,
                                     TenonU32 row0, TenonU32 column0, TenonU32 end) {
  const int own = static_cast<int>(threadIdx.x) - begin;
  if (own < 0 || own >= columns || (!Body::kWholeColumns && column0 + own >= end)) return;
  float v[warps];
  for (int i = 0; i < warps; ++i) v[i] = partial[i][tenon_plane_word<columns>(own)];
  for (int n = warps / 2; n > 0; n /= 2)
    for (int i = 0; i < n; ++i) v[i] = v[2 * i] + v[2 * i + 1];
  tenon_put_kept(tenon_partial<tile_rows, Body::kStrip>(a, row0 / tile_rows, column0 + own), v[0]);
}

// How many of its four rows a thread loads ahead. Registers limit it. `held`: other values also
// need registers, such as codes of earlier rows.
template <class Body, bool held>
constexpr int kTenonAhead = sizeof(typename Body::Raw) > 64                 ? 1
                            : sizeof(typename Body::Raw) > (held ? 16 : 32) ? 2
                                                                            : 4;

// Keeps the compiler from moving earlier loads after this point: a branch that is never taken. Each
// `place` needs a different branch.
template <class Arguments>
__device__ inline void tenon_all_loaded(const Arguments& a, int place) {
#if defined(__CUDA_ARCH__)
  if (gridDim.x == ~static_cast<TenonU32>(place)) __trap();
#endif
}

// Whether a column of a tile is inside the tensor.
template <class Body, class Arguments>
__device__ inline bool tenon_inside(const Arguments& a, TenonU32 column) {
  return Body::kWholeColumns || column < static_cast<TenonU32>(a.cols);
}

// Computes the results for eight elements of a row.
template <class Body, class Arguments>
__device__ inline void tenon_one_row(const Arguments& a, TenonU32 row, TenonU32 column,
                                     const typename Body::Raw& raw,
                                     float (&out)[Body::kStores][8]) {
  float in[Body::kLoads + 1][8];
  Body::unpack(a.at, a.random, row, column, raw, in);
  for (int e = 0; e < 8; ++e) {
    float x[Body::kLoads + 1];
    float y[Body::kStores];
    for (int k = 0; k < Body::kLoads; ++k) x[k] = in[k][e];
    Body::compute(x, y);
    for (int k = 0; k < Body::kStores; ++k) out[k][e] = y[k];
  }
}

// Loads and computes the four rows of a thread, then calls visit(row 0 … 3, whether the row exists,
// out). Outside the tensor it uses the nearest element inside. In full tiles, loads are issued
// before their use and before stores, which they cannot pass. In partial tiles, one row at a time.
// meanwhile() runs after the first loads are issued.
template <class Body, bool full, int ahead, class Arguments, class Visit, class Meanwhile>
__device__ inline void tenon_four_rows(const Arguments& a, TenonU32 row, TenonU32 column,
                                       const Visit& visit, const Meanwhile& meanwhile) {
  constexpr int depth = full ? ahead : 1;
  const TenonU32 last_row = static_cast<TenonU32>(a.rows) - 1;
  if (!tenon_inside<Body>(a, column)) column = static_cast<TenonU32>(a.cols) - 8;
  typename Body::Raw raw[depth];
  if (full) {
#pragma unroll
    for (int r = 0; r < depth; ++r) Body::fetch(a.at, row, column, r, raw[r]);
    if (Body::kLoads > 1) tenon_all_loaded(a, 0);  // a single load comes first anyway
  }
  meanwhile();
#pragma unroll(full ? 4 : 1)
  for (int r = 0; r < 4; ++r) {
    const TenonU32 own = full || row + r < last_row ? row + r : last_row;
    if (!full) Body::fetch(a.at, own, column, 0, raw[0]);
    float out[Body::kStores][8];
    tenon_one_row<Body>(a, own, column, raw[r % depth], out);
    visit(r, full || row + r <= last_row, out);
    if (full && r + depth < 4) {
      Body::fetch(a.at, row, column, r + depth, raw[r % depth]);
      tenon_all_loaded(a, r + depth);
    }
  }
}

// Body is printed:
// - kLoads, kStores, kAmax, kSums. kTurned: stores with a columnwise encoding.
// - kStrip: columns of partial sums that are stored together.
// - kLight: sums wait in shared memory. kLong: the formula is long.
// - kWholeRows, kWholeColumns: no tile extends outside the tensor.
// - Raw, fetch, unpack, compute, store (one row), codes, sum, turned (destination of a column).
// - start and finish as for vectors.

// The maxima of the warps of a tile. Two sums need all of the 48 KB that every device has. So with
// two sums each warp joins the global slots directly.
template <bool there, int slots>
struct TenonTileMost {
  static constexpr bool kHas = there;
  TenonU32 warps[slots + 1][16];
  __device__ TenonU32* most(int k, int warp) { return &warps[k][warp]; }
};
template <int slots>
struct TenonTileMost<false, slots> {
  static constexpr bool kHas = false;
  __device__ TenonU32* most(int, int) { return nullptr; }
};

template <class Body>
struct TenonTileShared : TenonTileMost<(Body::kSums < 2), Body::kAmax> {
  static constexpr int kSums = Body::kSums;
  static constexpr bool kWaits = kSums > 1 || Body::kLight;
  static constexpr int kSlots = kWaits ? kSums : 0;
  // First a sum that waits, later the columns of a result.
  TenonWords4 turned[Body::kTurned > kSlots ? Body::kTurned
                     : kSlots > 0           ? kSlots
                                            : 1][kTenonTile * 8];
  float partial[kSums > 0 ? kSums : 1][16][kSums > 0 ? kTenonTile : 1];
};

template <class Body, bool full, class Arguments>
__device__ inline void tenon_tile_part(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                       TenonTileShared<Body>& shared) {
  const TenonU32 row = row0 + 4 * (threadIdx.x / 16);
  const TenonU32 column = column0 + 8 * (threadIdx.x % 16);
  const TenonU32 cols = static_cast<TenonU32>(a.cols);
  const bool inside = tenon_inside<Body>(a, column);
  using Shared = TenonTileShared<Body>;
  const bool joins = !Shared::kHas || threadIdx.x < 32;  // this thread joins maxima
  TenonU32 before[Body::kAmax + 1];
  TenonU32 most[Body::kAmax + 1] = {};
  TenonWords2 codes[Body::kTurned + 1][4];
  TenonFour<TenonTileShared<Body>::kWaits> sums[Body::kSums + 1];
  // Two sums, two transposed results and a long formula leave no registers to load ahead.
  constexpr bool alone = Body::kLong && Body::kTurned > 1 && Body::kSums > 1;
  constexpr int ahead = alone ? 1 : kTenonAhead<Body, (Body::kTurned > 0 || Body::kLight)>;
  tenon_four_rows<Body, full, ahead>(
      a, row, column,
      [&](int r, bool there, const float(&out)[Body::kStores][8]) {
        TenonWords2 now[Body::kTurned + 1];
        Body::codes(a, out, now);
        if (there && inside)
          Body::store(a, full ? row : row + r, column, full ? r : 0, out, now, most);
      // A select, not an index, because the row may not be a constant.
#pragma unroll
        for (int k = 0; k < Body::kTurned; ++k)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            for (int w = 0; w < 2; ++w) codes[k][i].w[w] = i == r ? now[k].w[w] : codes[k][i].w[w];
        Body::sum(out, there, r, sums, shared.turned);
      },
      // Otherwise a single load would wait for the row before it.
      [&] {
        if (full && Body::kLoads == 1) tenon_all_loaded(a, 0);
      });
  if (joins) Body::start(a, before);
  for (int k = 0; k < Body::kAmax && Shared::kHas; ++k) {
    const TenonU32 own = tenon_warp_most(most[k]);
    if (threadIdx.x % 32 == 0) *shared.most(k, threadIdx.x / 32) = own;
  }
  if (TenonTileShared<Body>::kWaits && Body::kTurned > 0) __syncthreads();
  for (int k = 0; k < Body::kTurned; ++k) tenon_turn(shared.turned[k][0].w, codes[k]);
  for (int k = 0; k < Body::kSums; ++k)
    tenon_begin_sum<kTenonTile>(shared.partial[k][threadIdx.x / 32], sums[k].pair);
  if (Body::kTurned > 0 || Body::kSums > 0 || (Body::kAmax > 0 && Shared::kHas)) __syncthreads();
  for (int k = 0; k < Body::kTurned; ++k)
    tenon_store_turned<Body, full>(a, shared.turned[k][0].w, k, row0, column0, cols);
  for (int k = 0; k < Body::kSums; ++k)
    tenon_end_sum<Body, kTenonTile, 16>(a, shared.partial[k], k * kTenonTile, row0,
                                        k * cols + column0, (k + 1) * cols);
  if (!joins) return;
  for (int k = 0; k < Body::kAmax && Shared::kHas; ++k) most[k] = *shared.most(k, threadIdx.x % 16);
  Body::finish(a, most, before);
}

template <class Body, class Arguments>
__device__ inline void tenon_tile_map(const Arguments& a) {
  __shared__ TenonTileShared<Body> shared;  // shared by both paths
  const TenonU32 row = tenon_first_row<kTenonTile>(a);
  const TenonU32 column = blockIdx.x * kTenonTile;
  if (row < a.whole)
    tenon_tile_part<Body, true>(a, row, column, shared);
  else if constexpr (!Body::kWholeRows)
    tenon_tile_part<Body, false>(a, row, column, shared);
}
