"""What a plan would cost, for people: bytes per link and per rank, the peak, the lower bound, and who sends to whom.

Needs no device and no weights: `tidemill reshard plan --model qwen2.5-32b --from tp8,dp2 --to tp4,dp4 --devices 16`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tidemill.errors import ReshardError
from tidemill.reshard.layouts.parallel import Model, ParallelSizes, count, engine, learner, parse
from tidemill.reshard.move import BUCKET_BYTES, DEPTH
from tidemill.reshard.plan import Plan, Topology, plan

LINKS_GB_PER_S = (25.0, 50.0)
PICTURE_SIDE = 24  # ranks, or groups of ranks, a picture has room for
SHADES = " ·░▒▓█"


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A dry plan in numbers. Bytes unless it says otherwise; `most_` is of the busiest rank."""

    title: str
    parameters: int
    model_bytes: int
    devices: int
    bytes: int
    lower_bound_bytes: int
    by_distance: dict[str, int]
    most_in_bytes: int
    most_out_bytes: int
    mean_in_bytes: float
    lower_bound_most_bytes: int
    peak_extra_bytes: int
    gather_peak_extra_bytes: int
    gather_in_bytes: int
    seconds: dict[str, float]  # by link, GB/s
    lower_bound_seconds: dict[str, float]
    gather_seconds: dict[str, float]
    transfers: int
    picture: str

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def dry_plan(
    model: Model,
    source: str,
    target: str,
    *,
    devices: int = 0,
    per_node: int = 8,
    apart: bool = False,
    dtype: str = "bfloat16",
    depth: int = DEPTH,
    bucket_bytes: int = BUCKET_BYTES,
) -> PlanReport:
    """The plan of a model from one layout word to another. `apart`: the engine's devices come after the
    learner's; else both have the same. `devices` 0: as many as the words say."""
    wide, narrow = parse(source), parse(target)
    _check_devices(source, wide.size, target, narrow.size, devices, apart)
    return planned(model, wide, narrow, per_node, apart, dtype, depth, bucket_bytes)


def planned(
    shapes: Model,
    wide: ParallelSizes,
    narrow: ParallelSizes,
    per_node: int = 8,
    apart: bool = False,
    dtype: str = "",
    depth: int = DEPTH,
    bucket_bytes: int = BUCKET_BYTES,
) -> PlanReport:
    held = learner(shapes, wide, dtype=dtype)
    wanted = engine(shapes, narrow, first=wide.size if apart else 0, dtype=dtype)
    made = plan(held, wanted, Topology(per_node))
    where = "side by side on" if apart else "on"
    title = f"{shapes.name}: {wide} → {narrow}, {where} {len(made.ranks)} devices"
    return report(made, title, count(shapes), ring_bytes=depth * bucket_bytes, bucket_bytes=bucket_bytes)


def _check_devices(source: str, wide: int, target: str, narrow: int, devices: int, apart: bool) -> None:
    needed = wide + narrow if apart else max(wide, narrow)
    if devices and needed != devices:
        detail = f"{source} makes {wide} and {target} makes {narrow}"
        raise ReshardError(
            f"--devices is {devices}; {detail}{', side by side' if apart else ''}",
            f"say --devices {needed}, or other sizes",
        )


def report(made: Plan, title: str, parameters: int, *, ring_bytes: int, bucket_bytes: int) -> PlanReport:
    model_bytes = made.target.nbytes
    # What a switch that gathers everything needs: each rank gets all that it does not hold, and has room for all.
    least_held = min(_held_bytes(made).values())
    gathered = model_bytes - least_held

    def at(nbytes: int) -> dict[str, float]:
        return {f"{rate:g}": nbytes / (rate * 1e9) for rate in LINKS_GB_PER_S}

    return PlanReport(
        title=title,
        parameters=parameters,
        model_bytes=model_bytes,
        devices=len(made.ranks),
        bytes=made.bytes,
        lower_bound_bytes=made.lower_bound_bytes,
        by_distance=made.by_distance,
        most_in_bytes=max((0, *made.ingress.values())),
        most_out_bytes=max((0, *made.egress.values())),
        mean_in_bytes=made.bytes / len(made.target.ranks),
        lower_bound_most_bytes=made.lower_bound_busiest_bytes,
        peak_extra_bytes=ring_bytes + bucket_bytes if made.bytes else 0,
        gather_peak_extra_bytes=model_bytes,
        gather_in_bytes=gathered,
        seconds=at(made.busiest_bytes),
        lower_bound_seconds=at(made.lower_bound_busiest_bytes),
        gather_seconds=at(gathered),
        transfers=len(made.transfers),
        picture=picture(made),
    )


