// A product on Hopper tensor cores (sm_90a) with a body on its accumulators. A thread block
// computes tiles of 128 rows one after the other. One thread copies operands into a ring of stages.
// There are two groups of 128 threads: one multiplies while the other runs the body. Follows
// sums.cuh.

constexpr TenonU32 kTenonBox = 64 * 128;  // bytes of 64 lanes in one step
constexpr TenonU32 kTenonRaster = 16;     // rows of tiles in a band

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ inline void tenon_barrier_start(TenonU32 barrier, TenonU32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void tenon_barrier_wait(TenonU32 barrier, TenonU32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, 0x989680;\n"
      "@!done bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void tenon_barrier_expect(TenonU32 barrier, TenonU32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ inline void tenon_barrier_arrive(TenonU32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Named barriers of the two groups: wait for both, or arrive without waiting.
__device__ inline void tenon_turn_wait(TenonU32 number) {
  asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory");
}
__device__ inline void tenon_turn_give(TenonU32 number) {
  asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory");
}

// L2 policies of the copies. The tiles to the right read a again, so it is kept. Only tiles that
// run at the same time read b.
constexpr TenonU64 kTenonKeep = 0x1000000000000000ull, kTenonPass = 0x12f0000000000000ull;

__device__ inline void tenon_copy_2d(TenonU32 to, const TenonTensorMap& map, TenonU32 barrier,
                                     TenonU64 hint, TenonU32 x, TenonU32 y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(hint)
      : "memory");
}
__device__ inline void tenon_copy_3d(TenonU32 to, const TenonTensorMap& map, TenonU32 barrier,
                                     TenonU64 hint, TenonU32 x, TenonU32 y, TenonU32 z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(hint)
      : "memory");
}
__device__ inline void tenon_copy_5d(TenonU32 to, const TenonTensorMap& map, TenonU32 barrier,
                                     TenonU64 hint, TenonU32 x, TenonU32 y) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %5, %5, %5, %4}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(0), "l"(hint)
      : "memory");
}

__device__ inline void tenon_products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void tenon_products_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int left>
__device__ inline void tenon_products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(left) : "memory");
}

// The descriptor of an operand in shared memory with the 128-byte swizzle. Low word: the address
// and, if lanes are contiguous, the distance of 64 lanes. High word: the distance of 8 rows.
template <bool contiguous_lanes>
__device__ inline TenonU32 tenon_operand(TenonU32 place) {
  return (contiguous_lanes ? kTenonBox >> 4 << 16 : 0x10000u) | (place >> 4 & 0x3fffu);
}
__device__ inline TenonU64 tenon_descriptor(TenonU32 low) {
  TenonU64 all;
  asm("mov.b64 %0, {%1, %2};" : "=l"(all) : "r"(low), "r"(0x40000040u));
  return all;
}
// Offset between two products of 16 along the inner dimension, in units of 16 bytes.
template <bool contiguous_lanes>
__device__ constexpr TenonU32 tenon_next_sixteen() {
  return contiguous_lanes ? 16 * 128 / 16 : 2;
}

// The tile order: bands of kTenonRaster rows of tiles, column by column.
struct TenonTileAt {
  TenonU32 down, across;
};
template <class Arguments>
__device__ inline TenonTileAt tenon_tile_at(const Arguments& a, TenonU32 tile) {
  const TenonU32 band = tile / (kTenonRaster * a.across);
  const TenonU32 in_band = tile - band * kTenonRaster * a.across;
  const TenonU32 left = a.down - band * kTenonRaster;
  const TenonU32 high = left < kTenonRaster ? left : kTenonRaster;
  const TenonU32 across = in_band / high;
  return {band * kTenonRaster + in_band - across * high, across};
}

