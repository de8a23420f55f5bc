// The tiled map with block scales. The values of one result stay in registers until their maxima
// are known. The values of a second result wait in shared memory. A thread has 4 rows x 8 columns
// as in tile.cuh, which comes before this text. Body sets the tile size.

// Sets scales outside all blocks to 0. Called by thread block `block` of `blocks`.
template <class Encoder, bool rowwise, class Arguments>
__device__ inline void tenon_block_end(const Arguments& a, TenonU32 block, TenonU32 blocks) {
  constexpr int block_rows = rowwise ? Encoder::kRowRows : Encoder::kColumnRows;
  constexpr int block_cols = rowwise ? Encoder::kRowCols : Encoder::kColumnCols;
  constexpr bool scales_turned = rowwise ? Encoder::kRowTurned : Encoder::kColumnTurned;
  const TenonPlace& scales = a.place[Encoder::kPlace + (rowwise ? 1 : 3)];
  const TenonI64 cols = a.place[Encoder::kPlace + 5].cols;
  const TenonU32 used_rows = static_cast<TenonU32>((a.rows + block_rows - 1) / block_rows);
  const TenonU32 used_cols = static_cast<TenonU32>((cols + block_cols - 1) / block_cols);
  const TenonU32 down = static_cast<TenonU32>(scales_turned ? scales.cols : scales.rows);
  const TenonU32 across = static_cast<TenonU32>(scales_turned ? scales.rows : scales.cols);
  const TenonU32 warps = blockDim.x / 32;
#pragma unroll 1
  for (TenonU32 i = (used_cols < across ? 0 : used_rows) + block * warps + threadIdx.x / 32;
       i < down; i += blocks * warps)
#pragma unroll 1
    for (TenonU32 j = (i < used_rows ? used_cols : 0) + threadIdx.x % 32; j < across; j += 32)
      tenon_put_scale<Encoder, rowwise, scales_turned>(a, i, j, 0);
}

// Values of a thread that wait in shared memory, in 16-byte slots of the thread.
#if defined(__CUDA_ARCH__)
extern __shared__ TenonWords4 tenon_parked[];
#else
static TenonWords4 tenon_parked[8 * 512];
#endif
template <int threads>
__device__ inline TenonWords4& tenon_slot(int thread, int r, int half) {
  return tenon_parked[(2 * r + half) * threads + thread];
}

