// Coefficients of 2^x, lowest order first, printed by tools/polynomials.py.
#pragma once

namespace tenon::cpu::jit {

// clang-format off
// On [0, 1]: 2^-13.7
inline constexpr float kExp2Rough[] = {0x1.fff632p-1f, 0x1.64445cp-1f, 0x1.cefb78p-3f, 0x1.3f97cap-4f};
// On [0, 1]: 2^-23.6
inline constexpr float kExp2[] = {0x1.fffffep-1f, 0x1.62e4eap-1f, 0x1.ebd6c4p-3f, 0x1.c94992p-5f,
    0x1.26bcb8p-7f, 0x1.ebabc4p-10f};
// 2^(f + 1) on [-0.5, 0.5]: 2^-23.0
inline constexpr float kExp2Twice[] = {0x1.000002p+1f, 0x1.62e432p+0f, 0x1.ebf8p-2f,
    0x1.c6a9aep-4f, 0x1.3d604ep-6f, 0x1.6275f4p-9f};
// clang-format on

}  // namespace tenon::cpu::jit
