"""Options of `depthgate view`. Imports no torch."""

from dataclasses import dataclass

from depthgate.errors import InvalidValueError
from depthgate.options import DEVICES, Options, choice, count, option, positional


@dataclass(frozen=True)
class ViewConfig(Options):
    """See which tokens went deep (--model), or how training runs went (RUN_DIR...): one self-contained page."""

    runs: list[str] = positional(
        "folders of `depthgate train`, drawn over each other; or that of one study of `depthgate isoflop`"
    )
    model: str | None = option(
        None, "folder of a run, of one of its checkpoints, or of a model that `depthgate convert` wrote"
    )
    text: str | None = option(
        None, "file to read; the beginning of the text that the run held out unless text or prompt is given"
    )
    prompt: str | None = option(None, "text to read, given here")
    out: str | None = option(None, "file of the page; page.html unless given, or unless a picture is asked for")
    png: str | None = option(None, "file of a picture")
    svg: str | None = option(None, "file of a picture for papers")
    tokens: int = count(4000, "tokens read at most", maximum=2**16)
    device: str = choice("auto", DEVICES, "cpu, cuda, or auto")

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