// Body is printed as for the tiled map, with these additions:
// - kTileRows, kTileCols: the tile.
// - Encoder: kRowRows, kRowCols, kColumnRows, kColumnCols (scale blocks), kRowTurned, kColumnTurned
//   (transposed scales), kTransposes (transposed data).
// - kParts: values that are encoded or summed. Part p is result part(p). If summed(p), column c of
//   it is column c + sum_more(p) of the row of all sums.
// - kEncoded: the first parts, which form the tensor of the encoder. Columns begin(p) … end(p) of
//   the tensor are in the tiles of part p.
// - kShift: offset of the tiles of the second part relative to the first, in columns of the body.
//   It is nonzero if a scale block has columns of both parts. kShift > 0: the last tile of the
//   first part takes that block. kShift < 0: the first tile of the second part takes it.
template <class Body>
struct TenonBlock {
  using Encoder = typename Body::Encoder;
  static constexpr int kRows = Body::kTileRows, kCols = Body::kTileCols;
  static constexpr int kLanes = kCols / 8;  // lanes per row
  static constexpr int kShiftLanes = (Body::kShift < 0 ? -Body::kShift : Body::kShift) / 8;
  static constexpr int kThreads = kRows / 4 * kLanes;
  static constexpr int kWarps = kThreads / 32;
  // Maxima and sums of columns are in lines. A line belongs to one warp, or to all warps of a row.
  static constexpr int kLineThreads = kLanes > 32 ? kLanes : 32;
  static constexpr int kLines = kThreads / kLineThreads;
  static constexpr bool kWhole = Encoder::kRowRows > 1;  // one scale block is the tile
  static constexpr bool kColumnBlocks = Body::kColumnwise && !kWhole;
  static constexpr bool kTurns = Body::kColumnwise && Encoder::kTransposes;
  // The maxima of both parts share one barrier. Not with transposed columns, which have another
  // barrier anyway. Not with a long formula without sums, which would spill registers.
  static constexpr bool kTogether =
      kWhole && Body::kEncoded > 1 && !kTurns && (Body::kSums > 0 || !Body::kLong);
  static constexpr int kGroups = kColumnBlocks ? kRows / Encoder::kColumnRows : 1;  // of rows
  // Sums have three places: next to the maxima, at the same barrier; after the maxima in the same
  // memory, if memory is short; or at the end for all parts, in the memory of values that waited.
  static constexpr bool kSumsAfter = kColumnBlocks && !kTurns;
  static constexpr bool kSumsLast =
      Body::kSums > 0 && !kColumnBlocks && (!kWhole || Body::kParts > 1);
  static constexpr bool kSumsBeside = Body::kSums > 0 && !kSumsAfter && !kSumsLast;
  static constexpr bool kSumsWait = kSumsLast && Body::kParts > 1;
  // The L1 cache gets the shared memory that is left. Transposed columns reuse the memory of maxima
  // and sums if there is a barrier between. Multipliers reuse the memory of their maxima if nothing
  // else does.
  static constexpr int kTurned = kTurns && !Body::kLight ? kCols * kRows / 4 : 0;  // words
  static constexpr int kMaxima = kColumnBlocks ? kLines * kCols : 0;
  static constexpr int kSums = kSumsBeside || (kSumsLast && !kSumsWait) ? kLines * kCols : 0;
  static constexpr bool kInPlace = kColumnBlocks && !kTurns && Body::kSums == 0;
  static constexpr int kMultipliers = kWhole                       ? Body::kEncoded * kWarps
                                      : kColumnBlocks && !kInPlace ? kGroups * kCols
                                                                   : 0;
  static constexpr int kApart = kColumnBlocks ? 0 : kTurned;
  static constexpr int kWords = kApart + kMaxima + kSums;
  static constexpr int kFirst = kWords > kTurned ? kWords : kTurned;
  struct Shared {
    TenonWords4 words[(kFirst + kMultipliers + 3) / 4 + (kFirst + kMultipliers == 0)];
    __device__ TenonU32* turned() { return words[0].w; }
    __device__ float (*maxima())[kCols] { return at(words + kApart / 4); }
    __device__ float (*sums(int part))[kCols] {
      if (kSumsWait) return at(tenon_parked + part * (kLines * kCols / 4));
      return at(words + (kSumsAfter ? kApart : kApart + kMaxima) / 4);
    }
    // Maxima of warps, if the tile is one scale block.
    __device__ float* warps(int part) { return at(words + kFirst / 4)[0] + part * kWarps; }
    // Multipliers of a group of rows.
    __device__ float* multipliers(int group) {
      return kInPlace ? maxima()[group * (kLines / kGroups)] : at(words + kFirst / 4)[group];
    }
    __device__ static float (*at(TenonWords4* words))[kCols] {
      return reinterpret_cast<float(*)[kCols]>(words);
    }
  };
};

// Maxima of magnitudes. A NaN propagates.
__device__ inline float tenon_larger(float most, float v) { return tenon_max(most, tenon_abs(v)); }
template <class Encoder>
__device__ inline TenonScale tenon_block_scale(float amax) {
  return tenon_block_scale<Encoder>(__float_as_uint(amax));
}

// The scales of the rows of a thread, from maxima in `lanes` lanes. Lanes exchange rows until each
// has one, then distribute the multipliers. Lane l has row tenon_own_row(l).
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

template <bool full, class Arguments>
__device__ inline void tenon_block_total(const Arguments& a, TenonU32 row, const float (&v)[4][8],
                                         float (&total)[8]) {
  for (int e = 0; e < 8; ++e) {
    float x[4];
    for (int r = 0; r < 4; ++r) x[r] = full || row + r < a.rows ? v[r][e] : -0.0f;
    total[e] = (x[0] + x[1]) + (x[2] + x[3]);
  }
}
template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_sum(const Arguments& a, TenonU32 row, const float (&v)[4][8],
                                       int part, typename TenonBlock<Body>::Shared& shared) {
  float total[8];
  tenon_block_total<full>(a, row, v, total);
  tenon_begin_sum<Body::kTileCols>(shared.sums(part)[threadIdx.x / TenonBlock<Body>::kLineThreads],
                                   total);
}
template <class Body, class Arguments>
__device__ inline void tenon_block_end_sum(const Arguments& a,
                                           typename TenonBlock<Body>::Shared& shared, int part,
                                           int begin, TenonU32 row0, TenonU32 column0) {
  using Block = TenonBlock<Body>;
  const TenonU32 more = Body::sum_more(a, part);
  tenon_end_sum<Body, Block::kRows, Block::kLines>(a, shared.sums(part), begin, row0,
                                                   column0 + more, Body::end(a, part) + more);
}

