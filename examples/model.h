// The language model of the demonstration: letters in, one plan, letters out.
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

// The text as indices of letters.
struct Corpus {
  explicit Corpus(std::string_view text);

  std::string letters;  // all letters of the text, sorted
  std::vector<uint8_t> codes;

  [[nodiscard]] int64_t vocabulary() const { return static_cast<int64_t>(letters.size()); }
};

// The chain from the embeddings to the scores. It is one plan.
std::string chain_of(const ModelShape& shape, const Corpus& corpus);

// fp32 parameters with Adam's moments, and the work outside the chain: gathers embeddings, scatters
// their gradients, and computes the loss from the scores. It uses one thread, so that the numbers
// depend only on the seed.
class Model {
 public:
  Model(const ModelShape& shape, const Corpus& corpus, const Plan& plan, uint64_t seed);

  // Trains one step on batch `number`. Returns its mean loss in nats.
  double step(Runner& runner, int64_t number, double rate);
  // The first half of a step: computes the loss, and writes its gradient to the input of the
  // backward pass.
  double forward(Runner& runner, int64_t number);
  // Copies the parameters and the state of the random stream to the runner's memory.
  void begin(Runner& runner) const;
  // Generates `count` letters after `start`, with a plan for one row and the parameters of
  // `trained`.
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
  std::vector<Weights> weights_;  // the embeddings are first
  std::vector<size_t> batch_;     // start positions of its windows
  int64_t updates_ = 0;
};

}  // namespace demo
