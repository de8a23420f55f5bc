#include <stdio.h>
#include <tenon/tenon.h>

int main(void) {
  printf("tenon %s from C\n", tenon_version());
  return 0;
}
