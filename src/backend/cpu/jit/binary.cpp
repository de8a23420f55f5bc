// Code is written to its memory first. Then the memory becomes executable and read-only.
#include "backend/cpu/jit/binary.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

#include "tenon/error.h"

// What asmjit's failed assertions write to (cmake/asmjit.cmake).
extern "C" [[gnu::visibility("hidden")]] FILE* tenon_asmjit_stderr;
FILE* tenon_asmjit_stderr = stderr;

namespace tenon::cpu::jit {

namespace {

void check(asmjit::Error error) {
  if (error)
    fail(Code::runtime, "cpu: the JIT compiler failed: ", asmjit::DebugUtils::errorAsString(error));
}

}  // namespace

Binary::Binary(asmjit::CodeHolder& code) {
  check(code.flatten());
  check(code.resolveUnresolvedLinks());
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes_ = (code.codeSize() + page - 1) / page * page;
  memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory_ == MAP_FAILED)
    fail(Code::runtime, "cpu: no memory for ", bytes_, " bytes of compiled code");
  check(code.relocateToBase(reinterpret_cast<uint64_t>(memory_)));
  check(code.copyFlattenedData(memory_, bytes_));
  if (mprotect(memory_, bytes_, PROT_READ | PROT_EXEC) != 0)
    fail(Code::runtime, "cpu: the system permits no compiled code; set TENON_RUNNER=interpreter");
}

Binary::~Binary() {
  if (memory_) munmap(memory_, bytes_);
}

}  // namespace tenon::cpu::jit
