// The tiled map: tiles of 128 x 128, rows and columns of one encoding in one pass. A thread has 4
// rows x 8 columns: lane l of a half warp the columns 8l … 8l+7, half warp g the rows 4g … 4g+3.
// Follows vector.cuh.

constexpr int kTenonTile = 128;

// Eight elements as they lie in memory: loads of all rows come first, in few registers.
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

// Eight codes of one byte as two words.
template <class Format>
__device__ inline TenonWords2 tenon_codes8(const float (&v)[8]) {
  TenonWords2 x;
  TenonEight<Format>::store(reinterpret_cast<TenonU8*>(&x), v);
  return x;
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
// Word r holds row r of four columns; afterwards word c holds column c of four rows.
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

// The sum of a thread's four rows as a tree: pairs, then the pairs.
struct TenonFour {
  float first[8], pair[8];
  template <int row>
  __device__ void add(const float (&v)[8], bool there) {
    for (int e = 0; e < 8; ++e) {
      const float x = there ? v[e] : -0.0f;
      if (row % 2 == 0)
        pair[e] = x;
      else
        pair[e] = pair[e] + x;
      if (row == 1) first[e] = pair[e];
      if (row == 3) first[e] = first[e] + pair[e];
    }
  }
};

// A thread's 4 x 8 codes to the tile's columns in shared memory: word g of a column holds rows 4g …
// 4g+3. The words of a column are shuffled so that neither side meets a bank twice.
__device__ inline void tenon_turn(TenonU32* turned, const TenonWords2 (&codes)[4]) {
  const int l = threadIdx.x % 16;
  const int g = threadIdx.x / 16;
  for (int half = 0; half < 2; ++half) {
    TenonU32 w[4];
    for (int r = 0; r < 4; ++r) w[r] = codes[r].w[half];
    tenon_transpose_bytes(w);
    for (int i = 0; i < 4; ++i) turned[(8 * l + 4 * half + i) * 32 + (g ^ (2 * l))] = w[i];
  }
}

// Columns from shared memory, 16 rows a lane: whole lines of 128 bytes.
template <class Body, bool full, class Arguments>
__device__ inline void tenon_store_turned(const Arguments& a, const TenonU32* turned, int plane,
                                          TenonI64 row0, TenonI64 column0) {
  const int lane = threadIdx.x % 32;
  const int part = lane % 8;
  for (int n = 0; n < 2; ++n) {
    const int own = 8 * (threadIdx.x / 32) + 4 * n + lane / 8;
    const int at = own * 32 + 4 * (part ^ (own / 16));
    const bool swapped = own / 8 % 2 != 0;
    TenonWords4 w;
    for (int i = 0; i < 4; ++i) w.w[i] = turned[at + (swapped ? (i ^ 2) : i)];
    const TenonI64 to = row0 + 16 * part;
    if (!full && (column0 + own >= a.cols || to >= a.rows)) continue;
    TenonU8* const data = Body::turned(a, plane, column0 + own) + to;
    if (full || to + 16 <= a.rows) {
      *reinterpret_cast<TenonWords4*>(data) = w;
    } else {
      for (int i = 0; i < static_cast<int>(a.rows - to); ++i)
        data[i] = static_cast<TenonU8>(w.w[i / 4] >> (8 * (i % 4)));
    }
  }
}

// Sums of 8 rows a warp to shared memory, and the tree over the 16 warps to the partial row of the
// tile.
__device__ inline void tenon_begin_sum(float (*partial)[kTenonTile], const TenonFour& sum) {
  for (int e = 0; e < 8; ++e) {
    const float other = __shfl_xor_sync(0xffffffffu, sum.first[e], 16);
    if (threadIdx.x / 16 % 2 == 0)
      partial[threadIdx.x / 32][8 * (threadIdx.x % 16) + e] = sum.first[e] + other;
  }
}
template <class Body, bool full, class Arguments>
__device__ inline void tenon_end_sums(const Arguments& a, float (*partial)[16][kTenonTile],
                                      TenonI64 row0, TenonI64 column0) {
  if (threadIdx.x >= kTenonTile || (!full && column0 + threadIdx.x >= a.cols)) return;
  const TenonI64 blocks = (a.rows + kTenonTile - 1) / kTenonTile;
  for (int k = 0; k < Body::kSums; ++k) {
    float v[16];
    for (int i = 0; i < 16; ++i) v[i] = partial[k][i][threadIdx.x];
    for (int n = 8; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) v[i] = v[2 * i] + v[2 * i + 1];
    a.to[(k * blocks + row0 / kTenonTile) * a.cols + column0 + threadIdx.x] = v[0];
  }
}

// Body is printed: kLoads, kStores, kAmax, kTurned (stores with a columnwise encoding), kSums; Raw,
// fetch, unpack, compute, store (of one row), codes, sum, turned (where a column goes), finish.
template <class Body>
struct TenonTileShared {
  TenonU32 turned[Body::kTurned > 0 ? Body::kTurned : 1][kTenonTile * 32];
  float partial[Body::kSums > 0 ? Body::kSums : 1][16][kTenonTile];
};
template <class Body, bool full, class Arguments>
__device__ inline void tenon_tile_part(const Arguments& a, TenonI64 row0, TenonI64 column0,
                                       TenonTileShared<Body>& shared) {
  const int l = threadIdx.x % 16;
  const int g = threadIdx.x / 16;
  const int warp = threadIdx.x / 32;
  const TenonI64 row = row0 + 4 * g;
  const TenonI64 column = column0 + 8 * l;
  const bool inside = full || column < a.cols;
  typename Body::Raw raw[4];
  // Outside of the tensor the nearest element inside is read, and not stored.
  const TenonI64 safe_column = inside ? column : a.cols - 8;
  for (int r = 0; r < 4; ++r)
    Body::fetch(a.at, full ? row + r : tenon_least(row + r, a.rows - 1), safe_column, raw[r]);
  TenonU32 most[Body::kAmax + 1] = {};
  TenonWords2 codes[Body::kTurned + 1][4];
  TenonFour sums[Body::kSums + 1];
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
    }
    Body::codes(a, out, r, codes);
    if (there) Body::store(a, row + r, column, out, r, codes, most);
    if (r == 0) Body::template sum<0>(out, sums, there);
    if (r == 1) Body::template sum<1>(out, sums, there);
    if (r == 2) Body::template sum<2>(out, sums, there);
    if (r == 3) Body::template sum<3>(out, sums, there);
  }
  for (int k = 0; k < Body::kTurned; ++k) tenon_turn(shared.turned[k], codes[k]);
  for (int k = 0; k < Body::kSums; ++k) tenon_begin_sum(shared.partial[k], sums[k]);
  if (Body::kTurned > 0 || Body::kSums > 0) __syncthreads();
  for (int k = 0; k < Body::kTurned; ++k)
    tenon_store_turned<Body, full>(a, shared.turned[k], k, row0, column0);
  if (Body::kSums > 0) tenon_end_sums<Body, full>(a, shared.partial, row0, column0);
  Body::finish(a, most);
}

template <class Body, class Arguments>
__device__ inline void tenon_tile_map(const Arguments& a) {
  __shared__ TenonTileShared<Body> shared;  // of both paths
  const TenonI64 across = (a.cols + kTenonTile - 1) / kTenonTile;
  const TenonI64 tile = blockIdx.x;
  const TenonI64 row = tile / across * kTenonTile;
  const TenonI64 column = (tile - tile / across * across) * kTenonTile;
  if (row + kTenonTile <= a.rows && column + kTenonTile <= a.cols)
    tenon_tile_part<Body, true>(a, row, column, shared);
  else
    tenon_tile_part<Body, false>(a, row, column, shared);
}
