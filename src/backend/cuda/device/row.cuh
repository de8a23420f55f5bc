// Whole rows on chip: totals of a row, then the values that use them. Vector n of thread t is
// vector n·threads + t of the row. Follows tile.cuh.
// Body is printed:
// - kLoads, kRoots, kStores, kTotals, kSums, kAmax, kThreads, kVectors, kCols. Root kStores + t is
//   total t.
// - kGroups: the first total of each group. No total of a group reads another total of that group.
// - kLate: Fixed is loaded at its use, to save registers.
// - Raw (tiles), Fixed (rows) and Line (columns) with their loads, Stage (Raw of all threads).
// - unpack, compute, store, columns, sum, end_sum, finish.

template <class Body>
__device__ inline TenonU32 tenon_row_column(int n) {
  return (n * Body::kThreads + threadIdx.x) * 8;
}
template <class Body>
__device__ inline bool tenon_row_inside(int n) {
  return (n + 1) * Body::kThreads * 8 <= Body::kCols || tenon_row_column<Body>(n) < Body::kCols;
}
// After the end of the row, reads its last vector. Such a vector is not stored.
template <class Body>
__device__ inline TenonU32 tenon_row_safe(int n) {
  return tenon_row_inside<Body>(n) ? tenon_row_column<Body>(n) : Body::kCols - 8;
}

__device__ constexpr int tenon_power(int least) {
  return least > 1 ? 2 * tenon_power((least + 1) / 2) : 1;
}

// The tree sum of values in registers. count is a power of two.
template <int count>
__device__ inline float tenon_tree_of(const float (&v)[count]) {
  if constexpr (count == 1) {
    return v[0];
  } else {
    float half[count / 2];
#pragma unroll
    for (int i = 0; i < count / 2; ++i) half[i] = v[2 * i] + v[2 * i + 1];
    return tenon_tree_of(half);
  }
}

