"""The paged key/value cache: which pages are whose (`PagePool`, host only) and the bytes themselves (`PageStore`).

A page holds `page_size` tokens of one sequence, for every layer. Pages of a prompt are shared by the samples of its
group; each holder counts as one reference. Full pages can be found again by their content (`PrefixIndex`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tidemill.batch import Array
from tidemill.device.mapped import MappedMemory
from tidemill.models.upload import upload


class PagePool:
    """Hands out page numbers, lowest first, so that pages in use stay close together and attention on the CPU can walk
    them in storage order."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self.free: list[int] = list(range(pages))
        self.holders = np.zeros(pages, np.int32)
        self.tenancy = np.zeros(pages, np.int64)  # how often each page has been taken: tells its contents apart
        self.index = PrefixIndex(self)
        self.used = 0

    @property
    def tokens(self) -> int:
        return self.pages * self.page_size

    @property
    def available(self) -> int:
        """Free now, or free as soon as something that is only remembered is forgotten."""
        return len(self.free) + len(self.index.idle)

    def take(self) -> int:
        """One page with one holder. Ask `available` first: an empty pool is the scheduler's mistake."""
        if not self.free:
            self.index.forget_oldest()
        page = heapq.heappop(self.free)
        self.holders[page] = 1
        self.tenancy[page] += 1
        self.used += 1
        return page

    def tenant(self, page: int) -> tuple[int, int]:
        """What a full page is known by, as long as it is not given to another."""
        return page, int(self.tenancy[page])

    def is_kept(self, page: int, tenancy: int) -> bool:
        """Whether the page still has the contents of that tenancy, and can be held."""
        return self.tenancy[page] == tenancy and (self.holders[page] > 0 or page in self.index.idle)

    def hold(self, page: int) -> None:
        if self.holders[page] == 0:
            self.index.idle.pop(page)
            self.used += 1
        self.holders[page] += 1

    def drop(self, page: int) -> None:
        self.holders[page] -= 1
        if self.holders[page]:
            return
        self.used -= 1
        if page in self.index.key_of:
            self.index.idle[page] = None
        else:
            heapq.heappush(self.free, page)

    def unused(self, pages: Sequence[int]) -> list[int]:
        """Those of `pages` that nobody holds and nobody could find."""
        return [page for page in pages if not self.holders[page] and page not in self.index.key_of]

    def high(self) -> int:
        """One more than the highest page that anyone holds."""
        held = np.flatnonzero(self.holders)
        return int(held[-1]) + 1 if len(held) else 0


