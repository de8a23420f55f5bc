// The modes of the program. Each returns its exit code.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "function.h"
#include "inputs.h"
#include "measure.h"

namespace tenon::accuracy {

// Measures every function. The reports are in the order of the functions.
std::vector<std::unique_ptr<Report>> measure_all(const std::vector<Function>& list,
                                                 const Amounts& amounts);

// Writes docs/accuracy.md. Returns false if the file cannot be written.
bool write_table(const std::string& path, const std::vector<Function>& list,
                 const std::vector<std::unique_ptr<Report>>& reports);

// Tests all 2^32 fp32 inputs of unary functions.
int run_exhaustive(const std::vector<std::string>& names);

// Compares CUDA with the CPU, bit by bit.
int run_cuda(const std::vector<Function>& list, const Amounts& amounts);
int run_cuda_exhaustive(const std::vector<std::string>& names);

}  // namespace tenon::accuracy
