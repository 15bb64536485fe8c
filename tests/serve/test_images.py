"""Images in messages: taken from the message itself, and from nowhere else."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from tests.serve.made import client, served
from tidemill.models.load import make_tiny, save_folder
from tidemill.recipe.config import TinyModel, TinyVision

PIL = pytest.importorskip("PIL.Image")
SHAPE = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "intermediate": 48, "window": 256}
EYES = TinyVision(size=24, patch=4, hidden=32, layers=2, heads=2, intermediate=48)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def model_that_looks(folder, template: str | None = TEMPLATE):
    import torch

    shape = TinyModel(architecture="qwen2_5_vl", vision=EYES, **SHAPE)
    loaded = make_tiny(shape, torch.float32, 0, torch.device("cpu"))
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(4.0) if parameter.dim() > 1 else None
    loaded.tokenizer.chat_template = template
    save_folder(loaded.model, loaded.tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    with served(model_that_looks(tmp_path_factory.mktemp("looks") / "m")) as server, client(server) as made:
        yield made


def url(seed: int = 0, size: tuple[int, int] = (24, 24), kind: str = "PNG") -> str:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    found = io.BytesIO()
    PIL.fromarray(pixels).save(found, kind)
    return f"data:image/{kind.lower()};base64," + base64.b64encode(found.getvalue()).decode()


def asked(*images: str, text: str = "what?") -> list[dict]:
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def chat(ask, messages, **more):
    own = {"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "logprobs": True}
    return ask.post("/v1/chat/completions", json=own | more)


def logprobs(answer) -> list[float]:
    return [entry["logprob"] for entry in answer.json()["choices"][0]["logprobs"]["content"]]


def test_the_answer_depends_on_the_image(ask) -> None:
    one, same, other = chat(ask, asked(url(0))), chat(ask, asked(url(0))), chat(ask, asked(url(1)))
    assert one.status_code == 200, one.text
    assert len(one.json()["prompt_token_ids"]) == len(other.json()["prompt_token_ids"]) > 9
    assert logprobs(one) == pytest.approx(logprobs(same), abs=1e-5)
    assert logprobs(one) != pytest.approx(logprobs(other), abs=1e-3)


def test_several_images_and_several_turns(ask) -> None:
    first = asked(url(0), url(1))
    said = chat(ask, first).json()["choices"][0]["message"]
    more = [*first, said, *asked(url(2), text="and now?")]
    made = chat(ask, more)
    assert made.status_code == 200, made.text
    image = 9  # tokens of one
    assert len(made.json()["prompt_token_ids"]) > 3 * image


def test_responses_take_images_too(ask) -> None:
    content = [{"type": "input_image", "image_url": url(0)}, {"type": "input_text", "text": "what?"}]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8}
    made = ask.post("/v1/responses", json=body)
    assert made.status_code == 200, made.text


def test_only_what_stands_in_the_message_is_looked_at(ask, tmp_path) -> None:
    file = tmp_path / "secret.png"
    PIL.new("RGB", (8, 8)).save(file)
    for where in (str(file), f"file://{file}", "http://127.0.0.1:1/a.png", "https://x/a.png", "", 3, None):
        made = chat(ask, asked(where))
        assert made.status_code == 400, (where, made.text)
    for part in ({"type": "image", "path": str(file)}, {"type": "image", "url": str(file)}, {"type": "image"}):
        made = chat(ask, [{"role": "user", "content": [part]}])
        assert made.status_code == 400, (part, made.text)


def test_bad_images_cost_their_own_request(ask) -> None:
    good = url(0)
    bad = {
        "data:image/png;base64,%%%": "base64",
        "data:image/png;base64,": "empty",
        "data:text/plain;base64,aGVsbG8=": "not an image",
        good[: len(good) // 2 // 4 * 4]: "cut short|base64|broken",
        "data:image/png,abc": "base64",
    }
    for wrong, why in bad.items():
        made = chat(ask, asked(wrong))
        assert made.status_code == 400 and made.json()["error"]["message"], made.text
        assert __import__("re").search(why, made.json()["error"]["message"]), made.text
    assert chat(ask, asked(good)).status_code == 200


def test_words_that_look_like_an_image_are_words(ask) -> None:
    assert chat(ask, asked(url(0), text="is <image> an image?")).status_code in (200, 400)
    assert chat(ask, [{"role": "user", "content": "is <image> an image?"}]).status_code in (200, 400)
    assert chat(ask, asked(url(0))).status_code == 200


def test_a_model_without_a_template_sees_them_too(tmp_path) -> None:
    with served(model_that_looks(tmp_path / "m", None)) as server, client(server) as ask:
        one, other = chat(ask, asked(url(0))), chat(ask, asked(url(1)))
        assert one.status_code == 200, one.text
        assert logprobs(one) != pytest.approx(logprobs(other), abs=1e-3)


def test_a_model_that_reads_text_alone_says_so(server, ask) -> None:
    with client(server) as text_alone:
        made = chat(text_alone, asked(url(0)))
        assert made.status_code == 400 and "text alone" in made.text
