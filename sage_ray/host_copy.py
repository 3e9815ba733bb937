"""Arrays that fill on the host while their device computes on."""

from __future__ import annotations

import numpy as np
import torch


class HostCopy:
    """An array of `shape` on the host, written part by part.

    From a GPU, parts are copied into pinned memory on a stream of its own: after what the writing stream has queued so
    far, beside what it queues later. From the CPU they are copied at once.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str):
        device = torch.device(device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._host = torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)

    def write(self, index: slice | tuple[int | slice, ...], part: torch.Tensor) -> None:
        """Start to copy `part` to `index`, which must select memory without gaps.

        The part, of the array's dtype, may be let go at once, but not be overwritten.
        """
        target = self._host[index]
        assert target.shape == part.shape and target.dtype == part.dtype and target.is_contiguous()
        if self._stream is None:
            target.copy_(part)
            return
        part = part.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(part.device))
        with torch.cuda.stream(self._stream):
            target.copy_(part, non_blocking=True)
        part.record_stream(self._stream)

    def numpy(self) -> np.ndarray:
        """The array, once everything written so far has arrived; it shares the memory."""
        if self._stream is not None:
            self._stream.synchronize()
        return self._host.numpy()
