// The rules that every public call checks before anything is touched.
#pragma once

#include <string_view>

#include "core/few.h"
#include "tenon/options.h"
#include "tenon/view.h"

namespace tenon {

// A view with the name that messages use; `part` says which view of a tensor it is.
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

// Every enumerator of the options exists.
void check_options(std::string_view op, const Options& options);

// Sizes, stride and dtype of one view; check_view also looks at its pointer. Both want plain
// numbers; check_memory wants `dtype`.
void check_spec(std::string_view op, const Named& v);
void check_view_closely(std::string_view op, const Named& v);
// Whether a view surely breaks no rule; short, as every call asks for every view.
inline bool fine(const View& v) {
  constexpr int64_t kMost = int64_t{1} << 28;  // what is larger is looked at closely
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

// Whether two views share an element.
bool overlap(const View& a, const View& b);
// Same memory, element for element.
bool same(const View& a, const View& b);

// Outputs overlap nothing, except that a plain output may be exactly one of `in_place`.
void check_overlap(std::string_view op, const NamedList& inputs, const NamedList& outputs,
                   const NamedList& in_place);

}  // namespace tenon
