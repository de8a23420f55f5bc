// Generates the copy kernels of a mix.
#include "bench/ceiling.h"

#include "tenon/error.h"

namespace tenon::bench {

namespace {

// Reads each stream with plain 16-byte loads, all before the first store. All words are combined,
// so that the compiler cannot remove a load. kGrowth: bytes of a written element for each two bytes
// of a read element.
constexpr const char* kMove = R"(typedef unsigned long long U64;
struct alignas(16) Words4 { unsigned x, y, z, w; };
struct alignas(8) Words2 { unsigned x, y; };
struct Arguments { const Words4* in[8]; void* out[8]; U64 vectors; };

template <bool kFull, int kReads, int kWrites, int kGrowth, int kVectors, int kStore>
__device__ __forceinline__ void move_chunk(const Arguments& a, U64 chunk) {
  const U64 first = chunk * (blockDim.x * kVectors) + threadIdx.x;
  Words4 v[kVectors][kReads];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      const U64 at = first + j * blockDim.x;
      v[j][i] = kFull || at < a.vectors ? a.in[i][at] : Words4{0, 0, 0, 0};
    }
  Words4 m[kVectors];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    m[j] = v[j][0];
#pragma unroll
    for (int i = 1; i < kReads; ++i) {
      m[j].x ^= v[j][i].x; m[j].y ^= v[j][i].y; m[j].z ^= v[j][i].z; m[j].w ^= v[j][i].w;
    }
  }
  if (kWrites == 0) {
#pragma unroll
    for (int j = 1; j < kVectors; ++j) {
      m[0].x ^= m[j].x; m[0].y ^= m[j].y; m[0].z ^= m[j].z; m[0].w ^= m[j].w;
    }
    const bool never = m[0].x == 0x9e3779b9u && m[0].y == 0x7f4a7c15u && m[0].z == 0xf39cc060u &&
                       m[0].w == 0x5cedc834u;
    if (never) *static_cast<Words4*>(a.out[0]) = m[0];
    return;
  }
#pragma unroll
  for (int w = 0; w < kWrites; ++w) {
    if (kStore == 16 && kGrowth == 1) {
      const U64 half = chunk * (blockDim.x * (kVectors / 2)) + threadIdx.x;
#pragma unroll
      for (int j = 0; j < kVectors / 2; ++j) {
        const Words4& p = m[2 * j];
        const Words4& q = m[2 * j + (kVectors > 1)];
        const U64 at = half + j * blockDim.x;
        if (kFull || at < a.vectors / 2)
          static_cast<Words4*>(a.out[w])[at] = {p.x ^ p.z, p.y ^ p.w, q.x ^ q.z, q.y ^ q.w};
      }
      continue;
    }
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const U64 at = first + j * blockDim.x;
      if (kGrowth == 4) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const U64 to = 2 * at - threadIdx.x + half * blockDim.x;
          if (kFull || to < 2 * a.vectors) static_cast<Words4*>(a.out[w])[to] = m[j];
        }
        continue;
      }
      if (!kFull && at >= a.vectors) continue;
      if (kGrowth == 1)
        static_cast<Words2*>(a.out[w])[at] = {m[j].x ^ m[j].z, m[j].y ^ m[j].w};
      else
        static_cast<Words4*>(a.out[w])[at] = m[j];
    }
  }
}

template <int kReads, int kWrites, int kGrowth, int kVectors, int kStore>
__device__ __forceinline__ void move(const Arguments& a) {
  const U64 span = U64(blockDim.x) * kVectors;
  for (U64 chunk = blockIdx.x; chunk * span < a.vectors; chunk += gridDim.x) {
    if ((chunk + 1) * span <= a.vectors)
      move_chunk<true, kReads, kWrites, kGrowth, kVectors, kStore>(a, chunk);
    else
      move_chunk<false, kReads, kWrites, kGrowth, kVectors, kStore>(a, chunk);
    if (%ONCE%) return;
  }
}
)";

// With one block per chunk the loop runs once. A constant condition tells the compiler.
std::string skeleton(bool once) {
  std::string text = kMove;
  const std::string mark = "%ONCE%";
  text.replace(text.find(mark), mark.size(), once ? "true" : "false");
  return text;
}

}  // namespace

Ceiling ceiling_of(const Mix& mix) {
  Ceiling c{.mix = mix};
  c.read_width = mix.read % 2 != 0 ? 1 : 2;
  c.width = mix.write % 2 != 0 || mix.columnwise % 2 != 0 ? 1 : 2;
  c.reads = static_cast<int>(mix.read / c.read_width);
  c.writes = static_cast<int>((mix.write + mix.columnwise) / c.width);
  const int growth = 2 * c.width / c.read_width;
  if (c.reads < 1 || c.reads > CeilingArguments::kStreams || c.writes > CeilingArguments::kStreams)
    fail(Code::unsupported, "bench: the mix ", mix.name(), " has no ceiling; it has at most ",
         CeilingArguments::kStreams, " streams of reads and of writes");
  const bool reads_only = c.writes == 0;
  c.text = skeleton(!reads_only);
  const auto add = [&](unsigned threads, int vectors, int store) {
    const std::string entry = str("move_", threads, "_", vectors, "_", store);
    c.text += str("extern \"C\" __global__ void __launch_bounds__(", threads, ") ", entry,
                  "(const __grid_constant__ Arguments a) {\n  move<", c.reads, ", ", c.writes, ", ",
                  growth, ", ", vectors, ", ", store, ">(a);\n}\n");
    c.ways.push_back({entry, threads, vectors, false});
    if (reads_only) c.ways.push_back({entry, threads, vectors, true});
  };
  for (const unsigned threads : {128U, 256U, 512U})
    for (const int vectors : {1, 2, 4, 8}) {
      // Many loads at once cost registers. Only kernels that do not write gain from them.
      if (vectors * c.reads > 8 || (vectors == 8 && !reads_only)) continue;
      add(threads, vectors, growth == 1 ? 8 : 16);
      if (growth == 1 && vectors > 1) add(threads, vectors, 16);
    }
  return c;
}

}  // namespace tenon::bench
