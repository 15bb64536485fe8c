"""Launch on Kubernetes with KubeRay: a RayJob manifest, checked field by field, applied if asked.

The snapshot travels in a ConfigMap beside it where it is small enough, which the package itself is; images hold Ray,
torch and the other dependencies. Runs are kept on a volume claim, so that a retried job goes on.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import yaml
from pydantic import Field

from tidemill.errors import ConfigError
from tidemill.launch import script
from tidemill.launch.job import Job, State, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, File, Step
from tidemill.launch.targets import crd

CONFIG_MAP_BYTES = 1 << 20  # the most that Kubernetes keeps in one
CODE, RUNS = "/tidemill", "/runs"
STATES: dict[str, State] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "done",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


class KubeRayOptions(Options):
    image: str = Field("", description="of every container: Ray, torch and Tidemill's other dependencies")
    namespace: str = Field("default", description="Kubernetes namespace")
    claim: str = Field("", description="a PersistentVolumeClaim that all pods can write: runs are kept there")
    ray_version: str = Field("2.60.0", description="of the image's Ray")
    cpus: int = Field(4, ge=1, description="of each pod")
    memory: str = Field("16Gi", description="of each pod")
    devices: int = Field(0, ge=0, description="accelerators of each worker pod")
    device: str = Field("nvidia.com/gpu", description="their resource name; huawei.com/Ascend910 for Ascend")
    shm: str = Field("8Gi", description="of /dev/shm, where the dock's warehouse lies")
    retries: int = Field(3, ge=0, description="new clusters after a failure: backoffLimit")
    overlay: str = Field("", description="a YAML file laid over the manifest, for example tolerations")
    apply: bool = Field(False, description="kubectl apply it; else the manifest is only written")


class KubeRay:
    about: ClassVar[str] = "Kubernetes with KubeRay: a checked RayJob manifest, applied with -o apply=true"
    options: ClassVar[type[Options]] = KubeRayOptions
    shares_files: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = True
    programs: ClassVar[tuple[str, ...]] = ()

    def run_folder(self, options: Options, folder: str) -> str:
        return folder if folder.startswith("/") else RUNS

    def steps(self, job: Job) -> list[Step]:
        options = parse(KubeRayOptions, job.options, job.where)
        file = job.folder / "rayjob.yaml"
        documents = [config_map(job, options), manifest(job, options)]
        text = "---\n".join(yaml.safe_dump(document, sort_keys=False, width=120) for document in documents)
        found: list[Step] = [File(file, text)]
        return [*found, Command(("kubectl", "apply", "-f", str(file)))] if options.apply else found

    def reference(self, job: Job, output: str) -> str:
        return job.unique if output else ""

    def status(self, job: Job) -> Status:
        if not job.reference:
            return Status("written", f"kubectl apply -f {job.folder / 'rayjob.yaml'} starts it")
        shown = json.loads(_kubectl(job, "get", "rayjob", job.reference, "-o", "json"))
        found = shown.get("status", {})
        words = [found.get(key) for key in ("jobDeploymentStatus", "jobStatus", "message")]
        return Status(STATES.get(found.get("jobStatus", ""), "waiting"), ", ".join(word for word in words if word))

    def logs(self, job: Job, lines: int) -> str:
        return _kubectl(job, "logs", "-l", f"job-name={job.reference}", "--tail", str(lines))

    def stop(self, job: Job) -> None:
        _kubectl(job, "delete", "rayjob", job.reference, "--wait=false")


def _kubectl(job: Job, *words: str) -> str:
    namespace = parse(KubeRayOptions, job.options, job.where).namespace
    return Command(("kubectl", "-n", namespace, *words)).perform()


def config_map(job: Job, options: KubeRayOptions) -> dict[str, Any]:
    data = job.archive.read_bytes()
    if len(data) * 4 / 3 > CONFIG_MAP_BYTES:
        raise ConfigError(
            f"the snapshot has {len(data) / 2**20:.1f} MiB; a ConfigMap holds {CONFIG_MAP_BYTES * 3 / 4 / 2**20:.2f}",
            "include less, and put data and models on the volume claim",
        )
    metadata = {"name": f"{job.label}-code", "namespace": options.namespace}
    packed = {"code.tar.gz": base64.b64encode(data).decode()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": packed}


def manifest(job: Job, options: KubeRayOptions) -> dict[str, Any]:
    """The RayJob, checked: a field that KubeRay does not know is refused here, not dropped there."""
    if not options.image:
        raise ConfigError("--on kuberay needs an image", "-o image=REGISTRY/NAME:TAG with Ray and the dependencies")
    made: dict[str, Any] = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {
            "name": job.unique,
            "namespace": options.namespace,
            "annotations": {"tidemill/snapshot": job.digest},
        },
        "spec": {
            "entrypoint": _entrypoint(options),
            "backoffLimit": options.retries,
            "shutdownAfterJobFinishes": True,
            "submissionMode": "K8sJobMode",
            "rayClusterSpec": _cluster(job, options),
        },
    }
    if options.overlay:
        made = lay_over(made, yaml.safe_load(Path(options.overlay).read_text(encoding="utf-8")) or {})
    crd.check(made)
    return made


def _entrypoint(options: KubeRayOptions) -> str:
    setup = f"{options.setup}; " if options.setup else ""
    unpack = f"mkdir -p ~/code && tar -xzf {CODE}/code.tar.gz -C ~/code && cd ~/code"
    return f"bash -c '{setup}{unpack} && exec env {script.supervisor(options)}'"


def _cluster(job: Job, options: KubeRayOptions) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "rayVersion": options.ray_version,
        "headGroupSpec": {
            "rayStartParams": {},
            "template": _template(job, options, "ray-head", options.devices if options.nodes == 1 else 0),
        },
    }
    if options.nodes > 1:
        workers = options.nodes - 1
        counts = {"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
        template = _template(job, options, "ray-worker", options.devices)
        cluster["workerGroupSpecs"] = [{"groupName": "nodes", **counts, "rayStartParams": {}, "template": template}]
    return cluster


def _template(job: Job, options: KubeRayOptions, name: str, devices: int) -> dict[str, Any]:
    asked: dict[str, Any] = {"cpu": str(options.cpus), "memory": options.memory}
    if devices:
        asked[options.device] = devices
    mounts = [{"name": "code", "mountPath": CODE}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "code", "configMap": {"name": f"{job.label}-code"}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
    ]
    if options.claim:
        mounts.append({"name": "runs", "mountPath": RUNS})
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}})
    container = {"name": name, "image": options.image, "resources": {"limits": asked, "requests": dict(asked)}}
    env = [{"name": key, "value": value} for key, value in options.env.items()]
    return {"spec": {"containers": [{**container, "env": env, "volumeMounts": mounts}], "volumes": volumes}}


def lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge; lists and values replace."""
    made = dict(below)
    for key, value in above.items():
        inner = made.get(key)
        made[key] = lay_over(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return made
