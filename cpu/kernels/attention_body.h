/*
 * Attention (docs/spec.md, section 15), included by kernel_body.h behind declared operations, whose exponentials and sums it takes.
 * A query alone reads keys and values as they lie; many queries take blocks of them, widened and transposed.
 */
#include "machine/transpose.h"

/* The keys of a query: `count` from key `first` on, or those of a list. */
struct visible {
    int64_t first, count;
    const int32_t *list;
};

/* Keys or values of a sequence and a head. */
struct rows_of_keys {
    const struct fn_attention *job;
    int64_t sequence;
    const char *base;
    int64_t page, step; /* bytes from one page to the next, and from one key */
};
static struct rows_of_keys rows_of(const struct fn_attention *job, const struct fn_attended *of, int64_t sequence, int64_t head) {
    const char *const base = (const char *)of->address + head * of->stride[1] + (job->pages_kind ? 0 : sequence * of->stride[0]);
    return (struct rows_of_keys){job, sequence, base, of->stride[0], of->stride[2]};
}

/* Where keys number [r, r + n) of those that are visible lie. */
static void find_rows(const struct rows_of_keys *rows, const struct visible *seen, int64_t r, int n, const char **at) {
    const struct fn_attention *const job = rows->job;
    for (int i = 0; i < n; i++) {
        const int64_t key = seen->list ? seen->list[r + i] : seen->first + r + i;
        if (!job->pages_kind) {
            at[i] = rows->base + key * rows->step;
            continue;
        }
        const int64_t number = key / job->page_keys, row = rows->sequence * job->pages_stride + number;
        at[i] = rows->base + fn_whole_at(job->pages_kind, job->pages, row) * rows->page + (key - number * job->page_keys) * rows->step;
    }
}

/* Those keys of a range that a mask lets through; `list` has room for all keys. Without a list, -1 of them where the mask has holes. */
static struct visible masked(const struct fn_attention *job, struct visible range, int64_t sequence, int64_t head, int64_t query, int32_t *list) {
    const char *const mask = (const char *)job->mask + sequence * job->mask_stride[0] + head * job->mask_stride[1] + query * job->mask_stride[2];
    const int64_t step = job->mask_stride[3];
    int64_t begin = range.first, end = range.first + range.count, holes = 0, count = 0;
    while (begin < end && !mask[begin * step]) begin++;
    while (end > begin && !mask[(end - 1) * step]) end--;
    if (step == 1) {
        for (int64_t i = begin; i < end; i++) holes |= !mask[i];
    } else
        for (int64_t i = begin; i < end; i++) holes |= !mask[i * step];
    if (!holes) return (struct visible){begin, end - begin, NULL};
    if (!list) return (struct visible){begin, -1, NULL};
    for (int64_t i = begin; i < end; i++)
        if (mask[i * step]) list[count++] = (int32_t)i;
    return (struct visible){begin, count, list};
}
static struct visible visible_to(const struct fn_attention *job, const struct fn_sequence *s, int64_t sequence, int64_t head, int64_t query,
                                 int32_t *list) {
    const struct fn_range keys = fn_range_of(job, s, query);
    const struct visible range = {keys.first, keys.end - keys.first, NULL};
    return job->mask && range.count ? masked(job, range, sequence, head, query, list) : range;
}

/* Memory that a part has taken of its room. */
static float *taken(float **room, int64_t floats) {
    float *const at = *room;
    *room += (floats + 15) / 16 * 16;
    return at;
}

/*
 * Scores, n of them, become their exponentials, less the greatest, which a sink may be. Returns their sum; `segments` has room for
 * the sums of segments.
 */
static float find_weights(const struct fn_attention *job, float *t, int64_t n, int64_t head, float *segments) {
    _Alignas(64) float e[FN_SEGMENT], scores[FN_SEGMENT];
    const struct fn_gate cap = {.limit = job->softcap, .between = NONE};
    for (int64_t i = 0; job->softcap != 0 && i < n; i += FN_SEGMENT) {
        const int count = n - i < FN_SEGMENT ? (int)(n - i) : FN_SEGMENT;
        memcpy(scores, t + i, (size_t)count * sizeof *t);
        softcap_float(&cap, scores, count, t + i, NULL);
    }
    int32_t most = greatest_float(t, n, INT32_MIN);
    float sink = 0;
    if (job->sinks_kind) {
        double value;
        widen_double(job->sinks_kind, (const char *)job->sinks, head, 1, &value);
        sink = (float)value;
        most = greatest_float(&sink, 1, most);
    }
    const float m = of_order_float(most);
    for (int64_t i = 0; i < n; i += FN_SEGMENT) {
        const int count = n - i < FN_SEGMENT ? (int)(n - i) : FN_SEGMENT;
        exponentials_float(t + i, m, count, e);
        memcpy(t + i, e, (size_t)count * sizeof *t);
        memset(e + count, 0, (size_t)(FN_SEGMENT - count) * sizeof *e);
        segments[i / FN_SEGMENT] = sum_segment_float(0, e);
    }
    const float s = sum_of_sums_float(segments, (n + FN_SEGMENT - 1) / FN_SEGMENT);
    return job->sinks_kind ? s + exp_of_float(sink - m) : s;
}

