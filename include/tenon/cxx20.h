// Checks for C++20. Without it the headers of the C++ API are empty, so that this is the only
// error.
#pragma once

#if __cplusplus > 201703L  // g++ 10 gives less than 202002 for -std=c++20
#define TENON_CXX20
#else
#error "Tenon's C++ headers need C++20: compile with -std=c++20 (tenon/tenon.h is plain C)"
#endif
