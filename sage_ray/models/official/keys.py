"""The key map between the official HunyuanVideo-1.5 weights and diffusers', for transformer and VAE.

The map is data: one row for each kind of layer, written from the module names and shapes of the official program
(Tencent-Hunyuan/HunyuanVideo-1.5, commit 60783e7) and of diffusers 0.42.1. Expanded with a model's sizes it holds every
tensor of either side exactly once. Three operations happen to a tensor, each with an exact inverse:

    rename         nothing
    split in 3     the token refiner's fused [q; k; v] rows become to_q, to_k, to_v
    swap halves    the final modulation: officially rows are [shift; scale], in diffusers [scale; shift]

The blocks' own modulation is (shift, scale, gate) twice on both sides and is only renamed.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sage_ray.models.official.rows import Shape, coder_rows, transformer_rows

TRANSFORMER = "HunyuanVideo15Transformer3DModel"
VAE = "AutoencoderKLHunyuanVideo15"
KINDS: dict[str, Callable[[Shape], dict[str, Shape]]] = {
    "linear": lambda s: {"weight": s, "bias": s[:1]},
    "conv": lambda s: {"weight": s, "bias": s[:1]},
    "norm": lambda s: {"weight": s, "bias": s},
    "scale": lambda s: {"weight": s},
    "table": lambda s: {"weight": s},
    "gamma": lambda s: {"gamma": (*s, 1, 1, 1)},
}
"""kind of layer -> its parameters' official shapes, from the sizes of a row."""

OPERATIONS: dict[str, tuple[Callable, Callable]] = {
    "rename": (lambda x: [x], lambda xs: xs[0]),
    "split in 3": (lambda x: [part.clone() for part in x.chunk(3)], torch.cat),
    "swap halves": (lambda x: [torch.cat(x.chunk(2)[::-1])], lambda xs: torch.cat(xs[0].chunk(2)[::-1])),
}
"""operation -> (official tensor to diffusers' tensors, diffusers' tensors to the official one), along rows."""


@dataclass(frozen=True)
class Rule:
    """One official tensor and the tensors of diffusers that hold the same numbers.

    part: "transformer" or "vae". shape: of the official tensor.
    """

    part: str
    official: str
    diffusers: tuple[str, ...]
    shape: Shape
    operation: str

    @property
    def diffusers_shape(self) -> Shape:
        """Of each of diffusers' tensors."""
        return (self.shape[0] // len(self.diffusers), *self.shape[1:])

    def __str__(self) -> str:
        return f"{self.official} = {self.operation} = {', '.join(self.diffusers)}"

    def keys(self, side: str) -> dict[str, Shape]:
        """Key -> shape of this rule's tensors. side: "official" or "diffusers"."""
        if side == "official":
            return {self.official: self.shape}
        return dict.fromkeys(self.diffusers, self.diffusers_shape)

    def apply(self, tensors: Sequence[torch.Tensor], side: str) -> dict[str, torch.Tensor]:
        """This rule's tensors of the other side.

        Args: tensors: in the order of `keys(side)`. side: where they come from.
        Raises: ValueError when tensors that become one differ in dtype.
        """
        if side == "official":
            return dict(zip(self.diffusers, OPERATIONS[self.operation][0](tensors[0]), strict=True))
        if len({tensor.dtype for tensor in tensors}) > 1:
            raise ValueError(f"{self.part}: {self.diffusers[0]} and its neighbours differ in dtype (rule: {self})")
        return {self.official: OPERATIONS[self.operation][1](list(tensors))}


def rules(config: Mapping[str, Any]) -> list[Rule]:
    """The whole map of one model.

    Args: config: diffusers' config.json of the transformer or the VAE; _class_name says which.
    Raises: ValueError naming the key of a configuration that the map does not cover.
    """
    name = config.get("_class_name")
    if name not in (TRANSFORMER, VAE):
        raise ValueError(f"_class_name={name!r}: there is a key map for {TRANSFORMER} and {VAE} only")
    part = "transformer" if name == TRANSFORMER else "vae"
    try:
        coders = ("encoder", "decoder")
        rows = transformer_rows(config) if name == TRANSFORMER else [r for c in coders for r in coder_rows(config, c)]
    except KeyError as error:
        raise ValueError(f"{part}: the configuration must hold {error}") from None
    found = []
    for row in rows:
        for parameter, shape in KINDS[row.kind](row.shape).items():
            keys = tuple(f"{module}.{parameter}" for module in row.diffusers)
            found.append(Rule(part, f"{row.official}.{parameter}", keys, shape, row.operation))
    for side in ("official", "diffusers"):
        keys = [key for rule in found for key in rule.keys(side)]
        assert len(keys) == len(set(keys)), "two rules take one key"
    return found


def check_keys(found: Sequence[Rule], shapes: Mapping[str, Shape], side: str, where: str) -> None:
    """Whether tensors are exactly those of one side of a map.

    Args: shapes: key -> shape of what is there. side: "official" or "diffusers". where: for the message.
    Raises: ValueError naming key, part and rule of the first unknown, missing or mis-shaped key.
    """
    part = found[0].part
    expected = {key: (shape, rule) for rule in found for key, shape in rule.keys(side).items()}
    for key in sorted(shapes.keys() - expected.keys()):
        near = difflib.get_close_matches(key, expected, n=1, cutoff=0.0)
        raise ValueError(f"{where}: {part}: unknown key {key}; the nearest rule is {expected[near[0]][1]}")
    for key, (shape, rule) in expected.items():
        if key not in shapes:
            raise ValueError(f"{where}: {part}: missing key {key} (rule: {rule})")
        if tuple(shapes[key]) != shape:
            raise ValueError(f"{where}: {part}: {key} is {tuple(shapes[key])}, must be {shape} (rule: {rule})")