/* The sums of values, divided by the sum of weights, as a row of out; 0 where no key is visible. */
static void write_row(const struct fn_attention *job, const struct fn_sequence *s, int64_t sequence, int64_t head, int64_t query,
                      const float *total, float sum, int64_t count, float *y) {
    const struct fn_attended *const out = &job->out;
    char *const row = (char *)out->address + sequence * out->stride[0] + head * out->stride[1] + (s->place + query) * out->stride[2];
    if (count) {
        FN_VECTORS()
        for (int64_t i = 0; i < job->value_size; i++) y[i] = total[i] / sum;
    } else
        memset(y, 0, (size_t)fn_attention_value_width(job) * sizeof *y);
    narrow_any((int)job->kind, y, (int)job->value_size, row);
}

static const char *row_of_q(const struct fn_attention *job, const struct fn_sequence *s, int64_t sequence, int64_t head, int64_t query) {
    return (const char *)job->q.address + sequence * job->q.stride[0] + head * job->q.stride[1] + (s->place + query) * job->q.stride[2];
}

/* Of the numbers below a power of two the one that follows where their bits are in the opposite order. */
FN_INLINE int64_t after_reversed(int64_t number, int64_t end) {
    int64_t bit = end / 2;
    for (; number & bit; bit /= 2) number ^= bit;
    return number | bit;
}

/*
 * The products of a key as it lies, of `units` units, a power of two, with one row of q or two: halved until a unit is left of each.
 * Sums of four units that are `units / 4` apart are added to those before them as soon as both are there.
 */
FN_INLINE void multiply_key(int kind, int two, const float *q, int64_t width, const char *k, int64_t units, float *to, float *other) {
#define KEY(i) u_load(kind, k, (i) * UNIT, UNIT)
#define PRODUCT(row, i, key) u_mul(u_load(F32, q + (row) * width, (i) * UNIT, UNIT), key)
    if (units < 4) {
        for (int row = 0; row <= two; row++) {
            U a = PRODUCT(row, 0, KEY(0));
            if (units == 2) a = u_add(a, PRODUCT(row, 1, KEY(1)));
            u_store(F32, row ? other : to, 0, UNIT, a);
        }
        return;
    }
    const int64_t leaves = units / 4;
    float stack[2][8][128];
    int64_t depth = 0, leaf = 0;
    for (int64_t i = 0;; i++) {
        const U k0 = KEY(leaf), k2 = KEY(leaf + 2 * leaves);
        U a = u_add(PRODUCT(0, leaf, k0), PRODUCT(0, leaf + 2 * leaves, k2)), b = a;
        if (two) b = u_add(PRODUCT(1, leaf, k0), PRODUCT(1, leaf + 2 * leaves, k2));
        const U k1 = KEY(leaf + leaves), k3 = KEY(leaf + 3 * leaves);
        a = u_add(a, u_add(PRODUCT(0, leaf + leaves, k1), PRODUCT(0, leaf + 3 * leaves, k3)));
        if (two) b = u_add(b, u_add(PRODUCT(1, leaf + leaves, k1), PRODUCT(1, leaf + 3 * leaves, k3)));
        for (int64_t joined = i; joined & 1; joined >>= 1) {
            depth--;
            a = u_add(u_load(F32, stack[0][depth], 0, UNIT), a);
            if (two) b = u_add(u_load(F32, stack[1][depth], 0, UNIT), b);
        }
        if (i + 1 == leaves) {
            u_store(F32, to, 0, UNIT, a);
            if (two) u_store(F32, other, 0, UNIT, b);
            return;
        }
        u_store(F32, stack[0][depth], 0, UNIT, a);
        if (two) u_store(F32, stack[1][depth], 0, UNIT, b);
        depth++;
        leaf = after_reversed(leaf, leaves);
    }
#undef PRODUCT
#undef KEY
}