// Tree sums over the lanes of a warp, many at once: the two lanes of a pair take half of the sums
// each. Lane l ends with the sum of v[l % count]. count is a power of two.
template <int count, int step = 1>
struct TenonLanes {
  __device__ static float sum(const float (&v)[count]) {
    const bool odd = threadIdx.x / step % 2 != 0;
    float half[count / 2];
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const float mine = odd ? v[2 * i + 1] : v[2 * i];
      const float other = odd ? v[2 * i] : v[2 * i + 1];
      half[i] = mine + __shfl_xor_sync(0xffffffffu, other, step);
    }
    return TenonLanes<count / 2, 2 * step>::sum(half);
  }
};
template <int step>
struct TenonLanes<1, step> {
  __device__ static float sum(const float (&v)[1]) {
    float s = v[0];
    for (int d = step; d < 32; d *= 2) s = s + __shfl_xor_sync(0xffffffffu, s, d);
    return s;
  }
};
// Scales eight results by the multiplier of their block of columns, and stores its scale.
template <class Encoder, int block, bool scales_turned, class Arguments>
__device__ inline void tenon_scale8(const Arguments& a, TenonU32 row, TenonU32 column, bool there,
                                    const float (&v)[8], float (&scaled)[8]) {
  TenonU32 most = 0;
  for (int e = 0; there && e < 8; ++e) {
    const TenonU32 bits = __float_as_uint(v[e]) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  for (int d = block / 16; d > 0; d /= 2) {
    const TenonU32 other = __shfl_xor_sync(0xffffffffu, most, d);
    most = other > most ? other : most;
  }
  const TenonScale scale = tenon_block_scale<Encoder>(most);
  for (int e = 0; e < 8; ++e) scaled[e] = v[e] * scale.multiplier;
  if (there && column % block == 0)
    tenon_put_scale<Encoder, true, scales_turned>(a, row, column / block, scale.inverse);
}

template <class Body>
__device__ inline void tenon_fetch_fixed(const TenonAccess* at,
                                         typename Body::Fixed (&fixed)[Body::kVectors]) {
#pragma unroll
  for (int n = 0; n < Body::kVectors; ++n)
    Body::fetch_fixed(at, 0, tenon_row_safe<Body>(n), fixed[n]);
}

// Tree sums of 32 vectors each. Two alternating sets, so that one barrier per set is enough.
template <class Body>
struct TenonRowShared {
  static constexpr int kParts = Body::kVectors * (Body::kThreads / 32);
  float parts[2][Body::kTotals + 1][kParts];
};

// One row. `source` loads its tiles. A total may use earlier totals.
template <class Body, class Source, class Arguments>
struct TenonRow {
  const Arguments& a;
  TenonRowShared<Body>& shared;
  const typename Body::Fixed (&fixed)[Body::kVectors];
  const Source& source;
  TenonU32 row;
  typename Body::Line line;
  float totals[Body::kTotals + 1];

  __device__ void values(int n, float (&out)[Body::kRoots][8]) const {
    float in[Body::kLoads + 1][8];
    const typename Body::Raw raw = source(n);
    typename Body::Fixed own;
    if constexpr (Body::kLate)
      Body::fetch_fixed(a.at, 0, tenon_row_safe<Body>(n), own);
    else
      own = fixed[n];
    Body::unpack(a.at, a.random, row, tenon_row_safe<Body>(n), raw, own, line, totals, in);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float x[Body::kLoads + 1];
      float y[Body::kRoots];
#pragma unroll
      for (int i = 0; i < Body::kLoads; ++i) x[i] = in[i][e];
      Body::compute(x, y);
#pragma unroll
      for (int i = 0; i < Body::kRoots; ++i) out[i][e] = y[i];
    }
  }

  // The tree over the parts of the totals of a group, in every warp.
  template <int t, int first, int count>
  __device__ void join(int turn) {
    constexpr int parts = TenonRowShared<Body>::kParts;
    constexpr int width = tenon_power(parts);
    constexpr int own = width > 32 ? width / 32 : 1;  // adjacent parts per lane
    float v[own];
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int at = own * (threadIdx.x % (width / own)) + i;
      v[i] = at < parts ? shared.parts[turn][t][at] : -0.0f;
    }
    float s = tenon_tree_of(v);
#pragma unroll
    for (int d = 1; d < width / own; d *= 2) s = s + __shfl_xor_sync(0xffffffffu, s, d);
    totals[first + t] = s;
    if constexpr (t + 1 < count) join<t + 1, first, count>(turn);
  }

  // Elements after the end of the row are -0, which adds nothing.
  template <int group>
  __device__ void total(int& turn) {
    constexpr int first = Body::kGroups[group];
    constexpr int count = Body::kGroups[group + 1] - first;
    constexpr int slots = tenon_power(count * Body::kVectors);
    float sums[slots];
#pragma unroll
    for (int i = count * Body::kVectors; i < slots; ++i) sums[i] = -0.0f;
#pragma unroll
    for (int n = 0; n < Body::kVectors; ++n) {
      float out[Body::kRoots][8];
      values(n, out);
#pragma unroll
      for (int t = 0; t < count; ++t)
        sums[t * Body::kVectors + n] =
            tenon_row_inside<Body>(n) ? tenon_tree_of(out[Body::kStores + first + t]) : -0.0f;
    }
    const float sum = TenonLanes<slots>::sum(sums);
    const int lane = threadIdx.x % 32;
    if (lane < count * Body::kVectors)
      shared.parts[turn][lane / Body::kVectors]
                  [lane % Body::kVectors * (Body::kThreads / 32) + threadIdx.x / 32] = sum;
    __syncthreads();
    join<0, first, count>(turn);
    turn ^= 1;
    if constexpr (first + count < Body::kTotals) total<group + 1>(turn);
  }

  // Computes totals, then stores. each(n, out) gets the results.
  template <class Each>
  __device__ void run(int& turn, TenonU32* most, const Each& each) {
    if constexpr (Body::kTotals > 0) total<0>(turn);
#pragma unroll
    for (int n = 0; n < Body::kVectors; ++n) {
      float out[Body::kRoots][8];
      values(n, out);
      Body::store(a, row, tenon_row_column<Body>(n), tenon_row_inside<Body>(n), out, most);
      if (n == 0 && threadIdx.x == 0) Body::columns(a, row, out);
      each(n, out);
    }
  }
};

template <class Body>
struct TenonHeldRow {
  typename Body::Raw raw[Body::kVectors];
  __device__ const typename Body::Raw& operator()(int n) const { return raw[n]; }
};

