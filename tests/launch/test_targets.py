"""What each target would send: rendered, checked, and refused where it cannot work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch import recipes
from tidemill.errors import ConfigError
from tidemill.launch import job as jobs
from tidemill.launch import options, send, snapshot
from tidemill.launch.job import Job
from tidemill.launch.targets import crd, kuberay, modelarts, slurm, ssh
from tidemill.launch.targets.table import TARGETS

NEEDED: dict[str, dict[str, Any]] = {
    "ssh": {"hosts": "hosts"},
    "kuberay": {"image": "registry/tidemill:1", "claim": "runs", "nodes": 3, "devices": 8},
    "modelarts": {"obs": "obs://bucket/team", "image": "org/tidemill:1", "flavor": "modelarts.p.large", "nodes": 2},
    "skypilot": {"bucket": "s3://runs", "accelerators": "H200:8", "nodes": 2},
    "dstack": {"volume": "runs", "gpu": "H200:8", "nodes": 2},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(jobs.ENV_FOLDER, str(tmp_path / "launch"))
    (tmp_path / "hosts").write_text("# two machines\nuser@one address=10.0.0.1\ntwo  # address is its name\n")
    recipes.write(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    monkeypatch.setattr(snapshot, "PACKAGE", tmp_path / "package")  # packs in no time
    return tmp_path


def prepared(where: str, *overrides: str, **more: Any) -> Job:
    return send.prepare("small.yaml", overrides, where, {**NEEDED.get(where, {}), **more}, is_dry=True)


@pytest.mark.parametrize("where", TARGETS)
def test_a_dry_run_shows_every_step_and_leaves_no_job(where: str, home: Path) -> None:
    job = prepared(where)
    text = send.show(job)
    assert job.digest in text and "tidemill.launch.node --recipe recipe.yaml" in text
    assert jobs.names() == [] and not job.folder.exists()


@pytest.mark.parametrize("where", TARGETS)
def test_a_mistyped_option_is_refused_with_a_suggestion(where: str) -> None:
    with pytest.raises(ConfigError, match="did you mean restarts"):
        prepared(where, restart=1)


def test_an_unknown_place_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean slurm"):
        prepared("slrum")


def test_option_words_are_typed_and_env_is_gathered() -> None:
    assert options.read(["nodes=2", "env.A=1", "env.B=x"]) == {"nodes": 2, "env": {"A": "1", "B": "x"}}
    with pytest.raises(ConfigError, match="key=value"):
        options.read(["nodes"])
    with pytest.raises(ConfigError, match="nodes"):
        prepared("slurm", nodes=0)


def test_several_nodes_put_the_recipe_on_the_jobs_ray_cluster(home: Path) -> None:
    def cluster(job: Job) -> dict[str, Any]:
        shown = subprocess.run(["tar", "-xzOf", job.archive, "recipe.yaml"], capture_output=True, check=True).stdout
        return dict(yaml.safe_load(shown)["cluster"])

    assert cluster(prepared("slurm"))["executor"] == "local"
    assert {**cluster(prepared("slurm", nodes=2))}["executor"] == "ray"
    assert cluster(prepared("ssh"))["address"] == "auto"
    assert cluster(prepared("ray"))["executor"] == "ray"


def test_a_run_that_is_there_is_not_taken_over_unless_said(home: Path) -> None:
    run = home / "runs" / "small"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("name: small\n")
    with pytest.raises(ConfigError, match="already holds a run"):
        prepared("local")
    assert send.prepare("small.yaml", [], "local", {}, is_resume=True, is_dry=True).run == str(run)


def test_a_recipe_that_cannot_work_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        prepared("slurm", "model.path=/nowhere", "model.tiny=null")


# Slurm


def test_an_sbatch_script_asks_for_what_was_said_and_nothing_else(home: Path) -> None:
    job = prepared("slurm", nodes=4, partition="gpu", time="8:00:00", gpus_per_node=8, more=["--reservation=night"])
    text = slurm.render(job, slurm.SlurmOptions.model_validate(job.options))
    asked = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    for word in (
        "--nodes=4",
        "--partition=gpu",
        "--time=8:00:00",
        "--gpus-per-node=8",
        "--requeue",
        "--reservation=night",
    ):
        assert word in asked
    assert not any(word.startswith(("--account", "--mem", "--exclusive")) for word in asked)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


SRUN = """#!/bin/sh
n=$(cat {folder}/count 2>/dev/null || echo 0); echo $((n + 1)) >{folder}/count
code=$(sed -n "$((n + 1))p" {folder}/codes); exit $code
"""


@pytest.mark.parametrize(
    ("codes", "ends", "tries"), [([0], 0, 1), ([137, 0], 0, 2), ([1, 1, 1, 1], 1, 3), ([78], 78, 1), ([75], 75, 1)]
)
def test_a_batch_script_resumes_killed_steps_and_requeues_stopped_ones(
    codes: list[int], ends: int, tries: int, home: Path
) -> None:
    """With stand-ins for srun and scontrol that end as the test says."""
    job = prepared("slurm", restarts=2)
    (job.folder / "code").mkdir(parents=True)
    bin_ = home / "bin"
    bin_.mkdir()
    (bin_ / "srun").write_text(SRUN.format(folder=home))
    (bin_ / "scontrol").write_text(f"#!/bin/sh\necho $* >>{home}/asked\n")
    (bin_ / "sleep").write_text("#!/bin/sh\n")
    for file in bin_.iterdir():
        file.chmod(0o755)
    (home / "codes").write_text("".join(f"{code}\n" for code in codes))
    text = slurm.render(job, slurm.SlurmOptions.model_validate(job.options))
    env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(["bash"], input=text, text=True, env=env, capture_output=True, timeout=60)
    assert (done.returncode, (home / "count").read_text().strip()) == (ends, str(tries)), done.stderr
    assert (home / "asked").exists() == (codes == [75])


# Hosts


def test_a_hosts_file_gives_names_and_addresses(home: Path) -> None:
    assert ssh.read_hosts(home / "hosts") == [ssh.Host("user@one", "10.0.0.1"), ssh.Host("two", "two")]


@pytest.mark.parametrize(
    ("text", "said"), [("", "no machine"), ("a\na\n", "twice"), ("a adress=1\n", "no host"), ("-oX\n", "no host")]
)
def test_a_hosts_file_that_cannot_be_meant_is_refused(text: str, said: str, home: Path) -> None:
    (home / "bad").write_text(text)
    with pytest.raises(ConfigError, match=said):
        ssh.read_hosts(home / "bad")


# KubeRay


def made(**more: Any) -> dict[str, Any]:
    job = prepared("kuberay", **more)
    return kuberay.manifest(job, kuberay.KubeRayOptions.model_validate(job.options))


def test_a_manifest_asks_for_workers_devices_and_the_volume() -> None:
    spec = made()["spec"]
    workers = spec["rayClusterSpec"]["workerGroupSpecs"][0]
    container = workers["template"]["spec"]["containers"][0]
    assert workers["replicas"] == 2 and container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}} in workers["template"]["spec"]["volumes"]
    assert spec["backoffLimit"] == 3


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        ({"spec": {"backOffLimit": 3}}, "spec.backOffLimit: there is no such field; did you mean backoffLimit"),
        (
            {"spec": {"rayClusterSpec": {"rayVerison": "2"}}},
            "rayVerison: there is no such field; did you mean rayVersion",
        ),
        ({"spec": {"backoffLimit": "3"}}, "'3' is no integer"),
        ({"spec": {"suspend": 1}}, "1 is no boolean"),
        ({"spec": {"submissionMode": "HTTP"}}, "'HTTP' is not one of"),
        ({"spec": {"rayClusterSpec": {"workerGroupSpecs": [{"groupname": "a"}]}}}, r"workerGroupSpecs\[0\].groupname"),
        ({"kind": "RayCluster"}, "'RayCluster' is not one of RayJob"),
    ],
)
def test_a_typo_in_a_manifest_is_refused(overlay: dict[str, Any], said: str, home: Path) -> None:
    (home / "overlay.yaml").write_text(yaml.safe_dump(overlay))
    with pytest.raises(ConfigError, match=said):
        made(overlay=str(home / "overlay.yaml"))


def test_a_code_that_no_config_map_holds_is_refused(home: Path) -> None:
    (home / "noise").write_bytes(os.urandom(1 << 20))
    job = send.prepare("small.yaml", [], "kuberay", NEEDED["kuberay"], [home / "noise"], is_dry=True)
    with pytest.raises(ConfigError, match="ConfigMap"):
        send.show(job)


CRD = os.environ.get("KUBERAY_CRD", "")


@pytest.mark.skipif(not CRD, reason="KUBERAY_CRD names KubeRay's ray.io_rayjobs.yaml, to compare with")
def test_the_fields_we_allow_are_fields_of_the_custom_resource() -> None:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    versions = yaml.load(Path(CRD).read_text(), loader)["spec"]["versions"]
    spec = next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert list(different(crd.SPEC, spec, "spec")) == []


def different(ours: Any, theirs: dict[str, Any], path: str) -> list[str]:
    """Where a schema of ours is not a part of the custom resource's."""
    if isinstance(ours, str):
        kind = "quantity" if theirs.get("x-kubernetes-int-or-string") else theirs.get("type")
        return [] if ours == kind else [f"{path}: {ours}, {kind}"]
    if isinstance(ours, tuple):
        return [] if theirs.get("type") == "string" and set(ours) <= set(theirs.get("enum", ours)) else [path]
    if isinstance(ours, list):
        return different(ours[0], theirs["items"], f"{path}[]") if theirs.get("type") == "array" else [path]
    if set(ours) == {"*"}:
        values = theirs.get("additionalProperties")
        return different(ours["*"], values, f"{path}.*") if isinstance(values, dict) else [path]
    fields = theirs.get("properties", {})
    if path.endswith("template.metadata"):
        return []  # any object there
    missing = [f"{path}.{key}" for key in ours if key not in fields]
    return missing + [d for key in ours if key in fields for d in different(ours[key], fields[key], f"{path}.{key}")]


