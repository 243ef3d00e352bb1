"""The data of `shardwise train`: text files, one stream of tokens, and the windows of each step.

The text is tokenized once into a file of integers, which is mapped; `.npy` files of tokens are
mapped as they are. Sample `index` of the global batch of `step` is one window, a pure function of
(seed, step, index), so the data does not depend on the number of ranks.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardwise.checkpoint.files import replacing
from shardwise.data.order import SampleOrder
from shardwise.errors import ConfigError
from shardwise.keys import shown

if TYPE_CHECKING:
    import torch

    from shardwise.data.tokens import TokenFiles

_TEXTS = (".txt", ".text", ".md")  # a file of these is text, or a mistake
_COUNTED = 1 << 24  # tokens of files that were tokenized elsewhere
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "__pycache__"})


@dataclass(frozen=True)
class Tokenizer:
    """Text to token ids and back; ``name`` identifies the tokenizer."""

    vocab: int
    name: str
    encode: Callable[[str], Sequence[int] | np.ndarray]
    decode: Callable[[Sequence[int]], str]


# The bytes of UTF-8 as tokens; byte 0 ends a document.
BYTES = Tokenizer(
    256,
    "bytes",
    lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8),
    lambda ids: bytes(ids).decode("utf-8", errors="replace"),
)


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Load a `tokenizer.json`; without a path, use bytes.

    **Raises** ConfigError if the file cannot be read, or `tokenizers` is not installed.
    """
    if path is None:
        return BYTES
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
    name = hashlib.sha256(content).hexdigest()
    return Tokenizer(
        inner.get_vocab_size(),
        name,
        lambda text: list(inner.encode(text).ids),
        lambda ids: str(inner.decode(list(ids))),
    )


def find_documents(data: Path | None) -> list[Path]:
    """List the files to read, in an order that is the same on every rank.

    ``data`` is a file, a folder (hidden files are skipped), or None for the source files of
    Python's standard library, without its tests and installed packages.

    **Raises** ConfigError if it has no files.
    """
    if data is not None and data.is_file():
        return [data]
    if data is None:
        root, pattern, skipped = Path(sysconfig.get_paths()["stdlib"]), "*.py", _SKIPPED_FOLDERS
    else:
        root, pattern, skipped = data, "*", frozenset[str]()
    documents = []
    for path in sorted(root.rglob(pattern)):
        parts = path.relative_to(root).parts
        is_hidden = any(part.startswith(".") for part in parts)
        if skipped.isdisjoint(parts) and not is_hidden and path.is_file():
            documents.append(path)
    if not documents:
        raise ConfigError(f"data: expected a text file or a folder of text, found none at {root}")
    return documents


def read_texts(path: Path) -> Iterator[str]:
    """Yield the texts of a file: one per line of a `.jsonl` (field `text`), else the whole file.

    A file that is not UTF-8, or holds a zero byte, yields nothing, unless its name says that it is
    text.

    **Raises** ConfigError if a line of a `.jsonl` is not an object with a string `text`, and if a
    `.jsonl`, `.txt` or `.md` is not UTF-8.
    """
    if path.suffix != ".jsonl":
        content = path.read_bytes()
        try:
            if b"\0" in content:
                raise ValueError(f"it has a zero byte at {content.index(0)}")
            yield content.decode("utf-8")
        except ValueError as error:
            if path.suffix.lower() in _TEXTS:
                raise ConfigError(f"data: {path} {_not_utf8(content[:2], error)}") from None
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
                if not isinstance(record, dict) or not isinstance(record.get("text"), str):
                    raise TypeError(f"got {shown(record)}")
                yield record["text"]
            except UnicodeDecodeError as error:
                why = _not_utf8(line[:2] if number == 1 else b"", error)
                raise ConfigError(f"data: {path} line {number} {why}") from None
            except (ValueError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"data: {path} line {number}: expected an object with a string `text`: {error}"
                ) from None


def _not_utf8(begin: bytes, error: ValueError) -> str:
    """Describe bytes that are not UTF-8, and what to do."""
    what = f"at byte {error.start}" if isinstance(error, UnicodeDecodeError) else str(error)
    known = "UTF-16" if begin in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "ISO-8859-1"
    looks = "and looks like UTF-16" if known == "UTF-16" else "perhaps ISO-8859-1 or Windows-1252"
    return (
        f"is not UTF-8 text ({what}), {looks}. Convert it, as with `iconv -f {known} -t UTF-8`, or "
        "remove it"
    )


