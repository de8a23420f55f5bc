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

/* A matrix in the caller's memory; rows lie `stride` elements apart. Any alignment. */
typedef struct tenon_view {
  void* data;
  int64_t rows, cols, stride;
  int32_t dtype; /* tenon_dtype */
} tenon_view;

/* Lends a call that many bytes of device memory, 64-byte aligned, for work in the order of the
   stream; a call may use it more than once. */
typedef void* (*tenon_allocate)(void* user, size_t bytes);

/* Set `size` to sizeof; zero in the rest is the default. NULL stands for all defaults. */
typedef struct tenon_options {
  size_t size;
  int32_t precision, rounding, device;
  void* stream;            /* CUDA only; views then hold device pointers */
  tenon_allocate allocate; /* CUDA only; NULL: the device's own pool lends the memory */
  void* user;
} tenon_options;

enum tenon_power_of_two { TENON_MODE_DEFAULT = 0, TENON_POWER_OF_TWO = 1, TENON_EXACT_SCALE = 2 };

/* A tensor of M x K with scales; tenon_encoding_shape() gives the shapes of its views. It holds a
   rowwise encoding, a columnwise one, or both. */
typedef struct tenon_tensor {
  size_t size;
  const char* scaling;  /* "delayed", "current", "mxfp8", "block1x128", "block128x128"; "none" with
                           plain numbers is for transposed copies */
  int32_t dtype;        /* TENON_E4M3, TENON_E5M2; plain for "none" */
  int32_t power_of_two; /* tenon_power_of_two, of current and block scales */
  float eps;            /* current, block: the least amax */
  int32_t swizzled;     /* mxfp8: scales in the order of the tensor cores */
  int32_t amax_given;   /* current: amax is read, not found */
  const tenon_view* data;
  const tenon_view* scale_inv;
  const tenon_view* columnwise_data;
  const tenon_view* columnwise_scale_inv;
  const tenon_view* scale;  /* delayed, written: [1,1] f32, the multiplier */
  const tenon_view* amax;   /* delayed: joined by maximum; current: found or given; [1,1] f32 */
  const tenon_view* health; /* written: [1,3] f32, saturated, flushed to zero, not finite */
} tenon_tensor;

/* A scaling mode. Element 0 of an array is for the rowwise encoding, 1 for the columnwise one. */
typedef struct tenon_scaling {
  const char* name;
  int32_t scale_dtype; /* tenon_dtype of scale_inv */
  int32_t single;      /* both encodings share one scale for the whole tensor */
  int32_t scale_given; /* the caller gives `scale`; other modes find their scales */
  int32_t transposes;  /* columnwise data are [K,M] */
  int64_t block_rows[2], block_cols[2]; /* elements that share a scale; 0 without blocks */
} tenon_scaling;

/* All scaling modes, "none" first. Writes at most `capacity` of them, and to *count how many there
   are. */
TENON_API int tenon_scalings(tenon_scaling* list, size_t capacity, size_t* count);

/* Rows and columns of an encoding's data and scale_inv for a tensor of rows x cols. */
TENON_API int tenon_encoding_shape(const char* scaling, int64_t rows, int64_t cols,
                                   int32_t columnwise, int64_t data[2], int64_t scale_inv[2]);

/* y = f(x + bias)*scale. Pointers that are NULL do not take part; a tensor is given as a view or,
   encoded, in its other field, not in both. */
