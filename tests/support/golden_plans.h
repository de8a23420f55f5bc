// The chains with golden plan texts: one for each fusion.
#pragma once

#include <cstdint>
#include <ostream>

#include "tenon/plan.h"

namespace tenon::test {

struct Golden {
  const char* file;
  const char* chain;
  int64_t cols;
  const char* recipe = "none";
  bool input_grad = true;
  Keep keep = Keep::input;
};

inline void PrintTo(const Golden& g, std::ostream* out) { *out << g.file; }

inline PlanRequest request_of(const Golden& g, Device device) {
  PlanRequest r;
  r.cols = g.cols;
  r.dtype = DType::bf16;
  r.recipe = recipe(g.recipe);
  r.input_grad = g.input_grad;
  r.keep = g.keep;
  r.options.device = device;
  return r;
}

inline constexpr Golden kGoldenPlans[] = {
    {"bias_activation", "bias gelu", 96},
    {"bias_activation_quantise", "bias gelu linear(96,64)", 96, "delayed"},
    {"activation_quantise", "silu linear(96,64)", 96, "mxfp8"},
    {"bias_dropout_add", "bias dropout(0.1) add", 96},
    {"linear_bias_activation", "linear(64,128) bias gelu", 64},
    {"linear_bias_activation_kept", "linear(64,128) bias gelu linear(128,64)", 64, "none", true,
     Keep::fp8},
    {"gated_mlp_recomputed", "linear(64,256) bias swiglu linear(128,64)", 64, "mxfp8", true,
     Keep::recompute},
    {"linear_bias_gated_quantise", "linear(512,2048) bias swiglu linear(1024,512)", 512, "delayed"},
    {"linear_bias_activation_current", "linear(64,128) bias gelu linear(128,64)", 64, "current"},
    {"linear_bias_activation_block", "linear(64,256) bias gelu linear(256,64)", 64, "block"},
    {"linear_bias_add", "linear(64,96) bias add", 64},
    {"linear_scale_add", "linear(64,96) scale(0.5) add", 64},
    {"activation_backward_quantise", "linear(64,96) bias gelu", 64, "mxfp8"},
    {"linear_backward_add", "make_extra_output linear(64,96)", 64},
    {"linear_backward_channel_add", "make_extra_output>r linear(64,64) add<r", 64},
    {"linear_backward_scale", "scale(0.5) linear(64,96)", 64},
    {"add_norm", "add rmsnorm", 96},
    {"norm_quantise", "layernorm linear(96,64)", 96, "mxfp8"},
    {"norm_backward_add", "make_extra_output rmsnorm", 96},
    {"gated_mlp_block",
     "make_extra_output>r rmsnorm linear(64,256) bias swiglu linear(128,64) "
     "bias dropout(0.1) add<r",
     64, "mxfp8"}};

}  // namespace tenon::test
