// Finds libnvrtc, and compiles with the options for bit-exact strict results.
#include "backend/cuda/nvrtc.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <vector>

#include "backend/cuda/library.h"
#include "tenon/error.h"

namespace tenon::cuda {

namespace {

constexpr int kInvalidOption = 5;

using Program = struct ProgramHandle*;

// The functions that Tenon calls. A result of 0 is success.
struct Nvrtc {
  const char* (*get_error_string)(int result);
  int (*version)(int* major, int* minor);
  int (*get_num_supported_archs)(int* count);
  int (*get_supported_archs)(int* archs);
  int (*create_program)(Program* program, const char* source, const char* name, int headers,
                        const char* const* texts, const char* const* names);
  int (*destroy_program)(Program* program);
  int (*compile_program)(Program program, int count, const char* const* options);
  int (*get_program_log_size)(Program program, size_t* size);
  int (*get_program_log)(Program program, char* log);
  int (*get_cubin_size)(Program program, size_t* size);
  int (*get_cubin)(Program program, char* image);
  int (*get_ptx_size)(Program program, size_t* size);
  int (*get_ptx)(Program program, char* image);
};

struct Loaded {
  Nvrtc nvrtc{};
  std::string path, version;
  std::vector<int> archs;  // ascending: 75, 80, …
  std::string why;         // empty if NVRTC works
};

std::string resolve(const Library& library, Nvrtc& n) {
  std::string missing;
  const auto get = [&](auto*& function, const char* name) {
    if (!library.find(function, name) && missing.empty()) missing = name;
  };
  get(n.get_error_string, "nvrtcGetErrorString");
  get(n.version, "nvrtcVersion");
  get(n.get_num_supported_archs, "nvrtcGetNumSupportedArchs");
  get(n.get_supported_archs, "nvrtcGetSupportedArchs");
  get(n.create_program, "nvrtcCreateProgram");
  get(n.destroy_program, "nvrtcDestroyProgram");
  get(n.compile_program, "nvrtcCompileProgram");
  get(n.get_program_log_size, "nvrtcGetProgramLogSize");
  get(n.get_program_log, "nvrtcGetProgramLog");
  get(n.get_cubin_size, "nvrtcGetCUBINSize");
  get(n.get_cubin, "nvrtcGetCUBIN");
  get(n.get_ptx_size, "nvrtcGetPTXSize");
  get(n.get_ptx, "nvrtcGetPTX");
  return missing;
}

// NVRTC opens its builtins by file name at the first compile. That fails outside the path of the
// loader, so they are opened here first, from the folder of NVRTC.
void open_builtins(const std::string& path, const std::string& version) {
  const size_t slash = path.rfind('/');
  if (slash != std::string::npos)
    (void)Library::open(str(path.substr(0, slash + 1), "libnvrtc-builtins.so.", version), true);
}

// Why a library is not a usable NVRTC. Empty if it is.
std::string refusal(const Library& library) {
  constexpr int kOldest = 12;
  Nvrtc n;
  if (const std::string missing = resolve(library, n); !missing.empty())
    return str("has no ", missing);
  int major = 0;
  int minor = 0;
  n.version(&major, &minor);
  return major >= kOldest ? "" : str("is version ", major, ".", minor, ", ", kOldest, " is needed");
}

Loaded load() {
  Loaded l;
  const Library library = Library::open_nvidia("libnvrtc.so", "TENON_NVRTC", refusal);
  if (!library) {
    l.why = str("no NVRTC (", library.why(),
                "); install nvidia-cuda-nvrtc or set TENON_NVRTC to the file libnvrtc.so.*");
    return l;
  }
  l.path = library.path_of("nvrtcVersion");
  resolve(library, l.nvrtc);
  int major = 0;
  int minor = 0;
  int count = 0;
  l.nvrtc.version(&major, &minor);
  l.version = str(major, ".", minor);
  open_builtins(l.path, l.version);
  if (l.nvrtc.get_num_supported_archs(&count) == 0 && count > 0) {
    l.archs.resize(static_cast<size_t>(count));
    l.nvrtc.get_supported_archs(l.archs.data());
    std::ranges::sort(l.archs);
  }
  if (l.archs.empty()) l.why = str("NVRTC ", l.path, " names no architecture it compiles for");
  return l;
}

const Loaded& loaded() {
  static const auto& kLoaded = *new Loaded(load());
  return kLoaded;
}

// The option for an architecture, and whether the result is PTX.
struct Target {
  std::string option;
  bool is_ptx = false;
};

Target target(const Loaded& l, const std::string& arch) {
  int number = 0;
  const char* const digits = arch.data() + std::min<size_t>(3, arch.size());
  std::from_chars(digits, arch.data() + arch.size(), number);
  if (!arch.starts_with("sm_") || number == 0)
    fail(Code::invalid_argument, "nvrtc: '", arch, "' is no architecture; give one like sm_90a");
  if (number < kOldestArch)
    fail(Code::unsupported, "nvrtc: kernels need sm_", kOldestArch, " or newer, and this is ", arch,
         "; use device cpu");
  if (std::ranges::binary_search(l.archs, number)) return {str("--gpu-architecture=", arch), false};
  // PTX runs on its own architecture and on newer ones.
  const auto above = std::ranges::upper_bound(l.archs, number);
  if (above == l.archs.begin())
    fail(Code::unsupported, "nvrtc: NVRTC ", l.version, " compiles for sm_", l.archs.front(),
         " and newer, the device is ", arch, "; use an older NVRTC by TENON_NVRTC");
  return {str("--gpu-architecture=compute_", *(above - 1)), true};
}

// One compilation. Its destructor destroys the program.
class Compilation {
 public:
  Compilation(const Nvrtc& n, const std::string& source) : n_(n) {
    check(n.create_program(&program_, source.c_str(), "tenon.cu", 0, nullptr, nullptr), "");
  }
  ~Compilation() { n_.destroy_program(&program_); }
  Compilation(const Compilation&) = delete;
  Compilation& operator=(const Compilation&) = delete;

