"""What `depthgate view` can be told. Imports no torch."""

from dataclasses import dataclass

from depthgate.errors import InvalidValueError, check_choice, check_count


@dataclass(frozen=True)
class ViewConfig:
    """See which tokens went deep: one self-contained page for a model and a text.

    Args:
        model: folder of a run, or of one of its checkpoints
        text: file to read; the beginning of the text that the run held out unless text or prompt is given
        prompt: text to read, given here
        out: file of the page
        tokens: tokens read at most
        device: cpu, cuda, or auto
    """

    model: str
    text: str | None = None
    prompt: str | None = None
    out: str = "page.html"
    tokens: int = 4000
    device: str = "auto"

    def __post_init__(self) -> None:
        check_count(self.tokens, "tokens", maximum=2**16)
        check_choice(self.device, "device", ("auto", "cpu", "cuda"))
        if self.text is not None and self.prompt is not None:
            raise InvalidValueError("text and prompt are both given: leave one out")
        if self.prompt == "":
            raise InvalidValueError("prompt is empty: give some text")
