// The tiled map with scales of blocks: the values of one result at a time stay in registers until
// their maxima are known; those of a second one wait in shared memory. A thread has 4 rows x 8
// columns as in tile.cuh, which it follows; the tile is Body's.

__device__ inline TenonU32 tenon_most(TenonU32 a, TenonU32 b) { return a > b ? a : b; }

// Scales that belong to no block are 0.
template <class Encoder, bool rowwise, int block_rows, int block_cols, bool scales_turned,
          class Arguments>
__device__ inline void tenon_block_end(const Arguments& a) {
  const TenonPlace& scales = a.place[Encoder::kPlace + (rowwise ? 1 : 3)];
  const TenonI64 cols = a.place[Encoder::kPlace + 5].cols;
  const TenonI64 used_rows = (a.rows + block_rows - 1) / block_rows;
  const TenonI64 used_cols = (cols + block_cols - 1) / block_cols;
  const TenonI64 down = scales_turned ? scales.cols : scales.rows;
  const TenonI64 across = scales_turned ? scales.rows : scales.cols;
#pragma unroll 1
  for (TenonI64 i = blockIdx.x; i < down; i += gridDim.x)
#pragma unroll 1
    for (TenonI64 j = (i < used_rows ? used_cols : 0) + threadIdx.x; j < across; j += blockDim.x)
      tenon_put_scale<Encoder, rowwise, scales_turned>(a, i, j, 0);
}

// Body is printed as for the tiled map, with kTileRows, kTileCols; Encoder: kRowRows, kRowCols,
// kColumnRows, kColumnCols (the blocks), kRowTurned, kColumnTurned (their scales), kTransposes;
// kParts, the values that are encoded or summed: part p is result part(p), the first kEncoded make
// the encoder's tensor, whose column first(a, p) is p's column 0; sum_of(p) is its sum, or -1.
template <class Body>
struct TenonBlock {
  using Encoder = typename Body::Encoder;
  static constexpr int kRows = Body::kTileRows, kCols = Body::kTileCols;
  static constexpr int kLanes = kCols / 8;  // of a row
  static constexpr int kThreads = kRows / 4 * kLanes;
  static constexpr int kWarps = kThreads / 32;
  static constexpr bool kWhole = Encoder::kRowRows > 1;  // one block is the tile
  static constexpr bool kColumnBlocks = Body::kColumnwise && !kWhole;
  static constexpr bool kTurns = Body::kColumnwise && Encoder::kTransposes;
  static constexpr int kGroups = kColumnBlocks ? kRows / Encoder::kColumnRows : 1;  // of rows
  // Sums are added beside the maxima, at the same barrier, or after them in their memory where it
  // is short, or at a barrier of their own.
  static constexpr bool kSumsAfter = kColumnBlocks && !kTurns;
  static constexpr bool kSumsBeside = !kSumsAfter && (kWhole || kColumnBlocks);
  struct Shared {
    TenonWords4 turned[kTurns ? kCols * kRows / 16 : 1];
    alignas(16) float warps[kColumnBlocks ? kWarps : 1][kCols];  // maxima
    alignas(16) float own_sums[Body::kSums > 0 && !kSumsAfter ? kWarps : 1][kCols];
    alignas(16) float multipliers[kColumnBlocks ? kGroups : 1][kCols];  // the tile's maxima, too
    __device__ float (*sums())[kCols] { return kSumsAfter ? warps : own_sums; }
  };
};

// Values that wait, in 16-byte slots of the thread's own.
#if defined(__CUDA_ARCH__)
extern __shared__ TenonWords4 tenon_parked[];
#else
static TenonWords4 tenon_parked[8 * 512];
#endif
template <int threads>
__device__ inline TenonWords4& tenon_slot(int r, int half) {
  return tenon_parked[(2 * r + half) * threads + threadIdx.x];
}

// Maxima are of magnitudes, and NaN where there is one.
__device__ inline float tenon_larger(float most, float v) { return tenon_max(most, tenon_abs(v)); }
template <class Encoder>
__device__ inline TenonScale tenon_block_scale(float amax) {
  return tenon_block_scale<Encoder>(__float_as_uint(amax));
}

