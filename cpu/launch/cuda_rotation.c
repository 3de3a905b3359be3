/* Reads heads that are rotated, whose arguments are those of csrc/rotate.cu. */
#include "launch/cuda.h"
#include "abi/rotation.h"

/* Notes what an address and strides are multiples of, and appends the address; returns 0 if it lies between two elements. */
static int append_address(launch *l, size_t *at, uint64_t *low, uintptr_t address, int64_t strides, int64_t kind) {
    const int item = fn_element_size(kind);
    append(l->arguments, at, &address, sizeof address);
    if (!item || !address) return 1;
    *low |= address | (uint64_t)(strides * item);
    return address % (uintptr_t)item == 0;
}

static void append_strides(launch *l, size_t *at, const struct fn_rotation *r, int64_t outer_stride, int64_t stride) {
    const int64_t jump = outer_stride - r->inner * stride;
    append(l->arguments, at, &stride, sizeof stride);
    if (r->inner != r->rows) append(l->arguments, at, &jump, sizeof jump);
}

int fn_cuda_rotation(const struct fn_call *call, launch *l) {
    const struct fn_rotation *const r = (const struct fn_rotation *)(call + 1);
    const struct fn_operand *const tables[] = {&r->cos, &r->sin};
    const int64_t kinds[] = {r->x_kind, r->out_kind, r->between, r->products, r->cos.kind, r->sin.kind, r->heads[0].weight_kind};
    const int two_levels = r->inner != r->rows;
    uint64_t low = FN_MOST_ALIGNED;
    size_t at = 0;
    int fine = r->position_size == 0 || r->positions % (uintptr_t)r->position_size == 0;
    memset(&l->key, 0, sizeof l->key);
    l->rows = l->block = 0;
    if (two_levels) append(l->arguments, &at, &r->inner, sizeof(int64_t));
    for (int i = 0; i < FN_SETS; i++) {
        const struct fn_heads *h = &r->heads[i];
        fine &= append_address(l, &at, &low, h->x, h->x_outer_stride | h->x_stride | h->x_head_stride, r->x_kind);
        fine &= append_address(l, &at, &low, h->out, h->out_outer_stride | h->out_stride | h->out_head_stride, r->out_kind);
        fine &= append_address(l, &at, &low, h->weight, h->weight_stride, h->weight_kind);
        fine &= append_address(l, &at, &low, h->rstd, 0, FN_F32);
        append_strides(l, &at, r, h->x_outer_stride, h->x_stride);
        append(l->arguments, &at, &h->x_head_stride, sizeof(int64_t));
        append_strides(l, &at, r, h->out_outer_stride, h->out_stride);
        append(l->arguments, &at, &h->out_head_stride, sizeof(int64_t));
        append(l->arguments, &at, &h->weight_stride, sizeof(int64_t));
        append(l->arguments, &at, &h->count, sizeof(int64_t));
        l->rows += r->rows * h->count;
    }
    for (int i = 0; i < 2; i++)
        fine &= append_address(l, &at, &low, tables[i]->address, tables[i]->outer_stride | tables[i]->stride, tables[i]->kind);
    append(l->arguments, &at, &r->positions, sizeof(uintptr_t));
    for (int i = 0; i < 2; i++) append_strides(l, &at, r, tables[i]->outer_stride, tables[i]->stride);
    append_strides(l, &at, r, r->positions_outer_stride, r->positions_stride);
    append(l->arguments, &at, &r->rows, sizeof(int64_t));
    append_real(l->arguments, &at, r->eps, 0);
    append_real(l->arguments, &at, r->weight_offset, 0);
    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++) l->key.kinds |= kinds[i] << 4 * i;
    l->hidden = l->key.hidden = r->size;
    l->key.group = r->pairs;
    l->key.device = (int32_t)call->device;
    l->key.options = ROTATION | (two_levels ? TWO_LEVELS : 0) | (r->weight_offset != 0 ? OFFSET : 0) | (r->heads[0].rstd ? RSTD : 0);
    l->key.quantizer = (int32_t)(r->flags | r->position_size << 8);
    l->key.alignment = (int32_t)(low & -low);
    return fine && at <= ARGUMENT_BYTES;
}
