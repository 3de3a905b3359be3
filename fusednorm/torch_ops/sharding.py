"""DTensor's sharding rules for the operations of ``torch.ops.fusednorm``, and a style for ``parallelize_module``.

The import of this module registers the rules. It takes about two seconds if nothing else has imported
``torch.distributed.tensor``, so the first call with a DTensor imports it, not ``import fusednorm``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor

from fusednorm.calls.declared import Declaration, Role
from fusednorm.calls.quantization import Quantization, computed_by
from fusednorm.torch_ops.declared import DECLARED

try:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
    from torch.distributed.tensor._dtensor_spec import DTensorSpec
    from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo
    from torch.distributed.tensor.parallel import ParallelStyle

    _register_rule = DTensor._op_dispatcher.sharding_propagator.register_op_strategy
except (ImportError, AttributeError) as error:  # some of these names are private, and may change
    raise ImportError(
        f"fusednorm's rules for DTensor need names that torch {torch.__version__} does not have ({error}); install "
        "torch 2.13, or call fusednorm on the local tensors, as inside torch.distributed.tensor.experimental.local_map"
    ) from error

__all__ = ["SequenceParallel"]


class SequenceParallel(ParallelStyle):
    """Shards the rows of fusednorm's modules along the sequence.

    torch's style of this name keeps only the first input, and would drop the residual of ``norm(x, residual)`` and the
    gate of ``norm(x, gate)``. This style shards every tensor that the module takes: a plain tensor is this rank's part
    of the sequence, and a DTensor with another placement is redistributed. The parameters are replicated, from the
    first rank of the mesh.

    Args:
        sequence_dim: the sequence's dimension of the inputs, [..., N].
        use_local_output: return this rank's part of each output as a plain tensor, not as a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim, self.use_local_output = sequence_dim, use_local_output

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        distribute_module(module, device_mesh)
        module.register_forward_pre_hook(partial(self._sharded_inputs, device_mesh), with_kwargs=True)
        if self.use_local_output:
            module.register_forward_hook(_local_outputs)
        return module

    def _sharded_inputs(
        self, mesh: DeviceMesh, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        placements = [Shard(self.sequence_dim)]

        def sharded(value: Any) -> Any:
            if isinstance(value, DTensor):
                return value.redistribute(placements=placements)
            return DTensor.from_local(value, mesh, placements, run_check=False) if isinstance(value, Tensor) else value

        return tuple(map(sharded, args)), {name: sharded(value) for name, value in kwargs.items()}

    def __repr__(self) -> str:
        return f"SequenceParallel(sequence_dim={self.sequence_dim}, use_local_output={self.use_local_output})"


def _local_outputs(_: torch.nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
    return tuple(y.to_local() for y in outputs) if isinstance(outputs, tuple) else outputs.to_local()


def _placed(schema: OpSchema) -> dict[str, DTensorSpec]:
    """The tensor operands, by name."""
    names = [argument.name for argument in schema.op._schema.arguments]
    return {
        name: operand.strategies[0].output_spec
        for name, operand in zip(names, schema.args_schema, strict=False)  # torch leaves out defaults at the end
        if isinstance(operand, OpStrategy)
    }


def _rows(*operands: DTensorSpec, whole: int = 1) -> DTensorSpec:
    """The common placement of the rows of [..., N] operands: on each mesh dimension that of the first that shards rows.

    A mesh dimension on which no operand shards rows is replicated: partial sums are reduced, and parts of rows joined.
    So many dimensions at the end stay whole: a row, or all heads.
    """
    most = operands[0].ndim
    shardings = [
        [placement for placement in candidates if getattr(placement, "dim", most) < most - whole]
        for candidates in zip(*(operand.placements for operand in operands), strict=True)
    ]
    return DTensorSpec(operands[0].mesh, tuple(found[0] if found else Replicate() for found in shardings))


#: The operands without a row for each row of the call.
_WHOLE = ("weight", "scale", "zero_point")


def _strategy(
    outputs: tuple[DTensorSpec, ...] | DTensorSpec | None, operands: dict[str, DTensorSpec], rows: DTensorSpec
) -> Any:
    """The only strategy: operands with rows have the placement ``rows``; every rank has the others whole."""
    inputs = [_replicated(rows) if name in _WHOLE else rows for name in operands]
    return OpStrategy([OpSpec(outputs, inputs, [[0.0]] * len(inputs))])


def _replicated(spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim)


def on_rows(
    formula: Callable[..., tuple[Tensor | None, ...]],
    rows: Sequence[DTensor | None],
    whole: Sequence[DTensor | None],
    joined: int,
) -> tuple[DTensor | None, ...]:
    """The results of a formula, each rank computing it for its own rows; see ``dtensor_bridge.on_rows``."""
    meet = _rows(*(t._spec for t in rows if t is not None), whole=joined)
    mesh, shares = meet.mesh, _shares(meet).placements

    def local(operands: Sequence[DTensor | None], placements: Any, of_gradient: Any) -> list[Tensor | None]:
        return [
            t if t is None else t.redistribute(mesh, placements).to_local(grad_placements=of_gradient) for t in operands
        ]

    everywhere = _replicated(meet).placements
    found = formula(*local(rows, meet.placements, meet.placements), *local(whole, everywhere, shares))
    of_rows = len(found) - len(whole)
    like = next(t for t in rows if t is not None)
    placed: list[Any] = [(like, meet.placements)] * of_rows + [(operand, shares) for operand in whole]
    return tuple(
        None if t is None or operand is None else _of_ranks(t, mesh, placements, operand.shape)
        for t, (operand, placements) in zip(found, placed, strict=True)
    )


def parts_of_groups(rows: DTensor, groups: int) -> DTensor:
    """Rows of which each rank has whole groups of elements; torch cannot divide others into groups."""
    last = rows.ndim - 1
    ranks = [rows.device_mesh.size(i) for i, placement in enumerate(rows.placements) if placement.is_shard(last)]
    if not ranks or (len(ranks) == 1 and groups % ranks[0] == 0):
        return rows
    return rows.redistribute(placements=[Replicate() if p.is_shard(last) else p for p in rows.placements])


def _of_ranks(local: Tensor, mesh: DeviceMesh, placements: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _forward(schema: OpSchema) -> Any:
    """Every output has the placement of the operands' rows."""
    schema.get_mesh_from_args()  # refuses operands on different meshes
    operands = _placed(schema)
    rows = _rows(*(operands[name] for name in ("x", "residual") if name in operands))
    outputs = len(schema.op._schema.returns)
    return _strategy((rows,) * outputs if outputs > 1 else rows, operands, rows)


def _in_place(schema: OpSchema) -> Any:
    """Written operands keep their placements: out and residual_out where there are any, else x and residual."""
    schema.get_mesh_from_args()
    operands = _placed(schema)
    names = ("out", "residual_out") if "out" in operands else ("x", "residual")
    written = {name: operands[name] for name in names if name in operands}
    rows = _rows(*written.values())
    for name, spec in written.items():
        if spec.placements != rows.placements:
            _refuse_placement(name, spec, schema)
    return _strategy(None, operands, rows)


def _refuse_placement(name: str, spec: DTensorSpec, schema: OpSchema) -> NoReturn:
    other = {"x": "residual", "residual": "x", "out": "residual_out", "residual_out": "out"}[name]
    raise ValueError(
        f"{name} is written in place, so it cannot be redistributed, and its placements are {list(spec.placements)}; "
        f"expected are Replicate, or Shard of a dimension before the last, the same as those of {other}; call the "
        f"function that returns new tensors, or redistribute {name} before"
    )


def _quantize(schema: OpSchema) -> Any:
    """Numbers, and what is computed for each row, stay where the rows are."""
    schema.get_mesh_from_args()
    operands = _placed(schema)
    rows, quantization = _rows(operands["y"]), Quantization.parse(cast(str, schema.args_schema[1]))
    computed = len(computed_by(quantization))
    outputs = _gradients(rows, (rows,) * 3, (True, computed > 0, computed > 1))
    return _strategy(outputs, operands, rows)


def _shares(rows: DTensorSpec) -> DTensorSpec:
    """Where the gradient of a row of all ranks lies: each rank that has other rows has a share of it."""
    return DTensorSpec(
        rows.mesh, tuple(Replicate() if placement.is_replicate() else Partial() for placement in rows.placements)
    )


def _gradients(rows: DTensorSpec, placed: tuple[DTensorSpec, ...], needs: Sequence[bool]) -> tuple[DTensorSpec, ...]:
    """A gradient that is not needed is an empty tensor, the same on every rank."""
    return tuple(spec if need else _replicated(rows) for spec, need in zip(placed, needs, strict=True))


def _backward(schema: OpSchema) -> Any:
    """Gradients of rows have the rows' placement; the weight's gradient is Partial on dimensions that shard rows."""
    schema.get_mesh_from_args()
    operands = _placed(schema)
    rows = _rows(*(operands[name] for name in ("h", "dy", "d_residual_out") if name in operands))
    needs = cast(Sequence[bool], schema.args_schema[10])
    return _strategy(_gradients(rows, (rows, rows, _shares(rows)), needs), operands, rows)


def _register(name: str, rule: Callable[[OpSchema], Any], schema_info: RuntimeSchemaInfo | None = None) -> None:
    _register_rule(getattr(torch.ops.fusednorm, name).default, rule, schema_info)


def register_declared(declaration: Declaration) -> None:
    """Registers the rules of a declared operation and of its gradients."""
    _register(declaration.name, partial(_declared, declaration), RuntimeSchemaInfo(len(declaration.operands)))
    if declaration.gradient is not None:
        backward, first = f"{declaration.name}_backward", len(declaration.backward_tensors)
        _register(backward, partial(_declared_backward, declaration), RuntimeSchemaInfo(first))


def _of_role(role: Role, operand: DTensorSpec, rows: DTensorSpec) -> DTensorSpec:
    """Where an operand lies: with the rows, whole on each rank, or, a table, with the rows of heads."""
    if role is Role.TABLE:
        heads = operand.ndim - 1
        return DTensorSpec(
            rows.mesh, tuple(p if getattr(p, "dim", heads) < heads else Replicate() for p in rows.placements)
        )
    return _replicated(rows) if role is Role.WEIGHT else rows


def _rows_of(declaration: Declaration, operands: dict[str, DTensorSpec]) -> DTensorSpec:
    """The common placement of rows; those of weights with a row for each head have whole heads."""
    roles = declaration.roles()
    with_rows = (spec for name, spec in operands.items() if roles[name] is Role.ROWS)
    return _rows(*with_rows, whole=declaration.joined_of([operands.get(one.name) for one in declaration.operands]))


def _declared(declaration: Declaration, schema: OpSchema) -> Any:
    """Results lie where the rows are."""
    schema.get_mesh_from_args()
    operands, roles = _placed(schema), declaration.roles()
    rows = _rows_of(declaration, operands)
    outputs = (rows,) * len(declaration.results) if len(declaration.results) > 1 else rows
    inputs = [_of_role(roles[name], operand, rows) for name, operand in operands.items()]
    return OpStrategy([OpSpec(outputs, inputs, [[0.0]] * len(inputs))])


def _declared_backward(declaration: Declaration, schema: OpSchema) -> Any:
    """Gradients lie where the rows are; of a weight each rank with other rows has a share."""
    schema.get_mesh_from_args()
    operands, roles = _placed(schema), declaration.roles()
    rows, needs = _rows_of(declaration, operands), cast(Sequence[bool], schema.args_schema[-1])
    placed = tuple(_shares(rows) if one.role is Role.WEIGHT else rows for one in declaration.with_gradient)
    outputs = _gradients(rows, placed, needs)
    inputs = [_of_role(roles[name], operand, rows) for name, operand in operands.items()]
    return OpStrategy([OpSpec(outputs if len(outputs) > 1 else outputs[0], inputs, [[0.0]] * len(inputs))])


# DTensor keeps its decisions. It tells calls apart by their DTensors and all arguments from `static_argnum` on. These
# determine the dtypes of the outputs, or which of them there are.
_register("fused_add_rms_norm", _forward, RuntimeSchemaInfo(static_argnum=7))
_register("rms_norm", _forward, RuntimeSchemaInfo(static_argnum=6))
_register("fused_add_rms_norm_", _in_place)
_register("rms_norm_", _in_place)
_register("into", _in_place)
_register("add", _forward, RuntimeSchemaInfo(static_argnum=2))
_register("scale", _forward)
_register("backward", _backward, RuntimeSchemaInfo(static_argnum=6))
_register("quantize", _quantize, RuntimeSchemaInfo(static_argnum=1))
for _operator in DECLARED.values():
    register_declared(_operator.declaration)
