// A language model around a plan.
#include "examples/model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tenon/error.h"

namespace demo {

using tenon::Buffer, tenon::Pass, tenon::Role;

namespace {

// Streams of random numbers.
enum Stream : uint64_t { embeddings = 1, batches, samples };

// Number n of a stream, by SplitMix64. It depends only on its arguments.
uint32_t random_number(uint64_t seed, Stream stream, uint64_t n) {
  uint64_t z = (seed * 4 + stream) * 0xd1342543de82ef95U + n * 0x9e3779b97f4a7c15U;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
  return static_cast<uint32_t>(z >> 32);
}

float load(DType dtype, const char* from, int64_t i) {
  const auto size = info(dtype).bytes;
  uint32_t code = 0;
  std::memcpy(&code, from + i * size, static_cast<size_t>(size));
  return decode(dtype, code);
}

void store_one(DType dtype, char* to, int64_t i, float value) {
  const uint32_t code = encode(dtype, value);
  const auto size = info(dtype).bytes;
  std::memcpy(to + i * size, &code, static_cast<size_t>(size));
}

// Converts scores to probabilities.
void softmax(float* v, int64_t n) {
  const float most = *std::max_element(v, v + n);
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    v[i] = std::exp(v[i] - most);
    sum += v[i];
  }
  for (int64_t i = 0; i < n; ++i) v[i] /= sum;
}

}  // namespace

Corpus::Corpus(std::string_view text) : letters(text) {
  std::ranges::sort(letters);
  letters.erase(std::unique(letters.begin(), letters.end()), letters.end());
  for (const char c : text) codes.push_back(static_cast<uint8_t>(letters.find(c)));
}

std::string chain_of(const ModelShape& s, const Corpus& corpus) {
  const int64_t w = s.width();
  return tenon::str("make_extra_output>input rmsnorm(", w, ") linear(", w, ",", 2 * s.hidden,
                    "):up bias swiglu linear(", s.hidden, ",", w,
                    "):down bias dropout(0.2) add<input rmsnorm(", w, ") linear(", w, ",",
                    corpus.vocabulary(), "):head");
}

Model::Model(const ModelShape& shape, const Corpus& corpus, const Plan& plan, uint64_t seed)
    : shape_(shape),
      corpus_(corpus),
      seed_(seed),
      dtype_(plan.buffers()[plan.with(Role::input).front()].dtype) {
  Weights& table = weights_.emplace_back();
  table.value.resize(static_cast<size_t>(corpus.vocabulary() * shape.embedding));
  for (size_t i = 0; i < table.value.size(); ++i) {
    const uint32_t word = random_number(seed, Stream::embeddings, i);
    table.value[i] = static_cast<float>(word) * 0x1p-31F - 1;
  }
  for (const size_t i : plan.with(Role::param)) {
    const Buffer& b = plan.buffers()[i];
    Weights& w = weights_.emplace_back();
    w.name = b.name;
    w.dtype = b.dtype;
    std::vector<char> start(static_cast<size_t>(b.bytes(0)));
    plan.initialise(i, seed, start.data());
    for (int64_t k = 0; k < b.rows(0) * b.cols; ++k)
      w.value.push_back(load(b.dtype, start.data(), k));
  }
  for (Weights& w : weights_) w.gradient = w.mean = w.square = std::vector<float>(w.value.size());
}

int64_t Model::parameters() const {
  size_t count = 0;
  for (const Weights& w : weights_) count += w.value.size();
  return static_cast<int64_t>(count);
}

void Model::begin(Runner& runner) const {
  store(runner);
  const RandomState state{seed_, 0, 0, 0, static_cast<uint64_t>(shape_.width())};
  std::memcpy(runner.at("rng"), state.data(), sizeof state);
}

void Model::store(Runner& runner) const {
  for (const Weights& w : weights_) {
    if (w.name.empty()) continue;
    char* const to = static_cast<char*>(runner.at(w.name));
    for (size_t i = 0; i < w.value.size(); ++i)
      store_one(w.dtype, to, static_cast<int64_t>(i), w.value[i]);
  }
}

// Writes the embeddings of a window's letters, one after the other.
void Model::embed(const uint8_t* letters, DType dtype, char* to) const {
  for (int64_t j = 0; j < shape_.context; ++j)
    for (int64_t e = 0; e < shape_.embedding; ++e)
      store_one(dtype, to, j * shape_.embedding + e,
                weights_[0].value[static_cast<size_t>(letters[j] * shape_.embedding + e)]);
}

void Model::load_batch(Runner& runner, int64_t number) {
  char* const x = static_cast<char*>(runner.at("x"));
  const uint64_t windows = corpus_.codes.size() - static_cast<size_t>(shape_.context);
  batch_.clear();
  for (int64_t r = 0; r < shape_.batch; ++r) {
    const uint64_t i = static_cast<uint64_t>(number * shape_.batch + r);
    batch_.push_back(random_number(seed_, Stream::batches, i) % windows);
    embed(&corpus_.codes[batch_.back()], dtype_, x + r * shape_.width() * info(dtype_).bytes);
  }
}

