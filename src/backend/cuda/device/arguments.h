// The arguments of kernels. The host includes this file, and every kernel text begins with it. It
// includes nothing.
#ifndef TENON_BACKEND_CUDA_DEVICE_ARGUMENTS_H  // `#pragma once` has no meaning in a text
#define TENON_BACKEND_CUDA_DEVICE_ARGUMENTS_H

typedef unsigned int TenonU32;
typedef unsigned short TenonU16;
typedef unsigned char TenonU8;
typedef long long TenonI64;
typedef unsigned long long TenonU64;

static_assert(sizeof(TenonU32) == 4 && sizeof(TenonU16) == 2 && sizeof(TenonI64) == 8, "sizes");

constexpr int kTenonLine = 32;     // floats of a cache line
constexpr int kTenonTile = 128;    // rows and columns of a tile of the tiled map
constexpr int kTenonSumRows = 32;  // rows that the row map adds in sequence

// Location of a load or store. Column c is at (c / block)*block_stride + c % block + offset of a
// row.
struct TenonAccess {
  TenonU8* data = nullptr;
  TenonI64 stride = 0;  // elements between rows
  TenonI64 block = 1, block_stride = 1, offset = 0;
  TenonI64 tiles = 0;  // tiles of swizzled scales per row
  float value = 0;     // value of a parameter, which has no memory
};
static_assert(sizeof(TenonAccess) == 56, "size");

// A tensor of an encoder or of a product.
struct TenonPlace {
  TenonU8* data = nullptr;
  TenonI64 stride = 0, rows = 0, cols = 0;
};
static_assert(sizeof(TenonPlace) == 32, "size");

// The argument of a kernel: a head, then the loads and the stores, then the places, which the
// printed text uses by index. An empty array has one unused element. The host writes the parts one
// after the other, so no head may end in padding.
template <class Head, int accesses, int places>
struct TenonArguments : Head {
  TenonAccess at[accesses];
  TenonPlace place[places];
};

// The flat map.
struct TenonMapHead {
  TenonI64 rows = 0, cols = 0;
};
static_assert(sizeof(TenonMapHead) == 16, "size");

// The plain kernels and the row map.
struct TenonPlainHead {
  TenonI64 rows = 0, cols = 0, inner = 0;
  const TenonU64* random = nullptr;
  const float* from = nullptr;  // output of an earlier kernel
  float* to = nullptr;
  TenonI64 count = 0;
};
static_assert(sizeof(TenonPlainHead) == 56, "size");

// The vector map. The quotient of a 31-bit index v by `divisor` is the high word of 2v·magic,
// >> shift.
struct TenonVectorHead {
  TenonU32 divisor = 0;  // vectors per row; in a tall call, rows
  TenonU32 magic = 0, shift = 0;
  TenonU32 all = 0;     // vectors of the call; in a tall call, threads
  TenonU32 across = 0;  // vectors per row
  TenonU32 unused = 0;
  const TenonU64* random = nullptr;
};
static_assert(sizeof(TenonVectorHead) == 32, "size");

// The tiled map and the block map.
struct TenonTileHead {
  TenonI64 rows = 0, cols = 0;
  const TenonU64* random = nullptr;
  float* partial = nullptr;      // sums over the rows of a tile
  TenonU32 last = 0, whole = 0;  // first row of the last tiles; rows in full tiles
};
static_assert(sizeof(TenonTileHead) == 40, "size");

// The product on tensor cores. A step along the inner dimension is 128 bytes.
constexpr int kTenonStepBytes = 128;
constexpr int kTenonTurned = 32;  // columns that a group turns at once

// Opaque data from cuTensorMapEncodeTiled.
struct TenonTensorMap {
  TenonU64 data[16] = {};
};
struct TenonGemmHead {
  TenonTensorMap map[3];          // a, b, and b of the second half of a gated body
  TenonU32 rows = 0, cols = 0;    // rows and columns of the body
  TenonU32 steps = 0;             // steps along the inner dimension
  TenonU32 down = 0, across = 0;  // number of tiles
  TenonU32 block = 1;             // columns of the body that are adjacent in b
  const TenonU64* random = nullptr;
  float* partial = nullptr;  // sums over the rows of a group
  // Scales of the operands: one each, or those of blocks with the elements between their rows.
  const float* scale_a = nullptr;
  const float* scale_b = nullptr;
  TenonU32 pitch_a = 0, pitch_b = 0;
  TenonU32 start[2] = {};  // first column of b for each half of a gated body
};
static_assert(sizeof(TenonGemmHead) == 3 * 128 + 72, "size");

constexpr int kTenonMapAlignment = 128;
template <int accesses, int places>
struct alignas(kTenonMapAlignment) TenonGemmArguments
    : TenonArguments<TenonGemmHead, accesses, places> {};

#endif