def _held_bytes(made: Plan) -> dict[int, int]:
    """What each source rank holds of the model, at the target's dtype."""
    from tidemill.reshard.layouts.layout import ITEM_BYTES, volume

    found = dict.fromkeys(made.ranks, 0)
    for name, entries in made.source.by_name.items():
        wanted = made.target.by_name.get(name, entries)
        seen: set[object] = set()
        for piece in made.source.pieces(name):
            if (piece.rank, piece.box) not in seen:
                seen.add((piece.rank, piece.box))
                found[piece.rank] += volume(piece.box) * ITEM_BYTES[wanted[0].dtype]
    return found


def render(found: PlanReport) -> str:
    """The report as text, one screen."""
    moved = found.bytes / found.lower_bound_bytes if found.lower_bound_bytes else 1.0
    lines = [
        found.title,
        f"{found.parameters / 1e9:.2f} B parameters, {_gb(found.model_bytes)}",
        "",
        _line("on the wire", f"{_gb(found.bytes)}, {moved:.3f} × the least possible, in {found.transfers:,} transfers"),
    ]
    lines += [_line(where, _gb(n)) for where, n in found.by_distance.items()]
    lines += [
        _line("into a device", f"{_gb(found.most_in_bytes)} at most, {_gb(int(found.mean_in_bytes))} on average"),
        _line("out of a device", f"{_gb(found.most_out_bytes)} at most"),
        _line("extra memory", f"{_gb(found.peak_extra_bytes)} at most a device: the ring and one bucket"),
    ]
    for rate, seconds in found.seconds.items():
        lower = found.lower_bound_seconds[rate]
        lines.append(_line(f"at {rate} GB/s a device", f"{seconds:.2f} s; no plan is faster than {lower:.2f} s"))
    gathered = ", ".join(f"{s:.2f} s at {rate} GB/s" for rate, s in found.gather_seconds.items())
    lines += [
        _line("gathering everything", f"{_gb(found.gather_peak_extra_bytes)} extra on every device, {gathered}"),
        "",
        found.picture,
    ]
    return "\n".join(lines)


def picture(made: Plan) -> str:
    """Who sends to whom: a row for each sender, darker for more; ranks in groups where there are many."""
    ranks = made.ranks
    group = -(-len(ranks) // PICTURE_SIDE)
    per_node = made.topology.per_node
    if group > 1 and per_node:
        group = -(-group // per_node) * per_node
    index = {rank: i // group for i, rank in enumerate(ranks)}
    side = 1 + max(index.values())
    grid = [[0] * side for _ in range(side)]
    for (sender, receiver), n in made.links.items():
        grid[index[sender]][index[receiver]] += n
    most = max((max(row) for row in grid), default=0)
    if not most:
        return "nothing moves"
    what = "rank" if group == 1 else f"{group} ranks"
    head = f"rows send, columns receive; one {'cell a' if group == 1 else 'cell for'} {what}; █ is {_gb(most)}"
    body = [f"{ranks[i * group]:>5} │{''.join(2 * _shade(n, most) for n in row)}│" for i, row in enumerate(grid)]
    return "\n".join([head, *body])


def _shade(n: int, most: int) -> str:
    return SHADES[-(-n * (len(SHADES) - 1) // most)]


def _line(name: str, text: str) -> str:
    return f"  {name:<22}{text}"


def _gb(n: int) -> str:
    if n >= 1e9:
        return f"{n / 1e9:,.1f} GB"
    return f"{n / 1e6:,.1f} MB"
