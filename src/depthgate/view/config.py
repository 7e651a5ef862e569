"""Options of `depthgate view`. Imports no torch."""

from dataclasses import dataclass

from depthgate.errors import InvalidValueError
from depthgate.options import DEVICES, Options, choice, count, positional


@dataclass(frozen=True)
class ViewConfig(Options):
    """See which tokens went deep (--model), or how training runs went (RUN_DIR...): one self-contained page.

    Args:
        runs: folders of `depthgate train`, drawn over each other; or that of one study of `depthgate isoflop`
        model: folder of a run, of one of its checkpoints, or of a Hugging Face model that `depthgate convert` wrote
        text: file to read; the beginning of the text that the run held out unless text or prompt is given
        prompt: text to read, given here
        out: file of the page; page.html unless given, or unless a picture is asked for
        png: file of a picture
        svg: file of a picture for papers
        tokens: tokens read at most
        device: cpu, cuda, or auto
    """

    runs: list[str] = positional()
    model: str | None = None
    text: str | None = None
    prompt: str | None = None
    out: str | None = None
    png: str | None = None
    svg: str | None = None
    tokens: int = count(4000, maximum=2**16)
    device: str = choice("auto", DEVICES)

    def check_together(self) -> None:
        if bool(self.runs) == (self.model is not None):
            raise InvalidValueError("give either folders of runs (depthgate view RUN_DIR...) or --model DIR")
        if self.text is not None and self.prompt is not None:
            raise InvalidValueError("text and prompt are both given: leave one out")
        if self.runs and (self.text is not None or self.prompt is not None):
            raise InvalidValueError("text and prompt are for --model: runs have no text to show")
        if self.prompt == "":
            raise InvalidValueError("prompt is empty: give some text")

    @property
    def page(self) -> str | None:
        """File of the page; None: no page is asked for."""
        other = self.png or self.svg
        return self.out or (None if other else "page.html")
