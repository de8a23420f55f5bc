// The rules that every public call checks before anything is touched.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tenon/options.h"
#include "tenon/view.h"

namespace tenon {

// A view with the name that messages use; `part` says which view of a tensor it is.
struct Named {
  std::string_view name;
  View view;
  std::string_view part = {};
};

// Every enumerator of the options exists.
void check_options(std::string_view op, const Options& options);

// Sizes, stride and dtype of one view; check_view also looks at its pointer. Both want plain
// numbers; check_memory wants `dtype`.
void check_spec(std::string_view op, const Named& v);
void check_view(std::string_view op, const Named& v);
void check_memory(std::string_view op, const Named& v, DType dtype);
void check_shape(std::string_view op, const Named& v, int64_t rows, int64_t cols,
                 std::string_view rule);

// Whether two views share an element.
bool overlap(const View& a, const View& b);
// Same memory, element for element.
bool same(const View& a, const View& b);

// Outputs overlap nothing, except that a plain output may be exactly one of `in_place`.
void check_overlap(std::string_view op, const std::vector<Named>& inputs,
                   const std::vector<Named>& outputs, const std::vector<Named>& in_place);

}  // namespace tenon