def write_stream(documents: Sequence[Path], tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize documents into `folder/tokens.bin` and `tokens.json`, unless these are up to date.

    Both files appear by rename, so several ranks may write at once. Each document ends with a
    token 0. If all documents are `.npy` files of tokens, only `tokens.json` is written.

    **Raises** ConfigError if the documents hold no text, or the first 16 Mi tokens one that the
    tokenizer lacks.
    """
    digest = hashlib.sha256(tokenizer.name.encode())
    for path in documents:
        facts = path.stat()
        digest.update(f"{path.absolute()}\n{facts.st_size}\n{facts.st_mtime_ns}\n".encode())
    source = digest.hexdigest()
    paths = folder / "tokens.json", folder / "tokens.bin"
    if all(path.suffix == ".npy" for path in documents):
        entropy = unigram_entropy(_count_tokens(documents, tokenizer))
        folder.mkdir(parents=True, exist_ok=True)
        files = [str(path.absolute()) for path in documents]
        named = {"files": files, "dtype": None, "unigram_entropy": entropy, "source": source}
        with replacing(paths[0]) as part:
            part.write_text(json.dumps(named))
        return
    if all(path.exists() for path in paths):
        header = json.loads(paths[0].read_text())
        nbytes = header["num_tokens"] * np.dtype(header["dtype"]).itemsize
        is_ours = "files" not in header and header["source"] == source
        if is_ours and paths[1].stat().st_size == nbytes:
            return
    folder.mkdir(parents=True, exist_ok=True)
    dtype = np.dtype(np.min_scalar_type(tokenizer.vocab - 1))
    counts = np.zeros(tokenizer.vocab, dtype=np.int64)
    with replacing(paths[0]) as header_path, replacing(paths[1]) as path:  # the header last
        with path.open("wb") as file:
            for text in (text for path in documents for text in read_texts(path)):
                tokens = np.append(np.asarray(tokenizer.encode(text), dtype=dtype), dtype.type(0))
                counts += np.bincount(tokens, minlength=tokenizer.vocab)
                file.write(tokens.tobytes())
        num_tokens = int(counts.sum())
        if num_tokens == 0:
            raise ConfigError(
                f"data: no UTF-8 text in {len(documents)} files of {documents[0].parent}"
            )
        entropy = unigram_entropy(counts)
        header = {"num_tokens": num_tokens, "dtype": dtype.name, "unigram_entropy": entropy}
        header_path.write_text(json.dumps({**header, "source": source}))


def _count_tokens(files: Sequence[Path], tokenizer: Tokenizer) -> np.ndarray:
    """Count the first tokens of files that were made elsewhere."""
    from shardwise.data.tokens import TokenFiles

    counts = np.zeros(tokenizer.vocab, dtype=np.int64)
    left = _COUNTED
    for path, row in zip(files, TokenFiles(files, seq=1).rows, strict=True):
        head = row[:left].astype(np.int64)
        wrong = head[(head < 0) | (head >= tokenizer.vocab)]
        if len(wrong):
            raise ConfigError(
                f"data: {path} has token {wrong[0]}, and the tokenizer {tokenizer.vocab} "
                "tokens; give the tokenizer that made it (tokenizer: tokenizer.json)"
            )
        counts += np.bincount(head, minlength=tokenizer.vocab)
        left -= len(head)
    return counts


def open_stream(folder: Path, seq: int) -> tuple[TokenFiles, float]:
    """Map the files that `write_stream` wrote or named, in windows of ``seq`` tokens.

    The second value is the entropy of the token frequencies in nats per token, which is the loss of
    the best model without context; of the first 16 Mi tokens, if the tokens were given.

    **Raises** ConfigError if a file has no window.
    """
    from shardwise.data.tokens import TokenFiles

    header = json.loads((folder / "tokens.json").read_text())
    files = header.get("files", [folder / "tokens.bin"])
    return TokenFiles(files, seq, dtype=header["dtype"]), header["unigram_entropy"]


def unigram_entropy(counts: np.ndarray) -> float:
    """Return the entropy of token counts [vocab], in nats per token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class WindowSampler:
    """Maps samples to windows, with integers only, the same for any number of ranks.

    Every `num_windows // eval_windows`-th window is held out. Training goes through all other
    windows in a new random order each epoch.
    """

    num_windows: int
    eval_windows: int
    seed: int

    @classmethod
    def over(cls, windows: TokenFiles, eval_windows: int, seed: int) -> WindowSampler:
        """Divide windows into those to train on and those held out.

        **Raises** ConfigError if they are too few.
        """
        num_windows = len(windows)
        if num_windows < max(1, 2 * eval_windows):
            raise ConfigError(
                f"data: expected at least {max(1, 2 * eval_windows)} windows of seq "
                f"{windows.seq} (eval_windows {eval_windows} are held out), got "
                f"{windows.num_tokens} tokens = "
                f"{num_windows} windows; give more text, or a smaller seq or eval_windows"
            )
        return cls(num_windows, eval_windows, seed)

    @property
    def train_windows(self) -> int:
        """Number of windows that are trained on."""
        return self.num_windows - self.eval_windows

    def train_window(self, step: int, index: int, global_batch: int) -> int:
        """Return the window of sample `index` in step `step` (from 1)."""
        order = SampleOrder(self.train_windows, self.seed)
        rank_among_train = order.sample((step - 1) * global_batch + index)
        if self.eval_windows == 0:
            return rank_among_train
        stride = self.num_windows // self.eval_windows
        block, offset = divmod(rank_among_train, stride - 1)
        if block >= self.eval_windows:
            return rank_among_train + self.eval_windows
        return block * stride + offset

    def eval_window(self, index: int) -> int:
        """Return the held-out window `index` of `eval_windows`."""
        stride = self.num_windows // self.eval_windows
        return index * stride + stride - 1


def read_windows(files: TokenFiles, windows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and targets of windows, both int64 [len(windows), seq]; targets are one ahead."""
    import torch

    ids, targets = zip(*(files[window] for window in windows), strict=True)
    return torch.stack(ids), torch.stack(targets)
