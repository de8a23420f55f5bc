#include <tenon/tenon.h>

#include <cstdio>
#include <tenon/tenon.hpp>

int main() { std::printf("tenon %s from C++\n", tenon_version()); }
