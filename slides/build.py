"""Build the decks: slides/NN_name.md to self-contained HTML and PDF in slides/built, by marp-cli.

A deck shows figures as `![what it shows](figures/star.svg)`: `star` is a function of `slides.figures.labNN`, and the
numbers that it gives fill `{{rounds}}` on the same slide. `{{minutes 0.2}}` is what the notebook says. Figures, the
style and the letters that are used are put into the page itself. Left out: editing decks while they are shown.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from slides import cells, tools
from slides.drawing import Drawn, svg

HERE = Path(__file__).resolve().parent
BUILT = HERE / "built"
FIGURE = re.compile(r"!\[([^\]]*)\]\(figures/(\w+)\.svg\)")
PLACE = re.compile(r"\{\{([^}]*)\}\}")
COMMENT = re.compile(r"<!--.*?-->", re.S)
FACES = (
    ("DejaVuSans.ttf", "Deck", 400),
    ("DejaVuSans-Bold.ttf", "Deck", 700),
    ("DejaVuSansMono.ttf", "Deck Mono", 400),
)


def decks() -> list[Path]:
    """The decks, in the order of the labs."""
    return sorted(HERE.glob("[0-9][0-9]_*.md"))


def slides_of(deck: str) -> tuple[str, list[str]]:
    """(front matter with its marks, slides) of a deck's Markdown."""
    found = re.match(r"---\n.*?\n---\n", deck, re.S)
    if found is None:
        raise ValueError("a deck opens with front matter between lines of ---")
    return found[0], [slide.strip("\n") for slide in re.split(r"^---$", deck[found.end() :], flags=re.M)]


def title_of(slide: str) -> str:
    """The text of a slide's heading, "" without one."""
    found = re.search(r"^# (.+)$", slide, re.M)
    return found[1] if found else ""


def figures(lab: str) -> dict[str, Callable[[], Drawn]]:
    """The figure functions of a lab by name: the public functions of slides.figures.labNN."""
    module = importlib.import_module(f"slides.figures.lab{lab}")
    public = inspect.getmembers(module, inspect.isfunction)
    return {name: fn for name, fn in public if fn.__module__ == module.__name__ and name[0] != "_"}


def draw(lab: str) -> dict[str, Drawn]:
    """Every figure of a lab."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    found = {}
    for name, function in figures(lab).items():
        found[name] = function()
        plt.close(found[name].figure)  # pyplot forgets it; it can still be saved
    return found


def filled(lab: str, slide: str, drawings: Mapping[str, Drawn]) -> str:
    """A slide with its numbers. Raises ValueError, naming the slide, for one that its figure does not give."""
    numbers: dict[str, str] = {}
    for _, name in FIGURE.findall(slide):
        if name not in drawings:
            raise ValueError(f"deck {lab}, {title_of(slide)!r}: slides/figures/lab{lab}.py has no function {name}")
        numbers |= drawings[name].numbers

    def number(found: re.Match) -> str:
        if found[1].startswith("minutes "):
            return cells.minutes(lab, found[1].split()[1])
        if found[1] not in numbers:
            raise ValueError(f"deck {lab}, {title_of(slide)!r}: its figure gives no number called {found[1]!r}")
        return numbers[found[1]]

    return PLACE.sub(number, slide)


def markdown(path: Path, drawings: Mapping[str, Drawn]) -> str:
    """A deck with its numbers and figures in it, ready for marp-cli."""
    front, slides = slides_of(path.read_text(encoding="utf-8"))
    lab = path.name[:2]

    def picture(found: re.Match) -> str:
        data = base64.b64encode(svg(drawings[found[2]], f"{lab}_{found[2]}")).decode("ascii")
        return f"![{found[1]}](data:image/svg+xml;base64,{data})"

    done = [FIGURE.sub(picture, filled(lab, slide, drawings)) for slide in slides]
    return front + "\n\n---\n\n".join(done) + "\n"


def letters(deck: str) -> set[str]:
    """The characters that a deck shows, of its front matter and comments too: a footer is a comment."""
    return set(re.sub(r"data:[^)]*", "", deck)) | set(map(chr, range(32, 127)))


def stylesheet(shown: Iterable[str]) -> str:
    """theme.css with the fonts in it, which matplotlib brings, cut down to the characters `shown`."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    faces = []
    for name, family, weight in FACES:
        data = base64.b64encode(_subset(folder / name, shown)).decode("ascii")
        source = f"url(data:font/woff;base64,{data}) format('woff')"
        faces.append(f"@font-face {{ font-family: '{family}'; font-weight: {weight}; src: {source}; }}")
    return (HERE / "theme.css").read_text(encoding="utf-8") + "\n".join(faces) + "\n"


def _subset(path: Path, shown: Iterable[str]) -> bytes:
    from fontTools import subset

    options = subset.Options(flavor="woff", recalc_timestamp=False)
    options.drop_tables += ["FFTM"]  # FontForge's own dates
    font = subset.load_font(str(path), options)
    cut = subset.Subsetter(options)
    cut.populate(text="".join(sorted(shown)))
    cut.subset(font)
    kept = io.BytesIO()
    subset.save_font(font, kept, options)
    return kept.getvalue()


def build(path: Path, drawings: Mapping[str, Drawn], folder: Path) -> list[Path]:
    """Write folder/NN_name.html and .pdf. Raises CalledProcessError when marp-cli fails."""
    text = markdown(path, drawings)
    with tempfile.TemporaryDirectory() as work:
        deck, theme = Path(work, path.name), Path(work, "theme.css")
        deck.write_text(text, encoding="utf-8")
        theme.write_text(stylesheet(letters(text)), encoding="utf-8")
        made = [folder / f"{path.stem}.html", folder / f"{path.stem}.pdf"]
        for out in made:
            kind = ["--pdf", "--pdf-outlines"] if out.suffix == ".pdf" else []
            _marp(["--theme", str(theme), *kind, "--output", str(out), str(deck)])
    return made


def _marp(arguments: list[str]) -> None:
    """Run marp-cli on a browser of ours; as root it leaves the sandbox off by itself."""
    command = [str(HERE / "node_modules" / ".bin" / "marp"), "--config-file", str(HERE / "marp.config.mjs")]
    command += ["--no-stdin", "--browser", "chrome", "--browser-path", tools.browser(), "--browser-timeout", "120"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()


def main() -> int:
    """Build every deck into slides/built, figures beside them. Returns the exit code."""
    if tools.main() != 0:
        return 1
    for path in decks():
        lab = path.name[:2]
        drawings = draw(lab)
        pictures = BUILT / "figures" / lab
        pictures.mkdir(parents=True, exist_ok=True)
        for name, drawing in drawings.items():
            (pictures / f"{name}.svg").write_bytes(svg(drawing, f"{lab}_{name}"))
        for made in build(path, drawings, BUILT):
            print(f"built {os.path.relpath(made)}, {made.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
