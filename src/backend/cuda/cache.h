// Compiled kernels and timed cuBLASLt algorithms on disk, for the next process. A defective file
// counts as missing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tenon::cuda {

// Everything that an image depends on. An entry holds the full key, so no hash decides what runs.
struct CacheKey {
  std::string compiler;  // NVRTC version and options
  std::string arch;
  std::string source;
};

struct CachedImage {
  std::string image;
  bool is_ptx = false;
};

class Cache {
 public:
  // The cache in TENON_CACHE_DIR, else in tenon under XDG_CACHE_HOME or ~/.cache. TENON_CACHE_MB
  // sets the limit in millions of bytes.
  static Cache& shared();
  Cache(std::filesystem::path folder, uint64_t limit,
        std::string why_no_limit = "TENON_CACHE_MB is 0");

  [[nodiscard]] std::optional<CachedImage> find(const CacheKey& key);
  // Writes a temporary file and renames it when it is complete. A failure only loses the entry.
  void keep(const CacheKey& key, const CachedImage& image, const std::string& name);
  // Why the last failed entry was not kept. Empty if there was no failure.
  [[nodiscard]] std::string why_lost() const;

  // Why the cache is off. Empty if it is on. Reasons: no folder, or a folder that others can write
  // to.
  [[nodiscard]] std::string why_off() const;
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }

  struct Entry {
    std::filesystem::path file;
    std::string name, arch, compiler;  // empty if the file is not an entry of Tenon
    uint64_t bytes = 0;
    int64_t used = 0;  // seconds since 1970
  };
  [[nodiscard]] std::vector<Entry> entries() const;
  // Returns the number of removed files.
  size_t clear();

 private:
  [[nodiscard]] std::filesystem::path file_of(const CacheKey& key) const;
  void make_room(uint64_t bytes);
  void lose(std::string why);

  std::filesystem::path folder_;
  uint64_t limit_;
  std::string why_no_limit_;
  mutable std::mutex lock_;  // guards the next member
  std::string why_lost_;
};

}  // namespace tenon::cuda