// The mean cross entropy of the batch.
double Model::loss(Runner& runner) {
  const int64_t n = corpus_.vocabulary();
  const char* const y = static_cast<const char*>(runner.at("y"));
  char* const dy = static_cast<char*>(runner.at("dy"));
  std::vector<float> row(static_cast<size_t>(n));
  double sum = 0;
  for (int64_t r = 0; r < shape_.batch; ++r) {
    const size_t next = batch_[static_cast<size_t>(r)] + static_cast<size_t>(shape_.context);
    const uint8_t target = corpus_.codes[next];
    for (int64_t c = 0; c < n; ++c) row[static_cast<size_t>(c)] = load(dtype_, y, r * n + c);
    softmax(row.data(), n);
    sum -= std::log(std::max(row[target], 1e-30F));
    row[target] -= 1;
    for (int64_t c = 0; c < n; ++c)
      store_one(dtype_, dy, r * n + c,
                row[static_cast<size_t>(c)] / static_cast<float>(shape_.batch));
  }
  return sum / static_cast<double>(shape_.batch);
}

double Model::forward(Runner& runner, int64_t number) {
  load_batch(runner, number);
  runner.run(Pass::forward);
  return loss(runner);
}

double Model::step(Runner& runner, int64_t number, double rate) {
  const double value = forward(runner, number);
  runner.run(Pass::backward);
  runner.update_scales();

  for (Weights& w : weights_) {
    if (w.name.empty()) continue;
    // Gradients are fp32 for every parameter dtype.
    std::memcpy(w.gradient.data(), runner.at("d" + w.name), w.gradient.size() * sizeof(float));
  }
  Weights& table = weights_[0];
  std::ranges::fill(table.gradient, 0.0F);
  const char* const dx = static_cast<const char*>(runner.at("dx"));
  for (int64_t r = 0; r < shape_.batch; ++r)
    for (int64_t k = 0; k < shape_.width(); ++k) {
      const uint8_t letter =
          corpus_.codes[batch_[static_cast<size_t>(r)] + static_cast<size_t>(k / shape_.embedding)];
      table.gradient[static_cast<size_t>(letter * shape_.embedding + k % shape_.embedding)] +=
          load(dtype_, dx, r * shape_.width() + k);
    }
  ++updates_;
  for (Weights& w : weights_) adam(w, rate);
  store(runner);
  return value;
}

void Model::adam(Weights& w, double rate) const {
  constexpr float kMean = 0.9F, kSquare = 0.99F, kSmall = 1e-8F;
  const auto t = static_cast<double>(updates_);
  const auto grown = static_cast<float>(1 / std::sqrt(1 - std::pow(double{kSquare}, t)));
  const auto by = static_cast<float>(rate / (1 - std::pow(double{kMean}, t)));
  float* __restrict const value = w.value.data();
  float* __restrict const mean = w.mean.data();
  float* __restrict const square = w.square.data();
  const float* const g = w.gradient.data();
  for (size_t i = 0; i < w.value.size(); ++i) {
    mean[i] = kMean * mean[i] + (1 - kMean) * g[i];
    square[i] = kSquare * square[i] + (1 - kSquare) * g[i] * g[i];
    value[i] -= by * mean[i] / (std::sqrt(square[i]) * grown + kSmall);
  }
}

std::string Model::continued(std::string start, Session& one, const Session& trained,
                             int count) const {
  for (const Role role : {Role::param, Role::state})
    for (const size_t i : one.plan().with(role)) {
      const std::string& name = one.plan().buffers()[i].name;
      one.lend(name, trained.at(name));
    }
  const int64_t n = corpus_.vocabulary();
  std::vector<float> row(static_cast<size_t>(n));
  std::vector<uint8_t> window(static_cast<size_t>(shape_.context));
  for (int i = 0; i < count; ++i) {
    const std::string_view last =
        std::string_view(start).substr(start.size() - static_cast<size_t>(shape_.context));
    for (size_t j = 0; j < window.size(); ++j)
      window[j] = static_cast<uint8_t>(corpus_.letters.find(last[j]));
    embed(window.data(), dtype_, static_cast<char*>(one.at("x")));
    one.run(Pass::forward, i == 0);
    for (int64_t c = 0; c < n; ++c)
      row[static_cast<size_t>(c)] = load(dtype_, static_cast<const char*>(one.at("y")), c);
    softmax(row.data(), n);
    auto left = static_cast<float>(random_number(seed_, Stream::samples, static_cast<uint64_t>(i)) *
                                   0x1p-32);
    size_t letter = 0;
    while (letter + 1 < row.size() && left >= row[letter]) left -= row[letter++];
    start += corpus_.letters[letter];
  }
  return start;
}

}  // namespace demo
