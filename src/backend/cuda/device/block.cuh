// The tiled map with scales of blocks: the values of one result at a time stay in registers until
// their maxima are known. The tile and its threads are those of tile.cuh, which it follows.

__device__ inline TenonU32 tenon_most(TenonU32 a, TenonU32 b) { return a > b ? a : b; }

template <class Encoder, bool rowwise, bool scales_turned, class Arguments>
__device__ inline void tenon_put_scale(const Arguments& a, TenonI64 i, TenonI64 j,
                                       TenonU32 inverse) {
  using Format = typename Encoder::Scale;
  const TenonPlace& scales = a.place[Encoder::kPlace + (rowwise ? 1 : 3)];
  const TenonI64 tiles = (rowwise ? scales.cols : scales.rows) / 4;
  const TenonI64 at =
      tenon_scale_at<scales_turned, Encoder::kSwizzled, rowwise>(i, j, scales.stride, tiles);
  tenon_put<Format::bytes>(scales.data + at * Format::bytes, inverse);
}

// Body is printed as for the tiled map, with Encoder: kRowRows, kRowCols, kColumnRows, kColumnCols
// (the blocks), kRowTurned, kColumnTurned (their scales), kTransposes; and kParts: how many stores
// make its tensor, part p being result Body::part(p), its column 0 the tensor's Body::first(a, p).
template <class Body>
struct TenonBlockShared {
  TenonU32 turned[kTenonTile * 32];
  float partial[Body::kSums > 0 ? Body::kSums : 1][16][kTenonTile];
  TenonU32 maxima[16][kTenonTile];
  float multipliers[4][kTenonTile];
};
template <class Body, bool full, class Arguments>
__device__ inline void tenon_block_part(const Arguments& a, TenonI64 row0, TenonI64 column0,
                                        TenonBlockShared<Body>& shared) {
  using Encoder = typename Body::Encoder;
  using Format = typename Encoder::Format;
  const int l = threadIdx.x % 16;
  const int g = threadIdx.x / 16;
  const int warp = threadIdx.x / 32;
  const TenonI64 row = row0 + 4 * g;
  const TenonI64 column = column0 + 8 * l;
  const bool inside = full || column < a.cols;
  const TenonI64 safe_column = inside ? column : a.cols - 8;
  TenonU32 most[Body::kAmax + 1] = {};
  TenonFour sums[Body::kSums + 1];
  for (int part = 0; part < Body::kParts; ++part) {
    typename Body::Raw raw[4];
    for (int r = 0; r < 4; ++r)
      Body::fetch(a.at, full ? row + r : tenon_least(row + r, a.rows - 1), safe_column, raw[r]);
    float v[4][8];
    TenonU32 row_most[4] = {};
    TenonU32 column_most[8] = {};
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const bool there = full || (inside && row + r < a.rows);
      float in[Body::kLoads + 1][8];
      float out[Body::kStores][8];
      Body::unpack(a.at, a.random, full ? row + r : tenon_least(row + r, a.rows - 1), safe_column,
                   raw[r], in);
      for (int e = 0; e < 8; ++e) {
        float x[Body::kLoads + 1];
        float y[Body::kStores];
        for (int i = 0; i < Body::kLoads; ++i) x[i] = in[i][e];
        Body::compute(x, y);
        for (int i = 0; i < Body::kStores; ++i) out[i][e] = y[i];
        v[r][e] = Body::part(part, y);
        const TenonU32 bits = there ? __float_as_uint(v[r][e]) & 0x7fffffffu : 0;
        row_most[r] = tenon_most(row_most[r], bits);
        column_most[e] = tenon_most(column_most[e], bits);
      }
      if (part > 0) continue;  // all else is stored with the first
      if (there) Body::store(a, row + r, column, out, most);
      if (r == 0) Body::template sum<0>(out, sums, there);
      if (r == 1) Body::template sum<1>(out, sums, there);
      if (r == 2) Body::template sum<2>(out, sums, there);
      if (r == 3) Body::template sum<3>(out, sums, there);
    }
    // The tensor's column of the tile's first one.
    const TenonI64 tensor0 = Body::first(a, part) + column0;
    TenonScale whole = {};
    if (Encoder::kRowRows == kTenonTile) {  // one block is the tile
      TenonU32 m = 0;
      for (int r = 0; r < 4; ++r) m = tenon_most(m, row_most[r]);
      for (int step = 16; step > 0; step /= 2)
        m = tenon_most(m, __shfl_xor_sync(0xffffffffu, m, step));
      if (threadIdx.x % 32 == 0) shared.maxima[0][warp] = m;
      __syncthreads();
      for (int i = 0; i < 16; ++i) m = tenon_most(m, shared.maxima[0][i]);
      whole = tenon_scale_of<Encoder>(m);
    }
    if (Body::kRowwise) {
      for (int r = 0; r < 4; ++r) {
        TenonScale scale = whole;
        if (Encoder::kRowRows == 1) {
          constexpr int lanes = Encoder::kRowCols / 8;
          TenonU32 m = row_most[r];
          for (int step = lanes / 2; step > 0; step /= 2)
            m = tenon_most(m, __shfl_xor_sync(0xffffffffu, m, step));
          scale = tenon_scale_of<Encoder>(m);
          if (l % lanes == 0 && (full || (inside && row + r < a.rows)))
            tenon_put_scale<Encoder, true, Encoder::kRowTurned>(
                a, row + r, (tensor0 + 8 * l) / Encoder::kRowCols, scale.inverse);
        } else if (threadIdx.x == 0 && r == 0) {
          tenon_put_scale<Encoder, true, Encoder::kRowTurned>(
              a, row0 / Encoder::kRowRows, tensor0 / Encoder::kRowCols, scale.inverse);
        }
        float scaled[8];
        for (int e = 0; e < 8; ++e) scaled[e] = v[r][e] * scale.multiplier;
        if (!full && (!inside || row + r >= a.rows)) continue;
        const TenonPlace& data = a.place[Encoder::kPlace];
        TenonEight<Format>::store(data.data + (row + r) * data.stride + tensor0 + 8 * l, scaled);
      }
    }
    if (Body::kColumnwise) {
      if (Encoder::kColumnCols == 1) {
        constexpr int groups = kTenonTile / Encoder::kColumnRows;  // 1, or 4 of 32 rows
        for (int e = 0; e < 8; ++e) {
          const TenonU32 m =
              tenon_most(column_most[e], __shfl_xor_sync(0xffffffffu, column_most[e], 16));
          if (g % 2 == 0) shared.maxima[warp][8 * l + e] = m;
        }
        __syncthreads();
        if (threadIdx.x < groups * kTenonTile) {
          const int own = threadIdx.x % kTenonTile;
          const int group = threadIdx.x / kTenonTile;
          TenonU32 m = 0;
          for (int i = 0; i < 16 / groups; ++i)
            m = tenon_most(m, shared.maxima[group * (16 / groups) + i][own]);
          const TenonScale scale = tenon_scale_of<Encoder>(m);
          shared.multipliers[group][own] = scale.multiplier;
          const TenonI64 first_row = row0 + group * Encoder::kColumnRows;
          if (full || (column0 + own < a.cols && first_row < a.rows))
            tenon_put_scale<Encoder, false, Encoder::kColumnTurned>(
                a, first_row / Encoder::kColumnRows, tensor0 + own, scale.inverse);
        }
        __syncthreads();
      } else if (threadIdx.x == 0) {
        tenon_put_scale<Encoder, false, Encoder::kColumnTurned>(
            a, row0 / Encoder::kColumnRows, tensor0 / Encoder::kColumnCols, whole.inverse);
      }
      TenonWords2 codes[4];
      for (int r = 0; r < 4; ++r) {
        float scaled[8];
        for (int e = 0; e < 8; ++e)
          scaled[e] = v[r][e] * (Encoder::kColumnCols == 1
                                     ? shared.multipliers[4 * g / Encoder::kColumnRows][8 * l + e]
                                     : whole.multiplier);
        codes[r] = tenon_codes8<Format>(scaled);
        if (Encoder::kTransposes || (!full && (!inside || row + r >= a.rows))) continue;
        const TenonPlace& data = a.place[Encoder::kPlace + 2];
        *reinterpret_cast<TenonWords2*>(data.data + (row + r) * data.stride + tensor0 + 8 * l) =
            codes[r];
      }
      if (Encoder::kTransposes) {
        tenon_turn(shared.turned, codes);
        __syncthreads();
        tenon_store_turned<Body, full>(a, shared.turned, part, row0, column0);
      }
    }
    if (part == 0)
      for (int k = 0; k < Body::kSums; ++k) tenon_begin_sum(shared.partial[k], sums[k]);
    __syncthreads();  // shared memory is free for the next part
  }
  if (Body::kSums > 0) tenon_end_sums<Body, full>(a, shared.partial, row0, column0);
  Body::finish(a, most);
}

template <class Body, class Arguments>
__device__ inline void tenon_block_map(const Arguments& a) {
  __shared__ TenonBlockShared<Body> shared;  // of both paths
  const TenonI64 across = (a.cols + kTenonTile - 1) / kTenonTile;
  const TenonI64 tile = blockIdx.x;
  const TenonI64 row = tile / across * kTenonTile;
  const TenonI64 column = (tile - tile / across * across) * kTenonTile;
  if (row + kTenonTile <= a.rows && column + kTenonTile <= a.cols)
    tenon_block_part<Body, true>(a, row, column, shared);
  else
    tenon_block_part<Body, false>(a, row, column, shared);
}