/* The scores of one row of q, or two, with n keys, at most BATCH. */
FN_INLINE void score_batch(int kind, int two, const float *q, int64_t width, const char *const *keys, int n, int64_t units, float scale,
                           float *t, int64_t t_step) {
    _Alignas(64) float sums[2][BATCH * 128], found[BATCH];
    for (int i = 0; i < n; i++) multiply_key(kind, two, q, width, keys[i], units, sums[0] + i * UNIT, sums[1] + i * UNIT);
    for (int row = 0; row <= two; row++) {
        for (int i = n; i < BATCH; i++) u_store(F32, sums[row], i * UNIT, UNIT, u_set1(0));
        halve_rows(kind == BF16P, sums[row], found);
        for (int i = 0; i < n; i++) t[row * t_step + i] = found[i] * scale;
    }
}
/* The usual numbers of units are known to a copy of the loop each. */
#define FN_UNSWITCH_UNITS(units, call) \
    if (units == 4) call;              \
    else if (units == 8) call;         \
    else call
#define SCORES_OF_BATCH(kind, two)                                                                                                   \
    static FN_NOINLINE void score_batch_##kind##_##two(const float *q, int64_t width, const char *const *keys, int n, int64_t units, \
                                                       float scale, float *t, int64_t t_step) {                                     \
        FN_UNSWITCH_UNITS(units, score_batch(kind, two, q, width, keys, n, units, scale, t, t_step));                                \
    }
typedef void score_batch_fn(const float *q, int64_t width, const char *const *keys, int n, int64_t units, float scale, float *t, int64_t t_step);
SCORES_OF_BATCH(F32, 0) SCORES_OF_BATCH(F32, 1) SCORES_OF_BATCH(F16, 0) SCORES_OF_BATCH(F16, 1)
SCORES_OF_BATCH(ALL_BF16, 0) SCORES_OF_BATCH(ALL_BF16, 1)
static score_batch_fn *const score_batches[4][2] = {[F32] = {score_batch_F32_0, score_batch_F32_1},
                                                    [F16] = {score_batch_F16_0, score_batch_F16_1},
                                                    [BF16] = {score_batch_ALL_BF16_0, score_batch_ALL_BF16_1}};

/*
 * The sums of values of a block, times the weights of one row or two, of elements [begin, begin + n) where n is at most two units:
 * added to `total`, or, with `apart`, in place of it.
 */
FN_INLINE void add_block(int kind, int two, int whole, const float *e, int64_t e_step, const char *const *values, int keys, int64_t begin,
                         int n, float *total, int64_t total_step, int apart) {
    U a0 = u_set1(0), a1 = a0, b0 = a0, b1 = a0;
    for (int i = 0; i < keys; i++) {
        const U v0 = u_load(kind, values[i], begin, whole ? UNIT : n), e0 = u_set1(e[i]);
        a0 = u_add(a0, u_mul(e0, v0));
        if (two) b0 = u_add(b0, u_mul(u_set1(e[e_step + i]), v0));
        if (!whole) continue;
        const U v1 = u_load(kind, values[i], begin + UNIT, UNIT);
        a1 = u_add(a1, u_mul(e0, v1));
        if (two) b1 = u_add(b1, u_mul(u_set1(e[e_step + i]), v1));
    }
#define END(row, unit, sum)                                                                                       \
    u_store(F32, total + (row) * total_step, begin + (unit) * UNIT, UNIT,                                         \
            apart ? sum : u_add(u_load(F32, total + (row) * total_step, begin + (unit) * UNIT, UNIT), sum));
    END(0, 0, a0)
    if (two) END(1, 0, b0)
    if (whole) END(0, 1, a1)
    if (two && whole) END(1, 1, b1)
#undef END
}
#define SUMS_OF_BLOCK(kind, two)                                                                                                   \
    static FN_NOINLINE void add_block_##kind##_##two(const float *e, int64_t e_step, const char *const *values, int keys, int64_t n, \
                                                     float *total, int64_t total_step, int apart) {                                \
        int64_t i = 0;                                                                                                             \
        for (; i + 2 * UNIT <= n; i += 2 * UNIT) add_block(kind, two, 1, e, e_step, values, keys, i, 0, total, total_step, apart);  \
        for (; i < n; i += UNIT)                                                                                                   \
            add_block(kind, two, 0, e, e_step, values, keys, i, n - i < UNIT ? (int)(n - i) : UNIT, total, total_step, apart);      \
    }
