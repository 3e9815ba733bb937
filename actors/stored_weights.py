"""Buckets of published weights in the object store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import ray

from sage_ray.weights import WeightPart


def store_bucket(bucket: np.ndarray) -> ray.ObjectRef:
    """Copy a bucket into the object store; it stays as long as somebody holds the part that names it."""
    return ray.put(bucket)


def stored_bucket(bucket: Any) -> np.ndarray:
    """A read-only view of a stored bucket, or a bucket that came with its part."""
    return ray.get(bucket) if isinstance(bucket, ray.ObjectRef) else bucket


def fetched(part: WeightPart) -> WeightPart:
    """The part with all its buckets as arrays."""
    return replace(part, buckets=tuple(stored_bucket(bucket) for bucket in part.buckets))