// The scale of a result whose tile is one block, from the maxima of all threads. The caller adds a
// barrier.
template <class Body>
__device__ inline void tenon_tile_most(int part, float most,
                                       typename TenonBlock<Body>::Shared& shared) {
  const TenonU32 own = tenon_warp_most(__float_as_uint(most));
  if (threadIdx.x % 32 == 0) shared.warps(part)[threadIdx.x / 32] = tenon_bits(own);
}
template <class Body, class Arguments>
__device__ inline TenonScale tenon_tile_scale(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                              bool inside, int part,
                                              typename TenonBlock<Body>::Shared& shared) {
  using Encoder = typename Body::Encoder;
  const float* const warps = shared.warps(part);
  TenonU32 m = 0;
  for (int i = 0; i < TenonBlock<Body>::kWarps; ++i) m = tenon_most(m, __float_as_uint(warps[i]));
  const TenonScale scale = tenon_block_scale<Encoder>(m);
  if (threadIdx.x == 0 && inside && Body::kRowwise)
    tenon_put_scale<Encoder, true, Encoder::kRowTurned>(a, row0 / Encoder::kRowRows,
                                                        column0 / Encoder::kRowCols, scale.inverse);
  if (threadIdx.x == 0 && inside && Body::kColumnwise)
    tenon_put_scale<Encoder, false, Encoder::kColumnTurned>(
        a, row0 / Encoder::kColumnRows, column0 / Encoder::kColumnCols, scale.inverse);
  return scale;
}

// The place of a thread in the tile of a result, in columns of the encoder.
template <class Body>
struct TenonBlockAt {
  TenonU32 row0, column0;  // of the tile
  int lane, group;
  TenonU32 row, column;    // of the thread
  TenonU32 end, last_row;  // of the result
  bool inside;
};
template <class Body, class Arguments>
__device__ inline TenonBlockAt<Body> tenon_block_at(const Arguments& a, TenonU32 row0,
                                                    TenonU32 column0, int part) {
  const int lane = threadIdx.x % TenonBlock<Body>::kLanes;
  const int group = threadIdx.x / TenonBlock<Body>::kLanes;
  const TenonU32 column = column0 + 8 * lane;
  const TenonU32 end = Body::end(a, part);
  return {row0,
          column0,
          lane,
          group,
          row0 + 4 * group,
          column,
          end,
          static_cast<TenonU32>(a.rows) - 1,
          Body::kWholeColumns || column < end};
}

// The maxima of the four rows of a thread.
__device__ inline void tenon_row_maxima(const float (&v)[4][8], float (&most)[4]) {
  for (int r = 0; r < 4; ++r) {
    most[r] = tenon_abs(v[r][0]);
    for (int e = 1; e < 8; ++e) most[r] = tenon_larger(most[r], v[r][e]);
  }
}

// Stores the maxima of the columns of a thread in the line of its warp.
template <class Body>
__device__ inline void tenon_put_column_maxima(const TenonBlockAt<Body>& at, const float (&v)[4][8],
                                               typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  float* const line = shared.maxima()[threadIdx.x / Block::kLineThreads];
  float most[8];
  for (int e = 0; e < 8; ++e) {
    most[e] = tenon_abs(v[0][e]);
    for (int r = 1; r < 4; ++r) most[e] = tenon_larger(most[e], v[r][e]);
  }
  TenonWords4 w;
  if (Block::kLanes >= 32) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < 4; ++i) w.w[i] = __float_as_uint(most[4 * half + i]);
      *tenon_plane<Block::kCols>(line, at.lane, half) = w;
    }
  } else {  // the half warps exchange four columns each
    const bool upper = at.group % 2 != 0;
    for (int i = 0; i < 4; ++i)
      w.w[i] = __float_as_uint(
          tenon_max(upper ? most[4 + i] : most[i],
                    __shfl_xor_sync(0xffffffffu, upper ? most[i] : most[4 + i], 16)));
    *tenon_plane<Block::kCols>(line, at.lane, upper) = w;
  }
}

