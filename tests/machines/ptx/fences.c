/*
 * Preloaded into Python: puts a fence of 64 bytes before and behind what torch allocates (by posix_memalign), and says
 * whether an address lies in one. AddressSanitizer does more, and makes Triton's compiler five times slower.
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

void *__libc_memalign(size_t alignment, size_t size);
void __libc_free(void *);

enum { GRANULE = 64 };

/* Granules that are fences from a byte on, and allocations by the granule that they begin in; a power of two of places. */
typedef struct {
    uintptr_t granule; /* 0: free */
    uint32_t begin;
    void *base; /* of the allocation that begins here, else NULL */
} place;

static place *places;
static size_t size, taken;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static place *place_of(uintptr_t granule) {
    size_t at = granule * 0x9E3779B97F4A7C15u >> 32;
    while (places[at & (size - 1)].granule && places[at & (size - 1)].granule != granule) at++;
    return &places[at & (size - 1)];
}

static void grow(void) {
    if (2 * (taken + 3) <= size) return;
    place *const before = places;
    const size_t count = size;
    size = count ? 2 * count : 1 << 14;
    places = __libc_memalign(GRANULE, size * sizeof *places);
    for (size_t i = 0; i < size; i++) places[i] = (place){0, 0, NULL};
    for (size_t i = 0; i < count; i++)
        if (before[i].granule) *place_of(before[i].granule) = before[i];
    if (before) __libc_free(before);
}

static void add(uintptr_t granule, uint32_t begin, void *base) {
    place *p = place_of(granule);
    taken += !p->granule;
    *p = (place){granule, begin, base};
}

/* Takes one out, and puts in place again what follows it, which may have been put there because it was taken. */
static void take_out(uintptr_t granule) {
    place *p = place_of(granule);
    if (!p->granule) return;
    p->granule = 0;
    taken--;
    for (size_t at = (size_t)(p - places) + 1; places[at & (size - 1)].granule; at++) {
        const place moved = places[at & (size - 1)];
        places[at & (size - 1)].granule = 0;
        *place_of(moved.granule) = moved;
    }
}

int posix_memalign(void **found, size_t alignment, size_t bytes) {
    const size_t fence = alignment > GRANULE ? alignment : GRANULE;
    char *base = __libc_memalign(fence, bytes + 2 * fence + GRANULE);
    if (!base) return ENOMEM;
    const uintptr_t begin = (uintptr_t)base + fence, end = begin + bytes;
    pthread_mutex_lock(&mutex);
    grow();
    add(begin / GRANULE - 1, 0, base);
    if (end % GRANULE) add(end / GRANULE, end % GRANULE, NULL);
    add((end + GRANULE - 1) / GRANULE, 0, NULL);
    pthread_mutex_unlock(&mutex);
    *found = (void *)begin;
    return 0;
}

void free(void *pointer) {
    if (pointer && (uintptr_t)pointer % GRANULE == 0 && size) {
        pthread_mutex_lock(&mutex);
        place *p = place_of((uintptr_t)pointer / GRANULE - 1);
        void *base = p->granule ? p->base : NULL;
        if (base) {
            uintptr_t granule = (uintptr_t)pointer / GRANULE;
            take_out(granule - 1);
            while (!place_of(granule)->granule) granule++;
            const int partial = place_of(granule)->begin != 0;
            take_out(granule);
            if (partial) take_out(granule + 1);
            pointer = base;
        }
        pthread_mutex_unlock(&mutex);
    }
    __libc_free(pointer);
}

/* Whether one of these bytes lies in a fence. */
int in_a_fence(const void *address, size_t bytes) {
    const uintptr_t first = (uintptr_t)address, last = first + bytes - 1;
    int found = 0;
    pthread_mutex_lock(&mutex);
    for (uintptr_t granule = first / GRANULE; size && granule <= last / GRANULE; granule++) {
        const place *p = place_of(granule);
        if (p->granule) found |= last >= granule * GRANULE + p->begin;
    }
    pthread_mutex_unlock(&mutex);
    return found;
}