# ModelArts


def test_a_modelarts_request_names_obs_paths_as_the_api_does() -> None:
    job = prepared("modelarts", pool="pool-1", priority=2, preemptible=True)
    body = modelarts.body(job, modelarts.ModelArtsOptions.model_validate(job.options))
    assert body["algorithm"]["code_dir"] == "/bucket/team/small-1/code/"
    assert body["spec"]["resource"] == {"flavor_id": "modelarts.p.large", "node_count": 2, "pool_id": "pool-1"}
    mounted = {"pfs_path": "/bucket/team/small-1/runs", "local_path": "/home/ma-user/modelarts/runs"}
    assert body["spec"]["volumes"] == [{"pfs": mounted}]
    assert body["spec"]["schedule_policy"] == {"priority": 2, "preemptible": True}
    assert "AK" not in json.dumps(body)


@pytest.mark.parametrize("without", ["obs", "image", "flavor"])
def test_a_modelarts_request_without_what_it_needs_is_refused(without: str) -> None:
    with pytest.raises(ConfigError, match=without):
        send.show(prepared("modelarts", **{without: ""}))


SDK = os.environ.get("TIDEMILL_MODELARTS_PYTHON", "")
COMPARE = """
import json, sys
from huaweicloudsdkmodelarts.v1 import model
def check(name, plain, path):
    kind = getattr(model, name)
    for key, value in plain.items():
        assert key in kind.openapi_types, f"{path}.{key} is no field of {name}"
        value_of(kind.openapi_types[key], value, f"{path}.{key}")
def value_of(named, value, path):
    plain = {"str": str, "int": int, "bool": bool, "float": float}
    if named.startswith("list["):
        assert isinstance(value, list), path
        for item in value: value_of(named[5:-1], item, path + "[]")
    elif named.startswith("dict("):
        assert all(isinstance(v, str) for v in value.values()), path
    elif named in plain:
        assert type(value) is plain[named], f"{path}: {value!r} is no {named}"
    else: check(named, value, path)
given = json.load(sys.stdin)
check("Job", given, "Job")
sys.path.insert(0, sys.argv[1])
from huaweicloudsdkcore.utils.http_utils import sanitize_for_serialization
from tidemill.launch.targets.modelarts import typed
request = model.CreateTrainingJobRequest(body=typed(model, "Job", given))
assert sanitize_for_serialization(request.body) == given, "the SDK would send something else"
try: typed(model, "Job", {**given, "algoritm": {}})
except Exception as error: assert "no field algoritm" in str(error)
else: raise SystemExit("a typo passed")
print("same")
"""


@pytest.mark.skipif(
    not shutil.which(SDK), reason="TIDEMILL_MODELARTS_PYTHON names a Python with huaweicloudsdkmodelarts and pydantic"
)
def test_a_modelarts_request_is_field_by_field_what_the_sdk_sends() -> None:
    job = prepared("modelarts", pool="pool-1", preemptible=True, env={"A": "1"})
    body = modelarts.body(job, modelarts.ModelArtsOptions.model_validate(job.options))
    src = str(Path(modelarts.__file__).resolve().parents[3])
    done = subprocess.run([SDK, "-c", COMPARE, src], input=json.dumps(body), text=True, capture_output=True)
    assert done.stdout.strip().endswith("same"), done.stderr
