"""Both ends of a weight stream in actors: what a learner rank and a rollout worker do when weights are broadcast."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import ray
import torch
from torch import nn

from actors.clocked import phase
from sage_ray.checksum import Content
from sage_ray.parallel import local_shards
from sage_ray.weight_plan import Plan, check_plans, held_content, plan_weights, sent_content
from sage_ray.weight_stream import Meeting, StreamError, WeightStream, open_store


class StreamEnd:
    """An actor that joins streams; the one before is left. stream: None outside of one."""

    stream: WeightStream | None = None
    plans: tuple[Plan, ...] = ()

    def leave_stream(self) -> None:
        """Whatever it is doing."""
        if self.stream is not None:
            self.stream.close()
            self.stream = None

    def join_stream(self, meeting: Meeting, device: str, timeout_s: float, plans: Sequence[Plan]) -> None:
        """Unblocked by the group's last member. Raises StreamError."""
        self.leave_stream()
        self.plans = tuple(plans)
        self.stream = WeightStream(meeting, torch.device(device), timeout_s)

    def _joined(self) -> WeightStream:
        if self.stream is None:
            raise StreamError("weights: this actor has joined no stream")
        return self.stream


class WeightSender(StreamEnd, ABC):
    """A learner rank's end. Whoever inherits says what is published."""

    @abstractmethod
    def published(self, average: bool) -> AbstractContextManager[tuple[nn.Module, int, torch.dtype]]:
        """(sharded model, version, dtype on the way), while it holds what is asked for."""

    def open_meeting(self, timeout_s: float) -> tuple[str, int]:
        """A meeting point for groups on this actor's host: address and port. It stays as long as the actor."""
        host = ray.util.get_node_ip_address()
        self.store = open_store(host, timeout_s)
        return host, self.store.port

    def weight_plan(self) -> Plan:
        """What this rank publishes."""
        with self.published(False) as (model, _, dtype):
            return plan_weights(model, dtype)

    @phase("publish")
    def send_weights(self, average: bool = False) -> tuple[Content, dict[str, float]]:
        """Send this rank's shards to all who have joined; what they contain, and seconds. Raises StreamError."""
        start = time.monotonic()
        with self.published(average) as (model, _, dtype):
            if plan_weights(model, dtype) != self.plans[self._joined().meeting.rank]:
                raise StreamError("weights: what is trained has changed since the receivers checked it")
            shards = local_shards(model)
            self._joined().send(self.plans, shards)
            sent = time.monotonic()
            content = sent_content(self.plans[self._joined().meeting.rank], shards)
        return content, {"send_s": sent - start, "send_checksum_s": time.monotonic() - sent}


class WeightReceiver(StreamEnd, ABC):
    """A rollout worker's end."""

    def join_stream(self, meeting: Meeting, device: str, timeout_s: float, plans: Sequence[Plan]) -> None:
        """First checks what will be sent. Raises: ValueError naming the parameter that does not match; StreamError."""
        check_plans(self.parameters(), plans, self.expected_names())
        super().join_stream(meeting, device, timeout_s, plans)

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """Name to full tensor of everything that may be sent."""

    @abstractmethod
    def expected_names(self) -> frozenset[str]:
        """Of all that must be sent."""

    def receive_into_parameters(self) -> tuple[Content, dict[str, float]]:
        """Write what is sent into the parameters; what they then contain, and seconds. Raises StreamError."""
        start, parameters = time.monotonic(), self.parameters()
        self._joined().receive(self.plans, parameters)
        received = time.monotonic()
        content = held_content(self.plans[0], parameters)
        return content, {"receive_s": received - start, "receive_checksum_s": time.monotonic() - received}
