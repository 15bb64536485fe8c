"""The fields of a KubeRay RayJob that a manifest may use, as data, and a check that refuses any other.

Kubernetes drops fields it does not know without a word, so a typo would change a job silently. This is a subset of the
custom resource's schema (ray.io/v1, KubeRay 1.5): a test compares it with the schema itself where that file is at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tidemill.errors import ConfigError, did_you_mean

Schema = Any  # a type's name, a tuple of allowed values, [item], {"*": value} for free keys, {field: schema, …}
POLICY = ("DeleteCluster", "DeleteWorkers", "DeleteSelf", "DeleteNone")
TEXTS: Schema = {"*": "string"}
RESOURCES: Schema = {"limits": {"*": "quantity"}, "requests": {"*": "quantity"}}
ENV: Schema = [{"name": "string", "value": "string", "valueFrom": "object"}]
CONTAINER: Schema = {
    "name": "string",
    "image": "string",
    "imagePullPolicy": "string",
    "command": ["string"],
    "args": ["string"],
    "workingDir": "string",
    "env": ENV,
    "envFrom": ["object"],
    "ports": [{"containerPort": "integer", "name": "string", "protocol": "string", "hostPort": "integer"}],
    "resources": RESOURCES,
    "volumeMounts": [
        {"name": "string", "mountPath": "string", "subPath": "string", "readOnly": "boolean"},
    ],
    "lifecycle": "object",
    "securityContext": "object",
}
VOLUME: Schema = {
    "name": "string",
    "configMap": {"name": "string", "items": ["object"], "defaultMode": "integer", "optional": "boolean"},
    "emptyDir": {"medium": "string", "sizeLimit": "quantity"},
    "hostPath": {"path": "string", "type": "string"},
    "nfs": {"server": "string", "path": "string", "readOnly": "boolean"},
    "persistentVolumeClaim": {"claimName": "string", "readOnly": "boolean"},
    "secret": {"secretName": "string", "items": ["object"], "defaultMode": "integer", "optional": "boolean"},
}
POD: Schema = {
    "containers": [CONTAINER],
    "initContainers": [CONTAINER],
    "volumes": [VOLUME],
    "nodeSelector": TEXTS,
    "tolerations": ["object"],
    "affinity": "object",
    "serviceAccountName": "string",
    "imagePullSecrets": [{"name": "string"}],
    "priorityClassName": "string",
    "schedulerName": "string",
    "runtimeClassName": "string",
    "hostNetwork": "boolean",
    "hostIPC": "boolean",
    "restartPolicy": "string",
    "terminationGracePeriodSeconds": "integer",
    "topologySpreadConstraints": ["object"],
    "securityContext": "object",
}
TEMPLATE: Schema = {"metadata": {"labels": TEXTS, "annotations": TEXTS}, "spec": POD}
GROUP: Schema = {"rayStartParams": TEXTS, "template": TEMPLATE, "labels": TEXTS, "resources": TEXTS}
CLUSTER: Schema = {
    "rayVersion": "string",
    "enableInTreeAutoscaling": "boolean",
    "autoscalerOptions": "object",
    "gcsFaultToleranceOptions": "object",
    "headGroupSpec": {**GROUP, "serviceType": "string", "enableIngress": "boolean"},
    "workerGroupSpecs": [
        {
            **GROUP,
            "groupName": "string",
            "replicas": "integer",
            "minReplicas": "integer",
            "maxReplicas": "integer",
            "numOfHosts": "integer",
            "idleTimeoutSeconds": "integer",
            "suspend": "boolean",
        }
    ],
}
SPEC: Schema = {
    "activeDeadlineSeconds": "integer",
    "backoffLimit": "integer",
    "clusterSelector": TEXTS,
    "deletionStrategy": {"onSuccess": {"policy": POLICY}, "onFailure": {"policy": POLICY}, "deletionRules": ["object"]},
    "entrypoint": "string",
    "entrypointNumCpus": "number",
    "entrypointNumGpus": "number",
    "entrypointResources": "string",
    "jobId": "string",
    "managedBy": "string",
    "metadata": TEXTS,
    "preRunningDeadlineSeconds": "integer",
    "rayClusterSpec": CLUSTER,
    "runtimeEnvYAML": "string",
    "shutdownAfterJobFinishes": "boolean",
    "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    "submitterConfig": {"backoffLimit": "integer"},
    "submitterPodTemplate": TEMPLATE,
    "suspend": "boolean",
    "ttlSecondsAfterFinished": "integer",
}
RAY_JOB: Schema = {
    "apiVersion": ("ray.io/v1",),
    "kind": ("RayJob",),
    "metadata": {"name": "string", "namespace": "string", "labels": TEXTS, "annotations": TEXTS},
    "spec": SPEC,
}
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "object": (dict,),
    "quantity": (str, int, float),
}


def check(manifest: Mapping[str, Any]) -> None:
    """Refuse, in one message, every field of a RayJob that is unknown or of another type."""
    found = [*problems(manifest, RAY_JOB, ""), *_missing(manifest)]
    if found:
        raise ConfigError("the RayJob manifest cannot work:\n" + "\n".join(f"  - {line}" for line in found))


def problems(value: Any, schema: Schema, path: str) -> Iterator[str]:
    if isinstance(schema, str):
        is_truth = isinstance(value, bool) and schema != "boolean"
        if is_truth or not isinstance(value, TYPES[schema]):
            yield f"{path}: {value!r} is no {schema}"
    elif isinstance(schema, tuple):
        if value not in schema:
            yield f"{path}: {value!r} is not one of {', '.join(schema)}{did_you_mean(str(value), schema)}"
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{path}: a list is expected"
            return
        for index, item in enumerate(value):
            yield from problems(item, schema[0], f"{path}[{index}]")
    else:
        yield from _fields(value, schema, path)


def _fields(value: Any, schema: Mapping[str, Schema], path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path}: fields are expected, not {value!r}"
        return
    for key, item in value.items():
        inner = schema.get(key, schema.get("*"))
        where = f"{path}.{key}".lstrip(".")
        if inner is None:
            yield f"{where}: there is no such field{did_you_mean(key, schema)}"
        else:
            yield from problems(item, inner, where)


def _missing(manifest: Mapping[str, Any]) -> Iterator[str]:
    spec = manifest.get("spec")
    if not isinstance(spec, dict):
        yield "spec is missing"
        return
    cluster = spec.get("rayClusterSpec")
    if cluster is None and "clusterSelector" not in spec:
        yield "spec has neither rayClusterSpec nor clusterSelector"
    if isinstance(cluster, dict) and "template" not in cluster.get("headGroupSpec", {}):
        yield "spec.rayClusterSpec.headGroupSpec.template is missing"
