// Tests of the disk cache of kernels: valid entries, and invalid ones that must not run.
#include "backend/cuda/cache.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <future>
#include <thread>

#include "support/support.h"

namespace tenon::test {
namespace {

namespace fs = std::filesystem;
using cuda::Cache;
using cuda::CachedImage;
using cuda::CacheKey;

constexpr uint64_t kLimit = 1 << 20;

class DiskCache : public testing::Test {
 protected:
  DiskCache() {
    char pattern[] = "/tmp/tenon-cache-XXXXXX";
    root = mkdtemp(pattern);
    folder = root / "tenon";
  }
  ~DiskCache() override {
    fs::permissions(root, fs::perms::owner_all);
    fs::remove_all(root);
  }
  static CacheKey key(const std::string& source) { return {"nvrtc 13.0 -x", "sm_90a", source}; }
  static void keep(Cache& c, const std::string& source, const std::string& image) {
    c.keep(key(source), {image, false}, "gelu");
  }
  static std::string found(Cache& c, const std::string& source) {
    const auto image = c.find(key(source));
    return image ? image->image : "";
  }
  [[nodiscard]] fs::path only_file() const {
    EXPECT_EQ(std::distance(fs::directory_iterator(folder), {}), 1);
    return fs::directory_iterator(folder)->path();
  }

