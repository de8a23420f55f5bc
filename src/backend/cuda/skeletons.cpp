// Concatenates the skeletons of each kind of text.
#include "backend/cuda/skeletons.h"

#include "tenon/error.h"

namespace tenon::cuda {

std::string map_skeletons() {
  return str(kArgumentsSkeleton, "\n", kWordsSkeleton, "\n", kMapSkeleton, "\n");
}
std::string plain_skeletons() { return str(map_skeletons(), kPlainSkeleton, "\n"); }
std::string vector_skeletons() { return str(plain_skeletons(), kVectorSkeleton, "\n"); }
std::string sums_skeletons() { return str(vector_skeletons(), kSumsSkeleton, "\n"); }
std::string tile_skeletons() { return str(sums_skeletons(), kTileSkeleton, "\n"); }
std::string block_skeletons() { return str(tile_skeletons(), kBlockSkeleton, "\n"); }
std::string row_skeletons() { return str(tile_skeletons(), kRowSkeleton, "\n"); }
std::string gemm_skeletons() { return str(sums_skeletons(), kGemmSkeleton, "\n"); }

size_t skeleton_bytes(std::string_view text) {
  size_t size = 0;
  for (const std::string_view s :
       {kArgumentsSkeleton, kWordsSkeleton, kMapSkeleton, kPlainSkeleton, kVectorSkeleton,
        kSumsSkeleton, kTileSkeleton, kBlockSkeleton, kRowSkeleton, kGemmSkeleton})
    if (text.substr(size).starts_with(s)) {
      size += s.size();
      if (text.substr(size).starts_with('\n')) ++size;
    }
  return size;
}

}  // namespace tenon::cuda
