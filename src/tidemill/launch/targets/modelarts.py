"""Launch on Huawei Cloud ModelArts: a training job request through the vendor's own SDK, code and runs on OBS.

The request is built as plain data in the API's own field names. Every node of the job starts the same supervisor,
which finds its place in what ModelArts puts into the environment (VC_TASK_INDEX, VC_WORKER_HOSTS) and joins the job's
Ray cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from tidemill.errors import ConfigError, MissingExtra
from tidemill.launch import place, script
from tidemill.launch.job import Job, State, Status
from tidemill.launch.options import Options, parse
from tidemill.launch.steps import Command, Request, Step

HOME, RUNS = "/home/ma-user/modelarts/user-job-dir", "/home/ma-user/modelarts/runs"
ENV_KEY, ENV_SECRET = "HUAWEICLOUD_SDK_AK", "HUAWEICLOUD_SDK_SK"  # the SDK's own names; never part of a request
STATES: dict[str, State] = {
    "Creating": "waiting",
    "Pending": "waiting",
    "Running": "running",
    "Completed": "done",
    "Failed": "failed",
    "Abnormal": "failed",
    "CreateFailed": "failed",
    "Terminating": "running",
    "Terminated": "stopped",
}


class ModelArtsOptions(Options):
    obs: str = Field("", description="obs://BUCKET/PATH: code, logs and runs are kept under it")
    image: str = Field("", description="ORGANIZATION/NAME:TAG of SWR, with CANN or CUDA, torch and Ray")
    flavor: str = Field("", description="flavor_id of one node, such as modelarts.pool.visual.xlarge")
    pool: str = Field("", description="pool_id of a dedicated resource pool")
    mount: Literal["pfs", "obs"] = Field("pfs", description="how every node sees runs: a parallel file system, or OBS")
    region: str = Field("cn-southwest-2", description="of the service")
    workspace: str = Field("0", description="workspace_id")
    priority: int = Field(1, ge=1, le=3, description="in a dedicated pool; 3 is the highest")
    preemptible: bool = Field(False, description="may give way to jobs of a higher priority; it resumes")


class ModelArts:
    about: ClassVar[str] = "Huawei Cloud ModelArts: a training job by its SDK, code and runs on OBS"
    options: ClassVar[type[Options]] = ModelArtsOptions
    shares_files: ClassVar[bool] = False
    is_cluster: ClassVar[bool] = False
    programs: ClassVar[tuple[str, ...]] = ("obsutil",)

    def run_folder(self, options: Options, folder: str) -> str:
        return RUNS

    def steps(self, job: Job) -> list[Step]:
        options = parse(ModelArtsOptions, job.options, job.where)
        base = _base(options, job)
        upload = Command(("obsutil", "cp", str(job.archive), f"{base}/code/code.tar.gz", "-f"))
        return [upload, Request("create_training_job", body(job, options), _sender(options.region))]

    def reference(self, job: Job, output: str) -> str:
        return output

    def status(self, job: Job) -> Status:
        model, client = connect(parse(ModelArtsOptions, job.options, job.where).region)
        shown = client.show_training_job_details(model.ShowTrainingJobDetailsRequest(training_job_id=job.reference))
        phase = shown.status.phase
        return Status(STATES.get(phase, "unknown"), f"{phase}, {shown.status.secondary_phase or ''}".rstrip(", "))

    def logs(self, job: Job, lines: int) -> str:
        model, client = connect(parse(ModelArtsOptions, job.options, job.where).region)
        request = model.ShowTrainingJobLogsPreviewRequest(training_job_id=job.reference, task_id="worker-0")
        text = client.show_training_job_logs_preview(request).content or ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, job: Job) -> None:
        model, client = connect(parse(ModelArtsOptions, job.options, job.where).region)
        action = model.JobActionType(action_type="terminate")
        client.stop_training_job(model.StopTrainingJobRequest(training_job_id=job.reference, body=action))


def _base(options: ModelArtsOptions, job: Job) -> str:
    if not options.obs.startswith("obs://"):
        raise ConfigError("--on modelarts keeps code and runs on OBS", "-o obs=obs://BUCKET/PATH")
    return f"{options.obs.rstrip('/')}/{job.label}"


def body(job: Job, options: ModelArtsOptions) -> dict[str, Any]:
    """The request of POST /v2/{project_id}/training-jobs."""
    for name in ("image", "flavor"):
        if not getattr(options, name):
            raise ConfigError(f"--on modelarts needs {name}", f"-o {name}=…: {_help(name)}")
    base = _base(options, job).removeprefix("obs:/")  # the API writes /BUCKET/PATH
    resource: dict[str, Any] = {"flavor_id": options.flavor, "node_count": options.nodes}
    spec: dict[str, Any] = {"resource": resource, "log_export_path": {"obs_url": f"{base}/log/"}}
    # Mounted, not copied as an output: all nodes write there, and a retried job finds what it made.
    spec["volumes"] = [{options.mount: {f"{options.mount}_path": f"{base}/runs", "local_path": RUNS}}]
    if options.pool:
        resource["pool_id"] = options.pool
        spec["schedule_policy"] = {"priority": options.priority, "preemptible": options.preemptible}
    return {
        "kind": "job",
        "metadata": {
            "name": job.unique,
            "workspace_id": options.workspace,
            "description": f"tidemill {job.name}",
            "annotations": {"fault-tolerance/job-retry-num": str(options.restarts)},
        },
        "algorithm": {
            "code_dir": f"{base}/code/",
            "command": _command(options),
            "engine": {"image_url": options.image},
            "local_code_dir": HOME,
            "working_dir": HOME,
            "environments": {**options.env, place.HEAD_PORT: str(options.port)},
        },
        "spec": spec,
    }


def _help(name: str) -> str:
    return ModelArtsOptions.model_fields[name].description or ""


def _command(options: ModelArtsOptions) -> str:
    """Unpack the snapshot, which ModelArts copied somewhere under the local code folder, and supervise."""
    setup = f"{options.setup}; " if options.setup else ""
    unpack = f'cd "$(dirname "$(find {HOME} -name code.tar.gz | head -n 1)")" && tar -xzf code.tar.gz'
    return f"{setup}{unpack} && {script.supervisor(options)}"


def _sender(region: str) -> Any:
    def send(given: Mapping[str, Any]) -> str:
        model, client = connect(region)
        request = model.CreateTrainingJobRequest(body=typed(model, "Job", given))
        return str(client.create_training_job(request).metadata.id)

    return send


def typed(model: Any, name: str, plain: Any) -> Any:
    """Plain data as the SDK's own type, field by field; a field that the type does not have is refused."""
    kind = getattr(model, name)
    unknown = [key for key in plain if key not in kind.openapi_types]
    if unknown:
        raise ConfigError(f"the SDK's {name} has no field {', '.join(unknown)}", "its version may be another one")
    return kind(**{key: _value(model, kind.openapi_types[key], value) for key, value in plain.items()})


def _value(model: Any, named: str, value: Any) -> Any:
    if named.startswith("list["):
        return [_value(model, named[5:-1], item) for item in value]
    return typed(model, named, value) if hasattr(model, named) else value


def connect(region: str) -> tuple[Any, Any]:
    """The SDK's types and a client with the credentials of the environment."""
    try:
        from huaweicloudsdkmodelarts.v1 import model
        from huaweicloudsdkmodelarts.v1.modelarts_client import ModelArtsClient
        from huaweicloudsdkmodelarts.v1.region.modelarts_region import ModelArtsRegion
    except ImportError:
        raise MissingExtra("--on modelarts", "huaweicloudsdkmodelarts", "modelarts") from None
    return model, ModelArtsClient.new_builder().with_region(ModelArtsRegion.value_of(region)).build()
