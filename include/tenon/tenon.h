/* The C ABI: an op is text, so a new op changes nothing here. */
#ifndef TENON_TENON_H
#define TENON_TENON_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TENON_API __attribute__((visibility("default")))
#else
#define TENON_API
#endif

/* What calls return; after a failure tenon_last_error() says what, why and what to do. */
enum tenon_code {
  TENON_OK = 0,
  TENON_INVALID_ARGUMENT = 1,
  TENON_UNSUPPORTED = 2,
  TENON_RUNTIME = 3
};

enum tenon_dtype { TENON_F32 = 0, TENON_F16 = 1, TENON_BF16 = 2 };
enum tenon_precision { TENON_NATIVE = 0, TENON_STRICT = 1 };
enum tenon_rounding { TENON_ONCE = 0, TENON_EAGER = 1 };
enum tenon_device { TENON_CPU = 0, TENON_CUDA = 1 };

/* A matrix in the caller's memory; rows lie `stride` elements apart. Any alignment. */
typedef struct tenon_view {
  void* data;
  int64_t rows, cols, stride;
  int32_t dtype; /* tenon_dtype */
} tenon_view;

/* Set `size` to sizeof; zero in the rest is the default. NULL stands for all defaults. */
typedef struct tenon_options {
  size_t size;
  int32_t precision, rounding, device;
  void* stream; /* CUDA only; views then hold device pointers */
} tenon_options;

/* y = f(x + bias)*scale. Pointers that are NULL do not take part. */
typedef struct tenon_forward_args {
  size_t size;
  const tenon_view* x;     /* [M,K]; gated: [M,2H], or a alone with b */
  const tenon_view* b;     /* the linear half as a tensor of its own */
  const tenon_view* bias;  /* one number a column of the input */
  const tenon_view* scale; /* scaled(f): [M,1] */
  const tenon_view* y;
  const tenon_view* amax; /* [1,1] f32 */
  const char* layout;     /* "stacked" (default), "swapped", "interleaved(k)" */
} tenon_forward_args;

typedef struct tenon_backward_args {
  size_t size;
  const tenon_view* grad;
  const tenon_view* x;
  const tenon_view* b;
  const tenon_view* bias;
  const tenon_view* scale;
  const tenon_view* dx;
  const tenon_view* db;
  const tenon_view* dbias;  /* column sums of dx */
  const tenon_view* dscale; /* row sums of grad*f */
  const tenon_view* amax;
  const char* layout;
} tenon_backward_args;

TENON_API const char* tenon_version(void);

/* Of the calling thread's last failed call; valid until its next call. */
TENON_API const char* tenon_last_error(void);

/* `act` is a name, "name(parameter=number)", "gated(...)", "scaled(...)" or a formula such as
   "x*sigmoid(beta*x); beta = 1". */
TENON_API int tenon_forward(const char* act, const tenon_forward_args* args,
                            const tenon_options* options);
TENON_API int tenon_backward(const char* act, const tenon_backward_args* args,
                             const tenon_options* options);

/* A fused function from text: `arguments` names its inputs, e.g. "x, bias". Arguments are [M,K],
   [1,K], [M,1] or [1,1]; gradients[i] is like in[i], or has NULL data and size 0 if not wanted. */
TENON_API int tenon_fused_forward(const char* formula, const char* arguments, const tenon_view* in,
                                  size_t in_count, const tenon_view* y,
                                  const tenon_options* options);
TENON_API int tenon_fused_backward(const char* formula, const char* arguments, const tenon_view* in,
                                   size_t in_count, const tenon_view* grad,
                                   const tenon_view* gradients, const tenon_options* options);

/* Named functions: act, bias_act, dact, bgrad_dact, l2normalization[_fwd|_bwd]. */
TENON_API int tenon_run(const char* name, const tenon_view* in, size_t in_count,
                        const tenon_view* out, size_t out_count, const tenon_options* options);

/* A name of one's own for a formula; it may be defined again. */
TENON_API int tenon_define(const char* name, const char* formula);

/* The registered names, one a line. Writes at most `capacity` bytes, the final zero included, and
   the size needed to *size. */
TENON_API int tenon_names(char* buffer, size_t capacity, size_t* size);

/* Threads of the CPU backend; 0 restores the default. */
TENON_API int tenon_set_threads(int32_t count);

#ifdef __cplusplus
}
#endif

#endif
