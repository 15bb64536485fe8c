"""Files to examples: JSONL, CSV, Parquet, Hugging Face dataset folders. Bad rows are named and counted."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.data import conversations, known
from tidemill.data.pictures.opened import NoPicture
from tidemill.data.pictures.shown import of_row
from tidemill.data.prompts import template_columns
from tidemill.data.rewrite import answer_pattern, rewriter
from tidemill.data.source import Example, FileRows, Message
from tidemill.errors import DataError, MissingExtra, did_you_mean
from tidemill.models.box import hub

if TYPE_CHECKING:
    from tidemill.data.streamed.rows import StreamedRows
    from tidemill.recipe.config import Data

OUR_COLUMNS = ("prompt", *conversations.COLUMNS, "answer", "response", "image", "images")
FORMS = "a .json file is a list of objects; a .jsonl file has one object per line"
REMEDY = "fix the row, or set data.on_bad_row=skip to leave such rows out"
UTF8 = "save it as UTF-8, for example with iconv -t utf-8"
KINDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt")
TEXT = "text"  # the column of a document to learn from as it is


@dataclass(frozen=True, slots=True)
class BadRow:
    where: str
    why: str


Row = tuple[str, dict[str, Any]] | BadRow


def read(path: str, data: Data, split: str | None = None) -> FileRows | StreamedRows:
    """All usable rows of a file or folder: read now, or where they are large, when they are asked for."""
    from tidemill.data.streamed import rows

    file = at_hand(path)
    files = files_of(file, split or data.split)
    if rows.are_streamed(files, data):
        return rows.open_rows(path, files, data)
    examples, bad = to_examples(path, (row for one in files for row in read_file(one)), data)
    if not examples:
        raise DataError(
            f"{path} has no usable row: {bad[0].where}: {bad[0].why}" if bad else f"{path} is empty: it has no rows",
            "check how the file was written",
        )
    return FileRows(path, tuple(examples), len(bad), f"{bad[0].where}: {bad[0].why}" if bad else "")


def read_whole(path: str, data: Data, split: str | None = None) -> FileRows:
    """Held-out rows are asked again and again, so they are in memory, however large the file."""
    rows = read(path, data.model_copy(update={"stream": False}), split)
    assert isinstance(rows, FileRows)
    return rows


def at_hand(path: str) -> Path:
    """The file or folder of a data source, fetched from the hub where the source is one of the hub's data sets."""
    file = known.folder(path) or Path(path).expanduser()
    if file.exists():
        return file
    if known.is_on_hub(path):
        return hub.fetch_data(path)
    raise missing(path)


def missing(path: str) -> DataError:
    from tidemill.data.generators import registry

    if path in known.KNOWN:
        return known.missing(path)
    file = Path(path).expanduser()
    siblings = [str(file.parent / p.name) for p in file.parent.iterdir()] if file.parent.is_dir() else []
    return DataError(
        f"data.source {path!r} is neither a file, nor a folder, nor a generator"
        f"{did_you_mean(path, [*siblings, *registry()])}",
        f"generators: {', '.join(registry())}, reasoning_gym:TASK; files: {' '.join(KINDS)}",
    )


def read_file(file: Path) -> Iterator[Row]:
    if file.stat().st_size == 0:
        raise DataError(f"{file} is empty: it has no bytes", "check how the file was written or copied")
    match file.suffix.lower():
        case ".jsonl":
            return read_jsonl(file)
        case ".json":
            return read_json(file)
        case ".csv":
            return read_csv(file, ",")
        case ".tsv":
            return read_csv(file, "\t")
        case ".parquet":
            return read_parquet(file)
        case ".arrow":
            return read_arrow(file)
        case ".txt":
            return read_text(file)
    raise DataError(f"{file}: files that end in {file.suffix or 'nothing'} cannot be read", f"use {' '.join(KINDS)}")


def read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            row = parsed_line(file, number, line)
            if row is not None:
                yield row


def parsed_line(file: Path, number: int, line: bytes) -> Row | None:
    """One row of a JSONL file; None: a blank line."""
    if not line.strip():
        return None
    where = f"{file}:{number}"
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(where, f"is not UTF-8 text ({error.reason} at byte {error.start})")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadRow(where, f"is not JSON ({error})")
    return (where, row) if isinstance(row, dict) else BadRow(where, f"is {kind(row)}, not an object")


def read_json(file: Path) -> Iterator[Row]:
    """One list of objects; a file of one object per line is taken as JSONL."""
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from read_jsonl(file)
            return
        raise DataError(f"{file}:{error.lineno}: is not JSON ({error.msg})", f"fix it there; {FORMS}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 text ({error.reason} at byte {error.start})", UTF8) from error
    if not isinstance(content, list):
        raise DataError(f"{file} holds {kind(content)}, not a list of objects", FORMS)
    for number, row in enumerate(content, 1):
        where = f"{file}:row {number}"
        yield (where, row) if isinstance(row, dict) else BadRow(where, f"is {kind(row)}, not an object")


