// A product on Hopper tensor cores (sm_90a) with a body on its accumulators. A thread block
// computes tiles one after the other. One thread copies operands into a ring of stages. Groups of
// 128 threads multiply and run the body. Two groups alternate: one multiplies while the other runs
// the body of its tile. Or three groups have 64 rows of each tile and promote FP8 sums. Follows
// sums.cuh.

constexpr TenonU32 kTenonBox = 64 * 128;  // bytes of 64 lanes in one step
constexpr TenonU32 kTenonRaster = 16;     // rows of tiles in a band
constexpr TenonU32 kTenonTurn = 1;        // the first of two named barriers

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

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

template <class Body>
struct TenonGemmShape {
  static constexpr int kWidth = Body::kWidth, kStages = Body::kStages;
  static constexpr int kPart = kWidth / Body::kProducts;  // columns of the body
  static constexpr bool kPromoted = Body::kPromoted;
  static constexpr int kGroups = kPromoted ? 3 : 2;
  static constexpr int kGroupRows = kPromoted ? 64 : 128;
  static constexpr int kTileRows = kPromoted ? 192 : 128;
  static constexpr int kHalves = kGroupRows / 64;  // products of 64 rows
  static constexpr int kThreadRows = kGroupRows / 32;
  static constexpr TenonU32 kBytesA = kTileRows * kTenonStepBytes;
  static constexpr TenonU32 kBytesB = kWidth * kTenonStepBytes;
  // Scales of blocks in a step: one for each row of a, and for each column of b or for 128.
  static constexpr TenonU32 kScalesA = Body::kBlocks ? kTileRows * 4 : 0;
  static constexpr TenonU32 kScalesB = Body::kBlocks && Body::kBlocksB == 1 ? kWidth * 4 : 0;
  static constexpr TenonU32 kScaleBytes = kScalesA + kScalesB;
  static constexpr TenonU32 kB = kStages * kBytesA;  // start of the stages of b
  static constexpr TenonU32 kScalesAt = kB + kStages * kBytesB;
  static constexpr TenonU32 kFull = kScalesAt + kStages * kScaleBytes, kEmpty = kFull + kStages * 8;
  // Floats of the column sums of one group: one row for each block of eight rows.
  static constexpr int kBlockRows = kGroupRows / 8;
  static constexpr int kSums = Body::kSums * kBlockRows * kPart;
  static constexpr TenonU32 kSumsAt = kEmpty + kStages * 8;
  // Codes that a group turns: two buffers.
  static constexpr TenonU32 kTurnedBytes = Body::kTurned * kTenonTurned * kGroupRows;
  static constexpr TenonU32 kTurnedAt = (kSumsAt + kGroups * kSums * 4 + 15) / 16 * 16;
  // A unit: the accumulators that a thread processes at once. One or more rows of 32 columns.
  static constexpr int kUnits = kPart / 32 * kThreadRows / Body::kRows;
};

// The first row of the group of this thread.
template <class Body>
__device__ inline TenonU32 tenon_group_row(TenonTileAt at) {
  using Shape = TenonGemmShape<Body>;
  return at.down * Shape::kTileRows +
         (Shape::kPromoted ? threadIdx.x / 128 * Shape::kGroupRows : 0);
}