// One thread per column and group of rows: the scale of the block, from the maxima of all lines.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_column_scales(const Arguments& a, const TenonBlockAt<Body>& at,
                                           typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  using Encoder = typename Body::Encoder;
  constexpr int finishing = Block::kGroups * Block::kCols;
  constexpr int lines = Block::kLines / Block::kGroups;
  if (finishing != Block::kThreads && threadIdx.x >= finishing) return;
  const int group = Block::kGroups > 1 ? threadIdx.x / Block::kCols : 0;
  const int word = threadIdx.x - group * Block::kCols;
  const int own = tenon_plane_column<Block::kCols>(word);
  TenonU32 m = 0;
  for (int i = 0; i < lines; ++i)
    m = tenon_most(m, __float_as_uint(shared.maxima()[group * lines + i][word]));
  const TenonScale scale = tenon_block_scale<Encoder>(m);
  shared.multipliers(group)[word] = scale.multiplier;
  const TenonU32 first_row = at.row0 + group * Encoder::kColumnRows;
  if ((Body::kWholeColumns || at.column0 + own < at.end) && (full || first_row < a.rows))
    tenon_put_scale<Encoder, false, Encoder::kColumnTurned>(a, first_row / Encoder::kColumnRows,
                                                            at.column0 + own, scale.inverse);
}

// The multipliers of the four rows of a thread. Stores the scales.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_put_row_scales(const Arguments& a, const TenonBlockAt<Body>& at,
                                            const float (&most)[4], float (&multiplier)[4]) {
  using Encoder = typename Body::Encoder;
  constexpr int lanes = TenonBlock<Body>::kWhole ? 4 : Encoder::kRowCols / 8;
  const TenonScale scale = tenon_row_scales<Encoder, lanes>(most, multiplier);
  const TenonU32 own = at.row + tenon_own_row(at.lane);
  const bool begun = Body::kWholeColumns || at.column0 + 8 * (at.lane / lanes * lanes) < at.end;
  if (at.lane % lanes < 4 && begun && (full || own <= at.last_row))
    tenon_put_scale<Encoder, true, Encoder::kRowTurned>(a, own, at.column / Encoder::kRowCols,
                                                        scale.inverse);
}

// The codes of a thread with one multiplier per row. Stores them if there is a rowwise encoding.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_encode_rows(const Arguments& a, const TenonBlockAt<Body>& at,
                                         const float (&v)[4][8], const float (&multiplier)[4],
                                         TenonWords2 (&codes)[4]) {
  using Encoder = typename Body::Encoder;
  const TenonPlace& data = a.place[Encoder::kPlace];
  const TenonU32 stride = static_cast<TenonU32>(data.stride);
  TenonU8* const to = data.data + tenon_wide(at.row, stride, at.column);
  for (int r = 0; r < 4; ++r) {
    float scaled[8];
    for (int e = 0; e < 8; ++e) scaled[e] = v[r][e] * multiplier[r];
    codes[r] = tenon_codes8<typename Encoder::Format>(scaled);
  }
  if (Body::kRowwise && at.inside)
    for (int r = 0; r < 4; ++r)
      if (full || at.row + r <= at.last_row)
        *reinterpret_cast<TenonWords2*>(to + static_cast<TenonU64>(stride) * r) = codes[r];
}

// The codes of a thread with one multiplier per column, to memory or transposed to shared memory.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_encode_columns(const Arguments& a, const TenonBlockAt<Body>& at,
                                            const float (&v)[4][8],
                                            typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  using Encoder = typename Body::Encoder;
  using Format = typename Encoder::Format;
  const int group = Block::kGroups > 1 ? 4 * at.group / Encoder::kColumnRows : 0;
  float multiplier[8];
  for (int half = 0; half < 2; ++half) {
    const TenonWords4 w = *tenon_plane<Block::kCols>(shared.multipliers(group), at.lane, half);
    for (int i = 0; i < 4; ++i) multiplier[4 * half + i] = tenon_bits(w.w[i]);
  }
  if (Block::kTurns) {  // four rows of a column make one word
    for (int e = 0; e < 8; ++e) {
      const float m = multiplier[e];
      tenon_put_turned(shared.turned(), e,
                       tenon_encode_pair<Format>(v[0][e] * m, v[1][e] * m) |
                           tenon_encode_pair<Format>(v[2][e] * m, v[3][e] * m) << 16);
    }
  } else if (at.inside) {
    const TenonPlace& data = a.place[Encoder::kPlace + 2];
    const TenonU32 stride = static_cast<TenonU32>(data.stride);
    TenonU8* const to = data.data + tenon_wide(at.row, stride, at.column);
    for (int r = 0; r < 4; ++r) {
      float scaled[8];
      for (int e = 0; e < 8; ++e) scaled[e] = v[r][e] * multiplier[e];
      if (full || at.row + r <= at.last_row)
        *reinterpret_cast<TenonWords2*>(to + static_cast<TenonU64>(stride) * r) =
            tenon_codes8<Format>(scaled);
    }
  }
}

