// The named recipes.
#include "tenon/error.h"
#include "tenon/plan.h"

namespace tenon {

Recipe recipe(std::string_view name, bool e4m3) {
  const DType gradient = e4m3 ? DType::e4m3 : DType::e5m2;
  const auto one = [&](Scaling s, DType d) { return Format{.dtype = d, .scaling = s}; };
  if (name == "none") return {};
  if (name == "delayed" || name == "current") {
    const Scaling s = name == "delayed" ? Scaling::delayed : Scaling::current;
    return {std::string(name), one(s, DType::e4m3), one(s, DType::e4m3), one(s, gradient)};
  }
  if (name == "mxfp8") {
    const Format f = one(Scaling::mxfp8, DType::e4m3);
    return {"mxfp8", f, f, f};
  }
  if (name == "block") {
    const Format f = one(Scaling::block1x128, DType::e4m3);
    return {"block", f, one(Scaling::block128x128, DType::e4m3), f};
  }
  fail(Code::invalid_argument, "recipe: '", name,
       "' is not a recipe; use none, delayed, current, mxfp8 or block");
}

}  // namespace tenon
