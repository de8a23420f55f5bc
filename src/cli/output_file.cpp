// Writes a regular file under a temporary name and renames it, so that a full disk does not destroy
// an old file.
#include "cli/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cli/tensor_file.h"
#include "tenon/error.h"

namespace tenon::cli {

namespace {

// Returns 0 or the error code.
int write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return 0;
}

// The target of a link. Writing to the target keeps the link.
std::string resolved(const std::string& path) {
  const std::unique_ptr<char, void (*)(void*)> real(realpath(path.c_str(), nullptr), std::free);
  return real ? real.get() : path;
}

}  // namespace

void write_file(std::string_view option, const std::string& path, std::string_view bytes) {
  const std::string name = clean(path, 200);
  struct stat old {};
  const bool there = stat(path.c_str(), &old) == 0;
  // Other files, such as pipes, are written directly.
  const bool replaced = !there || S_ISREG(old.st_mode);
  const std::string target = there ? resolved(path) : path;
  const std::string unfinished = replaced ? str(target, ".", getpid(), ".unfinished") : target;
  const bool allowed = !there || access(target.c_str(), W_OK) == 0;
  const int flags = O_WRONLY | O_CLOEXEC | (replaced ? O_CREAT | O_EXCL : 0);
  const int fd = allowed ? open(unfinished.c_str(), flags, 0666) : -1;
  require(fd >= 0, option, " ", name, " cannot be opened: ", std::strerror(errno),
          "; give a path in a folder that can be written");
  int error = write_all(fd, bytes);
  if (error == 0 && replaced && there && fchmod(fd, old.st_mode & 07777U) != 0) error = errno;
  if (error == 0 && replaced && fsync(fd) != 0) error = errno;
  if (close(fd) != 0 && error == 0) error = errno;  // some file systems report a full disk here
  if (error == 0 && replaced && rename(unfinished.c_str(), target.c_str()) != 0) error = errno;
  if (error == 0) return;
  if (replaced) unlink(unfinished.c_str());
  fail(Code::runtime, option, " ", name, " could not be written: ", std::strerror(error),
       "; make room or give another path");
}

void require_other_file(std::string_view option, const std::string& output,
                        const std::string& input) {
  struct stat in {};
  struct stat out {};
  const bool same = stat(input.c_str(), &in) == 0 && stat(output.c_str(), &out) == 0 &&
                    in.st_dev == out.st_dev && in.st_ino == out.st_ino && S_ISREG(in.st_mode);
  require(!same, option, " ", clean(output, 200), " is the input file ", clean(input, 200),
          " itself; give the output a path of its own");
}

}  // namespace tenon::cli
