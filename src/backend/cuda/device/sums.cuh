// Column sums in two kernels: the first writes a partial row for each row of tiles, the second adds
// the partial rows as a tree. Follows vector.cuh.

// Stores a value for the next kernel. It stays in the L2 cache until a thread calls tenon_let_go on
// its line. A line that is discarded there is never written to memory.
__device__ inline void tenon_put_kept(float* to, float v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile(
      "{.reg .b64 p; createpolicy.fractional.L2::evict_last.b64 p, 1.0;"
      " st.global.L2::cache_hint.f32 [%0], %1, p;}" ::"l"(to),
      "f"(v)
      : "memory");
#else
  *to = v;
#endif
}
// Eight such values, in aligned memory.
__device__ inline void tenon_put_kept8(float* to, const float (&v)[8]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  TenonU64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  for (int i = 0; i < 8; i += 4)
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to + i),
                 "f"(v[i]), "f"(v[i + 1]), "f"(v[i + 2]), "f"(v[i + 3]), "l"(policy)
                 : "memory");
#else
  for (int i = 0; i < 8; ++i) to[i] = v[i];
#endif
}
// If memory does not start at a cache line, two blocks share some lines. Such a line only loses its
// priority. On the host the values are overwritten, so that tests detect later reads.
__device__ inline void tenon_let_go(const float* line) {
#if !defined(__CUDA_ARCH__)
  for (int i = 0; i < kTenonLine; ++i) const_cast<float*>(line)[i] = tenon_bits(0x7fc00000u);
#elif __CUDA_ARCH__ >= 800
  constexpr TenonU64 kBytes = kTenonLine * sizeof(float);
  const TenonU64 address = reinterpret_cast<TenonU64>(line);
  if (address % kBytes == 0)
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(address) : "memory");
  else
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(address / kBytes * kBytes)
                 : "memory");
#endif
}

// Partial rows are in strips of `strip` columns. Each strip has its own cache lines, so only the
// block that adds the strip reads them.
template <int tile_rows, int strip, class Arguments>
__device__ inline float* tenon_partial(const Arguments& a, TenonU32 row, TenonU32 column) {
  constexpr TenonU32 kLineRows = kTenonLine / strip;
  const TenonU32 rows = static_cast<TenonU32>((a.rows + tile_rows - 1) / tile_rows);
  const TenonU32 taken = (rows + kLineRows - 1) / kLineRows * kTenonLine;  // floats of a strip
  return a.partial + tenon_wide(column / strip, taken, row * strip + column % strip);
}

// The tree over the partial rows of the strip of this block. Each group of `strip` threads has an
// aligned part of the rows, 16 rows at a time. Missing rows are -0, which adds nothing. The first
// threads get the sums of the columns, the other threads 0.
template <int tile_rows, int sums, int strip, class Arguments>
__device__ inline float tenon_sum_partials(const Arguments& a) {
  __shared__ float done[32][strip];  // sums of warps
  constexpr int kLevels = 20;
  const TenonU32 rows = static_cast<TenonU32>((a.rows + tile_rows - 1) / tile_rows);
  const int own = threadIdx.x % strip;
  const bool there = blockIdx.x * strip + own < sums * static_cast<TenonU32>(a.cols);
  TenonU32 part = 16;
  while (blockDim.x / strip * part < rows) part *= 2;
  const TenonU32 first = threadIdx.x / strip * part;
  float held[kLevels];  // sums of 16·2^i rows
  float sum = -0.0f;
#pragma unroll 1
  for (TenonU32 n = 0; n < part / 16; ++n) {
    const TenonU32 row = first + 16 * n;
    float* const from = tenon_partial<tile_rows, strip>(a, row, blockIdx.x * strip);
    float v[16];
    for (int i = 0; i < 16; ++i) v[i] = there && row + i < rows ? from[i * strip + own] : -0.0f;
    for (int m = 8; m > 0; m /= 2)
      for (int i = 0; i < m; ++i) v[i] = v[2 * i] + v[2 * i + 1];
    sum = v[0];
    __syncwarp();
    for (int i = own; i < 16 / (kTenonLine / strip); i += strip)
      if (row + i * (kTenonLine / strip) < rows) tenon_let_go(from + i * kTenonLine);
    bool joins = true;
    for (int level = 0; level < kLevels; ++level) {
      const bool odd = (n >> level) % 2 != 0;
      if (joins && !odd) held[level] = sum;
      joins = joins && odd;
      if (joins) sum = held[level] + sum;
    }
  }
  for (int step = strip; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (threadIdx.x % 32 < strip) done[threadIdx.x / 32][own] = sum;
  __syncthreads();
  if (threadIdx.x >= strip) return 0;
  float v[32];
  for (int i = 0; i < 32; ++i) v[i] = i < blockDim.x / 32 ? done[i][own] : -0.0f;
  for (int m = 16; m > 0; m /= 2)
    for (int i = 0; i < m; ++i) v[i] = v[2 * i] + v[2 * i + 1];
  return v[0];
}
