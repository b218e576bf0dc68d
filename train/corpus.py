"""From files to one file of tokens with a frozen held-out part and fingerprints of both.

Takes a DataSpec, gives a Corpus and `tokens.bin` (training tokens, then held-out tokens) in a cache folder.
It must not import torch: launching prepares the data, so that what is wrong with it is said before a start.
"""

import hashlib
import os
import shutil
import sys
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from train.report import write_json
from train.spec import DataSpec, ModelSpec, Problem, Spec, as_typed

_STDLIB_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_CHUNK_CHARS = 1 << 20
_ARRAY_CODE = {"uint8": "B", "uint16": "H", "uint32": "I"}
TOKENS_FILE = "tokens.bin"
TOKEN_BYTES = {"uint8": 1, "uint16": 2, "uint32": 4}

Encode = Callable[[str], list[int] | bytes]


class DataError(Exception):
    """Something is wrong with the data that the config names."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Corpus(Spec):
    """Tokens on disk, in little-endian numbers; corpus.json beside them."""

    folder: str
    """Folder of tokens.bin."""
    token_dtype: Literal["uint8", "uint16", "uint32"]
    train_tokens: int
    """Tokens from the start of the file on."""
    eval_tokens: int
    """Held-out tokens, after the training tokens."""
    eval_text_bytes: int
    """UTF-8 bytes that the held-out tokens stand for."""
    documents: int
    data_fingerprint: str
    """SHA-256 of the training tokens."""
    eval_fingerprint: str
    """SHA-256 of the held-out tokens."""


def prepare(data: DataSpec, model: ModelSpec, seq_len: int, cache_dir: Path) -> Corpus:
    """The corpus of `data`, from the cache where the same files were read before.

    Documents are ordered by the SHA-256 of their content and the tail of the stream is held out: the split
    depends on the content alone. Raises DataError for what a user can mend, OSError when the cache cannot
    be written.
    """
    files = _stdlib_files() if data.source == "stdlib" else _text_files(data)
    folder = cache_dir / _cache_key(data, files)
    record = folder / "corpus.json"
    if record.exists():
        corpus = Corpus.model_validate_json(record.read_text(encoding="utf-8"))
    else:
        corpus = _build(data, files, folder)
    _check_vocabulary(data, model)
    _check_length(data, corpus, seq_len)
    return corpus


def _problem(key: str, value: object, why: str, fix: str) -> DataError:
    return DataError(Problem(key=key, value=as_typed(value), why=why, fix=fix))


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [
        path
        for path in sorted(root.rglob("*.py"))
        if not _STDLIB_LEFT_OUT & set(path.relative_to(root).parts) and path.is_file()
    ]


def _text_files(data: DataSpec) -> list[Path]:
    named = (data.path,) if isinstance(data.path, str) else data.path or ()
    files: list[Path] = []
    for name in named:
        path = Path(name).expanduser()
        if not path.exists():
            raise _problem("data.path", name, "there is no such file or folder", "Set it to one that exists")
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        if not found:
            raise _problem("data.path", name, "the folder holds no files", "Set it to a folder of UTF-8 text")
        files += found
    return files


def _cache_key(data: DataSpec, files: list[Path]) -> str:
    digest = hashlib.sha256(f"{sys.byteorder} {data.tokenizer} {data.eval_fraction}".encode())
    tokenizer = [] if data.tokenizer == "bytes" else [Path(data.tokenizer).expanduser()]
    for path in [*files, *(p for p in tokenizer if p.exists())]:
        stat = path.stat()
        digest.update(f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]


def _build(data: DataSpec, files: list[Path], folder: Path) -> Corpus:
    encode, dtype = _encoder(data)
    texts = sorted(_documents(data, files), key=lambda item: item[0])
    if not texts:
        raise _problem("data.path", data.path, "the files are empty", "Set it to UTF-8 text")
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    aside.mkdir(parents=True, exist_ok=True)
    try:
        counts = []
        with (aside / TOKENS_FILE).open("wb") as out:
            for _, path in texts:
                written = 0
                for chunk in _chunks(path.read_bytes().decode(), _CHUNK_CHARS):
                    tokens = array(_ARRAY_CODE[dtype], _encoded(data, encode, chunk, path))
                    tokens.tofile(out)
                    written += len(tokens)
                counts.append(written)
        corpus = _split(data, aside, folder, dtype, counts, [path for _, path in texts], encode)
        write_json(aside / "corpus.json", corpus.model_dump_json(indent=2))
        try:
            aside.rename(folder)
        except OSError:
            if not (folder / "corpus.json").exists():  # another process built the same, and was first
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return corpus


def _documents(data: DataSpec, files: list[Path]) -> Iterator[tuple[str, Path]]:
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise _problem(
                "data.path",
                data.path,
                f"{path} cannot be read ({error.strerror})",
                "Make it readable, or name only the text files",
            ) from error
        try:
            content.decode()
        except UnicodeDecodeError as error:
            if data.source == "stdlib":
                continue  # a few modules of the library declare another encoding
            raise _problem(
                "data.path",
                data.path,
                f"{path} is not UTF-8 at byte {error.start}",
                "Convert it, or name only the text files",
            ) from error
        if content:
            yield hashlib.sha256(content).hexdigest(), path


def _chunks(text: str, size: int) -> Iterator[str]:
    """Pieces of at most `size` characters, cut behind line ends where there are any."""
    begin = 0
    while begin < len(text):
        end = min(len(text), begin + size)
        if end < len(text):
            line_end = text.rfind("\n", begin, end)
            end = line_end + 1 if line_end > begin else end
        yield text[begin:end]
        begin = end


def _encoder(data: DataSpec) -> tuple[Encode, Literal["uint8", "uint16", "uint32"]]:
    if data.tokenizer == "bytes":
        return str.encode, "uint8"
    tokenizer = _load_tokenizer(data.tokenizer)
    dtype: Literal["uint16", "uint32"] = "uint16" if _vocabulary(tokenizer) <= 1 << 16 else "uint32"
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids, dtype


def _encoded(data: DataSpec, encode: Encode, chunk: str, path: Path) -> list[int] | bytes:
    try:
        return encode(chunk)
    except Exception as error:  # the tokenizers package raises nothing narrower
        raise _problem(
            "data.tokenizer",
            data.tokenizer,
            f"it cannot encode {path} ({error})",
            "Set it to a tokenizer with a token for the unknown, or to bytes",
        ) from error


def _vocabulary(tokenizer: Any) -> int:
    """Rows of an embedding for all its tokens; their numbers may have gaps."""
    return int(max(tokenizer.get_vocab().values(), default=-1) + 1)


def _load_tokenizer(name: str) -> Any:
    try:
        from tokenizers import Tokenizer  # late: an optional extra, only for data.tokenizer=FILE
    except ImportError as error:
        raise _problem(
            "data.tokenizer",
            name,
            "reading it needs the package tokenizers",
            "Install it (pip install 'orchestrator[tokenizer]'), or set data.tokenizer=bytes",
        ) from error
    path = Path(name).expanduser()
    if not path.is_file():
        raise _problem("data.tokenizer", name, "there is no such file", "Set it to bytes or to a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        raise _problem(
            "data.tokenizer",
            name,
            f"not a tokenizer file ({error})",
            "Set it to a Hugging Face tokenizer.json",
        ) from error


def _split(
    data: DataSpec,
    aside: Path,
    folder: Path,
    dtype: Literal["uint8", "uint16", "uint32"],
    counts: list[int],
    paths: list[Path],
    encode: Encode,
) -> Corpus:
    total = sum(counts)
    eval_tokens = int(total * data.eval_fraction)
    train_tokens = total - eval_tokens
    boundary = train_tokens * TOKEN_BYTES[dtype]
    return Corpus(
        folder=str(folder.resolve()),
        token_dtype=dtype,
        train_tokens=train_tokens,
        eval_tokens=eval_tokens,
        eval_text_bytes=eval_tokens if data.tokenizer == "bytes" else _tail_bytes(eval_tokens, counts, paths, encode),
        documents=len(paths),
        data_fingerprint=_sha256(aside / TOKENS_FILE, 0, boundary),
        eval_fingerprint=_sha256(aside / TOKENS_FILE, boundary, total * TOKEN_BYTES[dtype]),
    )


def _sha256(path: Path, begin: int, end: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            block = file.read(min(1 << 20, end - begin))
            digest.update(block)
            begin += len(block)
    return digest.hexdigest()


def _tail_bytes(eval_tokens: int, counts: list[int], paths: list[Path], encode: Encode) -> int:
    """UTF-8 bytes behind the last `eval_tokens` tokens; within a chunk that is cut, by its share of tokens."""
    remaining, text_bytes = eval_tokens, 0
    for count, path in zip(reversed(counts), reversed(paths), strict=True):
        if count <= remaining:
            remaining, text_bytes = remaining - count, text_bytes + path.stat().st_size
            continue
        for chunk in reversed(list(_chunks(path.read_bytes().decode(), _CHUNK_CHARS))):
            chunk_tokens = len(encode(chunk))
            taken = min(chunk_tokens, remaining)
            text_bytes += round(len(chunk.encode()) * taken / max(chunk_tokens, 1))
            remaining -= taken
        break
    return text_bytes


def _check_vocabulary(data: DataSpec, model: ModelSpec) -> None:
    if data.tokenizer == "bytes":
        return
    size = _vocabulary(_load_tokenizer(data.tokenizer))
    if size > model.vocab_size:
        raise _problem(
            "model.vocab_size",
            model.vocab_size,
            f"data.tokenizer={data.tokenizer} has {size} tokens",
            f"Set it to {size} or more",
        )


def _check_length(data: DataSpec, corpus: Corpus, seq_len: int) -> None:
    for part, tokens in (("training", corpus.train_tokens), ("held-out", corpus.eval_tokens)):
        if tokens < seq_len + 1:
            key, value = ("data.path", data.path) if data.source == "text" else ("data", data.source)
            raise _problem(
                key,
                value,
                f"its {part} part has {tokens} tokens, and one sequence with its target takes "
                f"train.seq_len + 1 = {seq_len + 1}",
                "Give it more text, lower train.seq_len, or change data.eval_fraction",
            )
