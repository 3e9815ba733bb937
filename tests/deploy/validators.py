"""What is wrong with a deployment file, without a cloud: Ray's schema, the clouds' API models, KubeRay's schema."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import jsonschema
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config

from actors.layout import POOLS

DATA = Path(__file__).parent / "data"
REFUSALS = (jsonschema.ValidationError, ValueError, RuntimeError, KeyError, AssertionError)
"""What Ray's own checks raise."""
ROLES = {"head", *POOLS}


def cluster_faults(content: dict[str, Any]) -> list[str]:
    """Of a file for `ray up`: what Ray checks, then every node_config against the cloud's model, and our own rules:
    a token, a dashboard that is not public, roles that runs know."""
    try:
        prepared = prepare_config(copy.deepcopy(content))
        validate_config(prepared)
    except (*REFUSALS, click.ClickException) as error:
        return [f"{type(error).__name__}: {getattr(error, 'message', error)}"]
    clouds = {"aws": aws_faults, "gcp": gcp_faults, "local": lambda name, node: iter(())}
    cloud = clouds[content["provider"]["type"]]
    faults = [fault for name, kind in content.get("available_node_types", {}).items() for fault in cloud(name, kind)]
    return faults + list(own_faults(content))


def own_faults(content: dict[str, Any]) -> Iterator[str]:
    """What Ray would take and we would not."""
    head, worker = (" ".join(content[f"{which}_start_ray_commands"]) for which in ("head", "worker"))
    for which, words in (("head", head), ("worker", worker)):
        if "RAY_AUTH_MODE=token" not in words:
            yield f"{which}_start_ray_commands: no token"
    if "--dashboard-host=127.0.0.1" not in head:
        yield "head_start_ray_commands: the dashboard must listen on 127.0.0.1"
    if not any(target.endswith("/.ray/auth_token") for target in content["file_mounts"]):
        yield "file_mounts: no token"
    for name, kind in content.get("available_node_types", {}).items():
        if kind.get("labels", {}).get("role") not in ROLES:
            yield f"{name}: labels.role must be one of {sorted(ROLES)}"


@cache
def _ec2():
    import botocore.session

    return botocore.session.get_session().get_service_model("ec2")


def aws_faults(name: str, kind: dict[str, Any]) -> Iterator[str]:
    """Against EC2's RunInstances."""
    import botocore.validate

    shape, node = _ec2().operation_model("RunInstances").input_shape, kind["node_config"]
    report = botocore.validate.ParamValidator().validate({**node, "MinCount": 1, "MaxCount": 1}, shape)
    if report.has_errors():
        yield f"{name}: {report.generate_report()}"
    for key in sorted(set(node) - set(shape.members)):
        yield f"{name}: unknown key {key}"
    if node.get("InstanceType") not in set(_ec2().shape_for("InstanceType").enum):
        yield f"{name}: unknown InstanceType {node.get('InstanceType')}"
    market = node.get("InstanceMarketOptions", {}).get("MarketType", "spot")
    if market not in _ec2().shape_for("MarketType").enum:
        yield f"{name}: unknown MarketType {market}"


@cache
def _compute() -> dict[str, Any]:
    import googleapiclient.discovery_cache as found

    file = Path(found.__file__).parent / "documents" / "compute.v1.json"
    return json.loads(file.read_text("utf-8"))["schemas"]


def gcp_faults(name: str, kind: dict[str, Any]) -> Iterator[str]:
    """Against Compute Engine's Instance."""
    yield from _google(kind["node_config"], {"$ref": "Instance"}, name)


def _google(value: Any, schema: dict[str, Any], place: str) -> Iterator[str]:
    schema = _compute()[schema["$ref"]] if "$ref" in schema else schema
    kind = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer"}[type(value)]
    if kind != schema.get("type"):
        yield f"{place}: is of type {kind}, must be {schema.get('type')}"
    elif kind == "object":
        for key, inner in value.items():
            if key not in schema.get("properties", {}):
                yield f"{place}.{key}: unknown key"
            else:
                yield from _google(inner, schema["properties"][key], f"{place}.{key}")
    elif kind == "array":
        for number, inner in enumerate(value):
            yield from _google(inner, schema["items"], f"{place}[{number}]")
    elif value not in schema.get("enum", [value]):
        yield f"{place}: {value!r} is none of {schema['enum']}"


@cache
def _kuberay(kind: str) -> dict[str, Any]:
    schema = json.loads(gzip.decompress((DATA / f"{kind.lower()}s.v1.json.gz").read_bytes()))
    return _strict(schema)


def _strict(schema: Any) -> Any:
    """Unknown fields are errors, as with `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [_strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    strict = {key: _strict(value) for key, value in schema.items()}
    closed = schema.get("type") == "object" and isinstance(schema.get("properties"), dict)
    if closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def kuberay_faults(content: dict[str, Any]) -> list[str]:
    """Of a RayCluster or RayJob; of a RayCluster also what Ray's autoscaler says to it, and our own rules."""
    schema = _kuberay(content["kind"])
    schema = schema | {"properties": schema["properties"] | {"metadata": {"type": "object"}}}
    found = jsonschema.Draft202012Validator(schema).iter_errors(content)
    faults = [f"{'.'.join(map(str, error.absolute_path))}: {error.message[:200]}" for error in found]
    if faults or content["kind"] != "RayCluster":
        return faults
    named = copy.deepcopy(content)
    named["metadata"].setdefault("namespace", "default")
    try:
        derived = _derive_autoscaling_config_from_ray_cr(named)
    except (ValueError, KeyError, AssertionError) as error:
        return [f"{type(error).__name__}: {error}"]
    return list(_kuberay_own(content["spec"], derived["available_node_types"]))


def _kuberay_own(spec: dict[str, Any], types: dict[str, Any]) -> Iterator[str]:
    for name, kind in types.items():
        if kind.get("labels", {}).get("role") not in ROLES:
            yield f"{name}: labels.role must be one of {sorted(ROLES)}"
    if spec["headGroupSpec"].get("serviceType", "ClusterIP") != "ClusterIP":
        yield "headGroupSpec.serviceType: the dashboard must not be public"
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            if not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= {one["name"] for one in container.get("env", [])}:
                yield f"{container['name']}: no token"


def read(file: Path) -> dict[str, Any]:
    """The file's content."""
    return yaml.safe_load(file.read_text("utf-8"))