typedef void add_block_fn(const float *e, int64_t e_step, const char *const *values, int keys, int64_t n, float *total, int64_t total_step, int apart);
SUMS_OF_BLOCK(F32, 0) SUMS_OF_BLOCK(F32, 1) SUMS_OF_BLOCK(F16, 0) SUMS_OF_BLOCK(F16, 1)
SUMS_OF_BLOCK(ALL_BF16, 0) SUMS_OF_BLOCK(ALL_BF16, 1)
static add_block_fn *const add_blocks[4][2] = {[F32] = {add_block_F32_0, add_block_F32_1},
                                               [F16] = {add_block_F16_0, add_block_F16_1},
                                               [BF16] = {add_block_ALL_BF16_0, add_block_ALL_BF16_1}};

/* The units of a row of q, padded to a power of two. */
static int64_t units_of_q(const struct fn_attention *job) {
    int64_t units = 1;
    while (units * UNIT < job->size) units *= 2;
    return units;
}

/* One query of `heads` heads that see the same keys, from head `first_head` on. */
static void attend_one(const struct fn_attention *job, const struct fn_attention_part *part, const struct fn_sequence *s, int64_t query,
                       int64_t first_head, int heads, const struct visible *seen, float *room) {
    const int64_t width = fn_attention_width(job), t_step = fn_attention_scores(job), v_width = fn_attention_value_width(job);
    const int64_t units = units_of_q(job), count = seen->count, blocks = (count + FN_ATTENTION_BLOCK - 1) / FN_ATTENTION_BLOCK;
    const int as_it_lies = units * UNIT == job->size, by_parity = ALL_BF16 == BF16P && job->kind == BF16;
    float *const q = taken(&room, heads * width), *const y = taken(&room, v_width), *const in_order = taken(&room, v_width);
    float *const segments = taken(&room, fn_attention_segments(job)), *const widened = taken(&room, BATCH * width);
    if (part->shared) room = part->shared;
    float *const t = taken(&room, heads * t_step), *const sums = taken(&room, heads), *const totals = room;
    /* Of blocks that threads take apart, each has sums of its own. */
    const int64_t total_step = part->shared ? fn_attention_blocks(job) * v_width : v_width;
    const int64_t first = part->shared ? part->first_block : 0, last = part->shared ? part->last_block : blocks;
    const char *at[FN_ATTENTION_BLOCK];
    if (part->steps & FN_FIND_SCORES && count) {
        const struct rows_of_keys keys = rows_of(job, &job->k, part->sequence, part->kv_head);
        score_batch_fn *const *const score = score_batches[as_it_lies ? job->kind : F32];
        for (int h = 0; h < heads; h++) {
            float *const row = q + h * width;
            memset(row, 0, (size_t)width * sizeof *row);
            const char *const from = row_of_q(job, s, part->sequence, first_head + h, query);
            if (by_parity && as_it_lies) widen_tile(ALL_BF16, 0, 0, from, (int)job->size, row);
            else widen_any((int)job->kind, from, (int)job->size, row);
        }
        if (!as_it_lies) memset(widened, 0, (size_t)(BATCH * width) * sizeof *widened);
        for (int64_t block = first; block < last; block++) {
            const int64_t begin = block * FN_ATTENTION_BLOCK;
            const int n = count - begin < FN_ATTENTION_BLOCK ? (int)(count - begin) : FN_ATTENTION_BLOCK;
            find_rows(&keys, seen, begin, n, at);
            for (int i = 0; i < n; i += BATCH) {
                const int batch = n - i < BATCH ? n - i : BATCH;
                const char *rows[BATCH];
                for (int k = 0; k < batch; k++) {
                    rows[k] = at[i + k];
                    if (as_it_lies) continue;
                    widen_any((int)job->kind, at[i + k], (int)job->size, widened + k * width);
                    rows[k] = (const char *)(widened + k * width);
                }
                for (int h = 0; h < heads; h += 2)
                    score[h + 1 < heads](q + h * width, width, rows, batch, units, (float)job->scale, t + h * t_step + begin + i, t_step);
            }
        }
    }
    if (part->steps & FN_FIND_WEIGHTS && count)
        for (int h = 0; h < heads; h++) sums[h] = find_weights(job, t + h * t_step, count, first_head + h, segments);
    if (part->steps & FN_ADD_VALUES && count) {
        const struct rows_of_keys values = rows_of(job, &job->v, part->sequence, part->kv_head);
        add_block_fn *const *const add = add_blocks[job->kind];
        if (!part->shared) memset(totals, 0, (size_t)(heads * total_step) * sizeof *totals);
        for (int64_t block = first; block < last; block++) {
            const int64_t begin = block * FN_ATTENTION_BLOCK;
            const int n = count - begin < FN_ATTENTION_BLOCK ? (int)(count - begin) : FN_ATTENTION_BLOCK;
            find_rows(&values, seen, begin, n, at);
            for (int h = 0; h < heads; h += 2)
                add[h + 1 < heads](t + h * t_step + begin, t_step, at, n, job->value_size,
                                   totals + h * total_step + (part->shared ? block * v_width : 0), total_step, part->shared != NULL);
        }
    }
    if (!(part->steps & FN_WRITE_SUMS)) return;
    for (int h = 0; h < heads; h++) {
        float *const total = totals + h * total_step;
        for (int64_t block = 1; part->shared && block < blocks; block++) {
            FN_VECTORS()
            for (int64_t i = 0; i < v_width; i++) total[i] += total[block * v_width + i];
        }
        if (by_parity && count) order_again(total, job->value_size, in_order);
        write_row(job, s, part->sequence, first_head + h, query, by_parity ? in_order : total, count ? sums[h] : 0, count, y);
    }
}

