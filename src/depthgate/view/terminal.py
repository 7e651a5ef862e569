"""The same on a terminal: text in colours, a map in blocks, runs in a table."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from depthgate.view.experts import ExpertLayer
from depthgate.view.routes import Routes
from depthgate.view.runs import Run, curve
from depthgate.view.runs_page import model
from depthgate.view.tokens import PART, count, pieces, visible

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", ".:-=+*#@"  # from little to much
# From no routed layer to all of them; without colours, digits below the text say it.
_SHADES = ("", "on #d9e6fb", "on #b4cdf6", "on #86adee", "on #5a8fe0", "on #1f5fbf")

_NUMBERS = (
    "below a token: the number of routed layers that computed it, + for ten or more, nothing for none; dashes are its "
    "length"
)


def print_routes(found: Routes, experts: Sequence[ExpertLayer], console: Console | None = None) -> None:
    """The text by depth, the map, and a table of the layers."""
    console = console or Console()
    ascii_only = console.options.ascii_only
    if not found.layers:
        console.print(Text("".join(visible(piece.text, kept=" \n") for piece in pieces(found.tokens))))
        console.print("no routed layers: every token goes through all of them")
    else:
        plain = console.color_system is None
        console.print(_numbered(found, console.width, ascii_only) if plain else _coloured(found, ascii_only))
        console.print(_NUMBERS if plain else _legend(len(found.layers)))
        console.print(_layers(found, max(10, console.width - 38), _blocks(console)))
    for layer in experts:
        if not layer.used:
            console.print(f"layer {layer.layer}: no token came to its {count(layer.experts, 'expert')}\n")
            continue
        table = Table("expert", "load", "", title=f"layer {layer.layer}: experts", box=box.SIMPLE)
        shares = [*((str(e), share) for e, share in enumerate(layer.load)), ("null", layer.null_share)]
        for name, share in shares[: len(shares) if layer.null_experts else -1]:
            table.add_row(name, f"{share:.1%}", _blocks(console)[-1] * round(share * 40))
        console.print(table)


def _shade(through: int, most: int) -> Style:
    name = _SHADES[-(-through * (len(_SHADES) - 1) // max(1, most))]
    return Style.parse(f"{'white' if through == most else 'black'} {name}") if name else Style()


def _shown(found: Routes, ascii_only: bool) -> Iterator[tuple[str, int, int]]:
    """Of each token its text, in how many routed layers it was computed, and how many lines it ends."""
    for t, piece in enumerate(pieces(found.tokens)):
        text = ("'" if ascii_only else PART) if piece.part else visible(piece.text.replace("\n", ""), kept=" ")
        yield text, len(found.through(t)), piece.text.count("\n")


def _coloured(found: Routes, ascii_only: bool) -> Text:
    text = Text(overflow="fold")
    for shown, through, ends in _shown(found, ascii_only):
        text.append(shown, _shade(through, len(found.layers)))
        text.append("\n" * ends)
    return text


def _numbered(found: Routes, width: int, ascii_only: bool) -> Text:
    """Lines of text, each with a line of digits below: a digit where a token begins, dashes to its end."""
    lines: list[str] = []
    above = below = ""

    def end() -> None:
        nonlocal above, below
        lines.extend([above, below.rstrip()] if below.strip() else [above])
        above = below = ""

    for shown, through, ends in _shown(found, ascii_only):
        sign = "" if not through else str(through) if through < 10 else "+"
        for c in shown:
            if cell_len(above + c) > width:
                end()
            above += c
            below += (sign or " ") * min(1, cell_len(c)) + ("-" if sign else " ") * (cell_len(c) - 1)
            sign = sign and "-"
        for _ in range(ends):
            end()
    end()
    return Text("\n".join(lines), no_wrap=True)


def _legend(most: int) -> Text:
    text = Text("routed layers: ")
    for n in range(most + 1):
        text.append(f" {n} ", _shade(n, most))
    return text


def _layers(found: Routes, width: int, blocks: str) -> Table:
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in ("layer", "routed", "top k", "rule right"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first to last token", no_wrap=True)
    parts = zip(found.layers, found.shares(found.causal), found.shares(found.top_k), found.accuracy, strict=True)
    for (layer, causal, best, right), row in zip(parts, found.causal, strict=True):
        table.add_row(str(layer), f"{causal:.1%}", f"{best:.1%}", f"{right:.1%}", _strip(row, width, blocks))
    return table


def _blocks(console: Console) -> str:
    return _ASCII if console.options.ascii_only else _BLOCKS


def _strip(row: Sequence[bool], width: int, blocks: str) -> str:
    """A row of the map: one block for some tokens, as high as the share of them that is routed; nothing for none."""
    size = max(1, -(-len(row) // width))
    shares = [fmean(row[i : i + size]) for i in range(0, len(row), size)]
    return "".join(" " if share == 0 else blocks[min(7, int(share * 8))] for share in shares)


def print_runs(runs: Sequence[Run], console: Console | None = None) -> None:
    """A line for each run, its loss drawn small."""
    console = console or Console()
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for name in ("step", "loss", "tokens/s", "routed", "resumed"):
        table.add_column(name, justify="right")
    room = max(5, min(20, console.width - 60))  # what a small window leaves beside the numbers
    table.add_column("loss over steps" if room > 15 else "curve", no_wrap=True)
    for run in runs:
        at = run.summary
        shown = [
            "-" if at["step"] is None else f"{at['step']:,}",
            "-" if at["loss"] is None else f"{at['loss']:.4f}",
            "-" if at["tokens_per_second"] is None else f"{at['tokens_per_second']:,.0f}",
            f"{fmean(at['routed_share']):.1%}" if at["routed_share"] else "all" if run.rows else "-",
            ", ".join(map(str, at["resumed_after"])) or "-",
        ]
        about = Text(f"{visible(run.name, kept=' ')}\n{visible(model(run), kept=' ')}")
        table.add_row(about, *shown, _spark(run, _blocks(console), room))
    console.print(table)
    for run in runs:
        for note in run.notes:
            console.print(Text(f"{visible(run.name, kept=' ')}: {note}"))


def _spark(run: Run, blocks: str, width: int) -> str:
    values = [y for _, y in curve(run, "step", "loss", width)[0]]
    known = [y for y in values if y == y]
    if not known:
        return ""
    low, high = min(known), max(known)
    return "".join(" " if y != y else blocks[int((y - low) / (high - low or 1) * 7)] for y in values)