// Encodes one result from its values: maxima, scales, rows, columns and the sum. If the tile is one
// block, its maxima and a sum are already in shared memory.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_encode(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                          const float (&v)[4][8], int part,
                                          typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  const TenonBlockAt<Body> at = tenon_block_at<Body>(a, row0, column0, part);
  const bool sum = Body::kSums > 0 && Body::summed(part);
  if (sum && Block::kSumsBeside && !Block::kWhole)
    tenon_block_sum<Body, full>(a, at.row, v, part, shared);
  float row_most[4];
  if (Body::kRowwise && !Block::kWhole) tenon_row_maxima(v, row_most);
  if (Block::kColumnBlocks) tenon_put_column_maxima(at, v, shared);
  TenonScale whole = {};
  if (Block::kWhole) whole = tenon_tile_scale<Body>(a, row0, column0, at.inside, part, shared);
  if (Block::kColumnBlocks) {
    __syncthreads();
    tenon_column_scales<Body, full>(a, at, shared);
  }
  // Done by threads that compute no column scale, if there are any.
  constexpr int summing = Block::kColumnBlocks && Block::kThreads > Block::kCols ? Block::kCols : 0;
  if (sum && Block::kSumsBeside) tenon_block_end_sum<Body>(a, shared, part, summing, row0, column0);
  TenonWords2 codes[4];
  if (Body::kRowwise || Block::kWhole) {
    float multiplier[4];
    if (Block::kWhole)
      for (int r = 0; r < 4; ++r) multiplier[r] = whole.multiplier;
    else
      tenon_put_row_scales<Body, full>(a, at, row_most, multiplier);
    tenon_encode_rows<Body, full>(a, at, v, multiplier, codes);
  }
  if (Block::kColumnBlocks) {
    __syncthreads();
    tenon_encode_columns<Body, full>(a, at, v, shared);
  } else if (Block::kTurns) {
    tenon_turn(shared.turned(), codes);
  }
  if (Block::kTurns) {
    __syncthreads();
    tenon_store_turned<Body, full>(a, shared.turned(), part, row0, column0, at.end);
  }
  if (sum && Block::kSumsAfter) {
    tenon_block_sum<Body, full>(a, at.row, v, part, shared);
    __syncthreads();
    tenon_block_end_sum<Body>(a, shared, part, 0, row0, column0);
  }
}

// Row r of the results after the first waits in the slots of `thread`.
template <class Body>
__device__ inline void tenon_park(int thread, int r, const float (&out)[Body::kStores][8]) {
  for (int p = 1; p < Body::kParts; ++p)
    for (int half = 0; half < 2; ++half) {
      TenonWords4 w;
      for (int i = 0; i < 4; ++i) w.w[i] = __float_as_uint(out[Body::part(p)][4 * half + i]);
      tenon_slot<TenonBlock<Body>::kThreads>(thread, 4 * (p - 1) + r, half) = w;
    }
}
template <class Body>
__device__ inline void tenon_unpark(int thread, int part, float (&v)[4][8]) {
  for (int r = 0; r < 4; ++r)
    for (int half = 0; half < 2; ++half) {
      const TenonWords4 w =
          tenon_slot<TenonBlock<Body>::kThreads>(thread, 4 * (part - 1) + r, half);
      for (int i = 0; i < 4; ++i) v[r][4 * half + i] = tenon_bits(w.w[i]);
    }
}

// The column of a thread in the tile of the first part, and the slot where its values wait.
struct TenonShiftAt {
  TenonU32 column;
  int slot;     // -1: none
  bool second;  // the column belongs to the second part
};
template <class Body, class Arguments>
__device__ inline TenonShiftAt tenon_shift_at(const Arguments& a, TenonU32 column0) {
  using Block = TenonBlock<Body>;
  constexpr int lanes = Block::kShiftLanes;
  const TenonU32 cols = static_cast<TenonU32>(a.cols);
  const int l = threadIdx.x % Block::kLanes;
  TenonShiftAt at = {column0 + 8 * l, static_cast<int>(threadIdx.x), false};
  if (Body::kShift < 0) at.slot = l + lanes < Block::kLanes ? at.slot + lanes : -1;
  if (Body::kShift > 0) {
    if (at.column >= Body::end(a, 0)) at.column = Body::end(a, 0) - 8;
    at.second = at.column >= cols;
    if (at.second)
      at.column -= cols;
    else
      at.slot = l < lanes ? -1 : at.slot - lanes;
  }
  return at;
}