#if defined(P_LANES)
/* Keys of a strip, whose scores with two rows registers hold; and elements of values in a slice, whose sums of four rows they hold. */
#if defined(MANY_REGISTERS)
#define STRIP (2 * P_LANES)
#define SLICE (4 * P_LANES)
#define EACH_SCORE(fn) fn(0, 0) fn(0, 1) fn(1, 0) fn(1, 1)
#define EACH_SCORE_OF(fn, x) fn(x, 0, 0) fn(x, 0, 1) fn(x, 1, 0) fn(x, 1, 1)
#define EACH_SCORE_OF_BOTH(fn, x, y) fn(x, y, 0, 0) fn(x, y, 0, 1) fn(x, y, 1, 0) fn(x, y, 1, 1)
#define EACH_VECTOR_OF_STRIP(fn) fn(0) fn(1)
#define EACH_VECTOR_OF_SLICE(fn, r) fn(r, 0) fn(r, 1) fn(r, 2) fn(r, 3)
#else
#define STRIP P_LANES
#define SLICE (2 * P_LANES)
#define EACH_SCORE(fn) fn(0, 0) fn(1, 0)
#define EACH_SCORE_OF(fn, x) fn(x, 0, 0) fn(x, 1, 0)
#define EACH_SCORE_OF_BOTH(fn, x, y) fn(x, y, 0, 0) fn(x, y, 1, 0)
#define EACH_VECTOR_OF_STRIP(fn) fn(0)
#define EACH_VECTOR_OF_SLICE(fn, r) fn(r, 0) fn(r, 1)
#endif

/*
 * The scores of two rows of q with the keys of a strip, the first of which are at k. Elements lie in the order of the tree's
 * leaves, `width` of them, a power of two from 16 on; one of q after the other, and of keys STRIP apart.
 */
