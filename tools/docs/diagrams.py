"""Draw the diagrams of docs/ (`python -m tools.docs.diagrams`): docs/images/*.svg.

A diagram is a list of boxes and arrows on a grid of pixels; a box is named by its first line.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
INK, LINE = "#24292f", "#57606a"
FILLS = {
    "plain": "#f6f8fa",
    "head": "#ddeeff",
    "stage": "#e3f4e3",
    "redis": "#fff1d6",
    "dead": "#eceff2",
}
LINE_HEIGHT = 16


@dataclass(frozen=True)
class Box:
    """A box with centred lines of text; `kind` is its colour."""

    x: int
    y: int
    width: int
    height: int
    lines: tuple[str, ...]
    kind: str = "plain"
    dashed: bool = False

    def draw(self) -> str:
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        size = f'x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}"'
        parts = [f'<rect {size} rx="5" fill="{FILLS[self.kind]}" stroke="{LINE}"{dash}/>']
        middle = self.y + self.height / 2 - LINE_HEIGHT * (len(self.lines) - 1) / 2 + 5
        for number, line in enumerate(self.lines):
            weight = "bold" if number == 0 and len(self.lines) > 1 else "normal"
            parts.append(
                f'<text x="{self.x + self.width / 2}" y="{middle + number * LINE_HEIGHT}" '
                f'text-anchor="middle" font-weight="{weight}">{escape(line)}</text>'
            )
        return "".join(parts)


@dataclass(frozen=True)
class Arrow:
    """An arrow through points, with a text beside its middle."""

    points: tuple[tuple[int, int], ...]
    text: str = ""
    dashed: bool = False
    offset: tuple[int, int] = (0, -6)

    def draw(self) -> str:
        path = " ".join(f"{x},{y}" for x, y in self.points)
        dash = ' stroke-dasharray="5 4"' if self.dashed else ""
        out = (
            f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="1.5" '
            f'marker-end="url(#tip)"{dash}/>'
        )
        if self.text:
            middle = len(self.points) // 2
            (x0, y0), (x1, y1) = self.points[middle - 1], self.points[middle]
            x, y = (x0 + x1) / 2 + self.offset[0], (y0 + y1) / 2 + self.offset[1]
            text = escape(self.text)
            out += f'<text x="{x}" y="{y}" text-anchor="middle" fill="{LINE}">{text}</text>'
        return out


@dataclass(frozen=True)
class Label:
    """A line of text."""

    x: int
    y: int
    text: str
    anchor: str = "start"

    def draw(self) -> str:
        place = f'x="{self.x}" y="{self.y}" text-anchor="{self.anchor}"'
        return f"<text {place}>{escape(self.text)}</text>"


Part = Box | Arrow | Label


def picture(width: int, height: int, parts: list[Part]) -> str:
    """An SVG of the parts, in their order."""
    tip = (
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{LINE}"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="13" fill="{INK}"><defs>{tip}</defs>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        f"{''.join(part.draw() for part in parts)}</svg>\n"
    )


def overview() -> str:
    """Who sends what to whom while a request is decoded."""
    parts: list[Part] = [
        Box(20, 20, 150, 56, ("client", "CLI, Python, HTTP")),
        Box(250, 20, 330, 56, ("Redis", "request log, task graph, leases"), "redis"),
        Box(20, 170, 150, 84, ("rank 0: head", "proposer, tree,", "scheduler"), "head"),
        Box(250, 170, 130, 84, ("rank 1: stage", "layers 0 to 9"), "stage"),
        Box(450, 170, 130, 84, ("rank 2: stage", "layers 10 to 19"), "stage"),
        Box(
            650,
            170,
            150,
            84,
            ("rank 3: last stage", "layers 20 to 29,", "LM head, verifier"),
            "stage",
        ),
        Arrow(((170, 40), (250, 40)), "requests"),
        Arrow(((250, 60), (170, 60)), "tokens", offset=(0, 16)),
        Arrow(((170, 212), (250, 212)), "batch"),
        Arrow(((380, 212), (450, 212)), "batch"),
        Arrow(((580, 212), (650, 212)), "batch"),
        Arrow(((725, 170), (725, 48), (580, 48)), "verdict", offset=(-30, 10)),
        Arrow(((500, 76), (500, 170)), "verdict", True, (30, 0)),
        Arrow(((315, 76), (315, 170)), "verdict", True, (30, 0)),
        Arrow(((270, 76), (140, 170)), "verdict, new requests", True, (-96, 4)),
    ]
    return picture(820, 274, parts)


def processes() -> str:
    """The processes of a cluster of two hosts."""
    parts: list[Part] = [
        Box(20, 100, 170, 70, ("launcher", "pipespec up,", "generate, serve")),
        Box(20, 220, 170, 44, ("redis-server (private)",), "redis"),
        Box(260, 20, 110, 50, ("agent", "of host a")),
        Box(260, 200, 110, 50, ("agent", "of host b")),
        Box(430, 20, 110, 50, ("torchrun", "of host a")),
        Box(430, 200, 110, 50, ("torchrun", "of host b")),
        Box(600, 10, 100, 36, ("supervisor",)),
        Box(600, 60, 100, 36, ("supervisor",)),
        Box(600, 207, 100, 36, ("supervisor",)),
        Box(760, 10, 190, 36, ("worker a/0: rank 0, head",), "head"),
        Box(760, 60, 190, 36, ("worker a/1: rank 1, stage",), "stage"),
        Box(760, 207, 190, 36, ("worker b/0: rank 2, last stage",), "stage"),
        Arrow(((190, 120), (225, 120), (225, 45), (260, 45)), "pipe", offset=(-18, 0)),
        Arrow(((190, 150), (225, 150), (225, 225), (260, 225)), "SSH", offset=(-18, 0)),
        Arrow(((105, 170), (105, 220))),
        Arrow(((370, 45), (430, 45))),
        Arrow(((370, 225), (430, 225))),
        Arrow(((540, 40), (570, 40), (570, 28), (600, 28))),
        Arrow(((540, 50), (570, 50), (570, 78), (600, 78)), "fork", offset=(18, 44)),
        Arrow(((540, 225), (600, 225)), "fork"),
        Arrow(((700, 28), (760, 28))),
        Arrow(((700, 78), (760, 78)), "fork"),
        Arrow(((700, 225), (760, 225)), "fork"),
    ]
    return picture(970, 284, parts)


def step() -> str:
    """One step in lockstep: what each rank does, and what it waits for."""
    names = ("head", "stage 1", "stage 2", "last stage")
    parts: list[Part] = []
    x_compute, x_wait, x_prune, x_send = 110, 300, 500, 640
    for number, name in enumerate(names):
        y = 40 + number * 70
        kind = "stage" if number else "head"
        parts.append(Label(100, y + 24, name, "end"))
        work = "expand the tree, some rounds" if number == 0 else "compute the batch of step t-1"
        width = 190 if number < 3 else 380
        text = work if number < 3 else "compute, then decide tokens: verdict t"
        parts.append(Box(x_compute, y, width, 38, (text,), kind))
        if number < 3:
            parts.append(Box(x_wait + 6, y, 158, 38, ("wait for verdict t",), "plain", True))
        pruning = "move the root" if number == 0 else "prune"
        parts.append(Box(x_prune, y, 130, 38, (pruning,), kind))
        if number < 3:
            sending = "choose rows, send" if number == 0 else "send what is left"
            parts.append(Box(x_send, y, 150, 38, (sending,), kind))
            parts.append(
                Arrow(((x_send + 150, y + 19), (820, y + 19), (820, y + 84), (840, y + 84)))
            )
        if number:
            parts.append(Label(846, y + 24, "batch of step t+1"))
    parts += [
        Arrow(((480, 250), (480, 60), (500, 60)), dashed=True),
        Arrow(((480, 132), (500, 132)), dashed=True),
        Arrow(((480, 202), (500, 202)), dashed=True),
        Label(480, 322, "the verdict reaches every rank through the controller", "middle"),
    ]
    return picture(970, 336, parts)


def parent_rule() -> str:
    """What a verdict does to the rows of a stage."""
    parts: list[Part] = [
        Label(20, 30, "before: tip and live nodes"),
        Box(20, 80, 110, 40, ("Once upon a",)),
        Box(160, 80, 80, 40, ("time", "tip"), "head"),
        Box(280, 40, 80, 40, ("there",), "stage"),
        Box(280, 120, 80, 40, (",",), "stage"),
        Box(400, 20, 80, 40, ("was",), "stage"),
        Box(400, 70, 80, 40, ("lived",), "stage"),
        Box(400, 120, 80, 40, ("in",), "stage"),
        Arrow(((130, 100), (160, 100))),
        Arrow(((240, 95), (280, 60))),
        Arrow(((240, 105), (280, 140))),
        Arrow(((360, 55), (400, 40))),
        Arrow(((360, 65), (400, 90))),
        Arrow(((360, 140), (400, 140))),
        Label(540, 30, "after the verdict “there”"),
        Box(540, 80, 150, 40, ("Once upon a time",)),
        Box(720, 80, 80, 40, ("there", "tip"), "head"),
        Box(840, 40, 80, 40, ("was",), "stage"),
        Box(840, 90, 80, 40, ("lived",), "stage"),
        Box(720, 140, 80, 36, (",",), "dead", True),
        Box(840, 140, 80, 36, ("in",), "dead", True),
        Arrow(((690, 100), (720, 100))),
        Arrow(((800, 95), (840, 60))),
        Arrow(((800, 105), (840, 110))),
        Arrow(((800, 158), (840, 158)), dashed=True),
        Label(700, 200, "pruned: their KV slots are free", "start"),
    ]
    return picture(940, 214, parts)


DIAGRAMS = {
    "overview": overview,
    "processes": processes,
    "step": step,
    "parent_rule": parent_rule,
}


def main() -> None:
    for name, drawn in DIAGRAMS.items():
        (IMAGES / f"{name}.svg").write_text(drawn())


if __name__ == "__main__":
    main()
