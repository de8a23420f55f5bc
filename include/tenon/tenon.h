/* The C ABI of Tenon. Ops are text, so a new op does not change this header. */
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

/* Return codes. After a failure tenon_last_error() returns the error, its cause and the remedy. */
enum tenon_code {
  TENON_OK = 0,
  TENON_INVALID_ARGUMENT = 1,
  TENON_UNSUPPORTED = 2,
  TENON_RUNTIME = 3
};

enum tenon_dtype {
  TENON_F32 = 0,
  TENON_F16 = 1,
  TENON_BF16 = 2,
  TENON_E4M3 = 3,
  TENON_E5M2 = 4,
  TENON_E8M0 = 5
};
enum tenon_precision { TENON_NATIVE = 0, TENON_STRICT = 1 };
enum tenon_rounding { TENON_ONCE = 0, TENON_EAGER = 1 };
enum tenon_device { TENON_CPU = 0, TENON_CUDA = 1 };

/* A matrix in the caller's memory. `stride` is the distance between rows in elements. Any alignment
   is valid. */
typedef struct tenon_view {
  void* data;
  int64_t rows, cols, stride;
  int32_t dtype; /* tenon_dtype */
} tenon_view;

/* Returns `bytes` bytes of device memory, 64-byte aligned, for stream-ordered use. One
   library call may allocate more than once. */
typedef void* (*tenon_allocate)(void* user, size_t bytes);

/* Set `size` to sizeof. Zero in every other field is the default. A NULL pointer means all
   defaults. */
typedef struct tenon_options {
  size_t size;
  int32_t precision, rounding, device;
  void* stream;            /* CUDA only; views then hold device pointers */
  tenon_allocate allocate; /* CUDA only; NULL: memory of the device's pool */
  void* user;
} tenon_options;

enum tenon_power_of_two { TENON_MODE_DEFAULT = 0, TENON_POWER_OF_TWO = 1, TENON_EXACT_SCALE = 2 };

/* A tensor of M x K with scales. It has a rowwise encoding, a columnwise encoding, or both.
   tenon_encoding_shape() returns the shapes of its views. */
typedef struct tenon_tensor {
  size_t size;
  const char* scaling;  /* "delayed", "current", "mxfp8", "block1x128", "block128x128"; "none":
                           transposed copies in a plain dtype */
  int32_t dtype;        /* TENON_E4M3, TENON_E5M2; plain for "none" */
  int32_t power_of_two; /* tenon_power_of_two, for current and block scales */
  float eps;            /* current, block: the minimum amax */
  int32_t swizzled;     /* mxfp8: scales in the order of the tensor cores */
  int32_t amax_given;   /* current: amax is an input, not computed */
  const tenon_view* data;
  const tenon_view* scale_inv;
  const tenon_view* columnwise_data;
  const tenon_view* columnwise_scale_inv;
  const tenon_view* scale;  /* delayed, outputs only: [1,1] f32, the multiplier */
  const tenon_view* amax;   /* [1,1] f32; delayed: updated by maximum; current: computed or given */
  const tenon_view* health; /* outputs only: [1,3] f32, counts: saturated, flushed to zero, not
                               finite */
} tenon_tensor;

/* A scaling mode. In arrays, element 0 is for the rowwise encoding and element 1 for the columnwise
   one. */
typedef struct tenon_scaling {
  const char* name;
  int32_t scale_dtype;                  /* tenon_dtype of scale_inv */
  int32_t single;                       /* both encodings share one scale for the whole tensor */
  int32_t scale_given;                  /* the caller gives `scale`; other modes compute it */
  int32_t transposes;                   /* columnwise data are [K,M] */
  int64_t block_rows[2], block_cols[2]; /* elements that share a scale; 0: no blocks */
} tenon_scaling;

/* All scaling modes, "none" first. Writes at most `capacity` of them to `list` and their total
   number to *count. */
TENON_API int tenon_scalings(tenon_scaling* list, size_t capacity, size_t* count);

