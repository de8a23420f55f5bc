// Compiled kernels on disk, for the next process. Everything that can be wrong with a file there
// makes it a file that is not there.
#pragma once

#include <cstdint>
#include <filesystem>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace tenon::cuda {

// What an image depends on. Entries hold it whole, so that no hash decides what runs.
struct CacheKey {
  std::string compiler;  // NVRTC's version and the options
  std::string arch;
  std::string source;
};

struct CachedImage {
  std::string image;
  bool is_ptx = false;
};

class Cache {
 public:
  // Of TENON_CACHE_DIR, or tenon under XDG_CACHE_HOME or ~/.cache; `limit` bytes at most,
  // TENON_CACHE_MB says how many of a million.
  static Cache& shared();
  Cache(std::filesystem::path folder, uint64_t limit,
        std::string why_no_limit = "TENON_CACHE_MB is 0");

  [[nodiscard]] std::optional<CachedImage> find(const CacheKey& key);
  // A file of its own that gets its name when it is complete. A failure is only a lost entry.
  void keep(const CacheKey& key, const CachedImage& image, const std::string& name);
  // Why the latest entry that was not kept was not, or empty.
  [[nodiscard]] std::string why_lost() const;

  // Why nothing is kept, or empty: no folder, or one that others can write to.
  [[nodiscard]] std::string why_off() const;
  [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }

  struct Entry {
    std::filesystem::path file;
    std::string name, arch, compiler;  // empty where the file is not an entry of ours
    uint64_t bytes = 0;
    int64_t used = 0;  // seconds since 1970
  };
  [[nodiscard]] std::vector<Entry> entries() const;
  // How many files were removed.
  size_t clear();

 private:
  [[nodiscard]] std::filesystem::path file_of(const CacheKey& key) const;
  void make_room(uint64_t bytes);
  void lose(std::string why);

  std::filesystem::path folder_;
  uint64_t limit_;
  std::string why_no_limit_;
  mutable std::mutex lock_;  // of the next
  std::string why_lost_;
};

}  // namespace tenon::cuda
