/*
 * Threads come from the OpenMP runtime that torch has already loaded, found by name in the running
 * process. Linking one would risk a second: two pools of spinning threads on the same cores turn
 * microseconds into milliseconds, and torch.set_num_threads would govern only one of them. Where
 * none is found (Windows, macOS, a torch without OpenMP) everything runs on the calling thread.
 */
#if !defined(_WIN32)
#define _GNU_SOURCE /* RTLD_DEFAULT, dladdr */
#include <dlfcn.h>
#include <pthread.h>
#endif

#include <stdlib.h>

#include "run/run.h"
#include "machine/ieee.h"

#if defined(_WIN32)

void fn_parallel(fn_task *task, void *argument, int threads) {
    (void)threads;
    task(argument, 0, 1);
}

const char *fn_openmp_path(void) { return ""; }

void fn_after_fork(void) {}

#else

/* The entry points that GCC's own `#pragma omp parallel` calls; LLVM's runtime has them too. */
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_thread)(void);
static int (*omp_threads)(void);

/* A child process has its parent's memory but not its threads: a parallel region would wait for them for ever. */
static int forked;

void fn_after_fork(void) { forked = 1; }

static void find_runtime(void) {
    pthread_atfork(NULL, NULL, fn_after_fork);
    /* Assigned as void *, because C has no cast from an object pointer to a function pointer. */
    *(void **)&omp_thread = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&omp_threads = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (omp_thread && omp_threads) *(void **)&gomp_parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

static void find_runtime_once(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_runtime);
}

struct region {
    fn_task *task;
    void *argument;
};

/* The team may be smaller than requested (inside another parallel region, or at a thread limit). */
static void run_member(void *argument) {
    const struct region *region = argument;
    region->task(region->argument, omp_thread(), omp_threads());
}

void fn_parallel(fn_task *task, void *argument, int threads) {
    find_runtime_once();
    if (threads < 2 || forked || !gomp_parallel) {
        task(argument, 0, 1);
        return;
    }
    struct region region = {task, argument};
    gomp_parallel(run_member, &region, (unsigned)threads, 0);
}

const char *fn_openmp_path(void) {
    Dl_info info;
    find_runtime_once();
    return gomp_parallel && dladdr(*(void **)&gomp_parallel, &info) ? info.dli_fname : "";
}

#endif

uint64_t fn_enter_arithmetic(void) { return fn_enter_ieee(); }
void fn_leave_arithmetic(uint64_t state) { fn_leave_ieee((fn_fp_state)state); }

/*
 * Most calls on one thread take a buffer that the thread keeps until it ends: to allocate one took a tenth of a row's time, and
 * a stack may have no more than 64 KiB. Of so many bytes, of which only those that were used take memory.
 */
enum { KEPT_BYTES = 128 * 1024 };

#if defined(_WIN32)
static void *kept_buffer(void) { return NULL; }
#else
static pthread_key_t key_of_buffer;
static int has_key;

static void make_key(void) { has_key = !pthread_key_create(&key_of_buffer, free); }

/* The thread's buffer; NULL if there is none. */
static void *kept_buffer(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_key);
    void *buffer = has_key ? pthread_getspecific(key_of_buffer) : NULL;
    if (buffer || !has_key) return buffer;
    buffer = malloc(KEPT_BYTES + FN_ALIGNMENT);
    if (buffer && pthread_setspecific(key_of_buffer, buffer)) {
        free(buffer);
        buffer = NULL;
    }
    return buffer;
}
#endif

struct division {
    fn_share *share;
    const void *argument;
    int64_t rows;
    size_t buffer_bytes;
    char *buffers; /* one per thread, or NULL */
};

static void run_share(void *argument, int thread, int threads) {
    const struct division *d = argument;
    const int64_t begin = fn_first_row(d->rows, thread, threads), end = fn_first_row(d->rows, thread + 1, threads);
    fn_fp_state state = fn_enter_ieee();
    d->share(d->argument, begin, end, d->buffers ? d->buffers + (size_t)thread * d->buffer_bytes : NULL);
    fn_leave_ieee(state);
}

int fn_divide(fn_share *share, const void *argument, int64_t rows, int64_t elements, int64_t threads, size_t buffer_bytes) {
    struct division d = {share, argument, rows, buffer_bytes, NULL};
    void *allocated = NULL, *buffers = NULL;
    if (threads > rows) threads = rows;
    if (threads < 1 || elements < FN_PARALLEL_ELEMENTS) threads = 1;
    if (buffer_bytes) {
        if (threads == 1 && buffer_bytes <= KEPT_BYTES) buffers = kept_buffer();
        if (!buffers) buffers = allocated = malloc(buffer_bytes * (size_t)threads + FN_ALIGNMENT);
        if (!buffers) return 1;
        d.buffers = (char *)fn_round_up((int64_t)(uintptr_t)buffers, FN_ALIGNMENT);
    }
    fn_parallel(run_share, &d, (int)threads);
    free(allocated);
    return 0;
}
