// The texts of device/, embedded by the build. A kernel text begins with some of them, in this
// order.
#pragma once

#include <string>
#include <string_view>

namespace tenon::cuda {

extern const char kArgumentsSkeleton[];
extern const char kWordsSkeleton[];
extern const char kMapSkeleton[];
extern const char kPlainSkeleton[];
extern const char kVectorSkeleton[];
extern const char kSumsSkeleton[];
extern const char kTileSkeleton[];
extern const char kBlockSkeleton[];
extern const char kRowSkeleton[];
extern const char kGemmSkeleton[];

// The skeletons of a text. The last one gives the function its name.
std::string map_skeletons();
std::string plain_skeletons();
std::string vector_skeletons();
std::string sums_skeletons();
std::string tile_skeletons();
std::string block_skeletons();
std::string row_skeletons();
std::string gemm_skeletons();

// The size of the skeletons that a text begins with.
size_t skeleton_bytes(std::string_view text);

}  // namespace tenon::cuda
