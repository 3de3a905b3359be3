/* Divides attention among threads: by sequences, heads of keys and tiles of queries; or one query's keys, where there are fewer. */
#include <stdlib.h>
#include <string.h>

#include "run/run.h"

struct work {
    const struct fn_attention *job;
    fn_attend *attend;
    int64_t tile; /* queries */
    struct fn_attention_part part; /* the query that is divided */
};

static int64_t tiles_of(const struct work *work, const struct fn_sequence *s) { return (s->end - s->begin + work->tile - 1) / work->tile; }

/* The tiles of all sequences and heads of keys. */
static int64_t tiles_of_all(const struct work *work) {
    int64_t tiles = 0;
    for (int64_t i = 0; i < work->job->sequences; i++) {
        const struct fn_sequence s = fn_sequence_of(work->job, i);
        tiles += work->job->kv_heads * tiles_of(work, &s);
    }
    return tiles;
}

/* Tile `at` of a sequence, counted through its heads of keys. */
static struct fn_attention_part part_of(const struct work *work, int64_t sequence, const struct fn_sequence *s, int64_t at) {
    const int64_t tiles = tiles_of(work, s), number = at % tiles;
    /* Late queries see more keys than early ones, so these alternate. */
    const int64_t place = number % 2 ? tiles - 1 - number / 2 : number / 2, begin = s->begin + place * work->tile;
    return (struct fn_attention_part){.sequence = sequence, .kv_head = at / tiles, .begin = begin,
                                      .end = s->end - begin < work->tile ? s->end : begin + work->tile, .steps = FN_ALL_STEPS};
}

/* Tiles [begin, end). */
static void run_tiles(const void *argument, int64_t begin, int64_t end, char *room) {
    const struct work *work = argument;
    for (int64_t sequence = 0, before = 0; sequence < work->job->sequences && before < end; sequence++) {
        const struct fn_sequence s = fn_sequence_of(work->job, sequence);
        const int64_t tiles = work->job->kv_heads * tiles_of(work, &s);
        for (int64_t at = begin > before ? begin - before : 0; at < tiles && before + at < end; at++) {
            const struct fn_attention_part part = part_of(work, sequence, &s, at);
            work->attend(work->job, &part, room);
        }
        before += tiles;
    }
}

/* Blocks [begin, end) of a query's keys. */
static void run_blocks(const void *argument, int64_t begin, int64_t end, char *room) {
    const struct work *work = argument;
    struct fn_attention_part part = work->part;
    part.first_block = begin;
    part.last_block = end;
    work->attend(work->job, &part, room);
}

/* One query after the other, each by all threads: a step after the other. Returns as fn_divide does. */
static int run_divided(struct work *work, int64_t elements, size_t bytes) {
    const struct fn_attention *job = work->job;
    float *const shared = malloc((size_t)fn_attention_shared(job) * sizeof *shared);
    int failed = !shared;
    for (int64_t sequence = 0; sequence < job->sequences && !failed; sequence++) {
        const struct fn_sequence s = fn_sequence_of(job, sequence);
        for (int64_t at = 0; at < job->kv_heads * tiles_of(work, &s) && !failed; at++) {
            work->part = part_of(work, sequence, &s, at);
            work->part.shared = shared;
            const struct fn_range seen = fn_range_of(job, &s, work->part.begin);
            const int64_t blocks = (seen.end - seen.first + FN_ATTENTION_BLOCK - 1) / FN_ATTENTION_BLOCK;
            for (int step = FN_FIND_SCORES; step <= FN_WRITE_SUMS && !failed; step *= 2) {
                const int alone = step == FN_FIND_WEIGHTS || step == FN_WRITE_SUMS;
                work->part.steps = step;
                failed = fn_divide(run_blocks, work, alone ? 1 : blocks, elements, alone ? 1 : job->threads, bytes);
            }
        }
    }
    free(shared);
    return failed;
}

/* Rows of q that belong to no sequence. */
static void clear_rows(const struct fn_attention *job, int64_t begin, int64_t end) {
    const struct fn_attended *const out = &job->out;
    for (int64_t row = begin > job->first ? begin : job->first; row < end && row < job->last; row++)
        for (int64_t head = 0; head < job->heads; head++)
            memset((char *)out->address + head * out->stride[1] + row * out->stride[2], 0, (size_t)(job->value_size * fn_element_size(job->kind)));
}

int fn_run_attention(const void *packed) {
    struct fn_attention own;
    memcpy(&own, packed, sizeof own);
    const struct fn_attention *const job = &own;
    const int64_t group = job->heads / job->kv_heads;
    struct work work = {.job = job, .attend = fn_kernels_for(FN_F32)->attend, .tile = group < FN_ATTENTION_ROWS ? FN_ATTENTION_ROWS / group : 1};
    int64_t pairs = 0, most = 0, keys = 0, tiles;
    for (int64_t i = 0; i < job->sequences; i++) {
        const struct fn_sequence s = fn_sequence_of(job, i);
        pairs += (s.end - s.begin) * s.keys;
        if (s.end - s.begin > most) most = s.end - s.begin;
        if (s.keys > keys) keys = s.keys;
    }
    own.keys = keys; /* of pages, those that hold keys */
    if (job->pages_kind) {
        clear_rows(job, 0, fn_whole_at(job->starts_kind, job->starts, 0));
        clear_rows(job, fn_whole_at(job->starts_kind, job->starts, job->sequences), job->queries);
    }
    if (work.tile > most) work.tile = most ? most : 1;
    while ((tiles = tiles_of_all(&work)) < job->threads && work.tile > 1) work.tile = (work.tile + 1) / 2;
    /* What a call takes is near to that of so many elements of a norm. */
    const int64_t elements = pairs * job->heads * (job->size + job->value_size) / 8;
    const size_t bytes = (size_t)fn_attention_bytes(job, work.tile);
    if (tiles && tiles < job->threads && elements / tiles >= FN_PARALLEL_ELEMENTS && !job->mask) return run_divided(&work, elements, bytes);
    return fn_divide(run_tiles, &work, tiles, elements, job->threads, bytes);
}
