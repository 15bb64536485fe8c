import json
from pathlib import Path

import pytest
import torch

from tidemill.check import precheck
from tidemill.device.api import DeviceMemory
from tidemill.errors import ConfigError
from tidemill.estimate.memory import memory
from tidemill.models.load import make_tiny, save_folder
from tidemill.models.shape import shape_of
from tidemill.recipe import load as recipe
from tidemill.recipe.config import ModelSettings, TinyModel

FITTING = ["data.max_prompt_tokens=64", "rollout.max_new_tokens=64"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIDEMILL_RECIPES", str(tmp_path))


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        precheck.check(recipe.load({}, [*FITTING, *overrides]).config)
    return str(caught.value)


def test_settings_that_work_pass():
    precheck.check(recipe.load({}, FITTING).config)
    precheck.check(recipe.load({}, [*FITTING, "device=cuda:1"]).config)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.updates_per_step=3", "does not divide train.prompts_per_step (16); 1, 2, 4, 8 or 16 would do"),
        ("train.samples_per_prompt=1", "grpo compares the samples of one prompt; 2 or more would do"),
        ("train.tokens_per_microbatch=100", "data.max_prompt_tokens (64) + rollout.max_new_tokens (64) = 128"),
        ("model.tiny.window=100", "model.tiny.window is 100 tokens, less than"),
        ("data.max_prompt_tokens=250", "data.max_prompt_tokens=192 would do"),
        ("rollout.cache_tokens=100", "rollout.cache_tokens is 100, but one sample needs"),
        ("rollout.weights=int8 & rollout.engine=hf", "rollout.weights is int8, but hf does not have this setting"),
        ("rollout.weights=fp8 & rollout.batch_invariant=true", "8 bits round"),
        ("rollout.vllm.args={quantization: fp8}", "rollout.engine=vllm would do, or leave it out"),
        ("rollout.engine=vllm & rollout.vllm.args={max_num_seqs: 4}", "which Tidemill sets; use rollout.concurrent"),
        ("rollout.engine=vllm & rollout.vllm.args={logprobs_mode: raw}", "so that it can load weights and score"),
        ("rollout.engine=vllm & rollout.vllm.args={tensor_parallel_size: x}", "is x, but it is a number of devices"),
        (
            "rollout.engine=vllm & rollout.vllm.args={tensor_parallel_size: 2} & cluster.executor=processes",
            "each rollout worker has one device; cluster.executor=local would do",
        ),
        (
            "rollout.engine=vllm & rollout.vllm.args={data_parallel_size: 2}",
            "here one program drives the engine; cluster.rollouts=2 with cluster.executor=processes|ray",
        ),
        ("rollout.engine=vllm & rollout.vllm.args={enable_expert_parallel: true}", "the model has no experts"),
        (
            "rollout.engine=vllm & rollout.vllm.args={enable_expert_parallel: true}"
            " & model.tiny.architecture=qwen3_moe",
            "one worker holds all experts; rollout.vllm.args.tensor_parallel_size=2 would do",
        ),
        (
            "rollout.engine=vllm & rollout.vllm.args={enable_expert_parallel: true, tensor_parallel_size: 2}"
            " & model.tiny.architecture=qwen3_moe & device=cpu",
            "on a CPU takes no part of them",
        ),
        (
            "rollout.engine=vllm & rollout.vllm.args={data_parallel_size: 2} & model.tiny.architecture=qwen3_moe",
            "experts shared: tensor_parallel_size 2 with enable_expert_parallel true",
        ),
        ("rollout.engine=vllm & rollout.vllm.args={enable_lora: true}", "nothing has adapters; learn.lora_rank=16"),
        ("rollout.engine=vllm & rollout.vllm.args={max_lora_rank: 8}", "which Tidemill sets; use learn.lora_rank"),
        (
            "rollout.engine=vllm & rollout.vllm.args={tensor_parallel_size: 2} & rollout.top_p=0.9",
            "works in one process; rollout.top_p=1",
        ),
        (
            "rollout.weights=int8 & model.tiny.architecture=gemma2",
            "rollout.weights is int8, but gemma2 is not among the models that it works for",
        ),
        (
            "learn.moe.balance=bias & rollout.engine=vllm",
            "rollout.engine=native would do, or learn.moe.balance=aux_loss",
        ),
        ("algorithm.rollout_correction=token", "algorithm.old_logprobs=recompute would do"),
        ("algorithm.name=rejection & algorithm.clip_high=0.3", "without a ratio; 0.2 would do, or algorithm=grpo"),
        ("algorithm.name=rejection & algorithm.baseline=none", "there are no advantages; mean would do"),
        ("algorithm.name=rejection & algorithm.covariance.mode=clip", "there are no advantages; none would do"),
        (
            "algorithm.name=rejection & algorithm.kl.coef=0.1 & algorithm.kl.place=reward",
            "whatever its reward; loss would do",
        ),
        ("algorithm.name=rejection & algorithm.overlong.buffer=8", "without algorithm.keep_best; 0 would do"),
        ("algorithm.name=distill & algorithm.advantage_scale=batch_std", "from the teacher; std would do"),
        ("algorithm.name=distill & algorithm.dynamic_sampling=true", "rewards are only measured; false would do"),
        ("algorithm.name=distill & algorithm.overlong.buffer=8", "rewards are only measured; 0 would do"),
        ("algorithm.keep_best=2", "which rejection does; none would do, or algorithm=rejection"),
        ("algorithm.teacher=some/model", "which distill does; none would do, or algorithm=distill"),
        ("algorithm=distill", "algorithm distill needs a teacher"),
        ("algorithm.name=distill & algorithm.teacher=some/model", "`tidemill models get some/model`"),
        ("algorithm.name=distill & algorithm.teacher=./none", "algorithm.teacher=./none does not exist"),
        (
            "rollout.engine=hf & rollout.speculate=on",
            "rollout.speculate is on, but hf does not have this",
        ),
        (
            "rollout.engine=vllm & rollout.cache_tokens=4096",
            "rollout.cache_tokens is 4096, but vllm does not",
        ),
        ("rollout.engine=hf & rollout.cache_on_host_gb=1", "rollout.cache_on_host_gb is 1.0, but hf does not have"),
        ("rollout.engine=hf & rollout.page_size=16", "rollout.page_size is 16, but hf does not have this setting"),
        ("rollout.batch_invariant=true & rollout.speculate=on", "rollout.batch_invariant does not use"),
        ("learn.dora=true", "learn.lora_rank=16 would do"),
        ("name=a/b", "cannot be a folder's name"),
        ("name=..", "cannot be a folder's name"),
        ("device=gpu", "device is 'gpu', but can be auto, cpu, cuda or npu"),
        ("device=cuda:x", "device is 'cuda:x'"),
        ("device=cuda:1 & cluster.executor=processes", "device=cuda would do, with CUDA_VISIBLE_DEVICES=1"),
        ("device=npu:0 & cluster.executor=ray", "device=npu would do, with ASCEND_RT_VISIBLE_DEVICES=0"),
        ("cluster.executor=ray & cluster.spread=true & rollout.tp=2", "false would do, or rollout.tp=1"),
        ("data.source=missing.jsonl", "data.source=missing.jsonl is neither a file"),
        ("data.eval_source=./missing", "data.eval_source=./missing is neither a file"),
        ("data.source=arithmatic", "did you mean arithmetic"),
        ("data.args.digts=3", "has no argument 'digts'"),
        ("rewards=exat", "there is no reward 'exat'; did you mean exact"),
        ("rewards=[{function: exact, args: {ignorecase: true}}]", "did you mean ignore_case"),
        ("rewards=my_rewards:good", "cannot import 'my_rewards:good'"),
        ("algorithm=losses", "there is no algorithm 'losses'"),
        ("algorithm=grop", "there is no algorithm 'grop'; did you mean grpo"),
        ("cluster.executor=ray & cluster.learners=3 & learn.parallel.fsdp=2", "2 ranks, one worker each; 2 would do"),
        ("cluster.executor=ray & learn.parallel.fsdp=2 & algorithm=reward_model", "cluster.executor=local would do"),
        (
            "cluster.executor=ray & cluster.placement.reference=separated & algorithm.kl.reset_every=5",
            "cluster.placement.reference=colocated would do",
        ),
        ("learn.lora_rank=4 & algorithm.kl.reset_every=5", "0 would do, or learn.lora_rank=0"),
        (
            "cluster.executor=ray & cluster.placement=separated & algorithm.kl.coef=1 & algorithm.kl.target=1",
            "cannot steer it; cluster.placement.reference=colocated would do",
        ),
        ("learn.backend=mindspore & model.dtype=bfloat16", "mindspore learns in float32; float32 would do"),
        ("learn.backend=mindspore & algorithm=reward_model", "has no value models; learn.backend=torch would do"),
        (
            "learn.backend=mindspore & algorithm.name=ppo & algorithm.critic.trunk=shared",
            "torch trains the critic; own would do",
        ),
        ("learn.backend=mindspore & learn.parallel.fsdp=2", "sizes of 1 with learn.mindspore.processes=2 would do"),
        (
            "learn.backend=mindspore & cluster.executor=processes & cluster.learners=2",
            "learns in one worker; 1 with learn.mindspore.processes=2 would do",
        ),
        ("learn.backend=mindspore & learn.lora_rank=4", "has no adapters; 0 would do"),
        ("learn.backend=mindspore & learn.optimizer=muon", "has only AdamW; adamw would do"),
        ("learn.backend=mindspore & learn.moments=int8", "keeps moments in float32; same would do"),
        ("learn.backend=mindspore & learn.ema=0.9", "keeps no running mean; 0 would do"),
        ("learn.backend=mindspore & learn.fp8=rowwise", "learns in float32; none would do"),
        ("learn.backend=mindspore & learn.recompute=mlp", "recomputes whole layers; full would do"),
        ("learn.backend=mindspore & observe.dump=[1]", "leaving it out would do"),
        ("learn.backend=mindspore & rollout.batch_invariant=true", "in a different order from rollout; false would do"),
        ("model.warm_start=warm", "model.warm_start: there is no recipe 'warm'"),
        ("model.path=Org/Model-1B", "`tidemill models get Org/Model-1B`"),
    ],
)
def test_what_cannot_work_is_refused_with_what_would_do(override, words):
    assert words in refusal(*override.split(" & "))