// One row per thread block, all of it in registers.
template <class Body, class Arguments>
__device__ inline void tenon_row_map(const Arguments& a) {
  __shared__ TenonRowShared<Body> shared;
  const TenonU32 row = blockIdx.x;
  TenonHeldRow<Body> held;
  typename Body::Fixed fixed[Body::kVectors];
#pragma unroll
  for (int n = 0; n < Body::kVectors; ++n)
    Body::fetch(a.at, row, tenon_row_safe<Body>(n), held.raw[n]);
  if constexpr (!Body::kLate) tenon_fetch_fixed<Body>(a.at, fixed);
  TenonRow<Body, TenonHeldRow<Body>, Arguments> r{a, shared, fixed, held, row, {}, {}};
  Body::fetch_line(a.at, row, r.line);
  TenonU32 most[Body::kAmax + 1] = {};
  int turn = 0;
  r.run(turn, most, [](int, const float(&)[Body::kRoots][8]) {});
  Body::finish(a, most);
}

// Asynchronous copies to shared memory. The copies before a mark are waited for together.
template <int bytes>
__device__ inline void tenon_copy(void* to, const TenonU8* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const TenonU32 at = static_cast<TenonU32>(__cvta_generic_to_shared(to));
  if (bytes == 8)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(at), "l"(from) : "memory");
  else
    for (int i = 0; i < bytes / 16; ++i)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at + 16 * i),
                   "l"(from + 16 * i)
                   : "memory");
#else
  for (int i = 0; i < bytes / 8; ++i)
    static_cast<TenonWords2*>(to)[i] = reinterpret_cast<const TenonWords2*>(from)[i];
#endif
}
__device__ inline void tenon_mark_copies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits for all but the last `left` marks. `left` is at most 3.
__device__ inline void tenon_wait_copies(int left) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if (left >= 3)
    asm volatile("cp.async.wait_group 3;" ::: "memory");
  else if (left == 2)
    asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (left == 1)
    asm volatile("cp.async.wait_group 1;" ::: "memory");
  else
    asm volatile("cp.async.wait_group 0;" ::: "memory");
#endif
}

template <class Body>
struct TenonStagedRow {
  const typename Body::Stage* stage;
  __device__ typename Body::Raw operator()(int n) const {
    typename Body::Raw raw;
    Body::from_stage(*stage, n, raw);
    return raw;
  }
};

// The index of column c of part p of sum k, of `count` parts. Strips of one cache line, as in
// tenon_partial.
template <class Body>
__device__ inline TenonI64 tenon_row_part(TenonI64 k, TenonI64 count, TenonI64 p, TenonU32 c) {
  constexpr TenonU32 kStrips = (Body::kCols + kTenonLine - 1) / kTenonLine;
  return ((k * kStrips + c / kTenonLine) * count + p) * kTenonLine + c % kTenonLine;
}

// The sums over the rows of a thread block, added in sequence.
template <class Body>
struct TenonRowSums {
  float v[Body::kSums + 1][Body::kVectors][8];
  __device__ TenonRowSums() {
#pragma unroll
    for (int k = 0; k < Body::kSums; ++k)
#pragma unroll
      for (int n = 0; n < Body::kVectors; ++n)
#pragma unroll
        for (int e = 0; e < 8; ++e) v[k][n][e] = -0.0f;
  }
  __device__ void operator()(int n, const float (&out)[Body::kRoots][8]) { Body::sum(out, n, v); }
  template <class Arguments>
  __device__ void store(const Arguments& a) const {
#pragma unroll
    for (int k = 0; k < Body::kSums; ++k)
#pragma unroll
      for (int n = 0; n < Body::kVectors; ++n)
        if (tenon_row_inside<Body>(n))
          tenon_put_kept8(
              a.to + tenon_row_part<Body>(k, gridDim.x, blockIdx.x, tenon_row_column<Body>(n)),
              v[k][n]);
  }
};