static FN_NOINLINE void score_strip(const float *q, int64_t q_step, const float *k, int64_t width, float scale, float *t, int64_t t_step) {
    float stack[8][4][16];
    int depth = 0;
#define LEAF_KEYS(v) const P k##v = p_load(F32, (const char *)(k + (d) * STRIP + v * P_LANES));
#define LEAF(x, r, v) x##r##v = p_mul(q##r, k##v);
#define ONE(x, at)                                                  \
    {                                                               \
        const int64_t d = i + (at);                                 \
        const P q0 = p_set1(q[d]), q1 = p_set1(q[q_step + d]);      \
        EACH_VECTOR_OF_STRIP(LEAF_KEYS)                             \
        EACH_SCORE_OF(LEAF, x)                                      \
    }
#define JOINED(x, y, r, v) x##r##v = p_add(x##r##v, y##r##v);
#define JOIN(x, y) EACH_SCORE_OF_BOTH(JOINED, x, y)
#define TWO(x, y, at) ONE(x, at) ONE(y, (at) + 1) JOIN(x, y)
#define FOUR(x, y, z, at) TWO(x, z, at) TWO(y, z, (at) + 2) JOIN(x, y)
#define EIGHT(w, x, y, z, at) FOUR(w, y, z, at) FOUR(x, y, z, (at) + 4) JOIN(w, x)
#define DECLARED(x, r, v) P x##r##v;
    for (int64_t i = 0; i < width; i += 16) {
        EACH_SCORE_OF(DECLARED, a) EACH_SCORE_OF(DECLARED, b) EACH_SCORE_OF(DECLARED, c)
        EACH_SCORE_OF(DECLARED, e) EACH_SCORE_OF(DECLARED, f)
        EIGHT(a, c, e, f, 0)
        EIGHT(b, c, e, f, 8)
        JOIN(a, b)
        for (int64_t joined = i / 16; joined & 1; joined >>= 1) {
            depth--;
#define ADD_BEFORE(r, v) a##r##v = p_add(p_load(F32, (const char *)stack[depth][2 * r + v]), a##r##v);
            EACH_SCORE(ADD_BEFORE)
        }
#define END(r, v) p_store(t + r * t_step + v * P_LANES, p_mul(a##r##v, p_set1(scale)));
#define KEEP(r, v) p_store(stack[depth][2 * r + v], a##r##v);
        if (i + 16 == width) {
            EACH_SCORE(END)
        } else {
            EACH_SCORE(KEEP)
            depth++;
        }
    }
#undef LEAF_KEYS
#undef LEAF
#undef ONE
#undef JOINED
#undef JOIN
#undef TWO
#undef FOUR
#undef EIGHT
#undef DECLARED
#undef ADD_BEFORE
#undef END
#undef KEEP
}

/* Adds n keys' values of a slice, which lie SLICE apart, times the weights of one row or four, to their sums. */
FN_INLINE void add_slice(int rows, const float *e, int64_t e_step, const float *v, int64_t n, float *sums, int64_t step) {
#define SUMS_AT(r, c) (sums + (r) * step + (c) * P_LANES)
#define BEGIN(r, c) P s##r##c = r < rows ? p_load(F32, (const char *)SUMS_AT(r, c)) : p_zero();
#define BEGIN_ROW(r) EACH_VECTOR_OF_SLICE(BEGIN, r)
    EACH_ROW(BEGIN_ROW)
#define VALUE(r, c) const P v##c = p_load(F32, (const char *)(v + i * SLICE + (c) * P_LANES));
#define TERM(r, c) s##r##c = p_add(s##r##c, p_mul(weight, v##c));
#define TERMS(r)                                        \
    if (r < rows) {                                     \
        const P weight = p_set1(e[(r) * e_step + i]);   \
        EACH_VECTOR_OF_SLICE(TERM, r)                   \
    }
    for (int64_t i = 0; i < n; i++) {
        EACH_VECTOR_OF_SLICE(VALUE, 0)
        EACH_ROW(TERMS)
    }
#define END(r, c) if (r < rows) p_store(SUMS_AT(r, c), s##r##c);
#define END_ROW(r) EACH_VECTOR_OF_SLICE(END, r)
    EACH_ROW(END_ROW)
#undef SUMS_AT
#undef BEGIN
#undef BEGIN_ROW
#undef VALUE
#undef TERM
#undef TERMS
#undef END
#undef END_ROW
}
static FN_NOINLINE void add_slice_of_1(const float *e, int64_t e_step, const float *v, int64_t n, float *sums, int64_t step) {
    add_slice(1, e, e_step, v, n, sums, step);
}
static FN_NOINLINE void add_slice_of_4(const float *e, int64_t e_step, const float *v, int64_t n, float *sums, int64_t step) {
    add_slice(4, e, e_step, v, n, sums, step);
}

/* Many rows, all of whose visible keys are ranges: rows are queries of the heads that share keys, the heads of a query together. */
struct many {
    int64_t rows, first, end; /* the keys that any row sees */
    int64_t t_step, v_width;
    const struct visible *seen; /* of each row */
    float *t, *block, *total; /* scores, and sums of the block that is added up and of those before it */
};

