// The rules that every public call checks before it reads or writes memory.
#pragma once

#include <string_view>

#include "core/few.h"
#include "tenon/options.h"
#include "tenon/view.h"

namespace tenon {

// A view with its name for messages. `part` names the view within its tensor.
struct Named {
  std::string_view name;
  View view;
  std::string_view part = {};
};
using NamedList = Few<Named, 8>;
inline void append(NamedList& list, std::string_view name, const View& view,
                   std::string_view part = {}) {
  if (view.given()) list.emplace_back(name, view, part);
}

// Checks that every option is a valid enumerator.
void check_options(std::string_view op, const Options& options);

// check_spec checks the sizes, the stride and the dtype of one view. check_view also checks its
// pointer. Both require a plain dtype. check_memory requires `dtype`.
void check_spec(std::string_view op, const Named& v);
void check_view_closely(std::string_view op, const Named& v);
// A fast check: true if the view certainly satisfies all rules. It is short because every call runs
// it for every view.
inline bool fine(const View& v) {
  constexpr int64_t kMost = int64_t{1} << 28;  // larger views go to check_view_closely
  return static_cast<size_t>(v.dtype) < kDTypes.size() && info(v.dtype).plain && 0 <= v.rows &&
         v.rows < kMost && 0 <= v.cols && v.cols <= v.stride && v.stride < kMost &&
         (v.data != nullptr || v.rows == 0 || v.cols == 0);
}
inline void check_view(std::string_view op, const Named& v) {
  if (!fine(v.view)) check_view_closely(op, v);
}
void check_memory(std::string_view op, const Named& v, DType dtype);
void check_shape(std::string_view op, const Named& v, int64_t rows, int64_t cols,
                 std::string_view rule);

// True if the two views share an element.
bool overlap(const View& a, const View& b);
// True if the two views have the same elements at the same addresses.
bool same(const View& a, const View& b);

// An output must not overlap any other view. Exception: a plain output may be equal to one view of
// `in_place`.
void check_overlap(std::string_view op, const NamedList& inputs, const NamedList& outputs,
                   const NamedList& in_place);

}  // namespace tenon
