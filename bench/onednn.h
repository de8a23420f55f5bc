// Plain products with oneDNN, for comparison.
#pragma once

#include <cpuid.h>

#include <functional>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>

#include "tenon/dtype.h"

namespace onednn {

// Limits the instruction set of oneDNN. Some virtual machines expose the matrix unit but not its
// palettes (CPUID leaf 29). oneDNN then configures no palette.
inline void prepare() {
  unsigned palettes = 0, b = 0, c = 0, d = 0;
  // TENON_ISA limits both libraries to instruction sets without bf16.
  if (std::getenv("TENON_ISA"))
    dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core);
  else if (!__get_cpuid_count(29, 0, &palettes, &b, &c, &d) || palettes == 0)
    dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core_bf16);
}

inline dnnl::engine& cpu() {
  static dnnl::engine one(dnnl::engine::kind::cpu, 0);
  return one;
}
inline dnnl::stream& queue() {
  static dnnl::stream one(cpu());
  return one;
}
inline dnnl::memory::data_type type(tenon::DType d) {
  return d == tenon::DType::f32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

// A dense matrix, or its transpose.
struct Matrix {
  void* data;
  tenon::DType dtype;
  int64_t rows, cols;
  bool turned;

  [[nodiscard]] Matrix t() const { return {data, dtype, cols, rows, !turned}; }
  [[nodiscard]] dnnl::memory::desc desc() const {
    using tag = dnnl::memory::format_tag;
    return {{rows, cols}, type(dtype), turned ? tag::ba : tag::ab};
  }
  [[nodiscard]] dnnl::memory memory() const { return {desc(), cpu(), data}; }
};

// c = a·b
inline std::function<void()> product(const Matrix& a, const Matrix& b, const Matrix& c) {
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(a.desc(), b.desc(), c.desc()), cpu());
  const std::unordered_map<int, dnnl::memory> args{
      {DNNL_ARG_SRC, a.memory()}, {DNNL_ARG_WEIGHTS, b.memory()}, {DNNL_ARG_DST, c.memory()}};
  return [kernel = dnnl::matmul(pd), args] {
    kernel.execute(queue(), args);
    queue().wait();
  };
}

}  // namespace onednn
