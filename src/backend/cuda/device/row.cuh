// Whole rows in registers: totals of a row, then what follows from them. A block has a row, or 32
// in turn where sums over rows are kept; vector n of thread t is the row's vector n·threads + t.
// Follows tile.cuh.

// The tree of a row: eight neighbours, lanes, then warps and vectors from shared memory. Threads
// are a power of two; what lies beyond the row is -0, which adds nothing.
template <int kVectors>
__device__ inline float tenon_row_total(const float (&v)[kVectors], float* parts) {
  const int warps = blockDim.x / 32;
  for (int n = 0; n < kVectors; ++n) {
    float s = v[n];
    for (int step = 1; step < 32; step *= 2) s = s + __shfl_xor_sync(0xffffffffu, s, step);
    if (threadIdx.x % 32 == 0) parts[n * warps + threadIdx.x / 32] = s;
  }
  __syncthreads();
  // At most 8 vectors of 16 warps: four neighbours a lane.
  float four[4];
  for (int i = 0; i < 4; ++i) {
    const int at = 4 * (threadIdx.x % 32) + i;
    four[i] = at < kVectors * warps ? parts[at] : -0.0f;
  }
  float s = (four[0] + four[1]) + (four[2] + four[3]);
  for (int step = 1; step < 32; step *= 2) s = s + __shfl_xor_sync(0xffffffffu, s, step);
  __syncthreads();  // parts may be written again
  return s;
}

__device__ inline float tenon_tree8(const float (&v)[8]) {
  return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// Body is printed: kLoads, kRoots, kStores, kTotals, kSums; Raw, fetch, unpack, compute, store,
// columns, sum. Root kStores + t is total t.
template <class Body, int kVectors, class Arguments>
struct TenonRows {
  const Arguments& a;
  float* parts;
  typename Body::Raw raw[kVectors];
  float totals[Body::kTotals + 1];

  __device__ TenonI64 column(int n) const {
    return (static_cast<TenonI64>(n) * blockDim.x + threadIdx.x) * 8;
  }
  __device__ void values(TenonI64 row, int n, float (&out)[Body::kRoots][8]) const {
    float in[Body::kLoads + 1][8];
    Body::unpack(a.at, a.random, row, tenon_least(column(n), a.cols - 8), raw[n], totals, in);
    for (int e = 0; e < 8; ++e) {
      float x[Body::kLoads + 1];
      float y[Body::kRoots];
      for (int i = 0; i < Body::kLoads; ++i) x[i] = in[i][e];
      Body::compute(x, y);
      for (int i = 0; i < Body::kRoots; ++i) out[i][e] = y[i];
    }
  }
  template <int t>
  __device__ void total(TenonI64 row) {
    float sums[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      float out[Body::kRoots][8];
      values(row, n, out);
      sums[n] = column(n) < a.cols ? tenon_tree8(out[Body::kStores + t]) : -0.0f;
    }
    totals[t] = tenon_row_total<kVectors>(sums, parts);
    if constexpr (t + 1 < Body::kTotals) total<t + 1>(row);
  }
};

template <class Body, int kVectors, class Arguments>
__device__ inline void tenon_row_map(const Arguments& a) {
  __shared__ float parts[8 * 16];
  constexpr int kRows = Body::kSums > 0 ? 32 : 1;
  TenonRows<Body, kVectors, Arguments> rows{a, parts, {}, {}};
  float sums[Body::kSums + 1][kVectors][8];
  const TenonI64 first = static_cast<TenonI64>(blockIdx.x) * kRows;
  const TenonI64 last = tenon_least(first + kRows, a.rows);
  for (TenonI64 row = first; row < last; ++row) {
    for (int n = 0; n < kVectors; ++n)
      Body::fetch(a.at, row, tenon_least(rows.column(n), a.cols - 8), rows.raw[n]);
    if constexpr (Body::kTotals > 0) rows.template total<0>(row);
    for (int n = 0; n < kVectors; ++n) {
      float out[Body::kRoots][8];
      rows.values(row, n, out);
      const TenonI64 column = rows.column(n);
      if (column < a.cols) Body::store(a, row, column, out);
      if (column == 0) Body::columns(a, row, out);
      Body::sum(out, row == first, n, sums);
    }
  }
  const TenonI64 blocks = (a.rows + kRows - 1) / kRows;
  for (int k = 0; k < Body::kSums; ++k)
    for (int n = 0; n < kVectors; ++n)
      if (rows.column(n) < a.cols)
        for (int e = 0; e < 8; ++e)
          a.to[(k * blocks + blockIdx.x) * a.cols + rows.column(n) + e] = sums[k][n][e];
}