// The scale of each of a thread's rows, whose maxima lie over `lanes` lanes: lanes exchange rows
// until each has one, and hand its multiplier out. Lane l has row tenon_own_row(l).
__device__ inline int tenon_own_row(int l) { return 2 * (l & 1) + (l >> 1 & 1); }
template <class Encoder, int lanes>
__device__ inline TenonScale tenon_row_scales(const float (&most)[4], float (&multiplier)[4]) {
  const int l = threadIdx.x % lanes;
  const bool low = (l & 1) == 0;
  const bool even = (l & 2) == 0;
  float two[2];
  for (int i = 0; i < 2; ++i)
    two[i] = tenon_max(low ? most[i] : most[2 + i],
                       __shfl_xor_sync(0xffffffffu, low ? most[2 + i] : most[i], 1));
  float m =
      tenon_max(even ? two[0] : two[1], __shfl_xor_sync(0xffffffffu, even ? two[1] : two[0], 2));
  for (int step = 4; step < lanes; step *= 2)
    m = tenon_max(m, __shfl_xor_sync(0xffffffffu, m, step));
  const TenonScale scale = tenon_block_scale<Encoder>(m);
  const float other = __shfl_xor_sync(0xffffffffu, scale.multiplier, 2);
  const float pair[2] = {even ? scale.multiplier : other, even ? other : scale.multiplier};
  for (int i = 0; i < 2; ++i) {
    const float rest = __shfl_xor_sync(0xffffffffu, pair[i], 1);
    multiplier[i] = low ? pair[i] : rest;
    multiplier[2 + i] = low ? rest : pair[i];
  }
  return scale;
}

template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_sum(const Arguments& a, TenonU32 row, const float (&v)[4][8],
                                       typename TenonBlock<Body>::Shared& shared) {
  float total[8];
  for (int e = 0; e < 8; ++e) {
    float x[4];
    for (int r = 0; r < 4; ++r) x[r] = full || row + r < a.rows ? v[r][e] : -0.0f;
    total[e] = (x[0] + x[1]) + (x[2] + x[3]);
  }
  tenon_begin_sum<Body::kTileCols>(shared.sums()[threadIdx.x / 32], total);
}

