// The C ABI as a C program uses it: an activation from text, forward, backward, and an error.
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <tenon/tenon.h>

int main(void) {
  float x[6] = {-2, -1, 0, 1, 2, 3};
  float ones[6] = {1, 1, 1, 1, 1, 1};
  float y[6];
  float dx[6];
  const tenon_view xv = {x, 2, 3, 3, TENON_F32};
  const tenon_view gv = {ones, 2, 3, 3, TENON_F32};
  const tenon_view yv = {y, 2, 3, 3, TENON_F32};
  const tenon_view dv = {dx, 2, 3, 3, TENON_F32};
  const tenon_forward_args forward = {.size = sizeof forward, .x = &xv, .y = &yv};
  const tenon_backward_args backward = {.size = sizeof backward, .grad = &gv, .x = &xv, .dx = &dv};

  printf("tenon %s from C\n", tenon_version());
  if (tenon_define("twice", "2*x*sigmoid(x)") || tenon_forward("twice", &forward, NULL) ||
      tenon_backward("twice", &backward, NULL)) {
    printf("%s\n", tenon_last_error());
    return 1;
  }
  for (int i = 0; i < 6; ++i) {
    const double s = 1 / (1 + exp(-x[i]));
    if (fabs(y[i] - 2 * x[i] * s) > 1e-6) return 2;
    if (fabs(dx[i] - 2 * (s + x[i] * s * (1 - s))) > 1e-6) return 3;
  }
  if (tenon_forward("gelo", &forward, NULL) != TENON_INVALID_ARGUMENT) return 4;
  return strstr(tenon_last_error(), "did you mean 'gelu'") ? 0 : 5;
}
