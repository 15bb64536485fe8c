"""How many `math` verdicts a core gives, and how often they are math-verify's."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks._math_cases import FORMS, Case, fuzzed, published, rambling, tidy
from tidemill.bench import repeat
from tidemill.errors import ConfigError
from tidemill.reward.api import Sample
from tidemill.reward.math import verdict
from tidemill.reward.verifiers.answers import last_number

ABOUT = "math verdicts per second and core (tidy, real and rambling answers), and agreement with math-verify"
OPTIONS = {
    "data": "../shared/data/gsm8k",  # GSM8K's test.jsonl and train.jsonl
    "solutions": "",  # 5,276 with labels, github.com/openai/grade-school-math; none given: looked for beside the data
    "answers": 5276,
    "rambling": 2000,
    "spoken": "",  # a JSON-lines file of a real model's answers; made where it is missing: hours on two cores
    "speaker": "smollm2-135m",
    "spoken_answers": 2000,
    "fuzzed": 20_000,  # 0: no comparison with math-verify, which takes minutes
    "compared_rambling": 200,  # of each kind without a known answer
    "seed": 0,
}
ASKED_AT_ONCE = 250
REFERENCE_S = 3  # of math-verify's own limit; an answer that takes longer is left out of the comparison


def run(options: Mapping[str, Any]) -> dict[str, Any]:
    verdict.warm_up()
    sets = labelled_sets(options)
    rates: dict[str, Any] = {}
    result: dict[str, Any] = {"verdicts_per_s_core": {}, "spread": {}, "slowest_s": {}, "accuracy": {}}
    for name, solutions in sets.items():
        cases = [Case(FORMS["####"](body, final), gold, "", name) for body, final, gold, _ in solutions]
        rates[name] = cases
        result["accuracy"][name] = {form: accuracy(form, solutions) for form in FORMS}
    rates["rambling"] = rambling(int(options["rambling"]), int(options["seed"]))
    if options["spoken"]:
        rates["spoken"] = spoken(options)
    for name, cases in rates.items():
        measured = repeat(lambda: speed(cases), options["repeats"])  # noqa: B023
        result["verdicts_per_s_core"][name] = measured["verdicts_per_s"]["median"]
        result["spread"][name] = measured["verdicts_per_s"]["spread"]
        result["slowest_s"][name] = max(measured["slowest_s"]["runs"])
    samples = [Sample("", case.response, case.gold) for case in rates["tidy"]]
    result["last_number_per_s"] = len(samples) / timed(lambda: [last_number(sample) for sample in samples])
    if options["fuzzed"]:
        result |= compared(fuzzed(int(options["fuzzed"]), int(options["seed"])))
        for name in {"rambling", "spoken"} & rates.keys():
            found = compared(rates[name][: int(options["compared_rambling"])])
            result |= {f"{name}_{key}": value for key, value in found.items()}
    return result


def spoken(options: Mapping[str, Any]) -> list[Case]:
    """What a model that was not trained for it answers to GSM8K's problems. It is asked once, and its answers are kept:
    a run that was cut off continues."""
    file, count = Path(str(options["spoken"])), int(options["spoken_answers"])
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if len(rows) < count:
        with file.open("a") as out:
            for row in asked(options, len(rows), count):
                out.write(json.dumps(row) + "\n")
                out.flush()
                rows.append(row)
    return [Case(row["response"], row["gold"], row["response"], "spoken") for row in rows[:count]]


def asked(options: Mapping[str, Any], first: int, count: int) -> Iterator[dict[str, str]]:
    from tidemill.rollout.engine import Request, Sampling
    from tidemill.rollout.native.engine import NativeEngine
    from tidemill.run.trained import open_trained

    problems = (Path(str(options["data"])) / "train.jsonl").read_text(encoding="utf-8").splitlines()
    model = open_trained(str(options["speaker"])).loaded
    room = {"max_seqs": 32, "max_len": 768, "cache_tokens": 32 * 768}
    engine = NativeEngine(model.model, eos_ids=model.eos_ids, tokenizer=model.tokenizer, **room)
    for start in range(first, count, ASKED_AT_ONCE):
        rows = [json.loads(line) for line in problems[start : min(count, start + ASKED_AT_ONCE)]]
        for id, row in enumerate(rows, start):
            said = [{"role": "user", "content": row["question"]}]
            encoded = model.tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)
            engine.submit(Request(id, list(encoded["input_ids"]), Sampling(max_tokens=320), n=1))
        while engine.has_work:
            for done in engine.step():
                gold = rows[done.request.id - start]["answer"].rpartition("#### ")[2]
                text = model.tokenizer.decode(done.tokens, skip_special_tokens=True)
                yield {"response": text, "gold": gold}


def labelled_sets(options: Mapping[str, Any]) -> dict[str, list[tuple[str, str, str, bool]]]:
    folder = Path(str(options["data"]))
    solutions = Path(str(options["solutions"] or folder / "example_model_solutions.jsonl"))
    if not (folder / "test.jsonl").exists():
        raise ConfigError(f"bench math: there is no {folder}/test.jsonl", "say where GSM8K is: --data FOLDER")
    found = {"tidy": tidy(folder)[: int(options["answers"])]}
    return found | ({"real": published(solutions)} if solutions.exists() else {})


def accuracy(form: str, solutions: Sequence[tuple[str, str, str, bool]]) -> float:
    """The share judged as labelled."""
    right = sum(
        verdict.math(Sample("", FORMS[form](body, final), gold)) == is_right
        for body, final, gold, is_right in solutions
    )
    return right / len(solutions)


def speed(cases: Sequence[Case]) -> dict[str, float]:
    """In this process, one after the other, nothing remembered."""
    verdict.by_algebra.cache_clear()
    verdict.same_unmarked.cache_clear()
    slowest, began = 0.0, time.perf_counter()
    for case in cases:
        started = time.perf_counter()
        verdict.math(Sample("", case.response, case.gold))
        slowest = max(slowest, time.perf_counter() - started)
    return {"verdicts_per_s": len(cases) / (time.perf_counter() - began), "slowest_s": slowest}


def timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compared(cases: Sequence[Case]) -> dict[str, Any]:
    """The share of verdicts that are math-verify's, and every other one with the verdict that is known to be right."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    disagreements, right, library_right = [], 0, 0
    for case in cases:
        ours = verdict.math(Sample("", case.response, case.gold))
        gold = math_verify.parse(f"\\boxed{{{case.gold}}}", parsing_timeout=REFERENCE_S)
        given = math_verify.parse(case.reference, parsing_timeout=REFERENCE_S)
        theirs = bool(math_verify.verify(gold, given, timeout_seconds=REFERENCE_S))
        right += ours == case.is_right
        library_right += theirs == case.is_right
        if ours != theirs:
            who = {ours: "tidemill", theirs: "math-verify"}.get(case.is_right, "unknown")  # type: ignore[arg-type]
            tail = case.response[-80:]
            disagreements.append({"form": case.form, "response": tail, "gold": case.gold, "ours": ours, "right": who})
    count = max(1, len(cases))
    found: dict[str, Any] = {"agreement": 1 - len(disagreements) / count, "disagreements": disagreements}
    if cases and cases[0].is_right is not None:
        worse = sum(disagreement["right"] != "tidemill" for disagreement in disagreements)
        found |= {"agreement_or_better": 1 - worse / count, "right": right / count}
        found["math_verify_right"] = library_right / count
    return found