// One result from its values: maxima, scales, rows, columns, and its sum.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_encode(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                          const float (&v)[4][8], int part,
                                          typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  using Encoder = typename Body::Encoder;
  using Format = typename Encoder::Format;
  const int l = threadIdx.x % Block::kLanes;
  const int g = threadIdx.x / Block::kLanes;
  const int warp = threadIdx.x / 32;
  const TenonU32 row = row0 + 4 * g;
  const TenonU32 column = column0 + 8 * l;
  const TenonU32 last_row = static_cast<TenonU32>(a.rows) - 1;
  const bool inside = full || column < static_cast<TenonU32>(a.cols);
  const TenonU32 tensor0 = Body::first(a, part) + column0;
  const int sum = Body::kSums > 0 ? Body::sum_of(part) : -1;
  if (sum >= 0 && !Block::kSumsAfter) tenon_block_sum<Body, full>(a, row, v, shared);
  float row_most[4] = {};
  if (Body::kRowwise || Block::kWhole)
    for (int r = 0; r < 4; ++r)
      for (int e = 0; e < 8; ++e) row_most[r] = tenon_larger(row_most[r], v[r][e]);
  if (Block::kWhole) {
    TenonU32 m = __float_as_uint(
        tenon_max(tenon_max(row_most[0], row_most[1]), tenon_max(row_most[2], row_most[3])));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    m = __reduce_max_sync(0xffffffffu, m);
#else
    for (int step = 16; step > 0; step /= 2)
      m = tenon_most(m, __shfl_xor_sync(0xffffffffu, m, step));
#endif
    if (threadIdx.x % 32 == 0) shared.multipliers[0][warp] = tenon_bits(m);
  }
  if (Block::kColumnBlocks) {
    float most[8];
    for (int e = 0; e < 8; ++e) {
      most[e] = tenon_abs(v[0][e]);
      for (int r = 1; r < 4; ++r) most[e] = tenon_larger(most[e], v[r][e]);
    }
    TenonWords4 w;
    if (Block::kLanes == 32) {
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < 4; ++i) w.w[i] = __float_as_uint(most[4 * half + i]);
        *tenon_plane<Block::kCols>(shared.warps[warp], l, half) = w;
      }
    } else {  // the half warps exchange four columns each
      const bool upper = g % 2 != 0;
      for (int i = 0; i < 4; ++i)
        w.w[i] = __float_as_uint(
            tenon_max(upper ? most[4 + i] : most[i],
                      __shfl_xor_sync(0xffffffffu, upper ? most[i] : most[4 + i], 16)));
      *tenon_plane<Block::kCols>(shared.warps[warp], l, upper) = w;
    }
  }
  if (Block::kWhole || Block::kColumnBlocks) __syncthreads();
  TenonScale whole = {};
  if (Block::kWhole) {
    TenonU32 m = 0;
    for (int i = 0; i < Block::kWarps; ++i)
      m = tenon_most(m, __float_as_uint(shared.multipliers[0][i]));
    whole = tenon_block_scale<Encoder>(m);
    if (threadIdx.x == 0 && Body::kRowwise)
      tenon_put_scale<Encoder, true, Encoder::kRowTurned>(
          a, row0 / Encoder::kRowRows, tensor0 / Encoder::kRowCols, whole.inverse);
    if (threadIdx.x == 0 && Body::kColumnwise)
      tenon_put_scale<Encoder, false, Encoder::kColumnTurned>(
          a, row0 / Encoder::kColumnRows, tensor0 / Encoder::kColumnCols, whole.inverse);
  }
  if (Block::kColumnBlocks && threadIdx.x < Block::kGroups * Block::kCols) {
    constexpr int warps = Block::kWarps / Block::kGroups;
    const int own = threadIdx.x % Block::kCols;
    const int group = threadIdx.x / Block::kCols;
    const int word = tenon_plane_word<Block::kCols>(own);
    TenonU32 m = 0;
    for (int i = 0; i < warps; ++i)
      m = tenon_most(m, __float_as_uint(shared.warps[group * warps + i][word]));
    const TenonScale scale = tenon_block_scale<Encoder>(m);
    shared.multipliers[group][word] = scale.multiplier;
    const TenonI64 first_row = row0 + group * Encoder::kColumnRows;
    if (full || (column0 + own < a.cols && first_row < a.rows))
      tenon_put_scale<Encoder, false, Encoder::kColumnTurned>(a, first_row / Encoder::kColumnRows,
                                                              tensor0 + own, scale.inverse);
  }
  // By threads that find no column's scale, if there are any.
  constexpr int summing = Block::kColumnBlocks && Block::kThreads > Block::kCols ? Block::kCols : 0;
  if (sum >= 0 && Block::kSumsBeside)
    tenon_end_sum<full, Block::kRows, Block::kWarps>(a, shared.sums(), sum, summing, row0, column0);
  TenonWords2 codes[4];
  if (Body::kRowwise || Block::kWhole) {
    float multiplier[4];
    if (Block::kWhole) {
      for (int r = 0; r < 4; ++r) multiplier[r] = whole.multiplier;
    } else {
      constexpr int lanes = Block::kWhole ? 4 : Encoder::kRowCols / 8;
      const TenonScale scale = tenon_row_scales<Encoder, lanes>(row_most, multiplier);
      const TenonU32 own = row + tenon_own_row(l);
      const bool begun = full || column0 + 8 * (l / lanes * lanes) < static_cast<TenonU32>(a.cols);
      if (l % lanes < 4 && begun && (full || own <= last_row))
        tenon_put_scale<Encoder, true, Encoder::kRowTurned>(
            a, own, (tensor0 + 8 * l) / Encoder::kRowCols, scale.inverse);
    }
    const TenonPlace& data = a.place[Encoder::kPlace];
    const TenonU32 stride = static_cast<TenonU32>(data.stride);
    TenonU8* const to = data.data + tenon_wide(row, stride, tensor0 + 8 * l);
    for (int r = 0; r < 4; ++r) {
      float scaled[8];
      for (int e = 0; e < 8; ++e) scaled[e] = v[r][e] * multiplier[r];
      codes[r] = tenon_codes8<Format>(scaled);
      if (Body::kRowwise && (full || (inside && row + r <= last_row)))
        *reinterpret_cast<TenonWords2*>(to + static_cast<TenonU64>(stride) * r) = codes[r];
    }
  }
  TenonU32* const turned = shared.turned[0].w;
  if (Block::kColumnBlocks) {
    __syncthreads();
    const int group = Block::kGroups > 1 ? 4 * g / Encoder::kColumnRows : 0;
    float multiplier[8];
    for (int half = 0; half < 2; ++half) {
      const TenonWords4 w = *tenon_plane<Block::kCols>(shared.multipliers[group], l, half);
      for (int i = 0; i < 4; ++i) multiplier[4 * half + i] = tenon_bits(w.w[i]);
    }
    if (Block::kTurns) {  // four rows of a column make a word
      for (int e = 0; e < 8; ++e) {
        const float m = multiplier[e];
        tenon_put_turned(turned, e,
                         tenon_encode_pair<Format>(v[0][e] * m, v[1][e] * m) |
                             tenon_encode_pair<Format>(v[2][e] * m, v[3][e] * m) << 16);
      }
    } else {
      const TenonPlace& data = a.place[Encoder::kPlace + 2];
      const TenonU32 stride = static_cast<TenonU32>(data.stride);
      TenonU8* const to = data.data + tenon_wide(row, stride, tensor0 + 8 * l);
      for (int r = 0; r < 4; ++r) {
        float scaled[8];
        for (int e = 0; e < 8; ++e) scaled[e] = v[r][e] * multiplier[e];
        if (full || (inside && row + r <= last_row))
          *reinterpret_cast<TenonWords2*>(to + static_cast<TenonU64>(stride) * r) =
              tenon_codes8<Format>(scaled);
      }
    }
  } else if (Block::kTurns) {
    tenon_turn(turned, codes);
  }
  if (Block::kTurns) {
    __syncthreads();
    tenon_store_turned<Body, full>(a, turned, part, row0, column0);
  }
  if (sum >= 0 && !Block::kSumsBeside) {
    if (Block::kSumsAfter) tenon_block_sum<Body, full>(a, row, v, shared);
    __syncthreads();
    tenon_end_sum<full, Block::kRows, Block::kWarps>(a, shared.sums(), sum, 0, row0, column0);
  }
}