/* Rows and columns of the data and scale_inv of an encoding, for a tensor of rows x cols. */
TENON_API int tenon_encoding_shape(const char* scaling, int64_t rows, int64_t cols,
                                   int32_t columnwise, int64_t data[2], int64_t scale_inv[2]);

/* y = f(x + bias)*scale. A NULL pointer means that the tensor is absent. A tensor is either a view
   or, in its other field, encoded. Do not set both fields. */
typedef struct tenon_forward_args {
  size_t size;
  const tenon_view* x;     /* [M,K]; gated: [M,2H], or only a if b is given */
  const tenon_view* b;     /* the linear half as a separate tensor */
  const tenon_view* bias;  /* one value per column of the input */
  const tenon_view* scale; /* scaled(f): [M,1] */
  const tenon_view* y;
  const tenon_view* amax; /* [1,1] f32 */
  const char* layout;     /* "stacked" (default), "swapped", "interleaved(k)" */
  const tenon_tensor* x_encoded;
  const tenon_tensor* b_encoded;
  const tenon_tensor* y_encoded;
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
  const tenon_tensor* grad_encoded;
  const tenon_tensor* x_encoded;
  const tenon_tensor* b_encoded;
  const tenon_tensor* dx_encoded;
  const tenon_tensor* db_encoded;
} tenon_backward_args;

/* y = x in another encoding: quantise, dequantise, or both in one pass. */
typedef struct tenon_quantize_args {
  size_t size;
  const tenon_view* x;
  const tenon_view* y;
  const tenon_view* dbias; /* [1,K]: column sums of x */
  const tenon_view* amax;  /* [1,1] f32 */
  const tenon_tensor* x_encoded;
  const tenon_tensor* y_encoded;
} tenon_quantize_args;

/* y = residual + dropout(x + bias). `random` is five numbers: seed, offset, row0, col0, columns. On
   CUDA they are in device memory. Element (r, c) uses number (row0 + r)*columns + col0 + c of the
   stream. A training call increases the offset by one. */
typedef struct tenon_dropout_args {
  size_t size;
  const tenon_view* x;
  const tenon_view* bias;
  const tenon_view* residual;
  const tenon_view* y;
  double p;
  int32_t training; /* 0: evaluation, nothing is dropped */
  uint64_t* random;
} tenon_dropout_args;

/* `random` must have the values from before the forward call. */
typedef struct tenon_dropout_backward_args {
  size_t size;
  const tenon_view* grad;
  const tenon_view* dx;
  const tenon_view* dbias;
  const tenon_view* dresidual;
  double p;
  int32_t training;
  const uint64_t* random;
} tenon_dropout_backward_args;

TENON_API const char* tenon_version(void);

/* The message of the last failed call of the calling thread. It is valid until the thread's next
   call. */
TENON_API const char* tenon_last_error(void);

/* `act` is a name, "name(parameter=number)", "gated(...)", "scaled(...)" or a formula such as
   "x*sigmoid(beta*x); beta = 1". */
TENON_API int tenon_forward(const char* act, const tenon_forward_args* args,
                            const tenon_options* options);
TENON_API int tenon_backward(const char* act, const tenon_backward_args* args,
                             const tenon_options* options);

TENON_API int tenon_quantize(const tenon_quantize_args* args, const tenon_options* options);

/* Updates delayed scaling: history [L,n] and scale [1,n] are f32. Row 0 of the history holds the
   amax since the last update. dtype is TENON_E4M3 or TENON_E5M2. */
TENON_API int tenon_delayed_update(const tenon_view* history, const tenon_view* scale,
                                   int32_t dtype, int32_t margin, int32_t most_recent,
                                   const tenon_options* options);

TENON_API int tenon_bias_dropout_add(const tenon_dropout_args* args, const tenon_options* options);
TENON_API int tenon_bias_dropout_add_backward(const tenon_dropout_backward_args* args,
                                              const tenon_options* options);

/* A fused function from text. `arguments` names its inputs, e.g. "x, bias". Arguments are [M,K],
   [1,K], [M,1] or [1,1]. gradients[i] has the shape of in[i], or NULL data and size 0 if it is not
   needed. */
