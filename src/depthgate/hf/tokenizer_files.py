"""What lies beside the weights of a model: its tokenizer and generation_config.json. A routed model reads and writes
text as the model does that it was made from."""

import json
import shutil
from pathlib import Path
from typing import Any

from depthgate.data.tokenizer import MOST_IDS, read_tokenizer
from depthgate.errors import DepthgateError
from depthgate.hf.code import check_tokenizer
from depthgate.hf.folder import gguf_of, why

_VOCABULARIES = ("tokenizer.json", "tokenizer.*.json", "tokenizer.model*", "vocab.*", "tekken.json", "*.tiktoken")
_FILES = (
    *_VOCABULARIES,
    *("tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
)

_PROBE = (
    "In 1905, 12345.67 or 1e-9? It's  a\ttest:\r\n\n    if (x != 'y') { z += 1; }  Über Größe, 東京都, привет 👍🏽\n"
)


def check_generation(folder: Path) -> None:
    """Refuse a generation_config.json that is damaged, which transformers passes over, or could not be saved again."""
    path = folder / "generation_config.json"
    if path.is_file():
        from transformers import GenerationConfig

        try:
            GenerationConfig.from_pretrained(folder, local_files_only=True).validate(strict=True)
        except Exception as error:  # a damaged file may be anything
            raise DepthgateError(f"{path} cannot be loaded: {why(error)}. Mend it, or take it away") from None


def check_text(folder: Path) -> None:
    """Refuse a tokenizer that is damaged or names code, which would be copied, and fail later."""
    check_tokenizer(folder / "tokenizer_config.json")
    if has_tokenizer(folder):
        load_tokenizer(folder)


def has_tokenizer(path: Path) -> bool:
    """Whether there is a vocabulary; some classes of tokenizers load without one, and know no word."""
    return gguf_of(path) is not None or any(any(path.glob(pattern)) for pattern in _VOCABULARIES)


def load_tokenizer(path: Path, **how: Any) -> Any:
    """The tokenizer beside a model, or within its GGUF file."""
    from transformers import AutoTokenizer

    packed = gguf_of(path)
    if packed is not None:
        how["gguf_file"] = packed.name
    elif not has_tokenizer(path):
        raise DepthgateError(
            f"{path} has no tokenizer: put the files of the model's own there, "
            f"as AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(path)!r}) does"
        )
    else:
        check_tokenizer(path / "tokenizer_config.json")
        if (path / "tokenizer.json").is_file():
            read_tokenizer(path / "tokenizer.json")  # refuses what would end the process
    try:
        folder = path if packed is None else packed.parent
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **how)
        largest = max(found.get_vocab().values(), default=-1)
    except (DepthgateError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of `tokenizers` is no Exception
        raise DepthgateError(
            f"{path} has no tokenizer that loads: {why(error)}. Mend its files, or take them away"
        ) from None
    if not 0 <= largest < MOST_IDS:
        raise DepthgateError(f"the tokenizer of {path} has {largest} as its largest id: it is damaged")
    return found


def copy_text(source: Path, out: Path) -> None:
    """The tokenizer of a model, or of its GGUF file, into the folder of another that has its config.json already. Its
    files stay as they are, if they mean the same there."""
    for pattern in _FILES if gguf_of(source) is None else ():
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    if not has_tokenizer(source):
        return
    tokenizer = load_tokenizer(source)
    for change in (None, _name_class, type(tokenizer).save_pretrained):
        if change is not None:
            change(tokenizer, out)
        if _same(tokenizer, out):
            return
    raise DepthgateError(
        f"the tokenizer of {source}, a {type(tokenizer).__name__}, reads text otherwise once it is saved: nothing is "
        "written; take its files out of the folder, and open it from another"
    )


def _name_class(tokenizer: Any, out: Path) -> None:
    """Say what class it is: of some types of models transformers does not believe what their files say."""
    path = out / "tokenizer_config.json"
    values = json.loads(path.read_bytes()) if path.is_file() else {}
    values["tokenizer_class"] = type(tokenizer).__name__
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _same(tokenizer: Any, out: Path) -> bool:
    """Whether a folder has this tokenizer, for those who know the type of its model and for those who do not, as
    depthgate is not imported; and has it as a tokenizer.json, if it can be one."""
    from transformers import PreTrainedConfig

    if hasattr(tokenizer, "backend_tokenizer") and not (out / "tokenizer.json").is_file():
        return False
    want = _content(tokenizer)
    try:
        return all(_content(load_tokenizer(out, **how)) == want for how in ({}, {"config": PreTrainedConfig()}))
    except DepthgateError:
        return False


def _content(tokenizer: Any) -> tuple[Any, ...]:
    """What makes two tokenizers the same: all their ids, and those of a text that holds a few thousand tokens."""
    vocab = tokenizer.get_vocab()
    some = sorted(vocab.values())[:: len(vocab) // 4096 + 1]
    text = _PROBE + " ".join(tokenizer.batch_decode([[i] for i in some]))
    try:
        ids = tokenizer(text)["input_ids"]
    except Exception as error:  # of those that know some words only
        ids = str(error)
    return type(tokenizer), vocab, ids, tokenizer.special_tokens_map, tokenizer.chat_template