/* Adds values of keys [begin, end), the first of which lie at v, to the sums of `rows` rows from `row` on. */
static void add_keys(const struct many *m, int64_t row, int rows, const float *v, int64_t begin, int64_t end, int64_t at) {
    while (begin < end) {
        int64_t next = end; /* where the first of these rows ends a block */
        for (int r = 0; r < rows; r++) {
            const int64_t first = m->seen[row + r].first, closed = begin + FN_ATTENTION_BLOCK - (begin - first) % FN_ATTENTION_BLOCK;
            if (closed < next) next = closed;
        }
        const float *const e = m->t + row * m->t_step + begin - m->first;
        float *const sums = m->block + row * m->v_width + at;
        (rows == 4 ? add_slice_of_4 : add_slice_of_1)(e, m->t_step, v, next - begin, sums, m->v_width);
        v += (next - begin) * SLICE;
        begin = next;
        for (int r = 0; r < rows; r++) {
            const int64_t done = begin - m->seen[row + r].first;
            if (done % FN_ATTENTION_BLOCK && done < m->seen[row + r].count) continue;
            float *const restrict sum = sums + r * m->v_width, *const restrict total = m->total + (row + r) * m->v_width + at;
            for (int64_t i = 0; i < SLICE; i++) {
                total[i] += sum[i];
                sum[i] = 0;
            }
        }
    }
}

/* The same of keys [begin, end) and rows [row, row + 4): keys that all of them see together, those before and after by themselves. */
static void add_chunk(const struct many *m, int64_t row, const float *v, int64_t begin, int64_t end, int64_t at) {
    const int64_t rows = m->rows - row < 4 ? m->rows - row : 4;
    int64_t first = begin, last = end;
    for (int64_t r = row; r < row + rows; r++) {
        const struct visible *const seen = &m->seen[r];
        if (seen->first > first) first = seen->first;
        if (seen->first + seen->count < last) last = seen->first + seen->count;
    }
    if (rows < 4 || last <= first) first = last = end;
#define ROW_ALONE(from, to)                                                                                          \
    for (int64_t r = row; r < row + rows; r++) {                                                                     \
        const int64_t a = m->seen[r].first > (from) ? m->seen[r].first : (from), z = m->seen[r].first + m->seen[r].count; \
        add_keys(m, r, 1, v + (a - begin) * SLICE, a, z < (to) ? z : (to), at);                                      \
    }
    ROW_ALONE(begin, first)
    if (first < last) add_keys(m, row, 4, v + (first - begin) * SLICE, first, last, at);
    ROW_ALONE(last, end)
#undef ROW_ALONE
}

