"""Attention has the oracle's bits, and a query's depend on it and its visible keys alone, wherever these lie."""

import pytest
import torch

import fusednorm
from fusednorm.conformance.cases import BF16, DTYPES, F16, F32, F64, covering, dtype_name, of_oracle
from fusednorm.reference import norm as reference

pytestmark = pytest.mark.promise("same bits")
others = pytest.mark.left_out("cuda", "triton_ptx", "triton", "triton_cpu")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)

#: Batch, heads of q and of k, queries, keys, the size of heads and of values.
SHAPES = (
    (1, 1, 1, 1, 1, 1, 1),
    (2, 4, 2, 2, 5, 16, 16),
    (1, 2, 1, 1, 131, 24, 8),
    (1, 2, 2, 9, 9, 64, 64),
    (1, 2, 1, 3, 2, 7, 3),
)
AXES = {
    "shape": SHAPES,
    "sinks": (None, F32, BF16),
    "mask": (None, "keys", "all"),
    "window": (None, 1, 4),
    "flags": ({}, {"causal": False}, {"softcap": 1.5}, {"scale": -0.3}),
    "data": ("normal", "large", "nan", "inf", "zeros"),
}


def numbers(shape, dtype, data, seed):
    """Of a shape; some of them are special."""
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64, device="cpu")
    if data == "large":
        normal = normal * (200 if dtype == F16 else 1e4)
    elif data == "zeros":
        normal = torch.where(normal > 0, 0.0, -0.0)
    found = reference.rounded(normal, dtype)
    if data in ("nan", "inf"):
        found.view(-1)[:: max(found.numel() // 3, 1)] = getattr(torch, data)
    return found.to(torch.get_default_device())


def tensors(shape, dtype, sinks=None, mask=None, data="normal"):
    """Operands by name."""
    batch, heads, kv_heads, queries, keys, size, values = shape
    shapes = (batch, heads, queries, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, values)
    of_data = ("normal", data, data)
    q, k, v = (numbers(*one, seed) for seed, one in enumerate(zip(shapes, [dtype] * 3, of_data, strict=True)))
    visible = None
    if mask is not None:
        sizes = (batch, 1, 1, keys) if mask == "keys" else (1, heads, queries, keys)
        visible = numbers(sizes, F32, "normal", 3) > -0.5
    of_heads = None if sinks is None else numbers((heads,), sinks, "normal", 4)
    return {"q": q, "k": k, "v": v, "sinks": of_heads, "mask": visible}


@dtypes
@others
def test_any_call(mode, agree, dtype):
    for shape, sinks, mask, window, flags, data in covering(*AXES.values(), turn=DTYPES.index(dtype)):
        given, flags = tensors(shape, dtype, sinks, mask, data), flags | {"window": window}
        about = f"{dtype_name(dtype)}, {shape}, {sinks}, {mask}, {data}, {flags}"
        found = fusednorm.attention(**given, **flags)
        agree(found, of_oracle("attention", given, (), **flags)["out"], about)
        out = torch.empty_like(found.transpose(1, 2).contiguous()).transpose(1, 2)
        assert fusednorm.attention(**given, **flags, out=out) is out
        agree(out, found, f"{about}, given an output")


@dtypes
@others
def test_blocks_of_keys(mode, agree, dtype):
    for keys in (127, 128, 129, 300, 1030):
        given = tensors((1, 2, 1, 1, keys, 8, 8), dtype)
        agree(fusednorm.attention(**given), of_oracle("attention", given, ())["out"], f"{dtype_name(dtype)}, {keys}")


@dtypes
@others
def test_layouts(mode, agree, dtype):
    """Operands in any strides."""
    given = tensors((2, 4, 2, 3, 9, 16, 8), dtype, F32, "all")
    wanted = fusednorm.attention(**given)
    lies = {
        "tokens first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "wider": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
        "columns": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        "negatives": lambda t: torch._neg_view(-t),
    }
    for name, lie in lies.items():
        moved = {key: lie(given[key]) for key in ("q", "k", "v")}
        agree(fusednorm.attention(**given | moved), wanted, name)
    mask = given["mask"].repeat_interleave(2, -1)[..., ::2]
    agree(fusednorm.attention(**given | {"mask": mask}), wanted, "a mask in steps")


@pytest.mark.promise("a row is a row")
@dtypes
@others
def test_a_query_has_its_bits_wherever_it_is(mode, agree, dtype):
    """Among other queries, behind keys that are not visible, and with keys in pages in any order."""
    for window in (None, 40):
        given = tensors((1, 4, 2, 12, 140, 16, 8), dtype, F32) | {"window": window}
        q, k, v = (given[name] for name in ("q", "k", "v"))
        whole = fusednorm.attention(**given)
        for begin, end in ((0, 1), (1, 4), (4, 12), (11, 12)):
            part = {"q": q[:, :, begin:end], "k": k[:, :, : 128 + end], "v": v[:, :, : 128 + end]}
            agree(fusednorm.attention(**given | part), whole[:, :, begin:end], f"{begin} to {end}")
        padded = {name: torch.nn.functional.pad(given[name], (0, 0, 70, 0), value=torch.nan) for name in "kv"}
        padded["mask"] = torch.arange(210, device=q.device) >= 70
        agree(fusednorm.attention(**given | padded), whole, "behind padding")
        order = torch.randperm(9, generator=torch.Generator().manual_seed(0), device="cpu").to(q.device)
        cache = torch.full((9, 2, 16, 24), torch.nan, dtype=dtype)
        for page, begin in zip(order.tolist(), range(0, 140, 16), strict=True):
            rows = torch.cat((k, v), -1)[0, :, begin : begin + 16]
            cache[page, :, : rows.shape[1]] = rows
        pages, starts = order.int().expand(2, -1).contiguous(), torch.tensor([0, 7, 10])
        queries = torch.cat((q[0, :, 5:], q[0, :, :3]), 1).transpose(0, 1)
        lengths, flags = torch.tensor([140, 131]), {"window": window, "sinks": given["sinks"]}
        found = fusednorm.paged_attention(queries, *cache.split((16, 8), -1), pages, starts, lengths, **flags)
        wanted = torch.cat((whole[0, :, 5:], whole[0, :, :3]), 1).transpose(0, 1)
        agree(found, wanted, "in pages")


@dtypes
@others
def test_nothing_to_compute(mode, agree, dtype):
    q, k, v, *_ = tensors((1, 2, 1, 3, 4, 8, 8), dtype).values()
    assert fusednorm.attention(q[:0], k[:0], v[:0]).shape == (0, 2, 3, 8)
    assert fusednorm.attention(q[:, :, :0], k, v).shape == (1, 2, 0, 8)
    assert fusednorm.attention(q, k, v[..., :0]).shape == (1, 2, 3, 0)
    agree(fusednorm.attention(q, k[:, :, :0], v[:, :, :0]), torch.zeros_like(q), "no keys")
    agree(fusednorm.attention(q, k, v, mask=torch.tensor(False)), torch.zeros_like(q), "no visible keys")
