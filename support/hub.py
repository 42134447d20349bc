"""The Hugging Face Hub: which files hold a dataset's text, how they get here, and what the `datasets` library reads.

`datasets` is imported here alone, and only inside functions, which fineweb.py calls in other processes: it is large.
"""

import dataclasses
import functools
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from support.cli import InputError, first_line
from support.files import atomic_path
from support.sources import COMPRESSED, DISK_FULL, SPAN_BYTES, Layout, Source, unpack

REPOSITORY = "HuggingFaceFW/fineweb-edu"
RETRY_SECONDS = (1, 4, 16, 64)  # the waits before the Hub is asked again in the middle of a run; at its start: 1
VALIDATION = ("validation", "valid", "val", "dev")  # what a split for validation is called
TEXT_TYPES = ("string", "large_string", "string_view")
# `datasets`' module for files of a kind that we read ourselves -> how their names end
READ_HERE = {"parquet": (".parquet",)} | {module: tuple(suffix + end for end in ("", *COMPRESSED))
                                          for module, suffix in (("json", ".jsonl"), ("text", ".txt"))}
PIECE_BYTES = 32 << 20  # of text: what is read of a stream at a time


# ---------------------------------------------------------------------------------------------------------------------
# Asking the Hub


def ask_hub(what: str, call: Callable[[], Any], waits: tuple[int, ...] = RETRY_SECONDS[:1]) -> Any:
    """call(), made again while the Hub or the way to it fails. Raises InputError when that does not help."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()  # its retries are told in many lines, its failure below in one
    disable_progress_bars()
    for wait in (*waits, None):
        try:
            return call()
        except errors.GatedRepoError:
            raise InputError(f"{what}: its owner gives access on its page on the Hub, to those who ask for it there; "
                             "then `hf auth login`, or set HF_TOKEN") from None
        except errors.RepositoryNotFoundError:
            raise InputError(f"{what}: no folder here, and not on the Hub, or private there: then `hf auth login`, or "
                             "set HF_TOKEN, as somebody who may read it") from None
        except errors.HFValidationError:
            raise InputError(f"{what}: no folder here, and no name that the Hub could have") from None
        except Exception as error:  # the Hub's, its HTTP library's, the socket's: they share no base
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            status = getattr(getattr(error, "response", None), "status_code", 500)
            if wait is None or constants.HF_HUB_OFFLINE or (status < 500 and status not in (408, 429)):
                raise InputError(f"{what}: the Hub could not be asked ({first_line(error)}); the same command tries "
                                 "again and goes on, --input takes local files") from None
        time.sleep(wait)


def list_folders(what: str, repository: str, commit: str, folders: Iterable[str]) -> dict[str, int]:
    """{path: bytes} of the files in some folders of a repository ("" is its root). Raises InputError."""
    from huggingface_hub import HfApi

    sizes = {}
    for folder in folders:
        options = {"path_in_repo": folder or None, "repo_type": "dataset", "revision": commit}
        tree = ask_hub(what, lambda options=options: list(HfApi().list_repo_tree(repository, **options)))
        sizes |= {file.path: file.size for file in tree if hasattr(file, "size")}
    return sizes


def find_fineweb(name: str, layout: Layout) -> Source:
    """A part of FineWeb-Edu at its newest commit. Raises InputError."""
    from huggingface_hub import HfApi

    folder = f"sample/{name.removeprefix('sample-')}" if name.startswith("sample-") else f"data/{name}"
    what = f"--name {name}: {REPOSITORY}, {folder}"
    commit = ask_hub(what, lambda: HfApi().dataset_info(REPOSITORY).sha)
    sizes = list_folders(what, REPOSITORY, commit, [folder])
    files = tuple(sorted((path, size) for path, size in sizes.items() if path.endswith(".parquet")))
    return Source(f"{REPOSITORY} {name}", files, layout, REPOSITORY, commit)


def fetch(repository: str, commit: str, name: str, folder: Path) -> Path:
    """folder/name, a file of the Hub; a transfer that breaks off goes on from there. Raises InputError."""
    from huggingface_hub import hf_hub_download

    options = {"repo_type": "dataset", "revision": commit, "local_dir": folder}
    return Path(ask_hub(name, lambda: hf_hub_download(repository, name, **options), RETRY_SECONDS))


def make_local(file: tuple[int, str], source: Source, folder: Path) -> Path:
    """Source file (index, path) if it is here and plain; else a copy in `folder`, to be read from its middle."""
    index, name = file
    copy = folder / f"{index:06d}_{Path(name).stem}"
    if not name.endswith(COMPRESSED):
        return fetch(source.dataset, source.commit, name, folder) if source.commit else Path(name)
    if not source.commit:
        unpack(Path(name), copy)
    elif not copy.exists():
        unpack(fetched := fetch(source.dataset, source.commit, name, folder), copy)
        fetched.unlink()
    return copy


# ---------------------------------------------------------------------------------------------------------------------
# Datasets


def import_datasets() -> ModuleType:
    try:
        import datasets
    except ImportError:
        raise InputError("--dataset needs a library: pip install datasets") from None
    datasets.config.TORCH_AVAILABLE = False  # or it imports torch
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # what it logs of an error stands in the error, too
    return datasets


def ask_datasets(what: str, call: Callable[[], Any]) -> Any:
    """call(), which is `datasets`' and may fail in any way. Raises InputError, which says the same in one line."""
    try:
        return call()
    except Exception as error:
        if isinstance(error, InputError) or getattr(error, "errno", None) in DISK_FULL:
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{what}: {message[:600]}") from None