// Shifted tiles also compute the columns of the second part that are next to the tile of the first
// part. Thread n starts with vector n of them. At the left edge they belong to the first part.
template <class Body, bool full, class Arguments>
struct TenonBeside {
  using Block = TenonBlock<Body>;
  static constexpr bool kShifted = Body::kShift != 0, kLeft = Body::kShift < 0;
  static constexpr int kLanes = kShifted ? Block::kShiftLanes : 1;
  static constexpr int kVectors = kShifted ? Block::kRows * kLanes : 0;
  const Arguments& a;
  TenonU32 row0, column0;
  typename Body::Raw raw;
  TenonU32 row = 0, column = 0;
  int first;

  __device__ TenonBeside(const Arguments& arguments, TenonU32 first_row, TenonU32 first_column)
      : a(arguments), row0(first_row), column0(first_column) {
    const bool there =
        kShifted && (kLeft || column0 + Block::kCols <= static_cast<TenonU32>(a.cols));
    first = there ? static_cast<int>(threadIdx.x) : kVectors;
    if (kShifted && first < kVectors) fetch(first);
  }
  __device__ void fetch(int n) {
    const TenonU32 cols = static_cast<TenonU32>(a.cols);
    row = row0 + n / kLanes;
    if (!full && row >= a.rows) row = static_cast<TenonU32>(a.rows) - 1;
    column = 8 * (n % kLanes) +
             (kLeft ? (column0 == 0 ? cols : column0) - 8 * kLanes : column0 + Block::kCols);
    if (column >= cols) column = cols - 8;
    Body::fetch(a.at, row, column, 0, raw);
  }
  // Calls each(out) for the vectors of this thread, after they wait in their slots.
  template <class Each>
  __device__ void run(const Each& each) {
    if constexpr (kShifted) {  // the compiler cannot prove that thread numbers are not negative
#pragma unroll 1
      for (int n = first; n < kVectors; n += Block::kThreads) {
        float out[Body::kStores][8];
        tenon_one_row<Body>(a, row, column, raw, out);
        if (kLeft && column0 == 0)
          for (int e = 0; e < 8; ++e) out[Body::part(Body::kParts - 1)][e] = out[Body::part(0)][e];
        tenon_park<Body>(
            n / kLanes / 4 * Block::kLanes + (kLeft ? 0 : Block::kLanes - kLanes) + n % kLanes,
            n / kLanes % 4, out);
        each(out);
        if (kVectors <= Block::kThreads) break;
        if (n + Block::kThreads < kVectors) fetch(n + Block::kThreads);
      }
    }
  }
};

// Computes and stores the values of a thread. Those of the first part go to v, the others wait.
// second_most: the maximum of the block of the second part, if the maxima share a barrier.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_values(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                          float (&v)[4][8], float& second_most, TenonU32* most) {
  using Block = TenonBlock<Body>;
  constexpr bool shifted = Body::kShift != 0;
  const TenonU32 row = row0 + 4 * (threadIdx.x / Block::kLanes);
  const TenonShiftAt at = tenon_shift_at<Body>(a, column0);
  TenonBeside<Body, full, Arguments> beside(a, row0, column0);
  const bool inside = tenon_inside<Body>(a, at.column);
  const auto join_second = [&](const float(&out)[Body::kStores][8]) {
    if (Block::kTogether)
      for (int e = 0; e < 8; ++e)
        second_most = tenon_larger(second_most, out[Body::part(Body::kParts - 1)][e]);
  };
  tenon_four_rows<Body, full, kTenonAhead<Body, false>>(
      a, row, at.column,
      [&](int r, bool there, const float(&out)[Body::kStores][8]) {
        if (there && inside)
          Body::store(a, full ? row : row + r, at.column, full ? r : 0, out, most);
      // A select, not an index, because the row may not be a constant.
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
          for (int e = 0; e < 8; ++e) v[i][e] = i == r ? out[Body::part(0)][e] : v[i][e];
        if (!shifted || at.slot >= 0) tenon_park<Body>(at.slot, r, out);
        if (!shifted || (at.slot >= 0 && !at.second)) join_second(out);
      },
      [&] { beside.run(join_second); });
  if (shifted && at.second) tenon_unpark<Body>(at.slot, 1, v);
}