typedef struct tenon_forward_args {
  size_t size;
  const tenon_view* x;     /* [M,K]; gated: [M,2H], or a alone with b */
  const tenon_view* b;     /* the linear half as a tensor of its own */
  const tenon_view* bias;  /* one number a column of the input */
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

/* y = residual + dropout(x + bias). `random` is five numbers: seed, offset, row0, col0, columns, on
   CUDA in its memory; element (r, c) is number (row0 + r)*columns + col0 + c of the stream. A
   training call moves the offset on by one. */
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

/* `random` holds what it held before the forward call. */
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

/* Of the calling thread's last failed call; valid until its next call. */
TENON_API const char* tenon_last_error(void);

/* `act` is a name, "name(parameter=number)", "gated(...)", "scaled(...)" or a formula such as
   "x*sigmoid(beta*x); beta = 1". */
TENON_API int tenon_forward(const char* act, const tenon_forward_args* args,
                            const tenon_options* options);
TENON_API int tenon_backward(const char* act, const tenon_backward_args* args,
                             const tenon_options* options);

TENON_API int tenon_quantize(const tenon_quantize_args* args, const tenon_options* options);

/* Delayed scaling: history [L,n] and scale [1,n], f32; row 0 holds what was found since the last
   update. dtype is TENON_E4M3 or TENON_E5M2. */
TENON_API int tenon_delayed_update(const tenon_view* history, const tenon_view* scale,
                                   int32_t dtype, int32_t margin, int32_t most_recent,
                                   const tenon_options* options);

TENON_API int tenon_bias_dropout_add(const tenon_dropout_args* args, const tenon_options* options);
TENON_API int tenon_bias_dropout_add_backward(const tenon_dropout_backward_args* args,
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

/* `act` with the contents of each name that was defined, as `soft_step@0f1e…`: a text that means
   the same after the name is defined again. Buffers as for tenon_names. */
TENON_API int tenon_pinned(const char* act, char* buffer, size_t capacity, size_t* size);

/* A parameter of an activation; any value from least to most is accepted. A bound that does not
   exist is infinite. */
typedef struct tenon_parameter {
  const char* name;
  float value, least, most;
} tenon_parameter;

typedef struct tenon_activation {
  const char* name;    /* or the beginning of its formula */
  const char* formula; /* as evaluated, shared parts t1, t2, … first */
  int32_t inputs;      /* 1, or 2 for a gated one */
  int32_t scaled;      /* takes a scale for each row */
  const tenon_parameter* parameters;
  size_t parameter_count;
} tenon_activation;

/* What `act` is. The pointers in *info are valid until the calling thread's next call of this
   function. */
TENON_API int tenon_activation_info(const char* act, tenon_activation* info);

/* Formula, derivative, error bound and code (of the derivative if `backward`), for people. */
TENON_API int tenon_show(const char* act, int32_t backward, char* buffer, size_t capacity,
                         size_t* size);

/* y = x*r with r = rsqrt(sum x^2 + eps) a row; r, if given, is [M,1] f32. */
TENON_API int tenon_l2_normalization(const tenon_view* x, const tenon_view* y, const tenon_view* r,
                                     float eps, const tenon_options* options);
TENON_API int tenon_l2_normalization_backward(const tenon_view* grad, const tenon_view* x,
                                              const tenon_view* r, const tenon_view* dx,
                                              const tenon_options* options);

/* From begin to end the calling thread's tenon_forward, tenon_backward and tenon_quantize run
   nothing; end gives the most bytes of workspace that one of them would take. Their views have
   addresses that nobody reads. No GPU is needed. */
TENON_API int tenon_measure_begin(void);
TENON_API int tenon_measure_end(size_t* bytes);

/* Threads of the CPU backend; 0 restores the default. */
TENON_API int tenon_set_threads(int32_t count);
TENON_API int tenon_threads(void);

/* ---- Ops: what a chain may name besides activations ---- */

enum tenon_argument_kind {
  TENON_ARGUMENT_COLUMNS = 0, /* those of the op's input, checked if given */
  TENON_ARGUMENT_COUNT = 1,   /* a whole number from 1 */
  TENON_ARGUMENT_NUMBER = 2,
  TENON_ARGUMENT_FLAG = 3,
  TENON_ARGUMENT_TEXT = 4
};

typedef struct tenon_op_argument {
  const char* name;
  int32_t kind;     /* tenon_argument_kind */
  int32_t required; /* a chain must give it */
  double value;     /* of a number or a flag that is not given */
  double least, most;
} tenon_op_argument;

/* A parameter has as many columns as the op's input, and one row unless an argument says more. */
typedef struct tenon_op_parameter {
  const char* name;
  const char* rows; /* the name of that argument, or NULL */
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

/* All ops. Their pointers are valid for the life of the process. List and count as for
   tenon_scalings. */
TENON_API int tenon_ops(tenon_op* list, size_t capacity, size_t* count);

/* ---- Plans: a chain of ops as few passes, forward and backward ---- */

/* Of a parameter or an extra input; zero is the default: wanted, in the tensor's own dtype. */
typedef struct tenon_grad_request {
  int32_t unwanted;
  int32_t dtype_given, dtype; /* dtype counts where dtype_given is not zero, e.g. for a main_grad */
  int32_t accumulate;         /* is added to what the gradient's memory holds */
} tenon_grad_request;

/* An op of the caller's own between ours. A callback returns 0, or says why not in the text that
   reaches the caller of tenon_plan_run behind the op's name. */
typedef struct tenon_opaque_op {
  const char* name;           /* as the chain calls it */
  int64_t cols;               /* of its output; 0: as its input */
  int64_t rows_mul, rows_div; /* of its output; 0 and 0: as its input */
  int (*forward)(void* user, int64_t rows, const tenon_view* x, const tenon_view* y, char* why,
                 size_t capacity);
  int (*backward)(void* user, int64_t rows, const tenon_view* x, const tenon_view* dy,
                  const tenon_view* dx, char* why, size_t capacity);
  void* user;
} tenon_opaque_op;

/* How the ranks of a group exchange tensors: the sum over ranks; the rows of all ranks, one rank's
   below the other's; this rank's rows of the sum. Callbacks return as those of an opaque op. */
typedef int (*tenon_exchange)(void* user, const tenon_view* in, const tenon_view* out, void* stream,
                              char* why, size_t capacity);
typedef struct tenon_collectives {
  int64_t ranks;
  tenon_exchange all_reduce, all_gather, reduce_scatter;
  void* user;
} tenon_collectives;

typedef struct tenon_plan_request {
  size_t size;
  int64_t cols;  /* of the input; 0: the chain says */
  int32_t dtype; /* of the input */
  int32_t parameter_dtype_given, parameter_dtype;
  const char* recipe;  /* "none" (default), "delayed", "current", "mxfp8", "block" */
  int32_t recipe_e4m3; /* gradients e4m3 too */
  int32_t evaluation;  /* no dropout */
  int32_t forward_only;
  int32_t no_input_grad;
  const char* keep; /* "input" (default), "fp8", "recompute" */
  const tenon_grad_request* parameter_grads;
  size_t parameter_grad_count; /* the rest has the defaults */
  const tenon_grad_request* extra_grads;
  size_t extra_grad_count;
  const tenon_opaque_op* opaque_ops;
  size_t opaque_op_count;
  const tenon_collectives* collectives; /* NULL: one rank */
  const char* target; /* a machine to plan for, e.g. "sm_90a": described, not run; NULL: this one */
} tenon_plan_request;

typedef struct tenon_plan tenon_plan;

/* Equal texts and requests share one plan. Free each handle. What the request points at is copied,
   `user` pointers as they are. */
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

/* Memory of a plan. One dimension has, for a call of `rows` rows,
   rup(cdiv(rows*rows_mul, rows_div), rows_round) + rows_add elements, the other one `cols`.
   Workspace buffers are in the workspace, where those that are never used at once share memory; the
   caller lends all others. A pass that adds to a buffer counts as writing it. */
typedef struct tenon_buffer {
  const char* name; /* valid until the plan is freed */
  int32_t role;     /* tenon_role */
  int32_t dtype;    /* tenon_dtype */
  int64_t rows_mul, rows_div, rows_round, rows_add;
  int64_t cols;
  int32_t rows_inside;             /* the rows are the contiguous dimension */
  int32_t random;                  /* five uint64_t, whatever dtype is */
  float initial_low, initial_high; /* of a parameter: it starts uniform between them */
  int32_t reads_forward, writes_forward, reads_backward, writes_backward;
  int32_t same_as; /* number of the first buffer that has the same memory; -1: it is the first */
} tenon_buffer;

/* All buffers, by number. List and count as for tenon_scalings. */
TENON_API int tenon_plan_buffers(const tenon_plan* plan, tenon_buffer* list, size_t capacity,
                                 size_t* count);

/* `format` is "text", "json" or "html". Buffers as for tenon_names. */
TENON_API int tenon_plan_describe(const tenon_plan* plan, int64_t rows, const char* format,
                                  char* buffer, size_t capacity, size_t* size);
/* Bytes of each buffer and of the workspace. As all that take rows, it refuses those that the chain
   cannot take, or that need more memory than there are numbers for. */
TENON_API int tenon_plan_sizes(const tenon_plan* plan, int64_t rows, int64_t* bytes, size_t count,
                               int64_t* workspace);
/* memory[i] is buffer i; those that a pass does not use may be NULL. On cuda the workspace begins
   at a multiple of 64 bytes. Weights are quantised again unless `weights_unchanged`. A plan without
   a backward pass refuses it. */
TENON_API int tenon_plan_run(const tenon_plan* plan, int32_t backward, int64_t rows,
                             void* const* memory, size_t count, void* workspace,
                             int32_t weights_unchanged, void* stream);

#ifdef __cplusplus
}
#endif

#endif
