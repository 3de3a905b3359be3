/* Attention, as fusednorm/calls/c_abi.py packs it: docs/spec.md, section 15. All fields have 8 bytes. */
#ifndef FUSEDNORM_ATTENTION_H
#define FUSEDNORM_ATTENTION_H

#include "abi/declared.h"

/* Strides are in bytes: of a sequence, or of a page of k and v, of a head, and of a query or a key. Elements of a row are adjacent. */
struct fn_attended {
    int64_t address, stride[3];
};

struct fn_attention {
    int64_t pass, operation, wide, threads; /* as in struct fn_declared; it is a forward pass in float */
    int64_t kind; /* that of q, k, v and out */
    int64_t sequences, heads, kv_heads, size, value_size;
    int64_t queries, keys; /* of each sequence; with pages, all queries, and the most keys of a sequence */
    int64_t first, last; /* of the queries those that are computed */
    int64_t causal, window; /* 0: there is no window */
    double scale, softcap; /* 0: there is no softcap */
    struct fn_attended q, k, v, out;
    int64_t mask, mask_stride[4]; /* bytes that are 0 or 1: of sequences, heads, queries and keys; or 0 */
    int64_t sinks_kind, sinks; /* a number for each head; or no kind */
    /* Key j of a sequence is row j % page_keys of page j / page_keys of the sequence's pages; or no kind. */
    int64_t pages_kind, pages, pages_stride, page_keys;
    int64_t starts_kind, starts, lengths_kind, lengths; /* with pages: a sequence's first query, and its number of keys */
};

_Static_assert(sizeof(struct fn_attention) <= sizeof(struct fn_declared), "what has room for one has room for the other");

/* Keys whose products are added up together, and queries of all heads that share keys which a thread takes together. */
enum { FN_ATTENTION_BLOCK = 128, FN_ATTENTION_ROWS = 64 };
/* Fewer rows are taken one after the other. The longest row of q that kernels take. */
enum { FN_ATTENTION_FEW_ROWS = 8, FN_ATTENTION_SIZE = 1024 };
/* The most pairs of an element of a query and of a key in a call that Python does not divide: one thread takes about half a second. */
#define FN_ATTENTION_OF_A_CALL 8000000000

/* A sequence: the place of its first query in q, its queries and keys, and those of its queries that are computed. */
struct fn_sequence {
    int64_t place, queries, keys, begin, end;
};
static inline struct fn_sequence fn_sequence_of(const struct fn_attention *job, int64_t number) {
    struct fn_sequence s = {0, job->queries, job->keys, job->first, job->last};
    if (!job->pages_kind) return s;
    s.place = fn_whole_at(job->starts_kind, job->starts, number);
    s.queries = fn_whole_at(job->starts_kind, job->starts, number + 1) - s.place;
    s.keys = fn_whole_at(job->lengths_kind, job->lengths, number);
    s.begin = job->first > s.place ? job->first - s.place : 0;
    s.end = job->last - s.place < s.queries ? job->last - s.place : s.queries;
    if (s.end < s.begin) s.end = s.begin;
    return s;
}

/* The keys that a query sees by its place: those from `first` on, up to `end`. */
struct fn_range {
    int64_t first, end;
};
static inline struct fn_range fn_range_of(const struct fn_attention *job, const struct fn_sequence *s, int64_t query) {
    const int64_t place = s->keys - s->queries + query, window = job->window;
    struct fn_range range = {0, s->keys};
    if (job->causal && place + 1 < range.end) range.end = place + 1;
    if (window && place - window + 1 > 0) range.first = place - window + 1;
    if (window && window < range.end - place) range.end = place + window;
    if (range.end < range.first) range.end = range.first;
    return range;
}

/* What a thread takes: queries [begin, end) of a sequence, of all heads that share a head of keys. */
struct fn_attention_part {
    int64_t sequence, kv_head, begin, end;
    int steps; /* all of them; or, where threads share one query, the step that is made */
    int64_t first_block, last_block; /* of the query's keys, of which a step takes these, */
    float *shared; /* and the room of all threads; else NULL */
};
enum { FN_FIND_SCORES = 1, FN_FIND_WEIGHTS = 2, FN_ADD_VALUES = 4, FN_WRITE_SUMS = 8, FN_ALL_STEPS = 15 };

/* `room` has fn_attention_bytes(job, queries of a part). */
typedef void fn_attend(const struct fn_attention *job, const struct fn_attention_part *part, char *room);

/* Elements of a row of q and of a row of values with their padding. */
static inline int64_t fn_attention_width(const struct fn_attention *job) {
    int64_t width = 128;
    while (width < job->size) width *= 2;
    return width;
}
static inline int64_t fn_attention_value_width(const struct fn_attention *job) { return (job->value_size + 127) / 128 * 128; }
static inline int64_t fn_attention_scores(const struct fn_attention *job) { return (job->keys + 127) / 64 * 64; }
/* The sums of segments of the keys' exponentials. */
static inline int64_t fn_attention_segments(const struct fn_attention *job) {
    int64_t segments = 16;
    while (segments * FN_SEGMENT < job->keys) segments *= 2;
    return segments;
}
static inline int64_t fn_attention_blocks(const struct fn_attention *job) { return (job->keys + FN_ATTENTION_BLOCK - 1) / FN_ATTENTION_BLOCK; }

/* What threads that share a query share, as floats: scores, sums of weights, and of each block the sums of values. */
static inline int64_t fn_attention_shared(const struct fn_attention *job) {
    return job->heads / job->kv_heads * (fn_attention_scores(job) + 16 + fn_attention_blocks(job) * fn_attention_value_width(job));
}

/* Rows of q, of scores and of sums; keys and values of a block, widened; and where a mask has holes a list of keys. */
static inline int64_t fn_attention_bytes(const struct fn_attention *job, int64_t queries) {
    const int64_t rows = (queries * (job->heads / job->kv_heads) + 3) / 4 * 4 + 4, width = fn_attention_width(job);
    const int64_t of_rows = width + fn_attention_scores(job) + 2 * fn_attention_value_width(job) + 16 + 8;
    const int64_t floats = rows * of_rows + 2 * width * 64 + width + (FN_ATTENTION_BLOCK + 1) * fn_attention_value_width(job) + fn_attention_segments(job);
    return (floats + (job->mask ? fn_attention_scores(job) : 0)) * (int64_t)sizeof(float);
}

#endif