TENON_API int tenon_fused_forward(const char* formula, const char* arguments, const tenon_view* in,
                                  size_t in_count, const tenon_view* y,
                                  const tenon_options* options);
TENON_API int tenon_fused_backward(const char* formula, const char* arguments, const tenon_view* in,
                                   size_t in_count, const tenon_view* grad,
                                   const tenon_view* gradients, const tenon_options* options);

/* Named functions: act, bias_act, dact, bgrad_dact, l2normalization[_fwd|_bwd]. */
TENON_API int tenon_run(const char* name, const tenon_view* in, size_t in_count,
                        const tenon_view* out, size_t out_count, const tenon_options* options);

/* Defines a name for a formula. A name may be defined again. */
TENON_API int tenon_define(const char* name, const char* formula);

/* The registered names, one per line. Writes at most `capacity` bytes to `buffer`, with the final
   zero, and the required size to *size. */
TENON_API int tenon_names(char* buffer, size_t capacity, size_t* size);

/* `act` with a hash of the contents after each defined name, e.g. `soft_step@0f1e…`. This text
   keeps its meaning after the name is defined again. `buffer`, `capacity` and `size` as for
   tenon_names. */
TENON_API int tenon_pinned(const char* act, char* buffer, size_t capacity, size_t* size);

/* A parameter of an activation. It must be from least to most. A missing bound is infinite. */
typedef struct tenon_parameter {
  const char* name;
  float value, least, most;
} tenon_parameter;

typedef struct tenon_activation {
  const char* name;    /* or the start of its formula */
  const char* formula; /* as evaluated; shared parts t1, t2, … come first */
  int32_t inputs;      /* 1; gated: 2 */
  int32_t scaled;      /* takes one scale per row */
  const tenon_parameter* parameters;
  size_t parameter_count;
} tenon_activation;

/* Properties of `act`. The pointers in *info are valid until the calling thread's next call of this
   function. */
TENON_API int tenon_activation_info(const char* act, tenon_activation* info);

/* Formula, derivative, error bound and code (of the derivative if `backward`) as readable text. */
TENON_API int tenon_show(const char* act, int32_t backward, char* buffer, size_t capacity,
                         size_t* size);

/* y = x*r with r = rsqrt(sum x^2 + eps) per row. r is optional, [M,1] f32. */
TENON_API int tenon_l2_normalization(const tenon_view* x, const tenon_view* y, const tenon_view* r,
                                     float eps, const tenon_options* options);
TENON_API int tenon_l2_normalization_backward(const tenon_view* grad, const tenon_view* x,
                                              const tenon_view* r, const tenon_view* dx,
                                              const tenon_options* options);

/* Measures workspace. Between begin and end, tenon_forward, tenon_backward and tenon_quantize of
   the calling thread run no kernel. end returns the maximum workspace of these calls in bytes. The
   memory of their views is not accessed. No GPU is needed. */
TENON_API int tenon_measure_begin(void);
TENON_API int tenon_measure_end(size_t* bytes);

/* Threads of the CPU backend; 0 restores the default. */
TENON_API int tenon_set_threads(int32_t count);
TENON_API int tenon_threads(void);

/* ---- Ops that a chain may use, in addition to activations ---- */

enum tenon_argument_kind {
  TENON_ARGUMENT_COLUMNS = 0, /* columns of the op's input, checked if given */
  TENON_ARGUMENT_COUNT = 1,   /* an integer of at least 1 */
  TENON_ARGUMENT_NUMBER = 2,
  TENON_ARGUMENT_FLAG = 3,
  TENON_ARGUMENT_TEXT = 4
};

typedef struct tenon_op_argument {
  const char* name;
  int32_t kind;     /* tenon_argument_kind */
  int32_t required; /* a chain must give it */
  double value;     /* default of a number or a flag */
  double least, most;
} tenon_op_argument;

/* A parameter has as many columns as the op's input. It has one row, or the number of rows that an
   argument gives. */
