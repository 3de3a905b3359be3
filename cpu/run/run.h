/* Functions by which files of this folder divide and run calls. */
#ifndef FUSEDNORM_RUN_H
#define FUSEDNORM_RUN_H

#include "kernels/jobs.h"
#include "machine/cpu_features.h"

const struct fn_kernels *fn_kernels_for(int kind); /* those in use for an x or a dy of this kind */

/* The first row of a thread's share of the rows. It is written so that rows * threads cannot overflow. */
static inline int64_t fn_first_row(int64_t rows, int thread, int threads) {
    int64_t share = rows / threads, more = rows % threads;
    return share * thread + (thread < more ? thread : more);
}

/* threads.c */
typedef void fn_task(void *argument, int thread, int threads);
void fn_parallel(fn_task *task, void *argument, int threads);
/*
 * Divides rows among at most so many threads, which take their shares with the spec's arithmetic: one thread where there are
 * few elements. `buffer` has so many bytes for each thread, on a 64-byte border; none if that is 0. Returns 0, or 1 if there
 * was no memory for buffers.
 */
typedef void fn_share(const void *argument, int64_t begin, int64_t end, char *buffer);
int fn_divide(fn_share *share, const void *argument, int64_t rows, int64_t elements, int64_t threads, size_t buffer_bytes);

/*
 * gate.c: rows [begin, end) of a gate. `passed` has NULL, or for an operand without memory of its own the place from which
 * on its rows lie one after the other. `kept` is NULL, or as fn_gate_run says, with room for fn_gate_kept(gate, rows)
 * numbers. Meanwhile `ahead` is fetched. `run` is asked for once per call: fn_use_isa may change it meanwhile.
 */
void fn_gate_rows(fn_gate_run *run, const struct fn_gate *gate, int64_t begin, int64_t end, char *const *passed, void *kept,
                  const struct fn_ahead *ahead);
fn_gate_run *fn_gate_run_in_use(void);
extern const struct fn_ahead fn_nothing_ahead;
int64_t fn_gate_kept(const struct fn_gate *gate, int64_t rows);

/* chain.c and backward.c */
int fn_forward(const struct fn_call *calls, int count);
int fn_backward(const struct fn_call *call);
int fn_run_attention(const void *packed); /* attention.c */

#endif
