"""The text encoders of a pipeline: every prompt is encoded once, and in between they need not be on the device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from diffusers import HunyuanVideo15Pipeline
from torch import nn

from sage_ray.parked import Parked
from sage_ray.types import Condition

MAX_CONDITIONS = 1024
"""Encoded prompts that a worker keeps, those used last; about 3 MB each at the real size."""


def align(module: nn.Module) -> None:
    """Give every parameter and buffer fresh, aligned storage: safetensors gives views at odd addresses, for which CPU
    kernels differ."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.data.clone()


def place(module: nn.Module, device: torch.device) -> None:
    """Move a module that is never trained to a device, aligned."""
    align(module.to(device).eval().requires_grad_(False))


class PromptEncoder:
    """Prompts to conditions, with the language model and byT5 of a pipeline.

    Args: parks: the encoders wait on the host, and are on the device only while prompts are encoded.
    """

    def __init__(self, pipeline: HunyuanVideo15Pipeline, device: torch.device, parks: bool = False):
        self._pipeline, self._device = pipeline, device
        self._conditions: OrderedDict[str, Condition] = OrderedDict()
        self._parked, self._parks = Parked(shared=False), parks
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
            place(encoder, device)
        if parks:
            self._parked.park([], self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """All of the encoders, on the device or not."""
        encoders = (self._pipeline.text_encoder, self._pipeline.text_encoder_2)
        return [tensor for encoder in encoders for tensor in (*encoder.parameters(), *encoder.buffers())]

    def encode(self, texts: Sequence[str]) -> list[Condition]:
        """Conditions of the texts, padding dropped. The encoders come to the device at most once."""
        missing = [text for text in dict.fromkeys(texts) if text not in self._conditions]
        if missing:
            with self._present():
                self._conditions |= {text: self._encoded(text) for text in missing}
        for text in texts:
            self._conditions.move_to_end(text)
        found = [self._conditions[text] for text in texts]
        while len(self._conditions) > MAX_CONDITIONS:
            self._conditions.popitem(last=False)
        return found

    @contextmanager
    def _present(self) -> Iterator[None]:
        self._parked.unpark()
        try:
            yield
        finally:
            if self._parks:
                self._parked.park([], self.tensors())

    @torch.no_grad()
    def _encoded(self, text: str) -> Condition:
        embeds, mask, byt5, byt5_mask = self._pipeline.encode_prompt(
            [text], device=self._device, dtype=torch.float32, batch_size=1
        )
        return Condition(text=embeds[0][mask[0].bool()].cpu().numpy(), byt5=byt5[0][byt5_mask[0].bool()].cpu().numpy())
