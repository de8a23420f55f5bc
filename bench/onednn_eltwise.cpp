// The module with oneDNN: its functions that are equal to an activation of ours.
#include <string>

#include "bench/eltwise.h"
#include "bench/onednn.h"

namespace {

using namespace tenon::bench;  // NOLINT: a part of the benchmarks

struct Function {
  std::string_view op;
  dnnl::algorithm algorithm;
  float alpha = 0;
};
constexpr Function kFunctions[] = {
    {"relu", dnnl::algorithm::eltwise_relu},
    {"leaky_relu", dnnl::algorithm::eltwise_relu, 0.01F},
    {"silu", dnnl::algorithm::eltwise_swish, 1},
    {"qgelu", dnnl::algorithm::eltwise_swish, 1.702F},
    {"sigmoid", dnnl::algorithm::eltwise_logistic},
    {"tanh", dnnl::algorithm::eltwise_tanh},
    {"gelu", dnnl::algorithm::eltwise_gelu_tanh},
    {"gelu_erf", dnnl::algorithm::eltwise_gelu_erf},
    {"hardswish", dnnl::algorithm::eltwise_hardswish},
    {"softplus", dnnl::algorithm::eltwise_soft_relu},
    {"mish", dnnl::algorithm::eltwise_mish},
    {"elu", dnnl::algorithm::eltwise_elu, 1},
};

class Primitive : public Eltwise {
 public:
  Primitive(const Function& f, const EltwiseCall& call) {
    using namespace dnnl;  // NOLINT: its names
    const engine& cpu = onednn::cpu();
    const memory::desc desc({call.elements},
                            call.bf16 ? memory::data_type::bf16 : memory::data_type::f32,
                            memory::format_tag::a);
    const eltwise_forward::primitive_desc forward(
        {call.backward ? prop_kind::forward_training : prop_kind::forward_inference, f.algorithm,
         desc, f.alpha},
        cpu);
    args_ = {{DNNL_ARG_SRC, memory(desc, cpu, call.x)}};
    if (!call.backward) {
      primitive_ = eltwise_forward(forward);
      args_.emplace(DNNL_ARG_DST, memory(desc, cpu, call.result));
      return;
    }
    primitive_ = eltwise_backward(
        eltwise_backward::primitive_desc({f.algorithm, desc, desc, f.alpha}, cpu, forward));
    args_.emplace(DNNL_ARG_DIFF_DST, memory(desc, cpu, call.grad));
    args_.emplace(DNNL_ARG_DIFF_SRC, memory(desc, cpu, call.result));
  }
  void run() override {
    primitive_.execute(onednn::queue(), args_);
    onednn::queue().wait();
  }

 private:
  dnnl::primitive primitive_;
  std::unordered_map<int, dnnl::memory> args_;
};

Eltwise* make(const EltwiseCall& call) {
  for (const Function& f : kFunctions)
    if (f.op == call.op) try {
        return new Primitive(f, call);
      } catch (const dnnl::error&) {
        return nullptr;  // not on this processor
      }
  return nullptr;
}

std::string version() {
  onednn::prepare();
  const dnnl_version_t& v = *dnnl_version();
  return std::to_string(v.major) + "." + std::to_string(v.minor) + "." + std::to_string(v.patch);
}
const std::string kVersion = version();

}  // namespace

extern "C" [[gnu::visibility("default")]] const EltwiseLibrary tenon_onednn;
const EltwiseLibrary tenon_onednn = {make, kVersion.c_str()};
