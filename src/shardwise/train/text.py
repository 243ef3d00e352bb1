"""Find text, tokenize it once into a file of integers, and map that file as one token stream."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.errors import ConfigError
from shardwise.keys import shown

_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


class Tokenizer(Protocol):
    """Text to token ids and back; `separator` ids stand between documents."""

    vocab: int
    name: str

    def encode(self, text: str) -> Sequence[int] | np.ndarray:
        """Return the ids of a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""


class ByteTokenizer:
    """Use the bytes of UTF-8 as tokens; vocabulary 256, byte 0 ends a document."""

    vocab = 256
    name = "bytes"

    def encode(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of a text, uint8 [num_bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of bytes; what is not UTF-8 shows as the replacement character."""
        return bytes(ids).decode("utf-8", errors="replace")


class _FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` package."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self.vocab: int = inner.get_vocab_size()
        self.name = name

    def encode(self, text: str) -> Sequence[int]:
        ids: list[int] = self._inner.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode(list(ids)))


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Return the tokenizer of a `tokenizer.json`, or bytes when path is None.

    **Raises** ConfigError: the file cannot be read, or the `tokenizers` package is not installed.
    """
    if path is None:
        return ByteTokenizer()
    try:
        from tokenizers import Tokenizer as TokenizerFile
    except ImportError:
        raise ConfigError(
            f"tokenizer: {path} needs the package `tokenizers`; "
            "install it with `pip install 'shardwise[tokenizers]'`, or leave the key out for bytes"
        ) from None
    try:
        content = path.read_bytes()
        inner = TokenizerFile.from_str(content.decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"tokenizer: {path} cannot be read: {error.strerror}") from None
    except Exception as error:  # the package raises plain Exception on a bad file
        raise ConfigError(f"tokenizer: {path} is not a tokenizer.json: {error}") from None
    return _FileTokenizer(inner, hashlib.sha256(content).hexdigest())


def find_documents(data: Path | None) -> list[Path]:
    """List the files to read, in an order that is the same on every rank.

    ``data`` is a file, a folder (hidden files are skipped), or None for the source files of
    Python's standard library, without its tests and installed packages.

    **Raises** ConfigError: there is nothing to read.
    """
    if data is not None and data.is_file():
        return [data]
    root = data or Path(sysconfig.get_paths()["stdlib"])
    skipped = _SKIPPED_FOLDERS if data is None else frozenset()
    pattern = "*.py" if data is None else "*"
    found = []
    for path in sorted(root.rglob(pattern)):
        parts = path.relative_to(root).parts
        if skipped.isdisjoint(parts) and not any(part.startswith(".") for part in parts):
            found.append(path)
    documents = [path for path in found if path.is_file()]
    if not documents:
        raise ConfigError(f"data: expected a text file or a folder of text, found none at {root}")
    return documents


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file: one per line of a `.jsonl` (field `text`), else the whole file.

    A file that is not UTF-8, or holds a zero byte, is not text and yields nothing.

    **Raises** ConfigError: a line of a `.jsonl` is not an object with a string `text`.
    """
    if path.suffix != ".jsonl":
        content = path.read_bytes()
        if b"\0" not in content:
            try:
                yield content.decode("utf-8")
            except UnicodeDecodeError:
                return
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield _text_of(json.loads(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"data: {path} line {number}: expected an object with a string `text`: {error}"
                ) from None


def _text_of(record: Any) -> str:
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise TypeError(f"got {shown(record)}")
    text: str = record["text"]
    return text


@dataclass(frozen=True)
class TokenStream:
    """All documents as one row of tokens, integer [num_tokens], mapped from a file.

    ``unigram_entropy`` is that of the token frequencies, nats per token: the loss of the best model
    that looks at no context.
    """

    tokens: np.ndarray
    unigram_entropy: float


def write_stream(documents: Sequence[Path], tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize documents into `folder/tokens.bin` and `tokens.json`, unless they are there already.

    Both files appear by rename, so several ranks may do this at once. Documents are separated by
    one token 0.

    **Raises** ConfigError: the documents hold no text.
    """
    source = _fingerprint(documents, tokenizer)
    header_path, tokens_path = folder / "tokens.json", folder / "tokens.bin"
    if header_path.exists() and tokens_path.exists():
        header = json.loads(header_path.read_text())
        nbytes = header["num_tokens"] * np.dtype(header["dtype"]).itemsize
        if header["source"] == source and tokens_path.stat().st_size == nbytes:
            return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(np.min_scalar_type(tokenizer.vocab - 1))
    counts = np.zeros(tokenizer.vocab, dtype=np.int64)
    partial_path = folder / f"tokens.bin.{os.getpid()}"
    with partial_path.open("wb") as file:
        for tokens in _encode_all(documents, tokenizer, dtype):
            counts += np.bincount(tokens, minlength=tokenizer.vocab)
            file.write(tokens.tobytes())
    num_tokens = int(counts.sum())
    if num_tokens == 0:
        partial_path.unlink()
        raise ConfigError(f"data: no UTF-8 text in {len(documents)} files of {documents[0].parent}")
    header = {
        "num_tokens": num_tokens,
        "dtype": dtype.name,
        "unigram_entropy": unigram_entropy(counts),
        "source": source,
    }
    partial_header_path = folder / f"tokens.json.{os.getpid()}"
    partial_header_path.write_text(json.dumps(header))
    partial_path.replace(tokens_path)
    partial_header_path.replace(header_path)


def open_stream(folder: Path) -> TokenStream:
    """Map what `write_stream` wrote."""
    header = json.loads((folder / "tokens.json").read_text())
    tokens = np.memmap(
        folder / "tokens.bin", dtype=header["dtype"], mode="r", shape=(header["num_tokens"],)
    )
    return TokenStream(tokens, header["unigram_entropy"])


def _encode_all(
    documents: Iterable[Path], tokenizer: Tokenizer, dtype: np.dtype[Any]
) -> Iterator[np.ndarray]:
    for path in documents:
        for text in read_texts(path):
            tokens = np.asarray(tokenizer.encode(text), dtype=dtype)
            yield np.concatenate([tokens, np.zeros(1, dtype=dtype)])


def _fingerprint(documents: Iterable[Path], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(tokenizer.name.encode())
    for path in documents:
        facts = path.stat()
        digest.update(f"{path.absolute()}\n{facts.st_size}\n{facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def unigram_entropy(counts: np.ndarray) -> float:
    """Return the entropy of token counts [vocab], in nats per token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