def find_dataset(name: str, config: str, split: str, layout: Layout) -> Source:
    """What `--dataset name` means, as the `datasets` library understands it. Raises InputError.

    name: a folder, or a repository of the Hub, whose newest commit is taken. config, split: "" for the only one, or
    the library's choice. layout: what the flags say of it; a column that they don't name is found.
    """
    datasets = import_datasets()
    what, commit = f"--dataset {name}{config and f' --config {config}'}", None
    if Path(name).is_dir():
        dataset, source = str(Path(name).absolute()), "folder"
    else:
        from huggingface_hub import HfApi

        info = ask_hub(what, lambda: HfApi().dataset_info(name))
        ask_hub(what, lambda: HfApi().auth_check(info.id, repo_type="dataset"))
        dataset, source, commit = info.id, name, info.sha
    builder = ask_datasets(what, lambda: datasets.load_dataset_builder(dataset, config or None, revision=commit))
    paths = {str(name): paths for name, paths in (builder.config.data_files or {}).items()}
    split = split or ("train" if "train" in paths or len(paths) != 1 else next(iter(paths)))
    if split not in paths:
        raise InputError(f"{what}: no split {split!r}; --split names one of: {', '.join(paths) or 'none'}")
    validation = next((other for other in VALIDATION if other in paths and split == "train"), "")
    stream = ask_datasets(what, lambda: builder.as_streaming_dataset(split))
    columns = ask_datasets(what, lambda: column_types(stream))
    layout = choose_columns(what, layout, columns)
    first, rest = ([path.removeprefix(f"hf://datasets/{dataset}@{commit}/") for path in paths.get(part, [])]
                   for part in (validation, split))
    if commit:
        folders = dict.fromkeys(str(PurePosixPath(path).parent).removeprefix(".") for path in [*first, *rest])
        sizes = list_folders(what, dataset, commit, folders)
    else:
        sizes = {path: Path(path).stat().st_size for path in [*first, *rest] if Path(path).exists()}
    untouched = all(getattr(builder.config, field.name) == field.default for field in dataclasses.fields(builder.config)
                    if field.name not in ("name", "version", "data_dir", "data_files", "description"))
    here = (untouched and all(path.endswith(READ_HERE.get(builder.name, ())) for path in [*first, *rest])
            and all(columns[column] in TEXT_TYPES for column in layout.columns))
    return Source(source, tuple((path, sizes.get(path, 0)) for path in [*first, *rest]), layout, dataset, commit,
                  builder.config.name, split, validation, len(first) if here else min(len(first), 1), stream=not here)


def column_types(stream: Any) -> dict[str, str]:
    """{column: type} of an IterableDataset, "string" for text; from its first rows where no schema says so."""
    if stream.features is None:
        rows = list(stream.take(100))
        values = {key: value for row in rows for key, value in row.items() if value is not None}
        kinds = {key: type(values.get(key)).__name__ for row in rows for key in row}
        return {key: "string" if kind == "str" else kind for key, kind in kinds.items()}
    return {key: feature.dtype if type(feature).__name__ == "Value" else type(feature).__name__
            for key, feature in stream.features.items()}