// Eight columns of one row for each thread, out of 32. If b's lanes were permuted, a thread already
// has adjacent columns. Otherwise lane t of four has columns 2t and 2t + 1 of each group of eight,
// and exchanges them for group t.
template <bool ordered>
__device__ inline void tenon_columns(float (&v)[8]) {
  if (ordered) return;
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const auto exchange = [&](int i, int j, bool swap) {
    const float x = v[i], y = v[j];
    v[i] = swap ? y : x;
    v[j] = swap ? x : y;
  };
  const auto by_lane = [&] {
    for (int e = 0; e < 2; ++e) {
      exchange(e, 2 + e, odd);
      exchange(4 + e, 6 + e, odd);
      exchange(e, 4 + e, high);
      exchange(2 + e, 6 + e, high);
    }
  };
  by_lane();
  for (int i = 2; i < 8; ++i) v[i] = __shfl_xor_sync(0xffffffffu, v[i], i / 2);
  by_lane();
}

template <class Body>
struct TenonGemmShape {
  static constexpr int kWidth = Body::kWidth, kStages = Body::kStages;
  static constexpr int kPart = kWidth / Body::kProducts;  // columns of the body
  static constexpr TenonU32 kBytesA = 2 * kTenonBox, kBytesB = kWidth / 64 * kTenonBox;
  static constexpr TenonU32 kB = kStages * kBytesA;  // start of the stages of b; barriers follow
  static constexpr TenonU32 kFull = kB + kStages * kBytesB, kEmpty = kFull + kStages * 8;
  // Floats of the column sums of one group, which follow.
  static constexpr int kSums = Body::kSums * kTenonTileSums * kPart;
  static constexpr TenonU32 kSumsAt = kEmpty + kStages * 8;
  // A unit: the accumulators that a thread processes at once. Rows r and r + 8, or one row, of 32
  // columns.
  static constexpr int kUnits = kPart / 32 * 4 / Body::kRows;
};

// The products of a unit. Registers cannot be indexed, so this selects by unit. A copy of a long
// body per unit would not fit the instruction cache with the product loop.
template <class Body, int first, int count, int size>
__device__ inline void tenon_take(const float (&d)[2][size], int unit,
                                  float (&product)[Body::kRows][Body::kProducts][8]) {
  if constexpr (count > 1) {
    if (unit < first + count / 2)
      tenon_take<Body, first, count / 2>(d, unit, product);
    else
      tenon_take<Body, first + count / 2, count - count / 2>(d, unit, product);
  } else {
    constexpr int kPart32 = TenonGemmShape<Body>::kPart / 32;
    constexpr int row = first * Body::kRows % 4, part = first * Body::kRows / 4;
#pragma unroll
    for (int r = 0; r < Body::kRows; ++r)
#pragma unroll
      for (int p = 0; p < Body::kProducts; ++p)
#pragma unroll
        for (int i = 0; i < 8; ++i)
          product[r][p][i] =
              d[(row + r) / 2][(p * kPart32 + part) * 16 + i / 2 * 4 + (row + r) % 2 * 2 + i % 2];
  }
}