typedef struct tenon_op_parameter {
  const char* name;
  const char* rows; /* name of that argument, or NULL */
} tenon_op_parameter;

enum tenon_extra_kind {
  TENON_EXTRA_TENSOR = 0, /* a tensor of the input's shape */
  TENON_EXTRA_COLUMN = 1, /* one value per row */
  TENON_EXTRA_SCALAR = 2  /* one value */
};

typedef struct tenon_op_extra {
  const char* name;
  int32_t kind; /* tenon_extra_kind */
} tenon_op_extra;

typedef struct tenon_op {
  const char* name;
  const char* summary;                /* one line */
  const tenon_op_argument* arguments; /* in order */
  size_t argument_count;
  const tenon_op_parameter* parameters;
  size_t parameter_count;
  const tenon_op_extra* extra_inputs;
  size_t extra_input_count;
  size_t extra_output_count;
} tenon_op;

/* All ops. Their pointers are valid for the life of the process. `list`, `capacity` and `count` as
   for tenon_scalings. */
TENON_API int tenon_ops(tenon_op* list, size_t capacity, size_t* count);

/* ---- Plans: a chain of ops in few passes, forward and backward ---- */

/* The request for the gradient of a parameter or an extra input. Zero is the default: wanted, in
   the dtype of the tensor. */
typedef struct tenon_grad_request {
  int32_t unwanted;
  int32_t dtype_given, dtype; /* dtype is used if dtype_given is not zero, e.g. for a main_grad */
  int32_t accumulate;         /* add to the gradient that is in memory */
} tenon_grad_request;

/* An op of the caller. A callback returns 0 on success. On failure it writes the reason to `why`.
   The caller of tenon_plan_run gets this reason after the op's name. */
typedef struct tenon_opaque_op {
  const char* name;           /* as in the chain */
  int64_t cols;               /* of its output; 0: as its input */
  int64_t rows_mul, rows_div; /* of its output; 0 and 0: as its input */
  int (*forward)(void* user, int64_t rows, const tenon_view* x, const tenon_view* y, char* why,
                 size_t capacity);
  int (*backward)(void* user, int64_t rows, const tenon_view* x, const tenon_view* dy,
                  const tenon_view* dx, char* why, size_t capacity);
  void* user;
} tenon_opaque_op;

/* The collectives of a group of ranks. all_reduce: the sum over ranks. all_gather: the rows of all
   ranks in rank order. reduce_scatter: this rank's rows of the sum. Callbacks return values like
   those of an opaque op. */
typedef int (*tenon_exchange)(void* user, const tenon_view* in, const tenon_view* out, void* stream,
                              char* why, size_t capacity);
typedef struct tenon_collectives {
  int64_t ranks;
  tenon_exchange all_reduce, all_gather, reduce_scatter;
  void* user;
} tenon_collectives;

/* The format of an operand. `scaling` is a name of tenon_scalings; NULL: not quantised. */
typedef struct tenon_format {
  const char* scaling;
  int32_t dtype;        /* TENON_E4M3, TENON_E5M2 */
  int32_t power_of_two; /* tenon_power_of_two, for current and block scales */
  float eps;            /* current, block: the minimum amax */
} tenon_format;

enum tenon_encodings { TENON_ROWWISE = 0, TENON_COLUMNWISE = 1, TENON_BOTH = 2 };

/* A tensor that comes encoded. Its buffers are the codes NAME and NAME.scale_inv, columnwise NAME.t
   and NAME.t.scale_inv. */
typedef struct tenon_encoding {
  tenon_format format;
  int32_t encodings; /* tenon_encodings */
  int32_t swizzled;  /* mxfp8: scales in the order of the tensor cores */
} tenon_encoding;

/* The request for an op that quantises: a linear or a quantize. */
typedef struct tenon_op_request {
  int32_t recipe_given; /* the formats below replace the recipe of the text and of the plan */
  tenon_format input, weight, gradient;
  const tenon_encoding* weight_encoding; /* the weight of a linear comes encoded. It is multiplied
                                            as it is, whatever the recipe; NULL: it comes plain */
  int32_t output; /* tenon_encodings that a quantize at the end of a chain gives */
} tenon_op_request;

