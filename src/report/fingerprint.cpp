// A name for everything that decides the bits of a plan's results.
#include "core/hash.h"
#include "lower/data.h"

namespace tenon {

namespace {

// Raise it when a word, an encoder, the random stream or the order of a sum gives other bits.
constexpr int kBits = 1;

// The makers of a product, because each adds in its own order. A library also chooses by version,
// device and timing.
void add_makers(std::string& text, const Choice& choice, const Target& target) {
  append_to(text, " by ", kDevices[static_cast<size_t>(target.device)]);
  for (const Way& w : choice.ways()) {
    append_to(text, " ", w.maker);
    if (!w.halves) continue;
    for (const auto* half : {w.halves->first.get(), w.halves->second.get()})
      add_makers(text, *half, target);
  }
  if (target.device == Device::cuda)
    append_to(text, " ", target.name, " ", target.cublaslt, target.tunes ? " timed" : "");
}

void add_views(std::string& text, const std::vector<BufferView>& views) {
  for (const BufferView& v : views)
    append_to(text, " ", v.buffer, ",", static_cast<int>(v.form), ",",
              static_cast<int>(v.orientation), ",", v.cols, ",", v.rows.mul, "/", v.rows.div, "/",
              v.rows.fixed);
}

void add_step(std::string& text, const PlanStep& s, const Target& target) {
  append_to(text, "\n", s.step.name, s.weights ? " weights " : " ", s.rows.mul, "/", s.rows.div,
            "/", s.rows.fixed);
  if (s.opaque) {
    append_to(text, " opaque");
  } else {
    append_to(text, " ", s.step.key());
    if (s.step.gemm()) add_makers(text, *s.chosen.kernel, target);
  }
  for (const float p : s.parameters) append_to(text, " #", __builtin_bit_cast(uint32_t, p));
  add_views(text, s.in);
  text += " ->";
  add_views(text, s.out);
}

}  // namespace

std::string Plan::fingerprint() const {
  const PlanData& d = *data_;
  std::string text = str("bits ", kBits, " ", print_chain(d.chain));
  for (const Buffer& b : d.buffers)
    append_to(text, "\n", b.name, " ", static_cast<int>(b.role), " ", info(b.dtype).name, " ",
              b.rows.mul, "/", b.rows.div, "/", b.rows.round, "/", b.rows.add, " ", b.cols,
              b.rows_inside ? " inside" : "");
  for (const auto* steps : {&d.forward, &d.backward}) {
    text += "\n";
    for (const PlanStep& s : *steps) add_step(text, s, *d.target);
  }
  return hash128(text);
}

}  // namespace tenon
