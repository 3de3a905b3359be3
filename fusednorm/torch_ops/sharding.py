"""DTensor's sharding rules for the operations of ``torch.ops.fusednorm``, and a style for ``parallelize_module``.

The import of this module registers the rules. It takes about two seconds if nothing else has imported
``torch.distributed.tensor``, so the first call with a DTensor imports it, not ``import fusednorm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fusednorm.calls.quantization import Quantization, computed_by
from fusednorm.declare.declaration import WHOLE, WITH_ROWS, Role
from fusednorm.declare.plan import Plan
from fusednorm.torch_ops.operator import DECLARED

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


def common_rows(*operands: DTensorSpec, whole: int = 1) -> DTensorSpec:
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


def _replicated(spec: DTensorSpec) -> DTensorSpec:
    return DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim)


def on_rows(
    formula: Callable[..., tuple[Tensor | None, ...]],
    operands: Sequence[DTensor | None],
    whole: Sequence[int],
    sums: Mapping[int, int],
    joined: int,
) -> tuple[DTensor | None, ...]:
    """The results of a formula, each rank computing it for its own rows; see ``dtensor_bridge.on_rows``."""
    rows = [t for place, t in enumerate(operands) if t is not None and place not in whole]
    widest = sorted(rows, key=lambda t: -t.ndim)  # numbers of rows have no last dimension
    meet = common_rows(*(t._spec for t in widest), whole=joined)
    mesh, shares, everywhere = meet.mesh, shares_of(meet).placements, _replicated(meet).placements
    found = formula(
        *(
            t
            if t is None
            else t.redistribute(mesh, everywhere).to_local(grad_placements=shares)
            if place in whole
            else t.redistribute(mesh, meet.placements).to_local(grad_placements=meet.placements)
            for place, t in enumerate(operands)
        )
    )
    placed: list[Any] = [
        (rows[0] if i not in sums else operands[sums[i]], shares if sums.get(i) in whole else meet.placements)
        for i in range(len(found))
    ]
    return tuple(
        None if t is None or operand is None else of_ranks(t, mesh, placements, operand.shape)
        for t, (operand, placements) in zip(found, placed, strict=True)
    )


def parts_of_groups(rows: DTensor, groups: int) -> DTensor:
    """Rows of which each rank has whole groups of elements; torch cannot divide others into groups."""
    last = rows.ndim - 1
    ranks = [rows.device_mesh.size(i) for i, placement in enumerate(rows.placements) if placement.is_shard(last)]
    if not ranks or (len(ranks) == 1 and groups % ranks[0] == 0):
        return rows
    return rows.redistribute(placements=[Replicate() if p.is_shard(last) else p for p in rows.placements])


def of_ranks(local: Tensor, mesh: DeviceMesh, placements: Any, shape: torch.Size) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def shares_of(rows: DTensorSpec) -> DTensorSpec:
    """The placement of the gradient of a row of all ranks: each rank that has other rows has a share of it."""
    return DTensorSpec(
        rows.mesh, tuple(Replicate() if placement.is_replicate() else Partial() for placement in rows.placements)
    )


@dataclass(frozen=True)
class _Rule:
    """The only strategy of an operator: operands with rows meet in one placement, and every rank has the others whole.

    Results lie where the rows are; the gradient of a weight is a sum, of which each rank with other rows has a share.
    Ranks that have all rows may have a part of a matrix each, and then have those columns of the products.
    """

    #: Of each tensor that the operator takes, by name; rows of the first ones decide where rows meet.
    roles: Mapping[str, Role]
    #: Of what it returns.
    results: Sequence[Role] = (Role.ROWS,)
    #: (arguments) -> whether there is each result; one that there is not is an empty tensor, the same on every rank.
    present: Callable[[Sequence[Any]], Sequence[bool]] | None = None
    #: So many dimensions at the end stay on one rank, by the operands.
    joined: Callable[[Mapping[str, DTensorSpec]], int] = lambda _: 1
    #: Operands that are written, in pairs: they keep their placements.
    written: tuple[str, str] | tuple[()] = ()

    def __call__(self, schema: OpSchema) -> Any:
        schema.get_mesh_from_args()  # refuses operands on different meshes
        operands = _placed(schema)
        deciding = [name for name, role in self.roles.items() if role in WITH_ROWS and name in operands]
        if self.written:
            deciding = [name for name in self.written if name in operands]
        rows = common_rows(*(operands[name] for name in deciding), whole=self.joined(operands))
        for name in deciding if self.written else ():
            if operands[name].placements != rows.placements:
                other = next(one for one in self.written if one != name)
                raise ValueError(
                    f"{name} is written in place, so it cannot be redistributed, and its placements are "
                    f"{list(operands[name].placements)}; expected are Replicate, or Shard of a dimension before the "
                    f"last, the same as those of {other}; call the function that returns new tensors, or redistribute "
                    f"{name} before"
                )
        columns = _columns(self.roles, operands, rows)
        last = operands[deciding[0]].ndim - 1
        results = tuple(_of_result(role, last, rows, columns) for role in self.results)
        if self.present is not None:
            there = self.present(schema.args_schema)
            results = tuple(spec if one else _replicated(rows) for spec, one in zip(results, there, strict=True))
        inputs = [_of_role(self.roles[name], operand, rows, columns) for name, operand in operands.items()]
        outputs = None if self.written else results if len(results) > 1 else results[0]
        return OpStrategy([OpSpec(outputs, inputs, [[0.0]] * len(inputs))])


def _columns(roles: Mapping[str, Role], operands: Mapping[str, DTensorSpec], rows: DTensorSpec) -> tuple[bool, ...]:
    """For each dimension of the mesh whether its ranks have parts of the matrix, and of the columns of products."""
    parts = [
        operand.placements
        if roles[name] is Role.MATRIX
        else tuple(Shard(0) if placement.is_shard(operand.ndim - 1) else placement for placement in operand.placements)
        for name, operand in operands.items()
        if roles[name] in (Role.MATRIX, Role.PRODUCTS)
    ]
    return tuple(
        placement.is_replicate() and any(part[i].is_shard(0) for part in parts)
        for i, placement in enumerate(rows.placements)
    )


def _split(spec: DTensorSpec, columns: Sequence[bool], placement: Any) -> DTensorSpec:
    """The placements, with another one where ranks have columns."""
    pairs = zip(spec.placements, columns, strict=True)
    return DTensorSpec(spec.mesh, tuple(placement if of_columns else one for one, of_columns in pairs))


def _of_result(role: Role, last: int, rows: DTensorSpec, columns: Sequence[bool]) -> DTensorSpec:
    """The placement of a result: with the rows and columns; the gradient of what all rows take is a sum."""
    if role in WHOLE:
        return _split(shares_of(rows), columns, Shard(0))
    return _split(rows, columns, Shard(last) if role is Role.PRODUCTS else Partial())


def _of_role(role: Role, operand: DTensorSpec, rows: DTensorSpec, columns: Sequence[bool]) -> DTensorSpec:
    """The placement of an operand: with the rows, whole on each rank, or, a table, with the rows of heads.

    Parts of matrices, and of what has their columns, lie with these.
    """
    if role is Role.TABLE:
        heads = operand.ndim - 1
        return DTensorSpec(
            rows.mesh, tuple(p if getattr(p, "dim", heads) < heads else Replicate() for p in rows.placements)
        )
    if role in WHOLE:
        return _split(_replicated(rows), columns, Shard(0))
    return _split(rows, columns, Shard(operand.ndim - 1)) if role is Role.PRODUCTS else rows


def _register(name: str, rule: _Rule, static_argnum: int = 100) -> None:
    """Registers a rule. DTensor keeps its decisions, and tells calls apart by all arguments from ``static_argnum`` on.

    They determine the dtypes of the outputs, or which of them there are.
    """
    _register_rule(getattr(torch.ops.fusednorm, name).default, rule, RuntimeSchemaInfo(static_argnum))


def register_declared(plan: Plan) -> None:
    """Registers the rules of a declared operation and of its gradients."""
    declaration, roles, joined = plan.declaration, plan.declaration.roles, plan.joined_of
    operands = {name: roles[name] for name in plan.operands_of_operator}
    _register(
        declaration.name, _Rule(operands, [one.role for one in declaration.results], joined=joined), len(operands)
    )
    if declaration.gradient is not None:
        taken, results = declaration.backward_tensors, [one.role for one in declaration.with_gradient]
        rule = _Rule({name: roles[name] for name in taken}, results, lambda arguments: arguments[-1], joined)
        _register(f"{declaration.name}_backward", rule, len(taken))


def _numbers(arguments: Sequence[Any]) -> Sequence[bool]:
    """Whether a quantizer computes scales and zero points, beside the numbers."""
    computed = len(computed_by(Quantization.parse(arguments[1])))
    return True, computed > 0, computed > 1


def _of_blocks(operands: Mapping[str, DTensorSpec]) -> int:
    """The dimensions that stay on one rank: all if blocks have given scales, else the last one."""
    scale = operands.get("scale")
    return 1 if scale is None or math.prod(scale.shape) == 1 else operands["y"].ndim


def _of_heads(operands: Mapping[str, DTensorSpec]) -> int:
    """Heads stay on one rank if each has a weight or a bias of its own."""
    return 2 if any(operands[name].ndim == 2 for name in ("weight", "bias") if name in operands) else 1


_NORM = {"x": Role.ROWS, "residual": Role.ROWS, "weight": Role.WEIGHT}
_OUTPUTS = {"out": Role.ROWS, "residual_out": Role.ROWS}
_GRADIENTS = {"h": Role.ROWS, "dy": Role.ROWS, "d_residual_out": Role.ROWS, "rstd": Role.NUMBERS, "weight": Role.WEIGHT}
_QUANTIZED = {"y": Role.ROWS, "scale": Role.WEIGHT, "zero_point": Role.WEIGHT}
_BIAS = {"bias": Role.WEIGHT}
for _name in ("rms_norm_", "fused_add_rms_norm_", "layer_norm_", "fused_add_layer_norm_"):
    _register(_name, _Rule(_NORM | _BIAS, written=("x", "residual"), joined=_of_heads))
_register("into", _Rule(_NORM | _OUTPUTS | _BIAS, written=("out", "residual_out"), joined=_of_heads))
_register("backward", _Rule(_GRADIENTS, [*_NORM.values()], lambda arguments: arguments[10]), static_argnum=6)
_of_layer_norm = _Rule(_GRADIENTS | _BIAS, [*(_NORM | _BIAS).values()], lambda arguments: arguments[11], _of_heads)
_register("layer_norm_backward", _of_layer_norm, static_argnum=7)
_register("quantize", _Rule(_QUANTIZED, [Role.ROWS] * 3, _numbers, _of_blocks), static_argnum=1)
for _operator in DECLARED.values():
    register_declared(_operator.plan)