// The maximum of the values of a thread, for a tile that is one block.
template <class Body>
__device__ inline void tenon_put_most(int part, const float (&v)[4][8],
                                      typename TenonBlock<Body>::Shared& shared) {
  float most = 0;
  for (int r = 0; r < 4; ++r)
    for (int e = 0; e < 8; ++e) most = tenon_larger(most, v[r][e]);
  tenon_tile_most<Body>(part, most, shared);
}

// Replaces the values of the part before by those of `part`, which waited.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_next_part(const Arguments& a, TenonU32 row, TenonU32 column0, int part,
                                       float (&v)[4][8],
                                       typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  constexpr bool shifted = Body::kShift != 0;
  float total[8];
  if (Block::kSumsLast) tenon_block_total<full>(a, row, v, total);
  // Now shared memory can be reused, and values from other threads are visible.
  if (Block::kTurns || Block::kColumnBlocks || (shifted && !Block::kWhole)) __syncthreads();
  int slot = threadIdx.x;
  if (shifted) {  // outside the tensor: the nearest vector inside
    const int l = threadIdx.x % Block::kLanes;
    const int last = static_cast<int>(Body::end(a, 1) - Body::begin(a, 1) - column0) / 8 - 1;
    if (l > last) slot += (last < 0 ? 0 : last) - l;
  }
  tenon_unpark<Body>(slot, part, v);
  if (Block::kSumsLast) {
    // Sums reuse slots that were read: slots of the own warp if two lanes have a column, else of
    // any warp.
    if (Block::kLanes == 16)
      __syncwarp();
    else
      __syncthreads();
    if (Body::summed(part - 1))
      tenon_begin_sum<Block::kCols>(shared.sums(part - 1)[threadIdx.x / Block::kLineThreads],
                                    total);
  }
}

// Encodes or sums the parts one after the other.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_parts(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                         float (&v)[4][8],
                                         typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  const TenonU32 row = row0 + 4 * (threadIdx.x / Block::kLanes);
#pragma unroll 1
  for (int part = 0;;) {
    if (Block::kWhole && !Block::kTogether && part < Body::kEncoded) {
      tenon_put_most<Body>(part, v, shared);
      if (Block::kSumsBeside && Body::summed(part))
        tenon_block_sum<Body, full>(a, row, v, part, shared);
      __syncthreads();
    }
    if (Body::kEncoded == Body::kParts || part < Body::kEncoded) {
      tenon_block_encode<Body, full>(a, row0, Body::begin(a, part) + column0, v, part, shared);
    } else if (!Block::kSumsLast) {
      tenon_block_sum<Body, full>(a, row, v, part, shared);
      __syncthreads();
      tenon_block_end_sum<Body>(a, shared, part, 0, row0, column0);
    }
    if (++part >= Body::kParts) break;
    tenon_next_part<Body, full>(a, row, column0, part, v, shared);
  }
  if (Block::kSumsLast) {
    constexpr int last = Body::kParts - 1;
    if (Body::summed(last)) tenon_block_sum<Body, full>(a, row, v, last, shared);
    __syncthreads();
    for (int p = 0; p < Body::kParts; ++p)
      if (Body::summed(p))
        tenon_block_end_sum<Body>(a, shared, p, p * Block::kCols % Block::kThreads, row0,
                                  Body::begin(a, p) + column0);
  }
}

template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_part(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                        typename TenonBlock<Body>::Shared& shared) {
  TenonU32 most[Body::kAmax + 1] = {};
  float v[4][8];
  float second_most = 0;
  tenon_block_values<Body, full>(a, row0, column0, v, second_most, most);
  if (TenonBlock<Body>::kTogether) {
    tenon_put_most<Body>(0, v, shared);
    tenon_tile_most<Body>(1, second_most, shared);
    __syncthreads();
  }
  tenon_block_parts<Body, full>(a, row0, column0, v, shared);
  TenonU32 before[Body::kAmax + 1];
  Body::start(a, before);
  Body::finish(a, most, before);
}

