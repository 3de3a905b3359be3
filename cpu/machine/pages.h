/* New memory: the first write to each page of it costs a page fault. */
#ifndef FUSEDNORM_PAGES_H
#define FUSEDNORM_PAGES_H

#include <stddef.h>
#include <stdint.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

/* NumPy's threshold for the same request: two huge pages of x86-64. */
enum { FN_NEW_BYTES = 4 * 1024 * 1024 };

/*
 * Asks Linux for huge pages, of 2 MiB instead of 4 KiB, for a large output that is not written yet: filling 32 MiB
 * took a fifth of the time. Elsewhere, and where the administrator has switched them off, this has no effect.
 */
static inline void fn_expect_writes(uintptr_t begin, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    uintptr_t page = bytes < FN_NEW_BYTES ? 0 : (uintptr_t)sysconf(_SC_PAGESIZE);
    if (!page || !begin) return;
    uintptr_t first = (begin + page - 1) / page * page;
    /* The result does not matter. */
    (void)madvise((void *)first, (begin + (uintptr_t)bytes - first) / page * page, MADV_HUGEPAGE);
#else
    (void)begin, (void)bytes;
#endif
}

#endif