def choose_columns(what: str, layout: Layout, columns: dict[str, str]) -> Layout:
    """The layout with the column that holds the text. Raises InputError, naming them all, when it can't be told."""
    texts = [column for column, kind in columns.items() if kind in TEXT_TYPES]
    problem = ""
    if not texts:
        problem = "no column of text"
    elif not (layout.template or layout.column):
        layout = layout._replace(column="text" if "text" in texts else texts[0])
        if layout.column != "text" and len(texts) > 1:
            problem = f"{len(texts)} columns of text: --text-column names one, --template joins several"
    elif missing := [column for column in layout.columns if column not in columns]:
        problem = f"no column {missing[0]!r}"
    elif not layout.template and layout.column not in texts:
        problem = f"no text in column {layout.column!r}"
    if problem:
        all_columns = ", ".join(f"{column} ({kind})" for column, kind in columns.items()) or "none"
        raise InputError(f"{what}: {problem}; its columns: {all_columns}")
    return layout


# ---------------------------------------------------------------------------------------------------------------------
# Streams: files of other kinds, which `datasets` reads, laid down here in pieces of a kind that we read


class Stream:
    """The texts of a split, in order. Of several ranks each has some of the files, or of their rows."""

    def __init__(self, source: Source, split: str, rank: int, world_size: int):
        builder = import_datasets().load_dataset_builder(source.dataset, source.config, revision=source.commit)
        self.rows = builder.as_streaming_dataset(split).select_columns(source.layout.columns)
        if world_size > 1:
            from datasets.distributed import split_dataset_by_node

            self.rows = split_dataset_by_node(self.rows, rank, world_size)
        self.document = source.layout.document
        self.piece = -1  # the next one; none before seek() and after an error

    def seek(self, piece: int, state: dict[str, Any] | None) -> None:
        """Goes to the beginning of a piece, where the rows' state was `state`; None for the first row."""
        self.rows.load_state_dict(state)
        self.piece, self.state, self.texts = piece, state, map(self.document, self.rows)

    def batches(self) -> Iterator[list[str | None]]:
        """The texts from here on, about SPAN_BYTES at a time."""
        texts, size = [], 0
        for text in self.texts:
            if not isinstance(text, str | None):
                raise TypeError(f"a row has no text but {type(text).__name__} {text!r:.40}; name another --text-column")
            texts.append(text)
            size += len(text or "") + 1
            if size >= SPAN_BYTES:
                yield texts
                texts, size = [], 0
        if texts:
            yield texts

    def write_piece(self, path: Path, size: int | None) -> bool:
        """Writes the next `size` bytes of text, or all, as a parquet file with a column "text"; its metadata keep the
        rows' state before and after it. False, and no file, at the end."""
        import pyarrow
        import pyarrow.parquet

        schema, batches, piece = pyarrow.schema({"text": pyarrow.large_string()}), self.batches(), self.piece
        self.piece = -1
        if not (first := next(batches, None)):
            return False
        with atomic_path(path) as partial, pyarrow.parquet.ParquetWriter(partial, schema) as file:
            for texts in itertools.chain([first], itertools.islice(batches, size and size // SPAN_BYTES - 1)):
                file.write(pyarrow.table({"text": texts}, schema))
            before, self.state = self.state, self.rows.state_dict()
            file.add_key_value_metadata({"before": json.dumps(before), "after": json.dumps(self.state)})
        self.piece = piece + 1
        return True


@functools.lru_cache(maxsize=1)
def open_stream(*arguments: Any) -> Stream:
    return Stream(*arguments)


def make_piece(file: tuple[int, str], source: Source, state: Any, share: tuple[int, int], folder: Path) -> Path | None:
    """Piece `index` of a stream as a file in `folder`; None after the last one. Raises InputError.

    The validation split is piece 0, whole; the others are of the training split. file: (index, nothing). state: that of
    the rows before piece `index`, unless the piece before lies in `folder`, or has just been made by this process.
    share: (rank, world_size).
    """
    index, _ = file
    path, before = folder / f"{index:06d}.parquet", folder / f"{index - 1:06d}.parquet"
    split, first = source.split, source.first_train
    if index < source.first_train:
        split, first, share = source.validation, 0, (0, 1)

    def make() -> bool:
        stream = open_stream(source, split, *share)
        if stream.piece != index:
            stream.seek(index, None if index == first else read_states(before)[1] if before.exists() else state)
        return stream.write_piece(path, PIECE_BYTES if split == source.split else None)

    if path.exists() or ask_datasets(f"--dataset {source.name}", make):
        return path
    if split == source.split:
        return None
    raise InputError(f"--dataset {source.name}: no rows in the split {split!r}")


def read_states(path: Path) -> tuple[Any, Any]:
    """What the metadata of a piece say: the state of the rows before it, and after it."""
    import pyarrow.parquet

    metadata = pyarrow.parquet.read_metadata(path).metadata
    return json.loads(metadata[b"before"]), json.loads(metadata[b"after"])
