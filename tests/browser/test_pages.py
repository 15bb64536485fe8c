"""Every page in a real browser: on finished runs and on a live one, wide and narrow, light and dark, by keyboard."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from tests.browser.conftest import ROOT, ended, tidemill, waited, watching
from tests.watch import made

pytestmark = pytest.mark.browser
PAGES = ("overview", "samples", "flow", "machines", "weights", "compare")
PICTURES = ROOT / "docs" / "pictures"
WRITES_PICTURES = os.environ.get("PICTURES") == "1"
RECIPE = """
name: live
about: sums of small numbers, learned while the page looks on
model: {tiny: {hidden: 32, layers: 1, heads: 2, kv_heads: 1, intermediate: 64, window: 32}}
data: {source: arithmetic, held_out: 8, max_prompt_tokens: 16}
train: {steps: 5000, prompts_per_step: 4, samples_per_prompt: 4}
rollout: {max_new_tokens: 6}
algorithm: {name: grpo, kl: {coef: 0.01}}
learn: {lr: 1.0e-4}
eval: {size: 8, before: false, after: false}
checkpoint: {every: 50}
observe: {tensorboard: false, progress: "off"}
folder: .
threads: 1
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The address of a page of two finished runs."""
    root = tmp_path_factory.mktemp("runs")
    made.run(root, "other", steps=150, lr=2e-5)
    made.run(root, "one", steps=200)
    with watching(root / "one", root / "watch.log") as address:
        yield address


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """The address of a page that may steer a run, and the run's folder."""
    root = tmp_path_factory.mktemp("live")
    (root / "live.yaml").write_text(RECIPE)
    with ended(tidemill("train", "live.yaml", cwd=root, log=root / "train.log")) as process:
        metrics = root / "live" / "metrics.jsonl"

        def has_stepped() -> bool:
            assert process.poll() is None, (root / "train.log").read_text()
            return metrics.exists() and metrics.stat().st_size > 0

        waited(has_stepped, 120)
        with watching(root / "live", root / "watch.log", "--control") as address:
            yield address, root / "live"


def ready(page: Page, name: str) -> None:
    page.wait_for_function("name => document.getElementById('page').dataset.ready?.startsWith(name)", arg=name)


def shown(page: Page, name: str) -> None:
    page.click(f"#nav >> text={name}")
    ready(page, name)


def picture(page: Page, name: str) -> None:
    if WRITES_PICTURES:
        PICTURES.mkdir(exist_ok=True)
        page.screenshot(path=PICTURES / name, type="jpeg", quality=70)


def steps_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if line.endswith("}")]


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_and_fits(finished, opened, width, scheme):
    page = opened(finished, width=width, scheme=scheme)
    ready(page, "overview")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for name in PAGES:
        shown(page, name)
        assert page.locator("#page h1").count() == 1, name
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{name} is wider than {width} pixels"
        if (width, scheme) in ((1280, "light"), (390, "dark")) and name in ("overview", "samples"):
            picture(page, f"watch-{name}-{width}.jpg")


def test_curves_are_drawn_and_zoomed(finished, opened):
    page = opened(finished)
    ready(page, "overview")
    reward = page.locator('[data-chart="Reward"]')
    expect(reward.locator("canvas")).to_be_visible()
    assert reward.get_attribute("data-last") == "200"
    box = reward.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 50, box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 150, box["y"] + 50, steps=5)
    page.mouse.up()
    page.wait_for_function("() => document.querySelector('[data-chart=\"Reward\"]').dataset.last < 200")
    page.mouse.dblclick(box["x"] + 50, box["y"] + 50)
    page.wait_for_function("() => document.querySelector('[data-chart=\"Reward\"]').dataset.last == 200")


def test_samples_are_found_sorted_and_seen_beside_their_group(finished, opened):
    page = opened(finished)
    shown(page, "samples")
    page.fill("input[type=search]", 'of "step 117"')
    page.keyboard.press("Enter")
    expect(page.locator(".sample")).to_have_count(4)
    page.fill("input[type=search]", "")
    page.select_option('select[aria-label="sort"]', "-reward")
    page.wait_for_function("() => [...document.querySelectorAll('.sample')].length == 50")
    assert page.locator(".sample").first.locator("span").nth(1).inner_text() == "1"
    page.locator(".sample").first.click()
    expect(page.locator(".detail .group article")).to_have_count(2)


def colours(page: Page) -> list[str]:
    """Of the tokens of the first sample of the open group."""
    own = page.locator(".detail .group article").first.locator(".tok")
    return own.evaluate_all("all => all.map(t => t.style.background + '|' + t.style.borderBottom + '|' + t.className)")


def test_tokens_are_coloured_by_what_the_learner_made_of_them(finished, opened):
    page = opened(finished)
    shown(page, "samples")
    page.locator(".sample").first.click()
    expect(page.locator(".detail .group article")).to_have_count(2)
    article = page.locator(".detail .group article").nth(1)  # its second and third token came from a tool
    expect(article.locator(".given")).to_have_count(1)
    assert article.locator(".tok").nth(3).get_attribute("title").startswith("log-prob -0.5, ratio 1, advantage -0.5")
    seen = {}
    for kind in ("plain", "advantage", "log-prob", "ratio", "version", "mask"):
        page.select_option('select[aria-label="colour tokens by"]', kind)
        seen[kind] = colours(page)
    assert len(set(map(tuple, seen.values()))) >= 5, seen
    assert len(set(seen["log-prob"])) == 4 and len(set(seen["ratio"])) == 3 and len(set(seen["advantage"])) == 1
    page.select_option('select[aria-label="colour tokens by"]', "mask")
    off = page.locator(".detail .group article").nth(1).locator(".tok.off")
    expect(off).to_have_count(2)
    page.select_option('select[aria-label="colour tokens by"]', "ratio")
    picture(page, "watch-tokens.jpg")


