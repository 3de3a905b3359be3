"""Attention in C: around its blocks, tiles and units, several threads, masks, pages, and calls that are interrupted."""

import random

import pytest
import torch
from surroundings import interrupted, takes_interrupts, threads

import fusednorm
from fusednorm.backends import cpu
from fusednorm.conformance.cases import differing
from fusednorm.reference import attention as reference

#: Around units and powers of two; around blocks, segments and strips; and around tiles of 64 rows, and of fewer.
SIZES = (1, 5, 16, 32, 64, 80, 96, 128, 256, 264)
KEYS = (1, 5, 15, 33, 127, 128, 129, 300, 1025)
QUERIES = (1, 1, 1, 2, 3, 7, 33, 70)
GROUPS = (1, 2, 3, 4)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def mask_of(kind, batch, heads, queries, keys):
    if kind == "padding":
        mask = torch.ones(batch, 1, 1, keys, dtype=torch.bool)
        mask[-1, ..., : keys // 3] = False
        return mask
    if kind == "holes":
        return torch.rand(batch, 1, queries, keys) < 0.6
    return torch.rand(heads, 1, keys) < 0.9 if kind == "heads" else None


def cases(dtype):
    """Calls, each with its operands and flags."""
    choose = random.Random(DTYPES.index(dtype))
    torch.manual_seed(DTYPES.index(dtype))
    for size in SIZES * 3:
        batch, kv_heads, group = choose.choice((1, 2)), choose.choice((1, 2)), choose.choice(GROUPS)
        queries, keys, of_values = choose.choice(QUERIES), choose.choice(KEYS), choose.choice((size, size, 33, 130))
        if queries * keys > 20_000:
            keys = 300
        heads = kv_heads * group
        q = torch.randn(batch, queries, heads, size).to(dtype).transpose(1, 2)
        k = torch.randn(batch, kv_heads, keys, size).to(dtype)
        v = torch.randn(batch, keys, kv_heads, of_values).to(dtype).transpose(1, 2)
        if choose.random() < 0.3:
            k[:, :, keys // 2] = choose.choice((float("nan"), float("inf")))
            v[:, :, keys // 3] = float("nan")
        flags = {
            "causal": choose.random() < 0.7,
            "window": choose.choice((None, None, 1, 3, 100)),
            "softcap": choose.choice((None, None, 20.0)),
            "scale": choose.choice((None, 0.3)),
            "sinks": choose.choice((None, torch.randn(heads))),
            "mask": mask_of(choose.choice((None, None, "padding", "holes", "heads")), batch, heads, queries, keys),
        }
        yield choose.choice((1, 2, 5)), (q, k, v), flags


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_blocks_and_tiles(dtype):
    for count, operands, flags in cases(dtype):
        (expected,) = reference.attention(*operands, **flags)
        for isa in cpu.variants():
            with cpu.use_variant(isa), threads(count):
                found = fusednorm.attention(*operands, **flags)
            shapes = [tuple(t.shape) for t in operands]
            assert not differing(found, expected).any(), (isa, count, shapes, flags)


def test_windows_of_several_blocks():
    """The blocks of each query begin at the first key that it sees."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, rows, 64) for heads, rows in ((4, 40), (2, 700), (2, 700)))
    for window, causal in ((130, True), (300, True), (200, False)):
        flags = {"scale": None, "causal": causal, "window": window, "softcap": None}
        (expected,) = reference.attention(q, k, v, sinks=None, mask=None, **flags)
        for isa in cpu.variants():
            with cpu.use_variant(isa):
                found = fusednorm.attention(q, k, v, **flags)
            assert not differing(found, expected).any(), (isa, window, causal)


def test_pages():
    """In any order, of any size; rows of q that belong to no sequence are zero, and sequences may have no queries."""
    choose = random.Random(0)
    torch.manual_seed(0)
    for turn in range(24):
        dtype, of_page, size, group = (
            DTYPES[turn % 3],
            choose.choice((1, 16, 128)),
            choose.choice((64, 80)),
            turn % 4 + 1,
        )
        lengths = [choose.choice((1, 5, 129, 300)) for _ in range(choose.choice((1, 2, 4)))]
        counts = [min(choose.choice((0, 1, 3, 40)), length) for length in lengths]
        starts = torch.tensor([2, *counts]).cumsum(0)
        most = -(-max(lengths) // of_page)
        pages = torch.randperm(len(lengths) * most + 3)[: len(lengths) * most].view(len(lengths), most)
        cache = torch.randn(pages.numel() + 3, 2, of_page, 2 * size).to(dtype)
        k, v, q = cache[..., :size], cache[..., size:], torch.randn(starts[-1] + 1, 2 * group, size).to(dtype)
        flags = {"window": choose.choice((None, 7)), "softcap": choose.choice((None, 30.0))}
        expected = torch.zeros_like(q)
        for s, length in enumerate(lengths):
            of, gathered = slice(starts[s], starts[s + 1]), [t[pages[s]].transpose(0, 1).flatten(1, 2) for t in (k, v)]
            of_q = q[of].transpose(0, 1).unsqueeze(0)
            (found,) = reference.attention(
                of_q, *[t[None, :, :length] for t in gathered], None, None, None, True, **flags
            )
            expected[of] = found[0].transpose(0, 1)
        for isa in cpu.variants():
            with cpu.use_variant(isa), threads(choose.choice((1, 2, 7))):
                found = fusednorm.paged_attention(q, k, v, pages.int(), starts, torch.tensor(lengths), **flags)
            assert not differing(found, expected).any(), (isa, lengths, counts, of_page, size, group)


def test_one_query_is_divided_among_threads():
    """By blocks of its keys, where there are fewer heads than threads."""
    torch.manual_seed(0)
    for keys, window in ((5000, None), (4097, 3000), (1500, None)):
        q, k, v = torch.randn(1, 3, 1, 256), torch.randn(1, 1, keys, 256), torch.randn(1, 1, keys, 256)
        with threads(1):
            expected = fusednorm.attention(q, k, v, window=window)
        for count in (2, 3, 8):
            with threads(count):
                assert torch.equal(fusednorm.attention(q, k, v, window=window), expected), (keys, count)


@takes_interrupts
def test_long_attention_is_interrupted():
    """It is made in parts, of queries: those after the interrupt are not computed."""
    q = torch.ones(1, 16, 1, 128, dtype=torch.bfloat16).expand(1, 16, 8192, 128)
    k = torch.ones(1, 1, 1, 128, dtype=torch.bfloat16).expand(1, 1, 8192, 128)
    out = torch.full(q.shape, -1.0, dtype=torch.bfloat16)
    with interrupted(after=0.02):
        fusednorm.attention(q, k, k, out=out)
    assert (out[:, :, -1] == -1).all()
