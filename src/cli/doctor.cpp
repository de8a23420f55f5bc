// `tenon doctor`: prints the features of this machine.
#include <fmt/core.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "backend/cpu/isa.h"
#include "backend/cuda/makers.h"
#include "choice/backends.h"
#include "cli/command.h"
#include "tenon/tenon.hpp"

namespace tenon::cli {

namespace {

// The target that plans assume on this machine.
nlohmann::json target_of(const Backend& b) {
  const Target& t = b.here();
  return {{"name", t.name},
          {"here", t.here},
          {"processors", t.processors},
          {"cache_bytes", t.cache_bytes},
          {"shared_bytes", t.shared_bytes},
          {"driver", t.driver},
          {"nvrtc", t.nvrtc},
          {"cublaslt", t.cublaslt}};
}

int doctor(bool json) {
  const cuda::Status cuda = cuda::status();
  if (json) {
    nlohmann::json out;
    out["tenon"] = version();
    out["cpu"] = {{"isa", std::string(cpu::isa_here().name)},
                  {"threads", threads()},
                  {"cores", std::thread::hardware_concurrency()}};
    out["cuda"] = {{"usable", cuda.gpu},  {"device", cuda.device},     {"driver", cuda.driver},
                   {"nvrtc", cuda.nvrtc}, {"cublaslt", cuda.cublaslt}, {"why", cuda.why}};
    for (const Backend* b : backends()) {
      nlohmann::json makers = nlohmann::json::array();
      for (const Maker& m : b->makers) makers.push_back(std::string(m.name));
      out["backends"][std::string(b->name)] = makers;
      out["targets"][std::string(b->name)] = target_of(*b);
    }
    fmt::print("{}\n", out.dump());
    return ok;
  }
  fmt::print("tenon   {}\n", version());
  fmt::print("cpu     {}, {} threads of {} cores (TENON_THREADS, TENON_ISA change them)\n",
             cpu::isa_here().name, threads(), std::thread::hardware_concurrency());
  for (const std::string& line : cuda::doctor_lines()) fmt::print("{}\n", line);
  return ok;
}

}  // namespace

extern const Command kDoctorCommand{
    "doctor", "what this machine offers: CPU, threads, CUDA", []() -> Bound {
      static bool json = false;
      return {{{"--json", &json, "one JSON object"}}, [] { return doctor(json); }};
    }};

}  // namespace tenon::cli