  int run(const std::vector<std::string>& options) {
    std::vector<const char*> texts;
    texts.reserve(options.size());
    for (const std::string& option : options) texts.push_back(option.c_str());
    return n_.compile_program(program_, static_cast<int>(texts.size()), texts.data());
  }

  [[nodiscard]] std::string log() const {
    std::string text = read(n_.get_program_log_size, n_.get_program_log);
    if (!text.empty()) text.pop_back();  // the final 0
    return text;
  }
  [[nodiscard]] std::string image(bool is_ptx) const {
    return is_ptx ? read(n_.get_ptx_size, n_.get_ptx) : read(n_.get_cubin_size, n_.get_cubin);
  }

  void check(int result, const std::string& text) const {
    if (result != 0)
      fail(Code::runtime, "nvrtc: ", n_.get_error_string(result), text.empty() ? "" : "\n", text);
  }

 private:
  [[nodiscard]] std::string read(int (*size_of)(Program, size_t*),
                                 int (*get)(Program, char*)) const {
    size_t size = 0;
    check(size_of(program_, &size), "");
    std::string text(size, '\0');
    if (size > 0) check(get(program_, text.data()), "");
    return text;
  }

  const Nvrtc& n_;
  Program program_ = nullptr;
};

// Strict results need the same bits everywhere. The last option, and an optional one after it, only
// reduce compile time.
constexpr std::string_view kOptions[] = {"--fmad=false",    "--ftz=false",      "--std=c++17",
                                         "--prec-div=true", "--prec-sqrt=true", "--minimal"};

const Loaded& working() {
  const Loaded& l = loaded();
  if (!l.why.empty()) fail(Code::runtime, "nvrtc: ", l.why);
  return l;
}

}  // namespace

std::optional<std::string> why_no_nvrtc() {
  const std::string& why = loaded().why;
  return why.empty() ? std::nullopt : std::optional(why);
}

std::string nvrtc_path() { return working().path; }
std::string nvrtc_version() { return working().version; }
std::string compiler_identity() {
  std::string text = "nvrtc " + nvrtc_version();
  for (const std::string_view o : kOptions) text += str(" ", o);
  return text;
}

namespace {
std::atomic<size_t> compiled_texts = 0;
}
size_t compilations() { return compiled_texts; }

Compiled compile(const std::string& source, const std::string& arch) {
  ++compiled_texts;
  const Loaded& l = working();
  const Target to = target(l, arch);
  std::vector<std::string> options(std::begin(kOptions), std::end(kOptions));
  options.insert(options.begin(), to.option);
  if (source.find(kCompileFast) != std::string::npos) options.emplace_back("--Ofast-compile=mid");
  for (;;) {
    Compilation compilation(l.nvrtc, source);
    const int result = compilation.run(options);
    // Older versions do not know the last options.
    if (result == kInvalidOption && options.back() != kOptions[std::size(kOptions) - 2]) {
      options.pop_back();
      continue;
    }
    std::string log = compilation.log();
    compilation.check(result, str("compiling for ", arch, " by ", l.path, ":\n", log));
    return {compilation.image(to.is_ptx), to.is_ptx, std::move(log)};
  }
}

}  // namespace tenon::cuda