typedef struct tenon_plan_request {
  size_t size;
  int64_t cols;  /* of the input; 0: inferred from the chain */
  int32_t dtype; /* of the input */
  int32_t parameter_dtype_given, parameter_dtype;
  const char* recipe;  /* "none" (default), "delayed", "current", "mxfp8", "block" */
  int32_t recipe_e4m3; /* gradients are e4m3 too */
  int32_t evaluation;  /* no dropout */
  int32_t forward_only;
  int32_t no_input_grad;
  const char* keep; /* "input" (default), "fp8", "recompute" */
  const tenon_grad_request* parameter_grads;
  size_t parameter_grad_count; /* the others have the defaults */
  const tenon_grad_request* extra_grads;
  size_t extra_grad_count;
  const tenon_opaque_op* opaque_ops;
  size_t opaque_op_count;
  const tenon_collectives* collectives; /* NULL: one rank */
  const char* target; /* machine to plan for, e.g. "sm_90a": can be described, not run; NULL: this
                         machine */
  int32_t input_dtype_given, input_dtype; /* of x and dx, if it is not `dtype` */
  const int32_t* parameter_dtypes;        /* of single parameters; -1: as above */
  size_t parameter_dtype_count;
  const int32_t* extra_dtypes; /* of single extra inputs; -1: `dtype` */
  size_t extra_dtype_count;
  const tenon_op_request* op_requests; /* for linears and quantizes, in chain order */
  size_t op_request_count;
  const tenon_encoding* input_encoding; /* x comes encoded. A linear that reads it multiplies it as
                                           it is, whatever the recipe; NULL: it comes plain */
  int32_t output_decoded; /* a quantize at the end gives the numbers that its codes represent */
} tenon_plan_request;

typedef struct tenon_plan tenon_plan;

/* Builds a plan. Equal texts and requests share one plan. Free each handle. All data that the
   request points to are copied. `user` pointers are copied as pointers. Runs take
   the memory for timing on cuda from `allocate` of the options. */
TENON_API int tenon_plan_build(const char* chain, const tenon_plan_request* request,
                               const tenon_options* options, tenon_plan** plan);
TENON_API void tenon_plan_free(tenon_plan* plan);

enum tenon_role {
  TENON_ROLE_INPUT = 0,
  TENON_ROLE_OUTPUT = 1,
  TENON_ROLE_PARAM = 2,
  TENON_ROLE_GRAD = 3,
  TENON_ROLE_EXTRA_IN = 4,
  TENON_ROLE_EXTRA_OUT = 5,
  TENON_ROLE_SAVED = 6,
  TENON_ROLE_STATE = 7,
  TENON_ROLE_WORKSPACE = 8,
  TENON_ROLE_RNG = 9
};

/* Memory of a plan. An encoded parameter has several buffers, but one entry in the lists of the
   request. For a call of `rows` rows, one dimension has rup(cdiv(rows*rows_mul, rows_div),
   rows_round) + rows_add elements. The other dimension has `cols` elements. Workspace buffers are
   in the workspace. There, buffers with disjoint lifetimes share memory. The caller provides all
   other buffers. A pass that adds to a buffer writes it. */
typedef struct tenon_buffer {
  const char* name; /* valid until the plan is freed */
  int32_t role;     /* tenon_role */
  int32_t dtype;    /* tenon_dtype */
  int64_t rows_mul, rows_div, rows_round, rows_add;
  int64_t cols;
  int32_t rows_inside;             /* the rows are the contiguous dimension */
  int32_t random;                  /* five uint64_t; dtype is ignored */
  float initial_low, initial_high; /* of a parameter: uniform between them */
  int32_t reads_forward, writes_forward, reads_backward, writes_backward;
  int32_t same_as; /* the buffer whose memory this one has; -1: its own. A result that is x, dy or
                      another gradient is not written: use that buffer. */
  /* The first and the last step of a pass that uses it; -1: none. */
  int32_t first_forward, last_forward, first_backward, last_backward;
  int32_t in_place; /* the saved buffer whose memory this one may have in TENON_BACKWARD_LAST, if it
                       has an address of its own; -1: none */
} tenon_buffer;

