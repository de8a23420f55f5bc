// Reads kernel attributes from the ELF sections .nv.info, which the compiler writes.
#include "bench/cubin.h"

#include <elf.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>
#include <vector>

namespace tenon::bench {

namespace {

class Image {
 public:
  explicit Image(const std::string& bytes) : bytes_(bytes) {}

  template <class T>
  [[nodiscard]] std::optional<T> read(size_t at) const {
    if (at > bytes_.size() || bytes_.size() - at < sizeof(T)) return std::nullopt;
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }
  [[nodiscard]] std::string text(size_t at) const {
    return at < bytes_.size() ? std::string(bytes_.c_str() + at) : std::string();
  }

 private:
  const std::string& bytes_;
};

// Attributes with one value per kernel: format, attribute, size, then the symbol of the kernel.
constexpr uint8_t kSized = 4;
constexpr uint8_t kFrameSize = 0x11;
constexpr uint8_t kRegisters = 0x2f;

}  // namespace

std::map<std::string, KernelUse> kernel_uses(const std::string& bytes) {
  std::map<std::string, KernelUse> uses;
  const Image image(bytes);
  const auto head = image.read<Elf64_Ehdr>(0);
  if (!head || std::memcmp(head->e_ident, ELFMAG, SELFMAG) != 0) return uses;
  std::vector<Elf64_Shdr> sections;
  for (size_t i = 0; i < head->e_shnum; ++i)
    if (const auto s = image.read<Elf64_Shdr>(head->e_shoff + i * head->e_shentsize))
      sections.push_back(*s);
  if (head->e_shstrndx >= sections.size()) return uses;
  const Elf64_Shdr* symbols = nullptr;
  const Elf64_Shdr* infos = nullptr;
  for (const Elf64_Shdr& s : sections) {
    const std::string name = image.text(sections[head->e_shstrndx].sh_offset + s.sh_name);
    if (s.sh_type == SHT_SYMTAB) symbols = &s;
    if (name == ".nv.info") infos = &s;
  }
  if (!symbols || !infos || symbols->sh_link >= sections.size()) return uses;
  const auto name_of = [&](uint32_t symbol) {
    const auto s = image.read<Elf64_Sym>(symbols->sh_offset + symbol * sizeof(Elf64_Sym));
    return s ? image.text(sections[symbols->sh_link].sh_offset + s->st_name) : std::string();
  };
  for (size_t at = infos->sh_offset; at + 4 <= infos->sh_offset + infos->sh_size;) {
    const auto format = image.read<uint8_t>(at);
    const auto which = image.read<uint8_t>(at + 1);
    const auto size = image.read<uint16_t>(at + 2);
    if (!format || !which || !size) break;
    const auto symbol = image.read<uint32_t>(at + 4);
    const auto value = image.read<uint32_t>(at + 8);
    at += *format == kSized ? 4U + *size : 4U;
    if (*format != kSized || *size < 8 || !symbol || !value) continue;
    const std::string name = name_of(*symbol);
    if (name.empty() || name.front() == '$') continue;  // a helper function of the compiler
    if (*which == kRegisters) uses[name].registers = static_cast<int>(*value);
    if (*which == kFrameSize) uses[name].local_bytes = static_cast<int>(*value);
  }
  return uses;
}

}  // namespace tenon::bench