// For one result without sums whose tile is one block. All values wait in shared memory, so a third
// thread block fits in the registers.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_light_part(const Arguments& a, TenonU32 row0, TenonU32 column0,
                                        typename TenonBlock<Body>::Shared& shared) {
  using Block = TenonBlock<Body>;
  using Encoder = typename Body::Encoder;
  const TenonU32 row = row0 + 4 * (threadIdx.x / Block::kLanes);
  const TenonU32 column = column0 + 8 * (threadIdx.x % Block::kLanes);
  const bool inside = tenon_inside<Body>(a, column);
  const int rows = full ? 4 : static_cast<int>(a.rows) - static_cast<int>(row);
  TenonU32 most[Body::kAmax + 1] = {};
  float largest = 0;
  tenon_four_rows<Body, full, kTenonAhead<Body, false>>(
      a, row, column,
      [&](int r, bool there, const float(&out)[Body::kStores][8]) {
        if (there && inside) Body::store(a, full ? row : row + r, column, full ? r : 0, out, most);
        for (int half = 0; half < 2; ++half) {
          TenonWords4 w;
          for (int i = 0; i < 4; ++i) {
            const float v = out[Body::part(0)][4 * half + i];
            largest = tenon_larger(largest, v);
            w.w[i] = __float_as_uint(v);
          }
          tenon_slot<Block::kThreads>(threadIdx.x, r, half) = w;
        }
      },
      [] {});
  const TenonU32 begin = Body::begin(a, 0);
  tenon_tile_most<Body>(0, largest, shared);
  __syncthreads();
  const float multiplier =
      tenon_tile_scale<Body>(a, row0, begin + column0, inside, 0, shared).multiplier;
  const TenonPlace& data = a.place[Encoder::kPlace];
  const TenonU32 stride = static_cast<TenonU32>(data.stride);
  TenonU8* to = data.data + tenon_wide(row, stride, begin + column);
  TenonWords2 codes[4];
#pragma unroll
  for (int r = 0; r < 4; ++r, to += stride) {
    float scaled[8];
    for (int half = 0; half < 2; ++half) {
      const TenonWords4 w = tenon_slot<Block::kThreads>(threadIdx.x, r, half);
      for (int i = 0; i < 4; ++i) scaled[4 * half + i] = tenon_bits(w.w[i]) * multiplier;
    }
    codes[r] = tenon_codes8<typename Encoder::Format>(scaled);
    if (Body::kRowwise && inside && r < rows) *reinterpret_cast<TenonWords2*>(to) = codes[r];
  }
  if (Block::kTurns) {
    TenonU32* const turned = tenon_parked[0].w;
    __syncthreads();  // all values are read
    tenon_turn(turned, codes);
    __syncthreads();
    tenon_store_turned<Body, full>(a, turned, 0, row0, begin + column0, Body::end(a, 0));
  }
  TenonU32 before[Body::kAmax + 1];
  Body::start(a, before);
  Body::finish(a, most, before);
}

// Chooses the variant for the body.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_tile(const Arguments& a, TenonU32 row, TenonU32 column,
                                        typename TenonBlock<Body>::Shared& shared) {
  if constexpr (Body::kLight)
    tenon_light_part<Body, full>(a, row, column, shared);
  else
    tenon_block_part<Body, full>(a, row, column, shared);
}

// Runs in thread blocks without a tile.
template <class Body, class Arguments>
__device__ inline void tenon_block_behind(const Arguments& a, TenonU32 tiles_down) {
  const TenonU32 block = (blockIdx.y - tiles_down) * gridDim.x + blockIdx.x;
  const TenonU32 blocks = (gridDim.y - tiles_down) * gridDim.x;
  if (Body::kRowwise) tenon_block_end<typename Body::Encoder, true>(a, block, blocks);
  if (Body::kColumnwise) tenon_block_end<typename Body::Encoder, false>(a, block, blocks);
}

template <class Body, class Arguments>
__device__ inline void tenon_block_map(const Arguments& a) {
  __shared__ typename TenonBlock<Body>::Shared shared;  // shared by both paths
  const TenonU32 row = tenon_first_row<Body::kTileRows>(a);
  const TenonU32 column = blockIdx.x * Body::kTileCols;
  if (row < a.whole) return tenon_block_tile<Body, true>(a, row, column, shared);
  if constexpr (!Body::kWholeRows)
    if (row <= a.last) return tenon_block_tile<Body, false>(a, row, column, shared);
  tenon_block_behind<Body>(a, a.last / Body::kTileRows + 1);
}
