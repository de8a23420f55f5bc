// One file per entry: a header of sizes, the texts, the image, and a checksum of all of them.
#include "backend/cuda/cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "core/hash.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace fs = std::filesystem;

namespace {

constexpr std::array<char, 8> kMagic{'t', 'e', 'n', 'o', 'n', 'k', '0', '2'};
constexpr const char* kSuffix = ".kernel";
constexpr const char* kUnfinished = ".unfinished";
constexpr uint64_t kMostBytes = uint64_t{64} << 20;  // larger files are not read
constexpr int64_t kStaleSeconds = 3600;              // older temporary files are abandoned

// Recognises files of this cache by name. All other files in the folder are left alone.
bool is_ours(const std::string& name, std::string_view end) {
  constexpr size_t kName = 32;
  return name.size() > kName && name.find_first_not_of("0123456789abcdef") == kName &&
         name.substr(kName).starts_with(kSuffix) && name.ends_with(end);
}
bool is_entry(const fs::path& file) { return is_ours(file.filename().string(), kSuffix); }
bool is_unfinished(const fs::path& file) { return is_ours(file.filename().string(), kUnfinished); }

// The parts of a file in order: compiler, arch, name, source, kind, image.
constexpr size_t kParts = 6;
using Parts = std::array<std::string, kParts>;

std::string packed(const Parts& parts) {
  std::string text(kMagic.data(), kMagic.size());
  for (const std::string& p : parts) {
    const uint64_t size = p.size();
    text.append(reinterpret_cast<const char*>(&size), sizeof size);
  }
  for (const std::string& p : parts) text += p;
  const uint64_t sum = hash64(text);
  return text.append(reinterpret_cast<const char*>(&sum), sizeof sum);
}

std::optional<Parts> unpacked(const std::string& text) {
  constexpr size_t kHeader = kMagic.size() + kParts * sizeof(uint64_t);
  if (text.size() < kHeader + sizeof(uint64_t) ||
      std::memcmp(text.data(), kMagic.data(), kMagic.size()) != 0)
    return std::nullopt;
  const size_t body = text.size() - sizeof(uint64_t);
  uint64_t sum = 0;
  std::memcpy(&sum, text.data() + body, sizeof sum);
  if (sum != hash64(std::string_view(text).substr(0, body))) return std::nullopt;
  Parts parts;
  size_t at = kHeader;
  for (size_t i = 0; i < kParts; ++i) {
    uint64_t size = 0;
    std::memcpy(&size, text.data() + kMagic.size() + i * sizeof size, sizeof size);
    if (size > body - at) return std::nullopt;
    parts[i] = text.substr(at, size);
    at += size;
  }
  return at == body ? std::optional(std::move(parts)) : std::nullopt;
}

std::optional<std::string> read_file(const fs::path& file) {
  // O_NONBLOCK: otherwise a FIFO would wait for a writer.
  const int f = open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (f < 0) return std::nullopt;
  struct stat s {};
  std::optional<std::string> text;
  // Never runs files of other users.
  if (fstat(f, &s) == 0 && S_ISREG(s.st_mode) && s.st_uid == geteuid() &&
      static_cast<uint64_t>(s.st_size) <= kMostBytes) {
    text.emplace(static_cast<size_t>(s.st_size), '\0');
    size_t done = 0;
    while (done < text->size()) {
      const ssize_t n = read(f, text->data() + done, text->size() - done);
      if (n <= 0) break;
      done += static_cast<size_t>(n);
    }
    if (done != text->size()) text.reset();
  }
  close(f);
  return text;
}

// 0, or the errno if the file is not complete.
int write_file(const fs::path& file, std::string_view text) {
  const int f = open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (f < 0) return errno;
  int error = 0;
  while (error == 0 && !text.empty()) {
    const ssize_t n = write(f, text.data(), text.size());
    if (n >= 0)
      text.remove_prefix(static_cast<size_t>(n));
    else if (errno != EINTR)
      error = errno;
  }
  if (close(f) != 0 && error == 0) error = errno;
  return error;
}

fs::path default_folder() {
  if (const char* given = std::getenv("TENON_CACHE_DIR"); given && *given) return given;
  if (const char* given = std::getenv("XDG_CACHE_HOME"); given && *given == '/')
    return fs::path(given) / "tenon";
  if (const char* home = std::getenv("HOME"); home && *home == '/')
    return fs::path(home) / ".cache" / "tenon";
  return {};
}

struct Limit {
  uint64_t bytes = 0;
  std::string why;  // reason if the limit is 0
};
Limit default_limit() {
  constexpr double kMegabyte = 1e6;
  constexpr double kDefault = 512;  // some thousands of kernels
  const char* given = std::getenv("TENON_CACHE_MB");
  if (!given || !*given) return {static_cast<uint64_t>(kDefault * kMegabyte), {}};
  char* end = nullptr;
  const double mb = std::strtod(given, &end);
  const std::string text(std::string_view(given).substr(0, 32));
  if (*end != '\0' || !(mb >= 0 && mb < 1e9))
    return {0, str("TENON_CACHE_MB is '", text, "'; it must be from 0 to 1e9 megabytes, e.g. 512")};
  const auto bytes = static_cast<uint64_t>(mb * kMegabyte);
  if (bytes == 0 && mb > 0)
    return {0, str("TENON_CACHE_MB is '", text, "', less than a byte; give megabytes, e.g. 512")};
  return {bytes, bytes == 0 ? "TENON_CACHE_MB is 0" : ""};
}

int64_t seconds_of(const struct stat& s) { return s.st_mtim.tv_sec; }

}  // namespace