@pytest.mark.parametrize("learners", [1, 4])
def test_a_learner_cut_over_workers_passes(learners):
    parallel = ["learn.parallel.fsdp=2", "learn.parallel.tp=2", f"cluster.learners={learners}"]
    precheck.check(recipe.load({}, [*FITTING, "cluster.executor=ray", *parallel]).config)


def test_all_problems_come_in_one_message_of_few_lines():
    message = refusal("train.updates_per_step=3", "train.samples_per_prompt=1", "device=gpu")
    assert message.startswith("3 settings cannot work:")
    assert len(message.splitlines()) == 4


def test_a_single_sample_per_prompt_is_fine_where_nothing_is_compared():
    precheck.check(recipe.load({}, [*FITTING, "train.samples_per_prompt=1", "algorithm=sft"]).config)
    one = ["train.samples_per_prompt=1", "algorithm.group_of_one=reward"]
    precheck.check(recipe.load({}, [*FITTING, *one]).config)


def test_an_empty_data_file_and_a_near_name_are_told(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "train.jsonl").write_text("{}")
    assert "data.source=empty.jsonl is an empty file" in refusal("data.source=empty.jsonl")
    assert "did you mean train.jsonl" in refusal("data.source=trian.jsonl")
    (tmp_path / "set").mkdir()
    assert "is an empty folder" in refusal("data.source=set")