// One thread: copies the operands of all tiles of the thread block as stages become free.
template <class Body, class Arguments>
__device__ inline void tenon_gemm_copy(const Arguments& a, TenonU32 base) {
  using Shape = TenonGemmShape<Body>;
  TenonU32 stage = 0, parity = 1;
  for (TenonU32 tile = blockIdx.x; tile < a.down * a.across; tile += gridDim.x) {
    const TenonTileAt at = tenon_tile_at(a, tile);
    const TenonU32 row = at.down * kTenonTileRows, column = at.across * Shape::kPart;
    for (TenonU32 step = 0; step < a.steps; ++step) {
      const TenonU32 k = step * kTenonStep, full = base + Shape::kFull + stage * 8;
      tenon_barrier_wait(base + Shape::kEmpty + stage * 8, parity);
      tenon_barrier_expect(full, Shape::kBytesA + Shape::kBytesB);
      const TenonU32 to_a = base + stage * Shape::kBytesA;
      const TenonU32 to_b = base + Shape::kB + stage * Shape::kBytesB;
      if (Body::kLanesA) {
        tenon_copy_2d(to_a, a.map[0], full, kTenonKeep, row, k);
        tenon_copy_2d(to_a + kTenonBox, a.map[0], full, kTenonKeep, row + 64, k);
      } else {
        tenon_copy_2d(to_a, a.map[0], full, kTenonKeep, k, row);
      }
#pragma unroll
      for (int p = 0; p < Body::kProducts; ++p) {
        const TenonU32 to = to_b + p * (Shape::kBytesB / Body::kProducts);
        const TenonTensorMap& map = a.map[1 + p];
        if (Body::kLanesB) {
#pragma unroll
          for (int i = 0; i < Shape::kPart / 64; ++i)
            tenon_copy_2d(to + i * kTenonBox, map, full, kTenonPass, column + i * 64, k);
        } else if (Body::kOrdered) {
          tenon_copy_5d(to, map, full, kTenonPass, k, column / 32);
        } else {
          const TenonU32 block = column / a.block;
          tenon_copy_3d(to, map, full, kTenonPass, k, column - block * a.block, block);
        }
      }
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// First row and column of the part of a unit that a thread has.
template <class Body>
struct TenonGemmPlace {
  TenonU32 row, column;
  __device__ TenonGemmPlace(TenonTileAt at, int unit) {
    const TenonU32 lane = threadIdx.x % 32, first = unit * Body::kRows % 4;
    row = at.down * kTenonTileRows + threadIdx.x % 128 / 32 * 16 + lane / 4 + first / 2 * 64 +
          first % 2 * 8;
    column = at.across * TenonGemmShape<Body>::kPart + unit * Body::kRows / 4 * 32 + lane % 4 * 8;
  }
  template <class Arguments>
  __device__ bool inside(const Arguments& a, int r) const {
    return row + 8 * r < a.rows && column < a.cols;
  }
};

// Adds eight rows as a tree. Lanes at a distance of 4 have adjacent rows of the same eight columns.
// Each lane stores the sum of one column in `to`, which has 32 columns.
__device__ inline void tenon_sum_lanes(const float (&out)[8], bool there, float* to) {
  const TenonU32 lane = threadIdx.x % 32;
  float v[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = there ? out[e] : -0.0f;
    // At each level a lane keeps half of its columns and gives away the others.
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    const int half = 4 >> level, bit = 4 << level;
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float own = upper ? v[i + half] : v[i], other = upper ? v[i] : v[i + half];
      v[i] = own + __shfl_xor_sync(0xffffffffu, other, bit);
    }
  }
  to[lane % 4 * 8 + (lane & 4) + (lane & 8) / 4 + (lane & 16) / 16] = v[0];
}

// The sums of a tile from those of its blocks of eight rows. All threads of a group call it.
template <class Body, class Arguments>
__device__ inline void tenon_sum_tile(const Arguments& a, TenonTileAt tile, const float* sums,
                                      TenonU32 group) {
  constexpr int kPart = TenonGemmShape<Body>::kPart;
  asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");  // numbers 1 and 2 are the turns
  for (int own = threadIdx.x % 128; own < Body::kSums * kPart; own += 128) {
    const int k = own / kPart;
    const TenonU32 column = tile.across * kPart + own % kPart;
    float v[kTenonTileSums];
#pragma unroll
    for (int i = 0; i < kTenonTileSums; ++i)
      v[i] = sums[(k * kTenonTileSums + i) * kPart + own % kPart];
#pragma unroll
    for (int n = kTenonTileSums / 2; n > 0; n /= 2)
#pragma unroll
      for (int i = 0; i < kTenonTileSums / 2; ++i)  // constant bounds keep v in registers
        if (i < n) v[i] = v[2 * i] + v[2 * i + 1];
    if (column < a.cols)
      tenon_put_kept(tenon_partial<kTenonTileRows, Body::kStrip>(a, tile.down, k * a.cols + column),
                     v[0]);
  }
}

// The vector loads of the body of a unit.
template <class Body>
struct TenonGemmUnit {
  typename Body::Raw raw[Body::kRows];
  typename Body::RawRow raw_row;

  template <class Arguments>
  __device__ void start(const Arguments& a, TenonTileAt tile, int unit) {
    const TenonGemmPlace<Body> at(tile, unit);
    if (at.inside(a, 0)) Body::fetch_row(a.at, at.row, at.column, raw_row);
#pragma unroll
    for (int r = 0; r < Body::kRows; ++r)
      if (at.inside(a, r)) Body::fetch(a.at, at.row + 8 * r, at.column, raw[r]);
  }
  template <class Arguments>
  __device__ void run(const Arguments& a, TenonTileAt tile, int unit,
                      float (&product)[Body::kRows][Body::kProducts][8], const float* multiplier,
                      TenonU32* most, float* sums) const {
    const TenonGemmPlace<Body> at(tile, unit);
#pragma unroll
    for (int r = 0; r < Body::kRows; ++r) {
#pragma unroll
      for (int p = 0; p < Body::kProducts; ++p) tenon_columns<Body::kOrdered>(product[r][p]);
      const bool inside = at.inside(a, r);
      if (Body::kSums == 0 && !inside) continue;
      const TenonU32 row = at.row + 8 * r;
      float out[Body::kStores][8];
      if (inside) {
        float in[Body::kLoads + 1][8];
        Body::unpack(a.at, a.random, row, at.column, raw[r], raw_row, product[r], in);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          float x[Body::kLoads + 1];
          float y[Body::kStores];
          for (int i = 0; i < Body::kLoads; ++i) x[i] = in[i][e];
          Body::compute(x, y);
          for (int i = 0; i < Body::kStores; ++i) out[i][e] = y[i];
        }
        Body::store(a, row, at.column, out, multiplier, most);
      }
      if constexpr (Body::kSums > 0) {
        constexpr int kPart = TenonGemmShape<Body>::kPart;
        const TenonU32 block = (row - tile.down * kTenonTileRows) / 8;
        Body::sum(out, [&](int k, const float(&v)[8]) {
          tenon_sum_lanes(
              v, inside, sums + (k * kTenonTileSums + block) * kPart + unit * Body::kRows / 4 * 32);
        });
      }
    }
  }
};

// Prefetches a cache line to L2.
__device__ inline void tenon_ahead(const TenonU8* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Two groups take the tiles of the thread block alternately.
template <class Body, class Arguments>
__device__ inline void tenon_gemm_multiply(const Arguments& a, TenonU32 base, TenonU32 group) {
  using Shape = TenonGemmShape<Body>;
  constexpr TenonU32 kNextA = tenon_next_sixteen<Body::kLanesA>();
  constexpr TenonU32 kNextB = tenon_next_sixteen<Body::kLanesB>();
  constexpr TenonU32 kTurn = 1;  // first of two named barriers
  const TenonU32 from_a = tenon_operand<Body::kLanesA>(base);
  const TenonU32 from_b = tenon_operand<Body::kLanesB>(base + Shape::kB);
  const TenonU32 lane = threadIdx.x % 32;
  TenonU32 before[Body::kAmax + 1];
  TenonU32 most[Body::kAmax + 1] = {};
  float multiplier[Body::kEncoders + 1];
  Body::start(a, before, multiplier);
  float d[2][Shape::kWidth / 2];
  float* const sums =
      static_cast<float*>(__cvta_shared_to_generic(base + Shape::kSumsAt)) + group * Shape::kSums;
  TenonU32 stage = 0, parity = 0, turn = 0;
  if (group == 1) tenon_turn_give(kTurn);
  for (TenonU32 tile = blockIdx.x; tile < a.down * a.across; tile += gridDim.x, turn ^= 1) {
    if (turn != group) {
      const TenonU32 laps = (stage + a.steps) / Shape::kStages;
      stage = stage + a.steps - laps * Shape::kStages;
      parity ^= laps & 1;
      continue;
    }
    const TenonTileAt at = tenon_tile_at(a, tile);
    Body::ahead(a, at.down * kTenonTileRows + threadIdx.x % 128, at.across * Shape::kPart);
    // Waits until the other group has seen its last stage: the same parity returns one lap later.
    tenon_turn_wait(kTurn + group);
    TenonU32 last = 0;
#pragma unroll 1
    for (TenonU32 step = 0; step < a.steps; ++step) {
      tenon_barrier_wait(base + Shape::kFull + stage * 8, parity);
      tenon_products_begin();
      const TenonU32 at_a = from_a + stage * (Shape::kBytesA >> 4);
      const TenonU32 at_b = from_b + stage * (Shape::kBytesB >> 4);
#pragma unroll
      for (TenonU32 k = 0; k < kTenonStep / 16; ++k)
#pragma unroll
        for (TenonU32 half = 0; half < 2; ++half)
          Body::multiply(d[half], tenon_descriptor(at_a + half * (kTenonBox >> 4) + k * kNextA),
                         tenon_descriptor(at_b + k * kNextB), (step | k) != 0);
      tenon_products_commit();
      if (step > 0) {
        tenon_products_wait<1>();
        if (lane == 0) tenon_barrier_arrive(base + Shape::kEmpty + last * 8);
      }
      if (step == a.steps - 1) tenon_turn_give(kTurn + 1 - group);
      last = stage;
      if (++stage == Shape::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    tenon_products_wait<0>();
    if (lane == 0) tenon_barrier_arrive(base + Shape::kEmpty + last * 8);

    // Loads of the next unit overlap with the current unit.
    TenonGemmUnit<Body> now;
    now.start(a, at, 0);
#pragma unroll Body::kUnrolled ? Shape::kUnits : 1
    for (int unit = 0; unit < Shape::kUnits; ++unit) {
      float product[Body::kRows][Body::kProducts][8];
      tenon_take<Body, 0, Shape::kUnits>(d, unit, product);
      TenonGemmUnit<Body> next;
      if (unit + 1 < Shape::kUnits) next.start(a, at, unit + 1);
      now.run(a, at, unit, product, multiplier, most, sums);
      now = next;
    }
    // The next tile writes the sums after the group has waited for its turn.
    if constexpr (Body::kSums > 0) tenon_sum_tile<Body>(a, at, sums, group);
  }
  Body::finish(a, most, before);
}

// Body is printed as for vector.cuh, with these differences:
// - Vectors of tiles and rows are separate from other loads: Raw and RawRow, fetch and fetch_row,
//   unpack, and ahead for a whole tile.
// - kWidth: columns of a product tile. kProducts: columns of the product that an element reads.
// - kRows: rows of a unit. kUnrolled: one copy of the body per unit.
// - kStages: stages of the ring. kSums and kStrip: as for tiles. sum: calls its argument for each
//   sum.
// - kLanesA, kLanesB: rows of a, or columns of b, are contiguous.
// - kOrdered: b's lanes are permuted. multiply: the instruction.
template <class Body, class Arguments>
__device__ inline void tenon_gemm(const Arguments& a) {
  using Shape = TenonGemmShape<Body>;
  extern __shared__ TenonU8 tenon_gemm_memory[];
  constexpr TenonU32 kSwizzle = 1024;  // period of the swizzle pattern, in bytes
  const TenonU32 base =
      (static_cast<TenonU32>(__cvta_generic_to_shared(tenon_gemm_memory)) + kSwizzle - 1) /
      kSwizzle * kSwizzle;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      tenon_barrier_start(base + Shape::kFull + i * 8, 1);
      tenon_barrier_start(base + Shape::kEmpty + i * 8, 4);  // one arrival per warp of the group
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == 256) tenon_gemm_copy<Body>(a, base);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    tenon_gemm_multiply<Body>(a, base, group);
  }
}

#else

// Other architectures compile an empty kernel. The host never launches it.
template <class Body, class Arguments>
__device__ inline void tenon_gemm(const Arguments&) {}

#endif
