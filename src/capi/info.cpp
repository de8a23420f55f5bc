// Queries over the C ABI: names, activations, scaling modes and their shapes.
#include <string>
#include <vector>

#include "capi/common.h"
#include "tenon/tenon.hpp"

namespace {

using tenon::require;
using namespace tenon::capi;  // NOLINT: helpers of the C ABI's files

// Storage for the pointers in the last result of tenon_activation_info.
struct Answer {
  std::string name, formula;
  std::vector<tenon::Parameter> parameters;
  std::vector<tenon_parameter> list;
};
thread_local Answer answer;

tenon_scaling row(tenon::Scaling s) {
  const tenon::ScalingInfo& mode = tenon::info(s);
  tenon_scaling row{};
  row.name = mode.name.data();
  row.scale_dtype = static_cast<int32_t>(mode.scale);
  row.single = mode.reads_scale;
  row.scale_given = mode.scale_given;
  row.transposes = mode.transposes;
  for (size_t side = 0; side < mode.blocks.size(); ++side) {
    row.block_rows[side] = mode.blocks[side].rows;
    row.block_cols[side] = mode.blocks[side].cols;
  }
  return row;
}

}  // namespace

const char* tenon_version(void) { return tenon::version(); }

const char* tenon_last_error(void) { return last_error; }

int tenon_scalings(tenon_scaling* list, size_t capacity, size_t* count) {
  return guarded([&] {
    give(tenon::kScalings.size(), list, capacity, count,
         [](size_t i) { return row(static_cast<tenon::Scaling>(i)); });
  });
}

int tenon_encoding_shape(const char* name, int64_t rows, int64_t cols, int32_t columnwise,
                         int64_t data[2], int64_t scale_inv[2]) {
  return guarded([&] {
    constexpr const char* kName = "tenon_encoding_shape";
    const tenon::Format f{.scaling = scaling(name, kName)};
    constexpr int64_t kMost = int64_t{1} << 60;
    require(rows >= 0 && cols >= 0 && rows <= kMost && cols <= kMost, kName, ": ", rows, "x", cols,
            "; sizes lie in [0, 2^60]");
    const auto side = columnwise ? tenon::Orientation::columnwise : tenon::Orientation::rowwise;
    const auto put = [](int64_t* to, const tenon::Shape& s) {
      if (to) to[0] = s.rows, to[1] = s.cols;
    };
    put(data, f.data_shape(rows, cols, side));
    put(scale_inv, f.scale_shape(rows, cols, side));
  });
}

int tenon_define(const char* name, const char* formula) {
  return guarded([&] {
    tenon::define(std::string(text(name, "tenon_define", "name")),
                  text(formula, "tenon_define", "formula"));
  });
}

int tenon_names(char* buffer, size_t capacity, size_t* size) {
  return guarded([&] {
    std::string all;
    for (const std::string& name : tenon::activation_names()) all += name + "\n";
    give(all, buffer, capacity, size);
  });
}

int tenon_pinned(const char* act, char* buffer, size_t capacity, size_t* size) {
  return guarded(
      [&] { give(tenon::pinned(text(act, "tenon_pinned", "act")), buffer, capacity, size); });
}

int tenon_activation_info(const char* act, tenon_activation* info) {
  return guarded([&] {
    constexpr const char* kName = "tenon_activation_info";
    require(info != nullptr, kName, ": info is NULL; pass where the answer goes");
    const tenon::Activation f = tenon::activation(text(act, kName, "act"));
    answer = {f.name, tenon::formula(f), f.parameters, {}};
    for (const tenon::Parameter& p : answer.parameters)
      answer.list.push_back({p.name.c_str(), p.value, p.least, p.most});
    *info = {answer.name.c_str(), answer.formula.c_str(), f.inputs, f.scaled,
             answer.list.data(),  answer.list.size()};
  });
}

int tenon_show(const char* act, int32_t backward, char* buffer, size_t capacity, size_t* size) {
  return guarded([&] {
    const tenon::Activation f = tenon::activation(text(act, "tenon_show", "act"));
    give(tenon::show(f, backward != 0), buffer, capacity, size);
  });
}