  fs::path root, folder;
};

TEST_F(DiskCache, KeepsAnImageForTheNextProcess) {
  {
    Cache c(folder, kLimit);
    EXPECT_EQ(found(c, "a"), "");
    keep(c, "a",
         std::string("\x7f"
                     "ELF\0binary",
                     11));
    c.keep({"nvrtc 13.0 -x", "sm_990", "a"}, {"text", true}, "gelu");
  }
  Cache c(folder, kLimit);
  EXPECT_EQ(found(c, "a"), std::string("\x7f"
                                       "ELF\0binary",
                                       11));
  EXPECT_TRUE(c.find({"nvrtc 13.0 -x", "sm_990", "a"})->is_ptx);
  EXPECT_EQ(c.why_off(), "");
  struct stat s {};
  ASSERT_EQ(stat(folder.c_str(), &s), 0);
  EXPECT_EQ(s.st_mode & 0777U, 0700U);
}

TEST_F(DiskCache, EveryPartOfTheKeyCounts) {
  Cache c(folder, kLimit);
  keep(c, "a", "image");
  EXPECT_FALSE(c.find({"nvrtc 13.1 -x", "sm_90a", "a"}));
  EXPECT_FALSE(c.find({"nvrtc 13.0 -x", "sm_80", "a"}));
  EXPECT_FALSE(c.find(key("b")));
}

// An entry with a changed byte or length is treated as missing.
TEST_F(DiskCache, ChangedAndShortenedFilesAreNotRun) {
  Cache c(folder, kLimit);
  keep(c, "source", "image");
  const fs::path file = only_file();
  std::ifstream in(file, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  const auto put = [&](const std::string& text) {
    std::ofstream(file, std::ios::binary | std::ios::trunc) << text;
  };
  for (size_t i = 0; i < whole.size(); ++i) {
    std::string text = whole;
    text[i] = static_cast<char>(text[i] ^ 0x10);
    put(text);
    EXPECT_EQ(found(c, "source"), "") << "byte " << i;
    put(whole.substr(0, i));
    EXPECT_EQ(found(c, "source"), "") << "length " << i;
  }
  put(whole + "x");
  EXPECT_EQ(found(c, "source"), "");
  put(whole);
  EXPECT_EQ(found(c, "source"), "image");
  put("");
  keep(c, "source", "again");  // an invalid entry is written again
  EXPECT_EQ(found(c, "source"), "again");
}

// A valid entry under the name of another one.
TEST_F(DiskCache, ForeignEntriesAreNotRun) {
  Cache c(folder, kLimit);
  keep(c, "a", "image of a");
  const fs::path a = only_file();
  keep(c, "b", "image of b");
  for (const auto& f : fs::directory_iterator(folder))
    if (f.path() != a) fs::copy_file(f, a, fs::copy_options::overwrite_existing);
  EXPECT_EQ(found(c, "a"), "");
  fs::remove(a);
  fs::create_symlink("/etc/hostname", a);
  EXPECT_EQ(found(c, "a"), "");
}

// Nobody writes to the FIFO, so a normal open would block forever.
TEST_F(DiskCache, AFifoIsNoEntry) {
  Cache c(folder, kLimit);
  keep(c, "a", "image");
  const fs::path file = only_file();
  fs::remove(file);
  ASSERT_EQ(mkfifo(file.c_str(), 0600), 0);
  auto answer = std::async(std::launch::async, [&] { return found(c, "a"); });
  const bool answered = answer.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
  EXPECT_TRUE(answered) << "still waiting for a writer";
  if (!answered) close(open(file.c_str(), O_WRONLY | O_NONBLOCK));  // unblocks the reader
  EXPECT_EQ(answer.get(), "");
  EXPECT_TRUE(c.entries().empty());
  keep(c, "a", "again");
  EXPECT_EQ(found(c, "a"), "again");
}

// Writes fail as on a full disk. The old entry stays, and the reason is available.
TEST_F(DiskCache, AFullDiskLosesOnlyTheNewEntry) {
  Cache c(folder, kLimit);
  keep(c, "a", "image");
  EXPECT_EQ(c.why_lost(), "");
  rlimit old{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, old.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  keep(c, "a", std::string(5000, 'i'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(found(c, "a"), "image");
  EXPECT_NE(c.why_lost().find("could not be written: "), std::string::npos) << c.why_lost();
  EXPECT_NE(c.why_lost().find(only_file().string()), std::string::npos) << c.why_lost();
  keep(c, "b", std::string(kLimit, 'i'));
  EXPECT_NE(c.why_lost().find("TENON_CACHE_MB"), std::string::npos) << c.why_lost();
}

TEST_F(DiskCache, AFolderThatOthersCanWriteToIsRefused) {
  Cache c(folder, kLimit);
  keep(c, "a", "image");
  for (const fs::perms p : {fs::perms::group_write, fs::perms::others_write}) {
    fs::permissions(folder, fs::perms::owner_all | p);
    EXPECT_EQ(found(c, "a"), "");
    EXPECT_NE(c.why_off().find("chmod 700"), std::string::npos) << c.why_off();
  }
  fs::permissions(folder, fs::perms::owner_all);
  EXPECT_EQ(found(c, "a"), "image");
}

TEST_F(DiskCache, WithoutAFolderNothingIsKeptAndNothingFails) {
  std::ofstream(root / "file") << "x";
  for (const fs::path& p : {fs::path(), root / "file", root / "file" / "below"}) {
    Cache c(p, kLimit);
    keep(c, "a", "image");
    EXPECT_EQ(found(c, "a"), "");
    EXPECT_NE(c.why_off().find("TENON_CACHE_DIR"), std::string::npos) << c.why_off();
    EXPECT_TRUE(c.entries().empty());
    EXPECT_EQ(c.clear(), 0U);
  }
  Cache off(folder, 0);
  keep(off, "a", "image");
  EXPECT_NE(off.why_off().find("TENON_CACHE_MB"), std::string::npos);
}

TEST_F(DiskCache, StaysBelowItsLimitAndTheOldestGoFirst) {
  Cache c(folder, 50'000);
  const std::string image(9'000, 'i');
  for (int i = 0; i < 12; ++i) {
    keep(c, std::to_string(i), image);
    const auto old = std::chrono::file_clock::now() - std::chrono::minutes(60 - i);
    for (const auto& f : fs::directory_iterator(folder))
      if (fs::last_write_time(f) > std::chrono::file_clock::now() - std::chrono::seconds(30))
        fs::last_write_time(f, old);
    EXPECT_EQ(found(c, "0").empty(), false) << i;  // in use all the time, so never the oldest
  }
  uint64_t total = 0;
  for (const Cache::Entry& e : c.entries()) total += e.bytes;
  EXPECT_LE(total, 50'000U);
  EXPECT_EQ(found(c, "1"), "");
  EXPECT_EQ(found(c, "11"), image);
  keep(c, "huge", std::string(60'000, 'h'));
  EXPECT_EQ(found(c, "huge"), "");
  EXPECT_EQ(found(c, "11"), image);
}

TEST_F(DiskCache, ListsAndClears) {
  Cache c(folder, kLimit);
  keep(c, "a", "image");
  const std::string name = "0123456789abcdef0123456789abcdef.kernel";
  std::ofstream(folder / name) << "not a kernel";
  std::ofstream(folder / (name + ".7.0.unfinished")) << "of a process that is gone";
  const std::vector<std::string> others{"notes.txt", "linux.kernel", "thesis.unfinished"};
  for (const std::string& other : others) std::ofstream(folder / other) << "of the user";
  const auto all = c.entries();
  ASSERT_EQ(all.size(), 2U);
  const auto ours = std::ranges::find(all, "gelu", &Cache::Entry::name);
  ASSERT_NE(ours, all.end());
  EXPECT_EQ(ours->arch, "sm_90a");
  EXPECT_EQ(c.clear(), 3U);
  for (const std::string& other : others) EXPECT_TRUE(fs::exists(folder / other)) << other;
  EXPECT_TRUE(c.entries().empty());
}

// Processes that write all the time and are killed at any moment leave whole entries or none.
TEST_F(DiskCache, SurvivesKilledWritersAndManyReaders) {
  const auto image = [](int i) {
    return std::string(20'000, static_cast<char>('a' + i % 26)) + std::to_string(i);
  };
  constexpr int kKeys = 8;
  for (int round = 0; round < 6; ++round) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      Cache c(folder, kLimit);
      for (int i = 0;; i = (i + 1) % kKeys) keep(c, std::to_string(i), image(i));
    }
    Cache c(folder, kLimit);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(40 + 7 * round);
    while (std::chrono::steady_clock::now() < end)
      for (int i = 0; i < kKeys; ++i) {
        const std::string got = found(c, std::to_string(i));
        EXPECT_TRUE(got.empty() || got == image(i));
      }
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  Cache c(folder, kLimit);
  keep(c, "after", "image");
  EXPECT_EQ(found(c, "after"), "image");
}

}  // namespace
}  // namespace tenon::test