class PrefixIndex:
    """Full pages by content: a page's key digests every token up to its end, so equal keys mean equal contents however
    pages were reused in between. Pages nobody holds stay until their room is needed, least recently held first."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.weights = 0  # which weights' pages may be remembered: goes up when those change
        self.page_of: dict[bytes, int] = {}
        self.key_of: dict[int, bytes] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def _keys(self, tokens: Array, pages: int) -> Iterator[bytes]:
        size = self.pool.page_size
        digest = hashlib.blake2b(digest_size=16)
        for i in range(pages):
            digest.update(tokens[i * size : (i + 1) * size].tobytes())
            yield digest.digest()

    def remember(self, tokens: Array, pages: Sequence[int], weights: int | None = None) -> None:
        """`pages` now hold `tokens`; only whole pages are remembered. Not those that older `weights` began to write: to
        whoever found them they would be as good as new."""
        if weights is not None and weights != self.weights:
            return
        for page, key in zip(pages, self._keys(tokens, len(tokens) // self.pool.page_size)):
            if key not in self.page_of and page not in self.key_of:
                self.page_of[key] = page
                self.key_of[page] = key

    def find(self, tokens: Array) -> list[int]:
        """The longest known run of pages from the start of `tokens`, each now held once more. The last token is always
        left out: its logits must be computed."""
        found: list[int] = []
        if not self.page_of:
            return found
        for key in self._keys(tokens, (len(tokens) - 1) // self.pool.page_size):
            page = self.page_of.get(key)
            if page is None:
                break
            self.pool.hold(page)
            found.append(page)
        return found

    def forget_oldest(self) -> None:
        page, _ = self.idle.popitem(last=False)
        self._forget(page)
        heapq.heappush(self.pool.free, page)

    def forget_all(self) -> None:
        """New weights: what was remembered is no longer true."""
        self.weights += 1
        for page in self.idle:
            heapq.heappush(self.pool.free, page)
        self.idle.clear()
        self.page_of.clear()
        self.key_of.clear()

    def _forget(self, page: int) -> None:
        key = self.key_of.pop(page)
        del self.page_of[key]


# How a narrow cache keeps an element: the type, and the largest number it takes.
NARROW = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


Part = tuple[str, int]  # keys, values, or scales of one of them; and the layer
Form = tuple[tuple[int, ...], torch.dtype]  # of one page


class PageStore:
    """Keys (pages, kv_heads, dim, page_size) and values (pages, kv_heads, page_size, dim) of every layer. Keys lie with
    positions side by side, so that a vector unit scores many at once. A layer's shape is learnt from its first write,
    because only the model knows it (MLA keeps values narrower than keys, some layers have fewer heads).

    With `kind` "int8" or "fp8" an element is one byte, and each token and head has a scale for its key and its value
    (pages, kv_heads, page_size).

    With `memory`, whose addresses stay, captured graphs may hold them through `clear` and `restore`."""

    memory: MappedMemory | None = None

    def __init__(self, pages: int, page_size: int, device: torch.device, kind: str | None = None) -> None:
        self.pages = pages
        self.page_size = page_size
        self.device = device
        self.kind = kind
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.scales: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, page: Tensor, offset: Tensor) -> None:
        """k, v (tokens, kv_heads, dim); token i goes to `offset[i]` of `page[i]`."""
        keys, values = self.layer(layer, k, v)
        if self.kind is not None:
            (k, k_scale), (v, v_scale) = narrow(k, self.kind), narrow(v, self.kind)
            self.scales[layer][0][page, :, offset], self.scales[layer][1][page, :, offset] = k_scale, v_scale
        # As plain bytes: few operations know one-byte floats.
        _bytes(keys)[page, :, :, offset] = _bytes(k)
        _bytes(values)[page, :, offset] = _bytes(v)

    def layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, made to the shape of k and v when it is new."""
        if layer not in self.keys:
            # Zeros, not garbage: masked positions are multiplied by a weight of 0, and 0 * NaN is NaN.
            size = self.page_size
            dtype = k.dtype if self.kind is None else NARROW[self.kind][0]
            self.keys[layer] = self.zeros((self.pages, k.shape[1], k.shape[2], size), dtype)
            self.values[layer] = self.zeros((self.pages, v.shape[1], size, v.shape[2]), dtype)
            if self.kind is not None:
                shape = (self.pages, k.shape[1], size)
                self.scales[layer] = self.zeros(shape, torch.float32), self.zeros(shape, torch.float32)
        return self.keys[layer], self.values[layer]

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for something of every page, in memory whose addresses stay where there is such memory."""
        if self.memory is not None:
            return self.memory.zeros(shape, dtype=dtype)
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def heads(self, layer: int) -> tuple[int, int]:
        """How many key/value heads the layer has, and the width of a value."""
        return self.keys[layer].shape[1], self.values[layer].shape[-1]

    def read_keys(self, layer: int, pages: int | Tensor, dtype: torch.dtype) -> Tensor:
        """(pages, kv_heads, dim, page_size) of some pages, or of all up to a number, as they are computed with."""
        held = _some(self.keys[layer], pages)
        return held if self.kind is None else _widen(held, _some(self.scales[layer][0], pages).unsqueeze(2), dtype)

    def read_values(self, layer: int, pages: int | Tensor, dtype: torch.dtype) -> Tensor:
        """(pages, kv_heads, page_size, dim)"""
        held = _some(self.values[layer], pages)
        return held if self.kind is None else _widen(held, _some(self.scales[layer][1], pages).unsqueeze(3), dtype)

    def parts(self) -> dict[Part, Tensor]:
        """All that is kept of a page, (pages, …) each; one-byte floats as plain bytes."""
        found = {("keys", n): held for n, held in self.keys.items()}
        found |= {("values", n): held for n, held in self.values.items()}
        found |= {("key_scales", n): pair[0] for n, pair in self.scales.items()}
        found |= {("value_scales", n): pair[1] for n, pair in self.scales.items()}
        return {part: _bytes(held) for part, held in found.items()}

    def make_parts(self, forms: Mapping[Part, Form]) -> None:
        """Room for these parts as they were before `clear`, unless there is some."""
        if self.keys:
            return
        made = {part: self.zeros((self.pages, *shape), dtype) for part, (shape, dtype) in forms.items()}
        if self.kind == "fp8":
            made = {
                part: held.view(torch.float8_e4m3fn) if held.dtype == torch.uint8 else held
                for part, held in made.items()
            }
        self.keys = {n: held for (what, n), held in made.items() if what == "keys"}
        self.values = {n: held for (what, n), held in made.items() if what == "values"}
        scaled = [n for what, n in made if what == "key_scales"]
        self.scales = {n: (made["key_scales", n], made["value_scales", n]) for n in scaled}

    def _all(self) -> list[Tensor]:
        return list(self.parts().values())

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        src, dst = upload(source, self.device), upload(target, self.device)
        for pages in self._all():
            pages[dst] = pages[src]

    def scrub(self, pages: Sequence[int]) -> None:
        """Zero pages that may hold NaN, before someone else gets them."""
        index = upload(pages, self.device)
        for held in self._all():
            held[index] = 0

    def clear(self) -> None:
        """Give the memory back. Whoever wrote to it has been waited for."""
        if self.memory is not None:
            self.memory.release()
            return
        self.keys.clear()
        self.values.clear()
        self.scales.clear()

    def restore(self) -> None:
        """Take it again, as zeros. Without `memory` that happens with the first write to each layer."""
        if self.memory is not None:
            self.memory.restore()

    @property
    def nbytes(self) -> int:
        if self.memory is not None and self.memory.is_released:
            return 0
        return sum(held.nbytes for held in self._all())


class TokenStore(PageStore):
    """Keys and values (pages, page_size, kv_heads, dim): a token's heads side by side, as library kernels want them."""

    def write(self, layer: int, k: Tensor, v: Tensor, page: Tensor, offset: Tensor) -> None:
        keys, values = self.layer(layer, k, v)
        keys[page, offset], values[page, offset] = k, v

    def layer(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self.keys:
            self.keys[layer] = k.new_zeros(self.pages, self.page_size, *k.shape[1:])
            self.values[layer] = v.new_zeros(self.pages, self.page_size, *v.shape[1:])
        return self.keys[layer], self.values[layer]

    def heads(self, layer: int) -> tuple[int, int]:
        return self.keys[layer].shape[2], self.values[layer].shape[-1]

    def read_keys(self, layer: int, pages: int | Tensor, dtype: torch.dtype) -> Tensor:
        return _some(self.keys[layer], pages).permute(0, 2, 3, 1)

    def read_values(self, layer: int, pages: int | Tensor, dtype: torch.dtype) -> Tensor:
        return _some(self.values[layer], pages).permute(0, 2, 1, 3)


def narrow(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """x (…, dim) in one byte each, and its scale (…): the largest of a row becomes the largest that the type takes."""
    dtype, most = NARROW[kind]
    scale = x.float().abs().amax(-1).clamp_min_(1e-12) / most
    scaled = x.float() / scale.unsqueeze(-1)
    return (scaled.round_() if kind == "int8" else scaled).to(dtype), scale


def _bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _some(held: Tensor, pages: int | Tensor) -> Tensor:
    if isinstance(pages, int):
        return held[:pages]
    return _bytes(held).index_select(0, pages).view(held.dtype)


def _widen(held: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (held.float() * scale).to(dtype)