/* All buffers, by number. `list`, `capacity` and `count` as for tenon_scalings. */
TENON_API int tenon_plan_buffers(const tenon_plan* plan, tenon_buffer* list, size_t capacity,
                                 size_t* count);

/* `format` is "text", "json" or "html". `buffer`, `capacity` and `size` as for tenon_names. */
TENON_API int tenon_plan_describe(const tenon_plan* plan, int64_t rows, const char* format,
                                  char* buffer, size_t capacity, size_t* size);
/* 32 hexadecimal digits. Plans with equal fingerprints give equal bits for equal inputs in strict
   precision. Products by a library: only on the same kind of device, with TENON_TUNE=0. */
TENON_API int tenon_plan_fingerprint(const tenon_plan* plan, char* buffer, size_t capacity,
                                     size_t* size);
/* Bytes of each buffer and of the workspace. All functions that take rows fail if the chain cannot
   process this number of rows, or if the memory sizes overflow. */
TENON_API int tenon_plan_sizes(const tenon_plan* plan, int64_t rows, int64_t* bytes, size_t count,
                               int64_t* workspace);
/* A pass of a plan. TENON_BACKWARD_LAST: a backward pass that may overwrite saved buffers, so that
   it needs less workspace. No other backward pass can follow it. */
enum tenon_pass { TENON_FORWARD = 0, TENON_BACKWARD = 1, TENON_BACKWARD_LAST = 2 };
/* Flags of a run, to be added. WEIGHTS_UNCHANGED: the weights are not quantised again. NO_TUNING:
   the run times no algorithms, so that it takes no memory and does not wait for the stream.
   ALIGNED: all addresses are multiples of 16 bytes, so that less workspace is enough on cuda.
   SEPARATE: workspace buffers have addresses of their own in `memory`. The workspace then only has
   the memory of kernels. */
enum tenon_run {
  TENON_RUN_WEIGHTS_UNCHANGED = 1,
  TENON_RUN_NO_TUNING = 2,
  TENON_RUN_ALIGNED = 4,
  TENON_RUN_SEPARATE = 8
};
/* Bytes of the workspace of one pass with the same flags. A pass that was not planned is an error.
   That of tenon_plan_sizes is enough for each pass. */
TENON_API int tenon_plan_workspace(const tenon_plan* plan, int32_t pass, int64_t rows,
                                   int32_t flags, int64_t* bytes);
/* memory[i] is the address of buffer i. Buffers that the pass does not use may be NULL. On cuda the
   workspace must be aligned to 64 bytes. The call fails if the pass is backward and the plan has no
   backward pass. */
TENON_API int tenon_plan_run(const tenon_plan* plan, int32_t pass, int64_t rows,
                             void* const* memory, size_t count, void* workspace, int32_t flags,
                             void* stream);
/* Does the one-time work of later runs with this number of rows and with addresses at multiples of
   256: compiles kernels and times products. It runs each step once on scratch memory, without
   opaque ops and collectives. Call it before a stream is captured in a CUDA graph. `memory`:
   tenon_plan_prepare_bytes bytes at a multiple of 256; NULL: memory of the device's pool. */
TENON_API int tenon_plan_prepare(const tenon_plan* plan, int64_t rows, void* memory, void* stream);
TENON_API int tenon_plan_prepare_bytes(const tenon_plan* plan, int64_t rows, int64_t* bytes);
/* Runs the steps [first, end) of a pass; an `end` beyond the last step means all. Between
   such runs the caller may allocate buffers that later steps write, and free those that no later
   step uses. */
TENON_API int tenon_plan_run_steps(const tenon_plan* plan, int32_t pass, size_t first, size_t end,
                                   int64_t rows, void* const* memory, size_t count, void* workspace,
                                   int32_t flags, void* stream);

#ifdef __cplusplus
}
#endif

#endif
