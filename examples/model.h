// The demonstration's language model: letters in, one plan, letters out.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/session.h"

namespace demo {

using tenon::DType, tenon::Plan;
using tenon::support::RandomState, tenon::support::Runner, tenon::support::Session;

struct ModelShape {
  int64_t context = 16, embedding = 16, hidden = 512, batch = 256;

  [[nodiscard]] int64_t width() const { return context * embedding; }
};

// The text as numbers of letters.
struct Corpus {
  explicit Corpus(std::string_view text);

  std::string letters;  // all that occur, in order
  std::vector<uint8_t> codes;

  [[nodiscard]] int64_t vocabulary() const { return static_cast<int64_t>(letters.size()); }
};

// Between embeddings and scores everything is this chain, so it is one plan.
std::string chain_of(const ModelShape& shape, const Corpus& corpus);

// fp32 parameters with Adam's moments, and what is done outside of the chain: embeddings are
// gathered and their gradients scattered, scores become a loss. One thread, so that the numbers
// depend on nothing but the seed.
class Model {
 public:
  Model(const ModelShape& shape, const Corpus& corpus, const Plan& plan, uint64_t seed);

  // One step of training on the batch of this number; gives its mean loss in nats.
  double step(Runner& runner, int64_t number, double rate);
  // Its first half: the loss, and its gradient where the chain reads it.
  double forward(Runner& runner, int64_t number);
  // Parameters and the state of the random stream, where the chain reads them.
  void begin(Runner& runner) const;
  // `count` letters after `start`, by a plan for one row with the parameters of `trained`.
  [[nodiscard]] std::string continued(std::string start, Session& one, const Session& trained,
                                      int count) const;

  [[nodiscard]] int64_t parameters() const;

 private:
  void store(Runner& runner) const;
  struct Weights {
    std::string name;  // of the plan's buffer; empty: the embeddings
    DType dtype = DType::f32;
    std::vector<float> value, gradient, mean, square;
  };
  void load_batch(Runner& runner, int64_t number);
  void embed(const uint8_t* letters, DType dtype, char* to) const;
  double loss(Runner& runner);
  void adam(Weights& w, double rate) const;

  ModelShape shape_;
  const Corpus& corpus_;
  uint64_t seed_;
  DType dtype_;
  std::vector<Weights> weights_;  // the embeddings first
  std::vector<size_t> batch_;     // where its windows begin
  int64_t updates_ = 0;
};

}  // namespace demo
