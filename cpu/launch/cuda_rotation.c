/* Reads heads that are rotated, whose arguments are those of csrc/rotate.cu. */
#include "launch/cuda.h"
#include "abi/rotation.h"

int fn_cuda_rotation(const struct fn_call *call, launch *l) {
    const struct fn_rotation *const r = (const struct fn_rotation *)(call + 1);
    const struct fn_operand *const tables[] = {&r->cos, &r->sin};
    const int64_t kinds[] = {r->x_kind, r->out_kind, r->between, r->products, r->cos.kind, r->sin.kind, r->heads[0].weight_kind};
    arguments to = begin_arguments(l, r->rows, r->inner);
    to.between = r->position_size && r->positions % (uintptr_t)r->position_size != 0;
    l->rows = l->block = 0;
    for (int i = 0; i < FN_SETS; i++) {
        const struct fn_heads *h = &r->heads[i];
        append_address(&to, h->x, h->x_outer_stride | h->x_stride | h->x_head_stride, r->x_kind);
        append_address(&to, h->out, h->out_outer_stride | h->out_stride | h->out_head_stride, r->out_kind);
        append_address(&to, h->weight, h->weight_stride, h->weight_kind);
        append_address(&to, h->rstd, 0, FN_F32);
        append_strides(&to, h->x_outer_stride, h->x_stride);
        append_integer(&to, h->x_head_stride);
        append_strides(&to, h->out_outer_stride, h->out_stride);
        append_integer(&to, h->out_head_stride);
        append_integer(&to, h->weight_stride);
        append_integer(&to, h->count);
        l->rows += r->rows * h->count;
    }
    for (int i = 0; i < 2; i++)
        append_address(&to, tables[i]->address, tables[i]->outer_stride | tables[i]->stride, tables[i]->kind);
    append(&to, &r->positions, sizeof(uintptr_t));
    for (int i = 0; i < 2; i++) append_strides(&to, tables[i]->outer_stride, tables[i]->stride);
    append_strides(&to, r->positions_outer_stride, r->positions_stride);
    append_integer(&to, r->rows);
    append_real(&to, r->eps, 0);
    append_real(&to, r->weight_offset, 0);
    for (int i = 0; i < (int)(sizeof kinds / sizeof *kinds); i++) l->key.kinds |= kinds[i] << 4 * i;
    l->hidden = l->key.hidden = r->size;
    l->key.group = r->pairs;
    l->key.device = (int32_t)call->device;
    l->key.options = ROTATION | (to.inner ? TWO_LEVELS : 0) | (r->weight_offset != 0 ? OFFSET : 0) | (r->heads[0].rstd ? RSTD : 0);
    l->key.quantizer = (int32_t)(r->flags | r->position_size << 8);
    return end_arguments(&to);
}