template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_part(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                        typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  const TenonU32 row = row0 + 4 * (threadIdx.x / Block::kLanes);
  const TenonU32 column = column0 + 8 * (threadIdx.x % Block::kLanes);
  TenonU32 most[Body::kAmax + 1] = {};
  float v[4][8];
  tenon_four_rows<Body, full, kTenonAhead<Body, false>>(
      a, row, column, [&](int r, bool there, const float(&out)[Body::kStores][8]) {
        if (there) Body::store(a, full ? row : row + r, column, full ? r : 0, out, most);
      // Chosen, not indexed, where the row is not a constant.
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 8; ++e) v[i][e] = i == r ? out[Body::part(0)][e] : v[i][e];
        for (int p = 1; p < Body::kParts; ++p)
          for (int half = 0; half < 2; ++half) {
            TenonWords4 w;
            for (int i = 0; i < 4; ++i) w.w[i] = __float_as_uint(out[Body::part(p)][4 * half + i]);
            tenon_slot<Block::kThreads>(4 * (p - 1) + r, half) = w;
          }
      });
#pragma unroll 1
  for (int part = 0;;) {
    if (Body::kEncoded == Body::kParts || part < Body::kEncoded) {
      tenon_block_encode<Body, full>(a, row0, column0, v, part, shared);
    } else {
      tenon_block_sum<Body, full>(a, row, v, shared);
      __syncthreads();
      tenon_end_sum<full, Block::kRows, Block::kWarps>(a, shared.sums(), Body::sum_of(part), 0,
                                                       row0, column0);
    }
    if (++part >= Body::kParts) break;
    for (int r = 0; r < 4; ++r)
      for (int half = 0; half < 2; ++half) {
        const TenonWords4 w = tenon_slot<Block::kThreads>(4 * (part - 1) + r, half);
        for (int i = 0; i < 4; ++i) v[r][4 * half + i] = tenon_bits(w.w[i]);
      }
    // Shared memory is free again.
    if (Block::kWhole || Block::kColumnBlocks || Body::kSums > 0) __syncthreads();
  }
  TenonU32 before[Body::kAmax + 1];
  Body::start(a, before);
  Body::finish(a, most, before);
}

template <class Body, class Arguments>
__device__ inline void tenon_block_map(const Arguments& a) {
  __shared__ typename TenonBlock<Body>::Shared shared;  // of both paths
  TenonU32 row, column;
  tenon_corner<Body::kTileRows, Body::kTileCols>(a, row, column);
  if (row + Body::kTileRows <= a.rows && column + Body::kTileCols <= a.cols)
    tenon_block_part<Body, true>(a, row, column, shared);
  else
    tenon_block_part<Body, false>(a, row, column, shared);
}