def test_the_images_of_a_sample_are_shown(finished, opened):
    page = opened(finished)
    shown(page, "samples")
    page.locator(".sample").first.click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.detail img')].filter(i => i.naturalWidth === 24).length === 2"
    )


def test_the_flow_page_shows_what_every_worker_did_when(finished, opened):
    page = opened(finished)
    shown(page, "flow")
    assert page.locator("#gantt .lane[data-worker]").evaluate_all("all => all.map(l => l.dataset.worker)") == [
        "learner-0", "reward-0", "rollout-0", "rollout-1",
    ]  # fmt: skip
    page.select_option('select[aria-label="steps shown"]', "1")
    bars = page.locator('#gantt [data-worker="learner-0"] i')
    expect(bars).to_have_count(2)
    track = page.locator('#gantt [data-worker="learner-0"] .track').bounding_box()
    box = bars.first.bounding_box()
    assert abs((box["x"] - track["x"]) / track["width"] - 0.62) < 0.02  # begin and end as written
    assert abs(box["width"] / track["width"] - 0.28) < 0.02
    page.fill('input[aria-label="step"]', "7")
    page.keyboard.press("Enter")
    expect(bars.first).to_have_attribute("title", "learner-0: learn, 0.28 s, 0.62 s after step 7 began")
    picture(page, "watch-flow.jpg")


def test_two_runs_compare_and_lie_over_each_other(finished, opened):
    page = opened(finished)
    shown(page, "compare")
    expect(page.locator("#first")).to_contain_text("first differ at step 1: lr")
    expect(page.locator("table").first).to_contain_text("learn.lr")
    picture(page, "watch-compare.jpg")
    page.click("#runs summary")
    page.check('#runs-list input[value="other"]')
    page.keyboard.press("Escape")
    shown(page, "overview")
    expect(page.locator('[data-chart="Reward"] .u-legend')).to_contain_text("other reward")


def test_the_keyboard_is_enough(finished, opened):
    page = opened(finished)
    ready(page, "overview")
    page.keyboard.press("2")
    ready(page, "samples")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.type") == "search"
    page.keyboard.type("step 9")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.sample').length > 3")
    page.locator(".sample").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".detail")).to_be_visible()
    page.keyboard.press("1")
    ready(page, "overview")


def test_a_page_that_only_reads_shows_no_controls(finished, opened):
    page = opened(finished)
    ready(page, "overview")
    assert page.locator('[aria-label="Steering"]').count() == 0


def test_without_the_token_the_page_stays_closed(finished, browser):
    context = browser.new_context()
    assert context.new_page().goto(finished.split("?")[0]).status == 401
    context.close()


def test_every_page_opens_on_a_live_run_and_curves_move(live, opened):
    address, run = live
    page = opened(address)
    for name in PAGES:
        shown(page, name)
    shown(page, "overview")
    before = int(page.locator('[data-chart="Reward"]').get_attribute("data-last"))
    page.wait_for_function("n => document.querySelector('[data-chart=\"Reward\"]').dataset.last > n", arg=before)
    wanted = steps_of(run)[-1]["step"] + 1
    waited(lambda: steps_of(run)[-1]["step"] >= wanted)
    page.wait_for_function(
        "n => document.querySelector('[data-chart=\"Reward\"]').dataset.last >= n", arg=wanted, timeout=2000
    )


def command(page: Page, kind: str) -> None:
    page.click(f'[aria-label="Steering"] button[data-kind="{kind}"]')
    page.click("dialog >> text=Yes")


def test_a_live_run_is_steered(live, opened):
    address, run = live
    page = opened(address)
    ready(page, "overview")
    page.fill('input[aria-label="new value"]', "3e-6")
    command(page, "set")
    waited(lambda: steps_of(run)[-1].get("lr") == 3e-6)
    done = [json.loads(line) for line in (run / "steered.jsonl").read_text().splitlines()]
    found = {m["step"]: m["lr"] for m in steps_of(run) if "lr" in m}
    assert found[done[0]["step"]] == 3e-6 and found[done[0]["step"] - 1] == 1e-4
    command(page, "evaluate")
    waited(lambda: any("eval/accuracy" in m for m in steps_of(run)))
    command(page, "pause")
    expect(page.locator("h1 small")).to_contain_text("paused")
    picture(page, "watch-steering.jpg")
    command(page, "resume")
    expect(page.locator("h1 small")).not_to_contain_text("paused")
    command(page, "save")
    waited(lambda: any(json.loads(line)["kind"] == "save" for line in (run / "steered.jsonl").read_text().splitlines()))
    command(page, "stop")
    waited(lambda: (run / "summary.json").exists())
    assert json.loads((run / "summary.json").read_text())["is_stopped"]
    page.reload()
    expect(page.locator("h1 small")).to_contain_text("stopped")
