// RAII classes for streams, graphs and contexts of the CUDA driver, for tests.
#pragma once

#include <algorithm>
#include <vector>

#include "backend/cuda/driver.h"
#include "backend/cuda/library.h"
#include "tenon/error.h"

namespace tenon::test {

using GpuStream = cuda::OwnStream;

// A graph captured from the work that `work` puts into a stream.
class GpuGraph {
 public:
  template <class Work>
  GpuGraph(const GpuStream& stream, Work work) : stream_(stream) {
    constexpr int kThreadLocal = 1;  // a call that is invalid during capture is an error
    const cuda::CurrentContext context;
    const cuda::Driver& d = cuda::driver();
    cuda::check(d.stream_begin_capture(stream.get(), kThreadLocal), "beginning a capture");
    try {
      work();
    } catch (...) {
      d.stream_end_capture(stream.get(), &graph_);
      throw;
    }
    cuda::check(d.stream_end_capture(stream.get(), &graph_), "ending a capture");
    cuda::check(d.graph_instantiate(&exec_, graph_, 0), "instantiating a graph");
  }
  ~GpuGraph() {
    const cuda::CurrentContext context;
    if (exec_) cuda::driver().graph_exec_destroy(exec_);
    if (graph_) cuda::driver().graph_destroy(graph_);
  }
  GpuGraph(const GpuGraph&) = delete;
  GpuGraph& operator=(const GpuGraph&) = delete;

  // Whether a replay allocates memory.
  [[nodiscard]] bool allocates() const {
    constexpr int kAllocation = 10;
    const cuda::Driver& d = cuda::driver();
    size_t count = 0;
    cuda::check(d.graph_get_nodes(graph_, nullptr, &count), "counting a graph's nodes");
    std::vector<cuda::GraphNode> nodes(count);
    cuda::check(d.graph_get_nodes(graph_, nodes.data(), &count), "listing a graph's nodes");
    return std::ranges::any_of(nodes, [&](cuda::GraphNode node) {
      int type = 0;
      cuda::check(d.graph_node_get_type(node, &type), "asking for a node's type");
      return type == kAllocation;
    });
  }

  void replay() const {
    const cuda::CurrentContext context;
    cuda::check(cuda::driver().graph_launch(exec_, stream_.get()), "launching a graph");
    stream_.wait();
  }

 private:
  const GpuStream& stream_;
  cuda::StreamGraph graph_ = nullptr;
  cuda::GraphExec exec_ = nullptr;
};

// A second context on device 0, in addition to the primary one.
class GpuContext {
 public:
  GpuContext() {
    const cuda::Library library = cuda::Library::open("libcuda.so.1");
    int (*create)(cuda::Context*, unsigned, int) = nullptr;
    int device = 0;
    if (!library.find(create, "cuCtxCreate_v2") || !library.find(destroy_, "cuCtxDestroy_v2"))
      fail(Code::runtime, "the driver makes no contexts");
    cuda::check(cuda::driver().device_get(&device, 0), "finding CUDA device 0");
    cuda::check(create(&context_, 0, device), "making a context");
    cuda::Context popped = nullptr;  // the new context is current
    cuda::driver().context_pop_current(&popped);
  }
  ~GpuContext() { destroy_(context_); }
  GpuContext(const GpuContext&) = delete;
  GpuContext& operator=(const GpuContext&) = delete;

  // Makes the context current in the calling thread for a scope.
  class Scope {
   public:
    explicit Scope(const GpuContext& c) {
      cuda::check(cuda::driver().context_push_current(c.context_), "making a context current");
    }
    ~Scope() {
      cuda::Context popped = nullptr;
      cuda::driver().context_pop_current(&popped);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

 private:
  cuda::Context context_ = nullptr;
  int (*destroy_)(cuda::Context) = nullptr;
};

}  // namespace tenon::test