// The place of a group in the ring of stages.
struct TenonRing {
  TenonU32 stage = 0, parity = 0;
  __device__ void next(TenonU32 stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ void skip(TenonU32 steps, TenonU32 stages) {
    const TenonU32 laps = (stage + steps) / stages;
    stage = stage + steps - laps * stages;
    parity ^= laps & 1;
  }
};

#if defined(__CUDA_ARCH__)

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

// Named barriers of two groups that alternate: wait for both, or arrive without waiting.
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

// Copies `bytes` from one place, a multiple of 16.
__device__ inline void tenon_copy_line(TenonU32 to, const void* from, TenonU32 barrier,
                                       TenonU32 bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
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
// A product takes 32 bytes along the inner dimension. Offset between two of them, in units of 16
// bytes. If lanes are contiguous, elements have 2 bytes.
constexpr TenonU32 kTenonProducts = kTenonStepBytes / 32;
template <bool contiguous_lanes>
__device__ constexpr TenonU32 tenon_next_product() {
  return contiguous_lanes ? 16 * 128 / 16 : 2;
}

// Copies of the scales of one step: those of the rows of a, and those of the columns of b if each
// has its own. The host has rounded up the number of scales to whole copies.
template <class Body>
struct TenonGemmScales {
  using Shape = TenonGemmShape<Body>;
  TenonU32 row, column, bytes_a = 0, bytes_b = 0;
  template <class Arguments>
  __device__ TenonGemmScales(const Arguments& a, TenonU32 r, TenonU32 c) : row(r), column(c) {
    if (!Body::kBlocks) return;
    const auto count = [](TenonU32 left, TenonU32 most) {
      const TenonU32 whole = (left + 3) / 4 * 4;
      return (whole < most ? whole : most) * 4;
    };
    bytes_a = count(a.rows - row, Shape::kTileRows);
    if (Shape::kScalesB > 0) bytes_b = count(a.cols - column, Shape::kPart);
  }
  __device__ TenonU32 bytes() const { return bytes_a + Body::kProducts * bytes_b; }
  template <class Arguments>
  __device__ void copy(const Arguments& a, TenonU32 to, TenonU32 full, TenonU32 step) const {
    if (!Body::kBlocks) return;
    tenon_copy_line(to, a.scale_a + tenon_wide(step, a.pitch_a, row), full, bytes_a);
    if (Shape::kScalesB == 0) return;
#pragma unroll
    for (int p = 0; p < Body::kProducts; ++p)
      tenon_copy_line(to + Shape::kScalesA + p * (Shape::kScalesB / Body::kProducts),
                      a.scale_b + tenon_wide(step, a.pitch_b, a.start[p] + column), full, bytes_b);
  }
};

// One thread: copies the operands of all tiles of the thread block as stages become free.
template <class Body, class Arguments>
__device__ inline void tenon_gemm_copy(const Arguments& a, TenonU32 base) {
  using Shape = TenonGemmShape<Body>;
  TenonU32 stage = 0, parity = 1;
  for (TenonU32 tile = blockIdx.x; tile < a.down * a.across; tile += gridDim.x) {
    const TenonTileAt at = tenon_tile_at(a, tile);
    const TenonU32 row = at.down * Shape::kTileRows, column = at.across * Shape::kPart;
    const TenonGemmScales<Body> scales(a, row, column);
    for (TenonU32 step = 0; step < a.steps; ++step) {
      const TenonU32 k = step * Body::kStep, full = base + Shape::kFull + stage * 8;
      tenon_barrier_wait(base + Shape::kEmpty + stage * 8, parity);
      tenon_barrier_expect(full, Shape::kBytesA + Shape::kBytesB + scales.bytes());
      scales.copy(a, base + Shape::kScalesAt + stage * Shape::kScaleBytes, full, step);
      const TenonU32 to_a = base + stage * Shape::kBytesA;
      const TenonU32 to_b = base + Shape::kB + stage * Shape::kBytesB;
      if (Body::kLanesA) {
#pragma unroll
        for (int i = 0; i < Shape::kTileRows / 64; ++i)
          tenon_copy_2d(to_a + i * kTenonBox, a.map[0], full, kTenonKeep, row + i * 64, k);
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

// All threads of a group wait for each other. Numbers 1 and 2 are the turns of two groups.
__device__ inline void tenon_group_wait() {
  asm volatile("bar.sync %0, 128;" ::"r"(3 + threadIdx.x / 128) : "memory");
}

// Prefetches a cache line to L2.
__device__ inline void tenon_ahead(const TenonU8* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// The factors of the sums of one step. With one scale for each operand the body applies them.
template <class Body>
struct TenonFactors {
  using Shape = TenonGemmShape<Body>;
  TenonU32 rows, columns;  // of this thread, in the scales of a stage
  const float* block[Body::kProducts];
  float next[Body::kProducts];

  template <class Arguments>
  __device__ TenonFactors(const Arguments& a, TenonU32 base, TenonTileAt at) {
    if (!Body::kBlocks) return;
    const TenonU32 lane = threadIdx.x % 32;
    rows = base + Shape::kScalesAt + (threadIdx.x / 32 * 16 + lane / 4) * 4;
    columns = base + Shape::kScalesAt + Shape::kScalesA + lane % 4 * (Body::kOrdered ? 32 : 8);
    if (Body::kBlocksB == 1) return;
#pragma unroll
    for (int p = 0; p < Body::kProducts; ++p) {
      block[p] =
          a.scale_b + tenon_wide((a.start[p] + at.across * Shape::kPart) / 128, a.pitch_b, 0);
      next[p] = __ldg(block[p]);
    }
  }
  __device__ static float shared(TenonU32 at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
  }
  __device__ static void shared4(TenonU32 at, float* v) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
                 : "r"(at)
                 : "memory");
  }
  __device__ static void shared2(TenonU32 at, float* v) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(at) : "memory");
  }
  // Adds the sums t of a step in `stage` to d. release() tells that the stage was read.
  template <class Release, int size>
  __device__ void promote(TenonU32 stage, TenonU32 step, TenonU32 steps, const float (&t)[size],
                          float (&d)[size], const Release& release) {
    const TenonU32 offset = stage * Shape::kScaleBytes;
    if constexpr (!Body::kBlocks) {
      tenon_products_wait<0>();
      release();
#pragma unroll
      for (int i = 0; i < size; ++i) d[i] += t[i];
    } else if constexpr (Body::kBlocksB > 1) {
      const float row[2] = {shared(rows + offset), shared(rows + offset + 32)};
      float factor[Body::kProducts][2];
#pragma unroll
      for (int p = 0; p < Body::kProducts; ++p) {
        for (int r = 0; r < 2; ++r) factor[p][r] = row[r] * next[p];
        if (step + 1 < steps) next[p] = __ldg(block[p] + step + 1);
      }
      tenon_products_wait<0>();
      release();
#pragma unroll
      for (int i = 0; i < size; ++i)
        d[i] = __fmaf_rn(t[i], factor[i / (size / Body::kProducts)][i / 2 % 2], d[i]);
    } else {
      const float row[2] = {shared(rows + offset), shared(rows + offset + 32)};
      tenon_products_wait<0>();
#pragma unroll
      for (int part = 0; part < size / 16; ++part) {  // 32 columns
        float v[8];
        if (Body::kOrdered) {
          shared4(columns + offset + part * 128, v);
          shared4(columns + offset + part * 128 + 16, v + 4);
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) shared2(columns + offset + part * 128 + j * 32, v + 2 * j);
        }
#pragma unroll
        for (int e = 0; e < 8; ++e)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int i = (part * 4 + e / 2) * 4 + r * 2 + e % 2;
            d[i] = __fmaf_rn(t[i], v[e] * row[r], d[i]);
          }
      }
      release();
    }
  }
};

// A tile of a group that alternates with the other: 128 rows.
template <class Body, class Arguments, int size>
__device__ inline void tenon_multiply(const Arguments& a, TenonU32 base, TenonTileAt,
                                      TenonRing& ring, float (&d)[2][size]) {
  using Shape = TenonGemmShape<Body>;
  constexpr TenonU32 kNextA = tenon_next_product<Body::kLanesA>();
  constexpr TenonU32 kNextB = tenon_next_product<Body::kLanesB>();
  const TenonU32 from_a = tenon_operand<Body::kLanesA>(base);
  const TenonU32 from_b = tenon_operand<Body::kLanesB>(base + Shape::kB);
  const TenonU32 lane = threadIdx.x % 32, group = threadIdx.x / 128;
  TenonU32 last = 0;
#pragma unroll 1
  for (TenonU32 step = 0; step < a.steps; ++step) {
    tenon_barrier_wait(base + Shape::kFull + ring.stage * 8, ring.parity);
    tenon_products_begin();
    const TenonU32 at_a = from_a + ring.stage * (Shape::kBytesA >> 4);
    const TenonU32 at_b = from_b + ring.stage * (Shape::kBytesB >> 4);
#pragma unroll
    for (TenonU32 k = 0; k < kTenonProducts; ++k)
#pragma unroll
      for (TenonU32 half = 0; half < 2; ++half)
        Body::multiply(d[half], tenon_descriptor(at_a + half * (kTenonBox >> 4) + k * kNextA),
                       tenon_descriptor(at_b + k * kNextB), (step | k) != 0);
    tenon_products_commit();
    if (step > 0) {
      tenon_products_wait<1>();
      if (lane == 0) tenon_barrier_arrive(base + Shape::kEmpty + last * 8);
    }
    if (step == a.steps - 1) tenon_turn_give(kTenonTurn + 1 - group);
    last = ring.stage;
    ring.next(Shape::kStages);
  }
  tenon_products_wait<0>();
  if (lane == 0) tenon_barrier_arrive(base + Shape::kEmpty + last * 8);
}

// The 64 rows of a group in a tile of all groups. The accumulators of FP8 products have few bits,
// so the sum of each step is added to one in fp32.
template <class Body, class Arguments, int size>
__device__ inline void tenon_multiply(const Arguments& a, TenonU32 base, TenonTileAt at,
                                      TenonRing& ring, float (&d)[1][size]) {
  using Shape = TenonGemmShape<Body>;
  constexpr TenonU32 kNext = tenon_next_product<false>();
  const TenonU32 lane = threadIdx.x % 32, group = threadIdx.x / 128;
  const TenonU32 from_a = tenon_operand<false>(base) + group * (kTenonBox >> 4);
  const TenonU32 from_b = tenon_operand<false>(base + Shape::kB);
  TenonFactors<Body> factors(a, base, at);
#pragma unroll
  for (int i = 0; i < size; ++i) d[0][i] = 0;
#pragma unroll 1
  for (TenonU32 step = 0; step < a.steps; ++step) {
    float t[size];
    tenon_barrier_wait(base + Shape::kFull + ring.stage * 8, ring.parity);
    tenon_products_begin();
    const TenonU32 at_a = from_a + ring.stage * (Shape::kBytesA >> 4);
    const TenonU32 at_b = from_b + ring.stage * (Shape::kBytesB >> 4);
#pragma unroll
    for (TenonU32 k = 0; k < kTenonProducts; ++k)
      Body::multiply(t, tenon_descriptor(at_a + k * kNext), tenon_descriptor(at_b + k * kNext),
                     k != 0);
    tenon_products_commit();
    factors.promote(ring.stage, step, a.steps, t, d[0], [&] {
      if (Body::kBlocks) __syncwarp();  // all lanes have read their scales
      if (lane == 0) tenon_barrier_arrive(base + Shape::kEmpty + ring.stage * 8);
    });
    ring.next(Shape::kStages);
  }
}

#else

// Emulation on a host: the products are given, one matrix of fp32 for each that the body reads.
inline void* __cvta_shared_to_generic(TenonU32 at) {
  static TenonU8 memory[227 * 1024];
  return memory + at;
}
inline void tenon_turn_wait(TenonU32) {}
inline void tenon_turn_give(TenonU32) {}
inline void tenon_group_wait() { __syncthreads(); }
inline void tenon_ahead(const TenonU8*) {}

template <class Body, class Arguments, int halves, int size>
inline void tenon_multiply(const Arguments& a, TenonU32, TenonTileAt at, TenonRing&,
                           float (&d)[halves][size]) {
  using Shape = TenonGemmShape<Body>;
  constexpr int kPart32 = Shape::kPart / 32;
  const TenonU32 lane = threadIdx.x % 32;
  for (int half = 0; half < halves; ++half)
    for (int i = 0; i < size; ++i) {
      const int pair = i / 4 % 4, e = i % 2;
      const TenonU32 row = tenon_group_row<Body>(at) + half * 64 + threadIdx.x % 128 / 32 * 16 +
                           lane / 4 + i / 2 % 2 * 8;
      const TenonU32 column =
          at.across * Shape::kPart + i / 16 % kPart32 * 32 +
          (Body::kOrdered ? lane % 4 * 8 + pair * 2 + e : pair * 8 + lane % 4 * 2 + e);
      const TenonU64* const given = a.map[i / 16 / kPart32].data;  // the address and the stride
      d[half][i] = row < a.rows && column < a.cols
                       ? reinterpret_cast<const float*>(given[0])[row * given[1] + column]
                       : 0.0f;
    }
}

#endif

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

// The products of a unit. Registers cannot be indexed, so this selects by unit. A copy of a long
// body per unit would not fit the instruction cache with the product loop.
template <class Body, int first, int count, int halves, int size>
__device__ inline void tenon_take(const float (&d)[halves][size], int unit,
                                  float (&product)[Body::kRows][Body::kProducts][8]) {
  if constexpr (count > 1) {
    if (unit < first + count / 2)
      tenon_take<Body, first, count / 2>(d, unit, product);
    else
      tenon_take<Body, first + count / 2, count - count / 2>(d, unit, product);
  } else {
    constexpr int kPart32 = TenonGemmShape<Body>::kPart / 32;
    constexpr int kThreadRows = TenonGemmShape<Body>::kThreadRows;
    constexpr int row = first * Body::kRows % kThreadRows, part = first * Body::kRows / kThreadRows;
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

// First row and column of the part of a unit that a thread has.
template <class Body>
struct TenonGemmPlace {
  TenonU32 row, column;
  __device__ TenonGemmPlace(TenonTileAt at, int unit) {
    using Shape = TenonGemmShape<Body>;
    const TenonU32 lane = threadIdx.x % 32, first = unit * Body::kRows % Shape::kThreadRows;
    row = tenon_group_row<Body>(at) + threadIdx.x % 128 / 32 * 16 + lane / 4 + first / 2 * 64 +
          first % 2 * 8;
    column = at.across * Shape::kPart + unit * Body::kRows / Shape::kThreadRows * 32 + lane % 4 * 8;
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

// The sums of the rows of a group from those of its blocks of eight rows.
template <class Body, class Arguments>
__device__ inline void tenon_sum_group(const Arguments& a, TenonTileAt tile, const float* sums) {
  using Shape = TenonGemmShape<Body>;
  constexpr int kPart = Shape::kPart, kRows = Shape::kBlockRows;
  const TenonU32 row = tenon_group_row<Body>(tile);
  tenon_group_wait();
  if (row >= a.rows) return;
  for (int own = threadIdx.x % 128; own < Body::kSums * kPart; own += 128) {
    const int k = own / kPart;
    const TenonU32 column = tile.across * kPart + own % kPart;
    float v[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) v[i] = sums[(k * kRows + i) * kPart + own % kPart];
#pragma unroll
    for (int n = kRows / 2; n > 0; n /= 2)
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i)  // constant bounds keep v in registers
        if (i < n) v[i] = v[2 * i] + v[2 * i + 1];
    if (column < a.cols)
      tenon_put_kept(tenon_partial<Shape::kGroupRows, Body::kStrip>(a, row / Shape::kGroupRows,
                                                                    k * a.cols + column),
                     v[0]);
  }
}

// Codes of 32 columns in shared memory, as columns of the rows of a group. Parts of 16 rows are
// permuted, so that neither side has bank conflicts.
template <class Body>
struct TenonTurn {
  static constexpr TenonU32 kGroupRows = TenonGemmShape<Body>::kGroupRows;
  TenonU8* turned;  // one buffer

  // Eight codes of a row of the group, for columns 8·(lane % 4) and following.
  __device__ void put(int plane, TenonU32 row, TenonWords2 codes) const {
    const TenonU32 t = threadIdx.x % 4;
    TenonU8* const to =
        turned + (plane * kTenonTurned + t * 8) * kGroupRows + ((row / 16 ^ t) * 16 + row % 16);
#pragma unroll
    for (int e = 0; e < 8; ++e)
      to[e * kGroupRows] = static_cast<TenonU8>(codes.w[e / 4] >> (8 * (e % 4)));
  }
  // Stores whole parts of 16 rows. All threads of the group call it.
  template <class Arguments>
  __device__ void store(const Arguments& a, TenonU32 row0, TenonU32 column0) const {
    constexpr TenonU32 kParts = kGroupRows / 16;
    for (int plane = 0; plane < Body::kTurned; ++plane)
#pragma unroll
      for (TenonU32 i = threadIdx.x % 128; i < kTenonTurned * kParts; i += 128) {
        const TenonU32 c = i / kParts, part = i % kParts, row = row0 + part * 16;
        if (column0 + c >= a.cols || row >= a.rows) continue;
        const TenonU8* const from =
            turned + (plane * kTenonTurned + c) * kGroupRows + (part ^ c / 8) * 16;
        TenonU8* const to = Body::turned(a, plane, column0 + c) + row;
        if (row + 16 <= a.rows)
          *reinterpret_cast<TenonWords4*>(to) = *reinterpret_cast<const TenonWords4*>(from);
        else
          for (TenonU32 k = 0; k < a.rows - row; ++k) to[k] = from[k];
      }
  }
};

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
                      float (&product)[Body::kRows][Body::kProducts][8], float scale,
                      const float* multiplier, TenonU32* most, float* sums,
                      const TenonTurn<Body>& turn) const {
    using Shape = TenonGemmShape<Body>;
    const TenonGemmPlace<Body> at(tile, unit);
    const TenonU32 first = tenon_group_row<Body>(tile);
#pragma unroll
    for (int r = 0; r < Body::kRows; ++r) {
#pragma unroll
      for (int p = 0; p < Body::kProducts; ++p) {
        tenon_columns<Body::kOrdered>(product[r][p]);
        if (Body::kScaled)
#pragma unroll
          for (int e = 0; e < 8; ++e) product[r][p][e] *= scale;
      }
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
        Body::store(a, row, at.column, out, multiplier, most,
                    [&](int plane, TenonWords2 codes) { turn.put(plane, row - first, codes); });
      }
      if constexpr (Body::kSums > 0) {
        const TenonU32 block = (row - first) / 8;
        Body::sum(out, [&](int k, const float(&v)[8]) {
          tenon_sum_lanes(v, inside,
                          sums + (k * Shape::kBlockRows + block) * Shape::kPart +
                              unit * Body::kRows / Shape::kThreadRows * 32);
        });
      }
    }
  }
};

// The scale of a product of two tensors with one scale each.
template <class Arguments>
__device__ inline float tenon_operand_scale(const Arguments& a) {
  return (a.scale_a ? __ldg(a.scale_a) : 1.0f) * (a.scale_b ? __ldg(a.scale_b) : 1.0f);
}

// The tiles of a group: products, then the body.
template <class Body, class Arguments>
__device__ inline void tenon_gemm_tiles(const Arguments& a, TenonU32 base, TenonU32 group) {
  using Shape = TenonGemmShape<Body>;
  TenonU32 before[Body::kAmax + 1];
  TenonU32 most[Body::kAmax + 1] = {};
  float multiplier[Body::kEncoders + 1];
  if (!Shape::kPromoted) Body::start(a, before, multiplier);
  float d[Shape::kHalves][Shape::kWidth / 2];
  float* const sums =
      static_cast<float*>(__cvta_shared_to_generic(base + Shape::kSumsAt)) + group * Shape::kSums;
  TenonU8* const turned = static_cast<TenonU8*>(__cvta_shared_to_generic(base + Shape::kTurnedAt)) +
                          group * 2 * Shape::kTurnedBytes;
  TenonRing ring;
  TenonU32 turn = 0, turns = 0;
  if (!Shape::kPromoted && group == 1) tenon_turn_give(kTenonTurn);
  for (TenonU32 tile = blockIdx.x; tile < a.down * a.across; tile += gridDim.x, turn ^= 1) {
    if (!Shape::kPromoted && turn != group) {
      ring.skip(a.steps, Shape::kStages);
      continue;
    }
    const TenonTileAt at = tenon_tile_at(a, tile);
    if (threadIdx.x % 128 < Shape::kGroupRows)
      Body::ahead(a, tenon_group_row<Body>(at) + threadIdx.x % 128, at.across * Shape::kPart);
    // Waits until the other group has seen its last stage: the same parity returns one lap later.
    if (!Shape::kPromoted) tenon_turn_wait(kTenonTurn + group);
    tenon_multiply<Body>(a, base, at, ring, d);
    // Promotion needs the registers of values that live through it.
    if (Shape::kPromoted) {
      Body::start(a, before, multiplier);
      for (TenonU32& m : most) m = 0;
    }
    const float scale = Body::kScaled ? tenon_operand_scale(a) : 1.0f;
    // Loads of the next units overlap with the current unit.
    TenonGemmUnit<Body> ahead[Body::kDepth];
#pragma unroll
    for (int i = 0; i < Body::kDepth; ++i) ahead[i].start(a, at, i);
#pragma unroll Body::kUnrolled ? Shape::kUnits : 1
    for (int unit = 0; unit < Shape::kUnits; ++unit) {
      float product[Body::kRows][Body::kProducts][8];
      tenon_take<Body, 0, Shape::kUnits>(d, unit, product);
      const TenonGemmUnit<Body> now = ahead[0];
#pragma unroll
      for (int i = 0; i + 1 < Body::kDepth; ++i) ahead[i] = ahead[i + 1];
      if (unit + Body::kDepth < Shape::kUnits)
        ahead[Body::kDepth - 1].start(a, at, unit + Body::kDepth);
      const TenonTurn<Body> to{turned + turns % 2 * Shape::kTurnedBytes};
      now.run(a, at, unit, product, scale, multiplier, most, sums, to);
      if constexpr (Body::kTurned > 0)
        if ((unit + 1) * Body::kRows % Shape::kThreadRows == 0) {
          // With two buffers, the next wait comes before a buffer is written again.
          tenon_group_wait();
          to.store(a, tenon_group_row<Body>(at),
                   at.across * Shape::kPart + unit * Body::kRows / Shape::kThreadRows * 32);
          ++turns;
        }
    }
    if constexpr (Body::kSums > 0) tenon_sum_group<Body>(a, at, sums);
    // The next tile writes the sums. Groups that alternate wait for their turn before.
    if (Shape::kPromoted && Body::kSums > 0) tenon_group_wait();
    if (Shape::kPromoted) Body::finish(a, most, before);
  }
  if (!Shape::kPromoted) Body::finish(a, most, before);
}

// Body is printed as for vector.cuh, with these differences:
// - Vectors of tiles and rows are separate from other loads: Raw and RawRow, fetch and fetch_row,
//   unpack, and ahead for a whole tile.
// - kWidth: columns of a product tile. kProducts: columns of the product that an element reads.
// - kRows: rows of a unit. kDepth: units whose loads are ahead. kUnrolled: one copy of the body per
//   unit.
// - kStages: stages of the ring. kStep: elements of a step. kSums and kStrip: as for tiles. sum:
//   calls its argument for each sum.
// - kTurned: stores with a columnwise encoding. store gives their codes to its last argument.
//   turned: where the transposed codes of a column are stored.
// - kPromoted: three groups that promote sums. kScaled: operands have one scale each. kBlocks: a
//   has scales of 1x128, and b those of 1x128 or 128x128: kBlocksB is 1 or 128.
// - kLanesA, kLanesB: rows of a, or columns of b, are contiguous.
// - kOrdered: b's lanes are permuted. multiply: the instruction.
#if defined(__CUDA_ARCH__)
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
    // One arrival per warp of the groups that read a stage.
    constexpr int kReaders = Shape::kPromoted ? 12 : 4;
    for (int i = 0; i < Shape::kStages; ++i) {
      tenon_barrier_start(base + Shape::kFull + i * 8, 1);
      tenon_barrier_start(base + Shape::kEmpty + i * 8, kReaders);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // The registers of a multiprocessor: 2·240 + 24, or 3·160 + 32.
  if (group == Shape::kGroups) {
    if (Shape::kPromoted)
      asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    else
      asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == Shape::kGroups * 128) tenon_gemm_copy<Body>(a, base);
  } else {
    if (Shape::kPromoted)
      asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    else
      asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    tenon_gemm_tiles<Body>(a, base, group);
  }
}
#else
template <class Body, class Arguments>
inline void tenon_gemm(const Arguments& a) {
  const TenonU32 group = threadIdx.x / 128;
  if (group < TenonGemmShape<Body>::kGroups) tenon_gemm_tiles<Body>(a, 0, group);
}
#endif

#else

// Other architectures compile an empty kernel. The host never launches it.
template <class Body, class Arguments>
__device__ inline void tenon_gemm(const Arguments&) {}

#endif