// A thread block processes 32 rows in sequence. The next rows are copied to shared memory. A thread
// reads only its own copies.
template <class Body, class Arguments>
__device__ inline void tenon_row_ring(const Arguments& a) {
  using Stage = typename Body::Stage;
  __shared__ TenonRowShared<Body> shared;
#if defined(__CUDA_ARCH__)
  extern __shared__ TenonWords4 tenon_ring[];
  Stage* const ring = reinterpret_cast<Stage*>(tenon_ring);
  TenonU32 bytes;
  asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  const int depth = static_cast<int>(bytes / static_cast<TenonU32>(sizeof(Stage)));
#else
  static Stage ring[2];
  const int depth = 2;
#endif
  const TenonU32 first = blockIdx.x * kTenonSumRows;
  const TenonU32 last = static_cast<TenonU32>(tenon_least(first + kTenonSumRows, a.rows));
  const auto copy = [&](TenonU32 row, int to) {
    if (row < last)
#pragma unroll
      for (int n = 0; n < Body::kVectors; ++n)
        Body::to_stage(a.at, row, tenon_row_safe<Body>(n), n, ring[to]);
    tenon_mark_copies();
  };
  for (int i = 0; i < depth; ++i) copy(first + i, i);
  typename Body::Fixed fixed[Body::kVectors];
  tenon_fetch_fixed<Body>(a.at, fixed);
  typename Body::Line next;
  Body::fetch_line(a.at, first, next);
  TenonRowSums<Body> sums;
  TenonU32 most[Body::kAmax + 1] = {};
  int turn = 0;
  int at = 0;
  for (TenonU32 row = first; row < last; ++row) {
    const TenonStagedRow<Body> staged{ring + at};
    TenonRow<Body, TenonStagedRow<Body>, Arguments> r{a, shared, fixed, staged, row, next, {}};
    Body::fetch_line(a.at, row + 1 < last ? row + 1 : row, next);
    tenon_wait_copies(depth - 1);
    r.run(turn, most, [&](int n, const float(&out)[Body::kRoots][8]) { sums(n, out); });
    copy(row + static_cast<TenonU32>(depth), at);
    at = at + 1 == depth ? 0 : at + 1;
  }
  sums.store(a);
  Body::finish(a, most);
}

// The same without shared memory, for rows that are too long for it.
template <class Body, class Arguments>
__device__ inline void tenon_row_chunk(const Arguments& a) {
  __shared__ TenonRowShared<Body> shared;
  const TenonU32 first = blockIdx.x * kTenonSumRows;
  const TenonU32 last = static_cast<TenonU32>(tenon_least(first + kTenonSumRows, a.rows));
  typename Body::Fixed fixed[Body::kVectors];
  tenon_fetch_fixed<Body>(a.at, fixed);
  TenonRowSums<Body> sums;
  TenonU32 most[Body::kAmax + 1] = {};
  int turn = 0;
  for (TenonU32 row = first; row < last; ++row) {
    TenonHeldRow<Body> held;
#pragma unroll
    for (int n = 0; n < Body::kVectors; ++n)
      Body::fetch(a.at, row, tenon_row_safe<Body>(n), held.raw[n]);
    TenonRow<Body, TenonHeldRow<Body>, Arguments> r{a, shared, fixed, held, row, {}, {}};
    Body::fetch_line(a.at, row, r.line);
    r.run(turn, most, [&](int n, const float(&out)[Body::kRoots][8]) { sums(n, out); });
  }
  sums.store(a);
  Body::finish(a, most);
}

// The tree over the sums of thread blocks: 512 sums for 32 columns per thread block. The rest is
// written to `to`.
template <class Body, class Arguments>
__device__ inline void tenon_row_sums(const Arguments& a) {
  constexpr int kOwn = 16;
  __shared__ float parts[32][32];
  const TenonU32 across = (Body::kCols + kTenonLine - 1) / kTenonLine;
  const TenonI64 groups = (a.count + 32 * kOwn - 1) / (32 * kOwn);
  const TenonU32 tile = blockIdx.x % across;
  const TenonI64 group = blockIdx.x / across % groups;
  const TenonI64 k = blockIdx.x / across / groups;
  const int x = threadIdx.x % 32;
  const TenonU32 column = tile * 32 + x;
  const TenonI64 first = (group * 32 + threadIdx.x / 32) * kOwn;
  const float* const from = a.from + tenon_row_part<Body>(k, a.count, first, tile * kTenonLine);
  float v[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    v[i] = column < Body::kCols && first + i < a.count ? from[i * kTenonLine + x] : -0.0f;
  parts[threadIdx.x / 32][x] = tenon_tree_of(v);
  __syncwarp();
  if (x < kOwn && first + x < a.count) tenon_let_go(from + x * kTenonLine);
  __syncthreads();
  if (threadIdx.x >= 32 || column >= Body::kCols) return;
  float s[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) s[i] = parts[i][x];
  const float sum = tenon_tree_of(s);
  if (groups == 1)
    Body::end_sum(a, static_cast<int>(k), column, sum);
  else
    tenon_put_kept(a.to + tenon_row_part<Body>(k, groups, group, column), sum);
}