Cache& Cache::shared() {
  static Cache cache = [] {
    Limit limit = default_limit();
    return Cache(default_folder(), limit.bytes, std::move(limit.why));
  }();
  return cache;
}

Cache::Cache(fs::path folder, uint64_t limit, std::string why_no_limit)
    : folder_(std::move(folder)), limit_(limit), why_no_limit_(std::move(why_no_limit)) {}

std::string Cache::why_off() const {
  if (folder_.empty())
    return "there is neither TENON_CACHE_DIR, XDG_CACHE_HOME nor HOME; set TENON_CACHE_DIR";
  if (limit_ == 0) return why_no_limit_;
  std::error_code ignored;
  fs::create_directories(folder_.parent_path(), ignored);
  mkdir(folder_.c_str(), 0700);
  struct stat s {};
  if (lstat(folder_.c_str(), &s) != 0)
    return str(folder_.string(), " cannot be made: ", std::strerror(errno),
               "; set TENON_CACHE_DIR to a folder of your own");
  if (!S_ISDIR(s.st_mode)) return str(folder_.string(), " is no folder; set TENON_CACHE_DIR");
  if (s.st_uid != geteuid())
    return str(folder_.string(), " belongs to another user; set TENON_CACHE_DIR");
  if ((s.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return str(folder_.string(),
               " can be written by others; run chmod 700, or set TENON_CACHE_DIR");
  if (access(folder_.c_str(), W_OK | X_OK) != 0)
    return str(folder_.string(), " cannot be written; set TENON_CACHE_DIR");
  return "";
}

fs::path Cache::file_of(const CacheKey& key) const {
  const std::string all = str(key.compiler, '\n', key.arch, '\n', key.source);
  return folder_ / str(hash128(all), kSuffix);
}

std::optional<CachedImage> Cache::find(const CacheKey& key) {
  if (!why_off().empty()) return std::nullopt;
  const fs::path file = file_of(key);
  const std::optional<std::string> text = read_file(file);
  if (!text) return std::nullopt;
  std::optional<Parts> parts = unpacked(*text);
  if (!parts) return std::nullopt;
  auto& [compiler, arch, name, source, kind, image] = *parts;
  if (compiler != key.compiler || arch != key.arch || source != key.source || image.empty())
    return std::nullopt;
  utimensat(AT_FDCWD, file.c_str(), nullptr, 0);  // marks the entry as recently used
  return CachedImage{std::move(image), kind == "ptx"};
}

void Cache::keep(const CacheKey& key, const CachedImage& image, const std::string& name) {
  if (!why_off().empty()) return;
  const std::string text = packed(
      {key.compiler, key.arch, name, key.source, image.is_ptx ? "ptx" : "cubin", image.image});
  if (text.size() > std::min(limit_, kMostBytes)) {
    lose(str("a kernel of ", text.size(), " bytes is too large; raise TENON_CACHE_MB"));
    return;
  }
  make_room(text.size());
  static std::atomic<uint64_t> count{0};
  const fs::path file = file_of(key);
  fs::path own = file;
  own += str(".", getpid(), ".", count++, kUnfinished);
  int error = write_file(own, text);
  if (error == 0 && rename(own.c_str(), file.c_str()) != 0) error = errno;
  if (error == 0) return;
  unlink(own.c_str());
  lose(str(file.string(), " could not be written: ", std::strerror(error),
           "; make room or set TENON_CACHE_DIR"));
}

void Cache::lose(std::string why) {
  const std::lock_guard guard(lock_);
  why_lost_ = std::move(why);
}

std::string Cache::why_lost() const {
  const std::lock_guard guard(lock_);
  return why_lost_;
}

std::vector<Cache::Entry> Cache::entries() const {
  std::vector<Entry> all;
  std::error_code error;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    if (!is_entry(it->path())) continue;
    struct stat s {};
    if (lstat(it->path().c_str(), &s) != 0 || !S_ISREG(s.st_mode)) continue;
    Entry e{.file = it->path(),
            .name = {},
            .arch = {},
            .compiler = {},
            .bytes = static_cast<uint64_t>(s.st_size),
            .used = seconds_of(s)};
    if (const auto text = read_file(e.file))
      if (std::optional<Parts> parts = unpacked(*text)) {
        e.compiler = std::move((*parts)[0]);
        e.arch = std::move((*parts)[1]);
        e.name = std::move((*parts)[2]);
      }
    all.push_back(std::move(e));
  }
  std::ranges::sort(all, {}, [](const Entry& e) { return std::pair(-e.used, e.file.string()); });
  return all;
}

size_t Cache::clear() {
  size_t removed = 0;
  std::error_code error;
  std::vector<fs::path> files;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error))
    if (is_entry(it->path()) || is_unfinished(it->path())) files.push_back(it->path());
  for (const fs::path& f : files) removed += unlink(f.c_str()) == 0 ? 1 : 0;
  return removed;
}

// Removes the least recently used files until a quarter of the limit is free. Also removes
// temporary files of processes that ended.
void Cache::make_room(uint64_t bytes) {
  struct File {
    fs::path path;
    uint64_t bytes;
    int64_t used;
  };
  std::vector<File> files;
  uint64_t total = bytes;
  const auto now = std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  std::error_code error;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    struct stat s {};
    if (lstat(it->path().c_str(), &s) != 0 || !S_ISREG(s.st_mode)) continue;
    if (is_unfinished(it->path()) && now - seconds_of(s) > kStaleSeconds)
      unlink(it->path().c_str());
    if (!is_entry(it->path())) continue;
    files.push_back({it->path(), static_cast<uint64_t>(s.st_size), seconds_of(s)});
    total += files.back().bytes;
  }
  if (total <= limit_) return;
  std::ranges::sort(files, {}, &File::used);
  for (const File& f : files) {
    if (total <= limit_ - limit_ / 4) return;
    if (unlink(f.path.c_str()) == 0) total -= f.bytes;
  }
}

}  // namespace tenon::cuda