def test_each_thing_a_model_folder_lacks_is_named_with_its_remedy(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    message = refusal(f"model.path={folder}")
    assert "has no config.json" in message
    assert "has no *.safetensors" in message
    assert "has no tokenizer; copy tokenizer.json" in message
    (folder / "pytorch_model.bin").touch()
    assert "pickled weights" in refusal(f"model.path={folder}")


def test_missing_shards_of_a_model_are_counted(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-1.safetensors").touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "lacks 1 of 2 weight files, the first model-2.safetensors" in refusal(f"model.path={folder}")


def test_the_window_of_a_model_folder_counts(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 96}
    (folder / "config.json").write_text(json.dumps(shape))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert f"the window of {folder} is 96 tokens" in refusal(f"model.path={folder}")


def test_the_window_of_a_warm_start_is_that_of_its_own_recipe(tmp_path):
    (tmp_path / "warm.yaml").write_text("model: {tiny: {window: 100}}\n")
    assert "model.tiny.window is 100" in refusal("model.warm_start=warm")


def test_warm_starts_in_a_ring_are_refused(tmp_path):
    (tmp_path / "warm.yaml").write_text("model: {warm_start: warm}\n")
    assert "warm starts form a cycle" in refusal("model.warm_start=warm")


def test_a_disk_too_small_for_the_checkpoints_is_told(monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(precheck.shutil, "disk_usage", lambda _: usage)
    assert "folder=runs has 1.0 kB free, but checkpoints may take" in refusal()


def test_what_the_batch_invariant_mode_cannot_be_joined_with_is_told():
    assert "only native has this mode" in refusal("rollout.batch_invariant=true", "rollout.engine=hf")
    assert "learn.recompute is full, but" in refusal("rollout.batch_invariant=true", "learn.recompute=full")


@pytest.mark.parametrize("override", ["train.profile=[1]", "learn.ema=0.9", "algorithm.kl.weights=int8"])
def test_what_works_in_one_process_is_refused_where_a_learner_is_cut_over_several(override):
    key = override.split("=")[0]
    precheck.check(recipe.load({}, [*FITTING, override]).config)
    cut = ("cluster.executor=processes", "learn.parallel.fsdp=2")
    assert f"{key} is " in (said := refusal(override, *cut)) and "would do" in said


@pytest.mark.parametrize("key", ["train.profile", "observe.dump"])
def test_steps_to_look_into_that_the_run_does_not_have_are_told(key):
    precheck.check(recipe.load({}, [*FITTING, "train.steps=5", f"{key}=[1,5]"]).config)
    assert f"{key} names step 6, but steps are 1 to 5" in refusal("train.steps=5", f"{key}=[1,6]")
    assert f"{key} names step 0, " in refusal("train.steps=5", f"{key}=[0]")


def test_dumps_are_of_one_process():
    precheck.check(recipe.load({}, [*FITTING, "observe.dump=[1]"]).config)
    assert "observe.dump is [1], but" in refusal("observe.dump=[1]", "cluster.executor=processes")


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that fits, one with another alphabet, one that reads too little."""
    place = tmp_path_factory.mktemp("teachers")
    shapes = {"fits": {}, "other": {"alphabet": "+-0123456789 ="}, "short": {"window": 100}}
    for name, changes in shapes.items():
        tiny = TinyModel(**{"hidden": 32, "heads": 4, "kv_heads": 2, **changes})
        made = make_tiny(tiny, torch.float32, 0, torch.device("cpu"))
        save_folder(made.model, made.tokenizer, place / name)
    return place


def test_a_teacher_is_examined_before_anything_is_loaded(teachers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_with(name: str) -> str:
        with pytest.raises(ConfigError) as refused:
            precheck.check(
                recipe.load({}, [*FITTING, "algorithm=distill", f"algorithm.teacher={teachers / name}"]).config
            )
        return refused.value.message

    precheck.check(recipe.load({}, [*FITTING, "algorithm=distill", f"algorithm.teacher={teachers / 'fits'}"]).config)
    assert "has another vocabulary" in wrong_with("other") and "a teacher with the policy's tokenizer" in wrong_with(
        "other"
    )
    assert "reads 100 tokens, less than a sample may have" in wrong_with("short")
    monkeypatch.setattr("tidemill.device.cpu.Cpu.memory", lambda self: DeviceMemory(1000, 1000, 0))
    assert "in all; model.dtype=bfloat16 or a smaller teacher would do" in wrong_with("fits")


def test_the_estimate_counts_the_teachers_own_parameters(teachers: Path) -> None:
    config = recipe.load({}, [*FITTING, "algorithm=distill", f"algorithm.teacher={teachers / 'fits'}"]).config
    shape, theirs = (shape_of(m) for m in (config.model, ModelSettings(path=str(teachers / "fits"))))
    assert theirs.parameters != shape.parameters
    assert memory(config, shape).reference == 4 * theirs.parameters
