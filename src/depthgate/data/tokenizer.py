"""Text to token ids and back: bytes, a byte-level BPE trained on the spot, or a Hugging Face tokenizer folder.

All are saved as a Hugging Face folder (tokenizer.json, tokenizer_config.json), which other tools open too. The end of
a document is a token of its own; text that merely spells it is text, and never becomes it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from depthgate.data.sources import documents, utf8
from depthgate.errors import DepthgateError, check_count
from depthgate.files import replace

END = "<|endoftext|>"
_PIECE = 2**20  # characters encoded at a time, as `tokenizers` takes some 100 bytes of memory for each
MOST_IDS = 2**24
_LARGEST = 2**27  # bytes of a tokenizer.json
_TRAINED_ON = 2**26  # characters a BPE is trained on: more would change few of its merges, and take minutes


class TextTokenizer:
    """A tokenizer of the `tokenizers` package, with the token that ends a document, where it has one."""

    def __init__(self, inner: Tokenizer, end: str | None) -> None:
        inner.no_truncation()  # many saved ones cut at the context of their model, in silence
        inner.no_padding()
        inner.encode_special_tokens = True
        ids = inner.get_vocab(with_added_tokens=True)
        if end is not None and end not in ids:
            raise DepthgateError(f"the end token {end!r} is not in the tokenizer's vocabulary of {len(ids)}")
        self.inner, self.end_text = inner, end
        self.vocab = max(ids.values()) + 1  # ids may have gaps
        self.token_bytes = _token_bytes(inner, self.vocab)

    @property
    def end(self) -> int:
        """The id that ends a document."""
        found = None if self.end_text is None else self.inner.token_to_id(self.end_text)
        if found is None:
            what = "the tokenizer does not say which token ends a text"
            raise DepthgateError(f"{what}: add eos_token to tokenizer_config.json")
        return found

    def check_vocab(self, vocab: int) -> None:
        """Refuse a model that has no place for some of the ids."""
        if self.vocab > vocab:
            why = f"the tokenizer has {self.vocab} ids, but the model has {vocab}"
            raise DepthgateError(f"{why}: they belong to different models")

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without an end."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of several texts, without ends."""
        for text in texts:
            utf8(text)
        cut = [(i, part) for i, text in enumerate(texts) for part in (_pieces(text) if self.token_bytes else [text])]
        found = self.inner.encode_batch_fast([part for _, part in cut], add_special_tokens=False)
        ids: list[list[int]] = [[] for _ in texts]
        for (i, _), encoding in zip(cut, found, strict=True):
            ids[i] += encoding.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; what is not UTF-8 becomes U+FFFD, ends become nothing."""
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids. For byte-level tokenizers those of a list are those of its parts, joined: a stream may be
        decoded part by part through `codecs.getincrementaldecoder("utf-8")`."""
        ids = list(ids)
        for i in ids:
            if not 0 <= i < self.vocab:
                raise DepthgateError(f"token id {i} is outside the tokenizer's vocabulary of {self.vocab}")
        if self.token_bytes:
            return b"".join(self.token_bytes[i] for i in ids)
        return self.inner.decode(ids, skip_special_tokens=True).encode()

    def token_text(self, token: int) -> str:
        """Text of one token, to be joined with those of others: bytes that are a part of a character are surrogates."""
        piece = str(self.inner.id_to_token(token) or "")
        if self.token_bytes:
            return self.token_bytes[token].decode(errors="surrogateescape") or piece
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # SentencePiece's names of bytes
            return bytes.fromhex(byte[1]).decode(errors="surrogateescape")
        said = str(self.inner.decode([token], skip_special_tokens=False)) or piece
        return f" {said}" if piece.startswith("▁") and not said.startswith(" ") else said

    def fingerprint(self) -> str:
        """A text that is the same for tokenizers that give the same ids."""
        return hashlib.sha256(f"{self.end}\n{self.inner.to_str()}".encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the files that `load_tokenizer` reads."""
        config = {"eos_token": self.end_text, "tokenizer_class": "PreTrainedTokenizerFast"}
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            replace(Path(folder, "tokenizer_config.json"), json.dumps(config) + "\n")
            # Last: where this file is, all is there.
            replace(Path(folder, "tokenizer.json"), self.inner.to_str(pretty=True) + "\n")
        except OSError as error:
            raise DepthgateError(f"the tokenizer cannot be written to {folder}: {error.strerror}") from None


class ByteTokenizer(TextTokenizer):
    """A tokenizer whose ids are bytes; 256 ends a document."""

    def __init__(self) -> None:
        inner = _byte_level(_alphabet())
        inner.add_special_tokens([AddedToken(END, special=True, normalized=False)])
        super().__init__(inner, END)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(utf8(text)) for text in texts]

    def fingerprint(self) -> str:
        return "bytes-1"


def train_bpe(texts: Iterable[str], vocab: int | None, limit: int = _TRAINED_ON) -> TextTokenizer:
    """A byte-level BPE, from which any text comes back exactly, of at most `vocab` ids (256 bytes, merges, the end),
    learned from the first `limit` characters of `texts`. The same texts give the same ids; little text gives fewer."""
    inner = _byte_level({})
    trainer = trainers.BpeTrainer(
        vocab_size=check_count(vocab, "vocab", 257, MOST_IDS),
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=64,
    )
    inner.train_from_iterator(_first(texts, limit), trainer)
    return TextTokenizer(inner, END)


def tokenizer_by_name(name: str, data: str, vocab: int | None, saved: Path | None = None) -> TextTokenizer:
    """The tokenizer `bytes`, a `bpe` of `vocab` ids trained on `data`, or the one in a folder. With `saved`, it is
    written to that folder, and read from there from then on."""
    if saved is not None and (saved / "tokenizer.json").exists():
        return load_tokenizer(saved)
    if name == "bytes":
        found: TextTokenizer = ByteTokenizer()
    elif name == "bpe":
        found = train_bpe(documents(data), vocab)
    else:
        found = load_tokenizer(name)
    if saved is not None:
        found.save(saved)
    return found


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """The tokenizer of a folder that `save` or Hugging Face wrote: tokenizer.json, and the end token that
    tokenizer_config.json or special_tokens_map.json names."""
    inner = read_tokenizer(Path(folder, "tokenizer.json"))
    for path in (Path(folder, "tokenizer_config.json"), Path(folder, "special_tokens_map.json")):
        try:
            config = json.loads(_read(path)) if path.is_file() else {}
        except (ValueError, RecursionError) as error:
            raise DepthgateError(f"{path} cannot be read: {error}") from None
        end = config.get("eos_token") if isinstance(config, dict) else None
        end = end.get("content") if isinstance(end, dict) else end
        if isinstance(end, str):
            found, as_bytes = TextTokenizer(inner, end), ByteTokenizer()
            same = inner.get_vocab() == as_bytes.inner.get_vocab() and found.end == 256 and not inner.normalizer
            return as_bytes if same else found
    raise DepthgateError(f"{folder} does not say which token ends a text: add eos_token to tokenizer_config.json")


def folder_hash(folder: str | Path) -> str:
    """A hash of a tokenizer's files, by which a checkpoint knows its own."""
    names = ("tokenizer.json", "tokenizer_config.json")
    return hashlib.sha256(b"".join(hashlib.sha256(_read(Path(folder, n))).digest() for n in names)).hexdigest()


def _read(path: Path) -> bytes:
    """The bytes of a plain file of a size that a tokenizer's can have."""
    try:
        if not path.is_file():
            raise DepthgateError(f"{path.parent} is not a tokenizer folder: it has no {path.name}")
        if path.stat().st_size > _LARGEST:
            raise DepthgateError(f"{path} is not a tokenizer: it has more than {_LARGEST} bytes")
        return path.read_bytes()
    except OSError as error:
        raise DepthgateError(f"{path} cannot be read: {error.strerror}") from None


def read_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer.json whose ids are checked first: `tokenizers` takes memory for the largest id, and ends the process
    where there is none."""
    try:
        text = _read(path).decode()
        found = json.loads(text)
        vocab, added = found["model"]["vocab"], [token["id"] for token in found.get("added_tokens") or ()]
        given = vocab.values() if isinstance(vocab, dict) else ()  # a list has the ids by place
        if not all(type(i) is int and 0 <= i < MOST_IDS for i in (*given, *added)):
            raise ValueError(f"it has ids that are not whole numbers from 0 to {MOST_IDS - 1}")
        return Tokenizer.from_str(text)
    except (DepthgateError, KeyboardInterrupt):
        raise
    except BaseException as error:  # `tokenizers` raises plain Exception, and in a panic not even that
        raise DepthgateError(f"{path} is not a tokenizer: {str(error)[:200]}") from None


def _byte_level(vocab: dict[str, int]) -> Tokenizer:
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def _alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {chr(byte if byte in plain else next(others)): byte for byte in range(256)}


def _token_bytes(inner: Tokenizer, vocab: int) -> list[bytes]:
    """The bytes of every id of a byte-level tokenizer; empty for other tokenizers, whose tokens need each other."""
    decoder = json.loads(inner.to_str()).get("decoder") or {}
    kinds = [decoder, *decoder.get("decoders", [])]
    if not any(kind.get("type") == "ByteLevel" for kind in kinds):
        return []
    byte_of = _alphabet()
    table = [b""] * vocab
    for token, i in inner.get_vocab(with_added_tokens=True).items():
        known = all(char in byte_of for char in token)
        table[i] = bytes(byte_of[char] for char in token) if known else token.encode(errors="replace")
    for i, added in inner.get_added_tokens_decoder().items():
        table[i] = b"" if added.special else added.content.encode()
    return table


def _pieces(text: str) -> Iterator[str]:
    """A long text in parts, cut after the last newline that is near enough."""
    start = 0
    while len(text) - start > _PIECE:
        stop = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:stop]
        start = stop
    yield text[start:]


def _first(texts: Iterable[str], limit: int) -> Iterator[str]:
    for text in texts:
        yield from _pieces(text[:limit])
        limit -= len(text)
        if limit <= 0:
            return
