// Decodes and scales lines of the tensor in the first-level cache, then copies them into panels.
#include "backend/cpu/gemm_pack.h"

#include <algorithm>
#include <cstring>

namespace tenon::cpu {

namespace {

constexpr int64_t kLine = 512;  // values of a line decoded at once
constexpr int64_t kLanes = 32;  // lanes of the widest panel
constexpr int64_t kSpan = 2 * kInnerBlock;

// Prefetches the next part of a line. Hardware prefetchers do not follow so many lines.
void fetch(const char* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

}  // namespace

bool exact_in_bf16(const Format& f) {
  const bool narrow = f.dtype == DType::bf16 || f.dtype == DType::e4m3 || f.dtype == DType::e5m2;
  return narrow && f.blocks(Orientation::rowwise).single();
}

Packer::Packer(const GemmKernel& kernel, const Loops& loops, const Matrix& m, Side side,
               const RunArgs& args, int64_t inner)
    : kernel_(kernel),
      loops_(loops),
      format_(m.format),
      orientation_(m.orientation),
      data_(args.in[m.arg]),
      inner_(inner),
      side_(side),
      k_first_((side == Side::b) != m.transposed),
      blocks_(!m.format.blocks(m.orientation).single()) {
  const bool turned = m.orientation == Orientation::columnwise && info(m.format.scaling).transposes;
  k_inside_ = k_first_ == turned;
  if (m.format.scaling == Scaling::none) return;
  scales_ = args.in[m.arg + 1];
  if (!blocks_) std::memcpy(&scale_, scales_.data, sizeof scale_);
}

const char* Packer::at(int64_t lane, int64_t k) const {
  const int64_t line = k_inside_ ? lane : k;
  const int64_t offset = line * data_.stride + (k_inside_ ? k : lane);
  return static_cast<const char*>(data_.data) + offset * info(format_.dtype).bytes;
}

// The scales of n values that are adjacent in memory.
void Packer::fill_scales(float* out, int64_t lane, int64_t k, int64_t n) const {
  const Blocks blocks = format_.blocks(orientation_);
  const int64_t row = k_first_ ? k : lane;
  const int64_t column = k_first_ ? lane : k;
  const bool along_rows = k_first_ == k_inside_;  // neighbours are in different rows
  const int64_t size = along_rows ? blocks.rows : blocks.cols;
  const int64_t bytes = info(scales_.dtype).bytes;
  const LoadLoop load = loops_.load[index(scales_.dtype)];
  const auto scale_at = [&](int64_t i) {
    const int64_t r = along_rows ? row + i : row;
    const int64_t c = along_rows ? column : column + i;
    const int64_t offset = scale_offset(format_, orientation_, r / blocks.rows, c / blocks.cols,
                                        {scales_.rows, scales_.cols}, scales_.stride);
    return static_cast<const char*>(scales_.data) + offset * bytes;
  };
  if (size == 1 && !format_.swizzled && along_rows == blocks.transposed)
    return load(out, scale_at(0), 1, static_cast<size_t>(n));
  const int64_t start = along_rows ? row : column;
  for (int64_t done = 0; done < n;) {
    const int64_t run = std::min(size - (start + done) % size, n - done);
    float scale = 0;
    load(&scale, scale_at(done), 1, 1);
    std::fill_n(out + done, run, scale);
    done += run;
  }
}

// Decodes n values that are adjacent in memory, from (lane, k) on.
void Packer::numbers(float* out, int64_t lane, int64_t k, int64_t n) const {
  loops_.load[index(format_.dtype)](out, at(lane, k), 1, static_cast<size_t>(n));
  if (!blocks_) return;
  float scales[kLine];
  fill_scales(scales, lane, k, n);
  for (int64_t i = 0; i < n; ++i) out[i] *= scales[i];
}

void Packer::halves(uint16_t* out, int64_t lane, int64_t k, int64_t n) const {
  float line[kLine];
  numbers(line, lane, k, n);
  for (int64_t i = 0; i < n; ++i)
    out[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, line[i]) >> 16);
}

void Packer::panel_of_numbers(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
                              int64_t count) const {
  const int64_t stride = data_.stride * static_cast<int64_t>(sizeof(float));
  if (!decodes())
    return (k_inside_ ? kernel_.transpose : kernel_.copy)(out, width, at(lane, k), stride, lanes,
                                                          count);
  if (!k_inside_) {
    for (int64_t i = 0; i < count; ++i, out += width) {
      numbers(out, lane, k + i, lanes);
      std::fill(out + lanes, out + width, 0.0F);
    }
    return;
  }
  constexpr int64_t kPart = 256;  // 32 KB of lines
  alignas(64) float lines[kLanes * kPart];
  for (int64_t done = 0; done < count; done += kPart) {
    const int64_t n = std::min(kPart, count - done);
    for (int64_t l = 0; l < lanes; ++l) {
      fetch(at(lane + l, k + done + kPart), n * info(format_.dtype).bytes);
      numbers(lines + l * kPart, lane + l, k + done, n);
    }
    kernel_.transpose(out + done * width, width, lines, kPart * sizeof(float), lanes, n);
  }
}

// Words after the last value of k are zero.
void Packer::panel_of_pairs(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
                            int64_t words) const {
  const int64_t n = std::clamp<int64_t>(inner_ - 2 * k, 0, 2 * words);
  const bool plain = !decodes();
  const int64_t stride = data_.stride * static_cast<int64_t>(sizeof(uint16_t));
  const int64_t whole = plain && k_inside_ ? n / 2 : 0;
  std::fill(out + cdiv(n, 2) * width, out + words * width, 0.0F);
  if (!k_inside_) {
    if (plain) return kernel_.zip(out, width, at(lane, 2 * k), stride, lanes, n);
    alignas(64) uint16_t lines[2 * kLanes];
    for (int64_t i = 0; i < n; i += 2, out += width) {
      for (int64_t j = 0; j < std::min<int64_t>(2, n - i); ++j)
        halves(lines + j * kLanes, lane, 2 * k + i + j, lanes);
      kernel_.zip(out, width, lines, 2 * kLanes, lanes, std::min<int64_t>(2, n - i));
    }
    return;
  }
  if (whole > 0) kernel_.transpose(out, width, at(lane, 2 * k), stride, lanes, whole);
  constexpr int64_t kPart = 256;
  alignas(64) uint16_t lines[kLanes * kPart];
  for (int64_t done = 2 * whole; done < n; done += kPart) {
    const int64_t part = std::min(kPart, n - done);
    for (int64_t l = 0; l < lanes; ++l) {
      fetch(at(lane + l, 2 * k + done + kPart), part * info(format_.dtype).bytes);
      halves(lines + l * kPart, lane + l, 2 * k + done, part);
      if (part % 2) lines[l * kPart + part] = 0;
    }
    kernel_.transpose(out + done / 2 * width, width, lines, 2 * kPart, lanes, cdiv(part, 2));
  }
}

// [k ÷ 16][width][16]: 16 words of each row, the rows of the panel one after the other.
void Packer::panel_of_tiles(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
                            int64_t words) const {
  constexpr int64_t kTile = 16;
  if (!k_inside_) {
    alignas(64) float pairs[kTile * kLanes];
    for (int64_t i = 0; i < words; i += kTile, out += kTile * width) {
      panel_of_pairs(pairs, lane, lanes, width, k + i, kTile);
      kernel_.transpose(out, kTile, pairs, width * static_cast<int64_t>(sizeof(float)), kTile,
                        width);
    }
    return;
  }
  const int64_t n = std::clamp<int64_t>(inner_ - 2 * k, 0, 2 * words);
  alignas(64) uint16_t line[kSpan];
  for (int64_t l = 0; l < width; ++l) {
    const char* from = l < lanes ? at(lane + l, 2 * k) : nullptr;
    const int64_t valid = l < lanes ? n : 0;
    if (valid > 0 && format_.dtype != DType::bf16) {
      halves(line, lane + l, 2 * k, valid);
      from = reinterpret_cast<const char*>(line);
    }
    for (int64_t i = 0; i < words; i += kTile) {
      auto* to = reinterpret_cast<char*>(out + (i / kTile * width + l) * kTile);
      const auto here = static_cast<size_t>(std::clamp<int64_t>(valid - 2 * i, 0, 2 * kTile)) * 2;
      if (here > 0) std::memcpy(to, from + 4 * i, here);
      if (here < 4 * kTile) std::memset(to + here, 0, 4 * kTile - here);
    }
  }
}

void Packer::panel(float* out, int64_t lane, int64_t lanes, int64_t width, int64_t k,
                   int64_t words) const {
  if (!kernel_.pairs) return panel_of_numbers(out, lane, lanes, width, k, words);
  if (kernel_.tiles && side_ == Side::a) return panel_of_tiles(out, lane, lanes, width, k, words);
  panel_of_pairs(out, lane, lanes, width, k, words);
}

}  // namespace tenon::cpu