static void attend_many(const struct fn_attention *job, const struct fn_attention_part *part, const struct fn_sequence *s,
                        const struct visible *seen, float *room) {
    const int group = (int)(job->heads / job->kv_heads);
    struct many m = {.rows = (part->end - part->begin) * group, .first = s->keys, .t_step = fn_attention_scores(job),
                     .v_width = fn_attention_value_width(job), .seen = seen};
    int64_t width = 16; /* of the tree */
    while (width < job->size) width *= 2;
    for (int64_t r = 0; r < m.rows; r++) {
        if (!seen[r].count) continue;
        if (seen[r].first < m.first) m.first = seen[r].first;
        if (seen[r].first + seen[r].count > m.end) m.end = seen[r].first + seen[r].count;
    }
    const int64_t rows = (m.rows + 1) / 2 * 2, step = fn_attention_width(job), v_width = m.v_width;
    float *const q = taken(&room, rows * width), *const sums = taken(&room, m.rows), *const segments = taken(&room, fn_attention_segments(job));
    float *const row = taken(&room, step > v_width ? step : v_width);
    m.t = taken(&room, rows * m.t_step);
    m.block = taken(&room, m.rows * v_width);
    m.total = taken(&room, m.rows * v_width);
    memset(m.block, 0, (size_t)(m.rows * v_width) * sizeof(float));
    memset(m.total, 0, (size_t)(m.rows * v_width) * sizeof(float));
    const char *at[FN_ATTENTION_BLOCK];
    int16_t leaf[FN_ATTENTION_SIZE]; /* the place of each element in the order of the tree's leaves */
    for (int64_t d = 0, reversed = 0; d < width; d++) {
        leaf[d] = (int16_t)reversed;
        reversed = after_reversed(reversed, width);
    }
    memset(q, 0, (size_t)(rows * width) * sizeof *q);
    for (int64_t r = 0; r < m.rows; r++) {
        const int64_t head = part->kv_head * group + r % group;
        widen_any((int)job->kind, row_of_q(job, s, part->sequence, head, part->begin + r / group), (int)job->size, row);
        for (int64_t d = 0; d < job->size; d++) q[r * width + leaf[d]] = row[d];
    }
    {
        float *other = room;
        float *const strip = taken(&other, width * STRIP), *const widened = taken(&other, STRIP * step);
        const struct rows_of_keys keys = rows_of(job, &job->k, part->sequence, part->kv_head);
        memset(widened, 0, (size_t)(STRIP * step) * sizeof *widened);
        for (int64_t begin = m.first; begin < m.end; begin += STRIP) {
            const int n = (int)(m.end - begin < STRIP ? m.end - begin : STRIP);
            const struct visible these = {begin, n, NULL};
            find_rows(&keys, &these, 0, n, at);
            for (int i = 0; i < n; i++) widen_any((int)job->kind, at[i], (int)job->size, widened + i * step);
            for (int64_t d = 0; d < width; d += 4) {
                float *to[4] = {strip + leaf[d] * STRIP, strip + leaf[d + 1] * STRIP, strip + leaf[d + 2] * STRIP, strip + leaf[d + 3] * STRIP};
                for (int64_t i = 0; i < STRIP; i += 4) {
                    transpose_four(widened + i * step + d, step, to);
                    for (int c = 0; c < 4; c++) to[c] += 4;
                }
            }
            for (int64_t r = 0; r < m.rows; r += 2) {
                const struct visible *const a = &seen[r], *const b = &seen[r + 1 < m.rows ? r + 1 : r];
                if ((a->first >= begin + n || a->first + a->count <= begin) && (b->first >= begin + n || b->first + b->count <= begin)) continue;
                score_strip(q + r * width, width, strip, width, (float)job->scale, m.t + r * m.t_step + begin - m.first, m.t_step);
            }
        }
    }
    for (int64_t r = 0; r < m.rows; r++)
        if (seen[r].count)
            sums[r] = find_weights(job, m.t + r * m.t_step + seen[r].first - m.first, seen[r].count, part->kv_head * group + r % group, segments);
    float *const values = taken(&room, FN_ATTENTION_BLOCK * v_width);
    const struct rows_of_keys of_values = rows_of(job, &job->v, part->sequence, part->kv_head);
    memset(row, 0, (size_t)v_width * sizeof *row);
    for (int64_t begin = m.first; begin < m.end; begin += FN_ATTENTION_BLOCK) {
        const int n = (int)(m.end - begin < FN_ATTENTION_BLOCK ? m.end - begin : FN_ATTENTION_BLOCK);
        const struct visible these = {begin, n, NULL};
        find_rows(&of_values, &these, 0, n, at);
        for (int i = 0; i < n; i++) {
            widen_any((int)job->kind, at[i], (int)job->value_size, row);
            for (int64_t d = 0; d < job->value_size; d += SLICE)
                memcpy(values + d * FN_ATTENTION_BLOCK + i * SLICE, row + d, SLICE * sizeof *row);
        }
        for (int64_t d = 0; d < job->value_size; d += SLICE)
            for (int64_t r = 0; r < m.rows; r += 4) add_chunk(&m, r, values + d * FN_ATTENTION_BLOCK, begin, begin + n, d);
    }
    for (int64_t r = 0; r < m.rows; r++)
        write_row(job, s, part->sequence, part->kv_head * group + r % group, part->begin + r / group, m.total + r * v_width, sums[r],
                  seen[r].count, row);
}
#endif

void FN_OF(attend)(const struct fn_attention *job, const struct fn_attention_part *part, char *memory) {
    float *room = (float *)(void *)memory;
    const struct fn_sequence s = fn_sequence_of(job, part->sequence);
    const int group = (int)(job->heads / job->kv_heads), apart = job->mask && job->mask_stride[1];
    const int64_t first_head = part->kv_head * group;
#if defined(P_LANES)
    struct visible seen[FN_ATTENTION_ROWS];
    const int64_t rows = (part->end - part->begin) * group;
    int many = !part->shared && rows >= FN_ATTENTION_FEW_ROWS && rows <= FN_ATTENTION_ROWS;
    for (int64_t r = 0; many && r < rows; r++) {
        if (r % group && !apart) seen[r] = seen[r - 1];
        else seen[r] = visible_to(job, &s, part->sequence, first_head + r % group, part->begin + r / group, NULL);
        many = seen[r].count >= 0;
    }
    if (many) {
        attend_many(job, part, &s, seen, room);
        return;
    }
#endif
    int32_t *const list = job->mask ? (int32_t *)(void *)taken(&room, fn_attention_scores(job)) : NULL;
    for (int64_t query = part->begin; query < part->end; query++)
        for (int h = 0; h < group; h += apart ? 1 : group) {
            const struct visible one = visible_to(job, &s, part->sequence, first_head + h, query, list);
            attend_one(job, part, &s, query, first_head + h, apart ? 1 : group, &one, room);
        }
}