def read_text(file: Path) -> Iterator[Row]:
    """The file is one document."""
    try:
        yield str(file), {TEXT: file.read_bytes().decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        yield BadRow(str(file), f"is not UTF-8 text ({error.reason} at byte {error.start})")


def kind(value: Any) -> str:
    """What JSON calls a value, with its article."""
    kinds = {list: "a list", dict: "an object", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def read_csv(file: Path, delimiter: str) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        while True:
            where = f"{file}:{reader.line_num + 1}"
            try:
                fields = next(reader, None)
            except csv.Error as error:
                yield BadRow(where, f"is not CSV ({error})")
                return  # after a broken quote no later line can be trusted
            except UnicodeDecodeError as error:
                raise DataError(f"{where}: is not UTF-8 text ({error.reason})", UTF8) from error
            if fields is None:
                return
            if not fields:
                continue
            if header is None:
                header = fields
            elif len(fields) != len(header):
                yield BadRow(where, f"has {len(fields)} fields where the header has {len(header)}")
            else:
                yield where, dict(zip(header, fields))


def read_parquet(file: Path) -> Iterator[Row]:
    arrow = pyarrow(file)
    with readable(arrow, file, "Parquet"):
        yield from rows_of(file, arrow.parquet.ParquetFile(file).iter_batches())


def read_arrow(file: Path) -> Iterator[Row]:
    """The stream (or file) form of Arrow that Hugging Face's save_to_disk writes."""
    arrow = pyarrow(file)
    with readable(arrow, file, "Arrow"), arrow.memory_map(str(file)) as source:
        try:
            batches: Iterable[Any] = arrow.ipc.open_stream(source)
        except arrow.ArrowInvalid:
            opened = arrow.ipc.open_file(source)
            batches = (opened.get_batch(i) for i in range(opened.num_record_batches))
        yield from rows_of(file, batches)


def rows_of(file: Path, batches: Iterable[Any]) -> Iterator[Row]:
    rows = (row for batch in batches for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        yield f"{file}:row {number}", row


@contextmanager
def readable(arrow: Any, file: Path, form: str) -> Iterator[None]:
    try:
        yield
    except (arrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file} cannot be read as {form}: {error}", "the file may be cut short; copy it again"
        ) from error


def pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra(f"reading {file}", "pyarrow", "data") from None
    return pyarrow


def files_of(path: Path, split: str | None) -> list[Path]:
    """The data files of a file or folder: a folder of save_to_disk (one dataset or a dict of splits), or any folder of
    data files."""
    if not path.is_dir():
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text()).get("splits", [])
        return files_of(path / choose_split(path, splits, split), None)
    if (path / "state.json").is_file():
        names = [entry["filename"] for entry in json.loads((path / "state.json").read_text())["_data_files"]]
        return [path / name for name in names]
    files = sorted(p for p in path.rglob("*") if p.suffix.lower() in KINDS and p.name != "dataset_infos.json")
    files = [p for p in files if p.suffix.lower() != ".txt"] or files  # beside data, texts are licences and notes
    if not files:
        raise DataError(f"{path} has no data file", f"data files end in {' '.join(KINDS)}")
    if len(files) > 1 or split:
        splits = list(dict.fromkeys(split_of(p, path) for p in files))
        if split or "train" in splits:
            chosen = choose_split(path, splits, split)
            files = [p for p in files if split_of(p, path) == chosen]
    return files


def split_of(file: Path, folder: Path) -> str:
    """`data/train-00000-of-00002.parquet` and `train/part.jsonl` both belong to train."""
    for part in file.relative_to(folder).parts:
        stem = re.split(r"[-_.]", part)[0]
        if stem in ("train", "test", "validation", "valid", "dev"):
            return stem
    return re.split(r"[-.]", file.name)[0]


def choose_split(folder: Path, splits: list[str], wanted: str | None) -> str:
    if wanted is None and len(splits) == 1:
        return splits[0]
    wanted = wanted or "train"
    if wanted not in splits:
        raise DataError(
            f"{folder} has no split {wanted!r}{did_you_mean(wanted, splits)}",
            f"choose one with data.split: {', '.join(splits)}",
        )
    return wanted


def to_examples(path: str, rows: Iterable[Row], data: Data) -> tuple[list[Example], list[BadRow]]:
    examples: list[Example] = []
    bad: list[BadRow] = []
    make = maker(data)
    wrong_names: DataError | None = None
    for row in rows:
        made, error = make(row)
        wrong_names = wrong_names or error
        if isinstance(made, Example):
            examples.append(made)
        elif data.on_bad_row == "fail":
            raise wrong_names or DataError(f"{made.where}: {made.why}", REMEDY)
        else:
            bad.append(made)
    if not examples and wrong_names:  # no row has it: the recipe's mistake, not the rows'
        raise wrong_names
    return examples, bad


def maker(data: Data) -> Callable[[Row], tuple[Example | BadRow, DataError | None]]:
    """Return a function from a row to its example, or to what is wrong with it; with an error where the recipe may
    have named the wrong column."""
    pattern, rewrite, needed = answer_pattern(data), rewriter(data), needed_columns(data)

    def make(row: Row) -> tuple[Example | BadRow, DataError | None]:
        if isinstance(row, BadRow):
            return row, None
        made = to_example(row[0], row[1], data, pattern)
        if error := missing_column(row[0], row[1], needed):
            return BadRow(row[0], error.message.removeprefix(f"{row[0]}: ")), error
        return made if isinstance(made, BadRow) else rewrite(made), None

    return make


def needed_columns(data: Data) -> list[tuple[str, set[str]]]:
    """The recipe's key and the columns of which a row must have one."""
    needed = [(f"data.columns.{ours}", {theirs}) for ours, theirs in data.columns.items()]
    if data.template is not None:
        names = [name for name in template_columns(data.template) if name not in (*data.columns, "answer")]
        return needed + [("data.template", {name}) for name in names]
    own = {"prompt", TEXT, *conversations.COLUMNS}
    return needed if own & {*data.columns} else [*needed, ("", own)]


def missing_column(where: str, row: Mapping[str, Any], needed: list[tuple[str, set[str]]]) -> DataError | None:
    for key, names in needed:
        if names & row.keys():
            continue
        if key:
            (name,) = names
            message = f"{where}: {key} names column {name!r}, which the row does not have{did_you_mean(name, row)}"
            return DataError(message, f"its columns are {', '.join(row)}")
        near = did_you_mean("prompt", row) or did_you_mean("question", row)
        message = f"{where}: there is no column 'prompt', 'messages', 'conversations' or 'text'{near}"
        return DataError(message, f"name it with data.columns.prompt; the row's columns are {', '.join(row)}")
    return None


def to_example(where: str, row: Mapping[str, Any], data: Data, pattern: re.Pattern[str] | None) -> Example | BadRow:
    named = {**row, **{ours: row.get(theirs) for ours, theirs in data.columns.items()}}
    aside = {*OUR_COLUMNS, *(data.columns[name] for name in ("image", "images") if name in data.columns)}
    meta = {name: value for name, value in named.items() if name not in aside}
    prompt, response = named.get("prompt"), named.get("response")
    try:
        messages = conversations.messages_of(named) if prompt is None else None
    except conversations.NoConversation as wrong:
        return BadRow(where, str(wrong))
    if messages is not None:
        if messages[-1]["role"] == "assistant":
            prompt, response = messages[:-1], messages[-1]["content"] if response is None else response
        else:
            prompt = messages
    try:
        images, shown = of_row(
            named, prompt if isinstance(prompt, list) else None, Path(where.rpartition(":")[0]).parent
        )
    except NoPicture as wrong:
        return BadRow(where, f"has an image that {wrong}")
    prompt = shown if isinstance(prompt, list) else prompt
    if prompt is None and data.template is None and TEXT in named:
        return as_document(where, named[TEXT], meta)
    if prompt is None and data.template is None:
        return BadRow(where, "has no prompt")
    if isinstance(prompt, list):
        if why := wrong_messages(prompt):
            return BadRow(where, why)
    elif prompt is not None and not isinstance(prompt, str):
        return BadRow(where, f"has a prompt that is {kind(prompt)}, not text or a list of messages")
    elif data.template is None and not (prompt or "").strip():
        return BadRow(where, "has an empty prompt")
    answer = as_text(named.get("answer"))
    if pattern is not None:
        found = pattern.search(answer)
        if found is None:
            return BadRow(where, f"has an answer that data.answer_pattern does not match: {answer[:60]!r}")
        answer = found[1].strip()
    said = None if response is None else as_text(response)
    return Example(prompt or "", answer, said, meta, where, messages, images=images)


def as_document(where: str, text: Any, meta: Mapping[str, Any]) -> Example | BadRow:
    if not isinstance(text, str):
        return BadRow(where, f"has a text that is {kind(text)}")
    if not text.strip():
        return BadRow(where, "has an empty text")
    return Example("", meta={name: value for name, value in meta.items() if name != TEXT}, where=where, text=text)


def wrong_messages(messages: list[Message]) -> str | None:
    if not messages:
        return "has an empty list of messages"
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return "has a message without role and content"
    return None


def as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
