// The flat map: one element per thread, adjacent threads on adjacent elements. Follows words.cuh.

// For values that are not negative. 64-bit division is slow, and most indices fit in 32 bits.
__device__ inline TenonI64 tenon_divide(TenonI64 a, TenonI64 b) {
  if ((a | b) >> 32 == 0) return static_cast<TenonU32>(a) / static_cast<TenonU32>(b);
  return a / b;
}

__device__ inline TenonI64 tenon_mapped(const TenonAccess& a, TenonI64 column) {
  if (a.block == a.block_stride) return column + a.offset;
  const TenonI64 block = tenon_divide(column, a.block);
  return block * a.block_stride + (column - block * a.block) + a.offset;
}

// The element index for each kind of access, relative to its data.
__device__ inline TenonI64 tenon_tile(const TenonAccess& a, TenonI64 row, TenonI64 column) {
  return row * a.stride + tenon_mapped(a, column);
}
__device__ inline TenonI64 tenon_row(const TenonAccess& a, TenonI64, TenonI64 column) {
  return tenon_mapped(a, column);
}
__device__ inline TenonI64 tenon_column(const TenonAccess& a, TenonI64 row, TenonI64) {
  return row * a.stride;
}
__device__ inline TenonI64 tenon_scalar(const TenonAccess&, TenonI64, TenonI64) { return 0; }

template <class Format>
__device__ inline float tenon_load(const TenonAccess& a, TenonI64 element) {
  return tenon_read<Format>(a.data + element * Format::bytes);
}
template <class Format>
__device__ inline void tenon_store(const TenonAccess& a, TenonI64 element, float v) {
  tenon_write<Format>(a.data + element * Format::bytes, v);
}

// Body is printed for each step: kLoads, kStores, load, compute, store. All loads of an element
// come before its stores, and no other thread accesses it. So in-place calls are correct.
template <class Body, class Arguments>
__device__ inline void tenon_map(const Arguments& a) {
  const TenonI64 count = a.rows * a.cols;
  const TenonI64 threads = static_cast<TenonI64>(gridDim.x) * blockDim.x;
  for (TenonI64 i = static_cast<TenonI64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    const TenonI64 row = tenon_divide(i, a.cols);
    const TenonI64 column = i - row * a.cols;
    float in[Body::kLoads + 1];  // + 1: a formula may have no loads
    float out[Body::kStores];
    Body::load(a.at, row, column, in);
    Body::compute(in, out);
    Body::store(a.at + Body::kLoads, row, column, out);
  }
}
