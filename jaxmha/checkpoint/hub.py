"""Fetches checkpoints from Hugging Face, or a hub with the same protocol, at a fixed commit.

`huggingface_hub` stores the files in its cache, and provides the token and the hub's address.
"""

import contextlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmha.checkpoint import shards_read
from jaxmha.checkpoint.errors import (
    CheckpointError,
    MissingDependency,
    UnreadableFile,
    UnsupportedFormat,
)
from jaxmha.checkpoint.limits import Limits
from jaxmha.checkpoint.source import Source

SCHEME = "hf://"
_ADDRESS = re.compile(
    r"hf:/{1,2}(?P<model>[\w.-]+(/[\w.-]+)?)(@(?P<revision>(?!.*\.\.)\w[\w./-]*))?", re.ASCII
)  # Path turns two slashes into one
_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]+):/")  # C:/ is no URL, and a Path has one slash
_FETCHED = (".safetensors", ".safetensors.index.json")
_CONFIG = "config.json"
_FORM = "write hf://ORGANISATION/MODEL, or hf://ORGANISATION/MODEL@REVISION"


class Fetched(NamedTuple):
    """The folder of a model in the cache, and its address with the commit as revision."""

    folder: Path
    address: str


def is_address(source: Any) -> bool:
    """True if `source` is an address such as hf://org/model, as a str or Path.

    >>> is_address("hf://org/model@main"), is_address(Path("hf://org/model")), is_address("a.npz")
    (True, True, False)
    """
    return isinstance(source, str | Path) and str(source).startswith(("hf:/", SCHEME))


def scheme_of(path: str | Path) -> str:
    """The scheme of a path that is a URL, and "" of others, such as those that exist.

    >>> scheme_of("s3://bucket/model.safetensors"), scheme_of("C:/a.npz")
    ('s3', '')
    """
    found = _URL.match(str(path))
    return found[1] if found and not os.path.lexists(path) else ""


def refuse_url(path: str | Path, remedy: str) -> None:
    """Raises UnsupportedFormat if a path is a URL, such as s3://bucket/model.safetensors.

    >>> refuse_url("gs://bucket/a.npz", "write a local file")
    Traceback (most recent call last):
    ...
    jaxmha.checkpoint.errors.UnsupportedFormat: gs://bucket/a.npz: is a URL; write a local file
    """
    if scheme_of(path):
        raise UnsupportedFormat(str(path), "is a URL", local_remedy(path) or remedy)


def local_remedy(path: str | Path) -> str:
    """The remedy for a URL of a local file, or "" for any other.

    >>> local_remedy("file:///home/my%20model"), local_remedy("s3://bucket/a.npz")
    ('give the path alone: /home/my model', '')
    """
    if scheme_of(path) != "file":
        return ""
    rest = str(path).partition(":")[2].removeprefix("//localhost").lstrip("/")
    return f"give the path alone: /{urllib.parse.unquote(rest)}"


def model_of(address: str) -> str:
    """The address without its revision.

    >>> model_of("hf://org/model@v1")
    'hf://org/model'
    """
    return address.partition("@")[0]


def fetch(address: str | Path) -> Fetched:
    """Fetches the safetensors files and the config.json of a model, unless they are in the cache.

    A cached model needs no network. After an error, complete files stay in the cache for the next
    try; `huggingface_hub` removes partial files, or continues them on the next try.

    Raises:
        MissingDependency: huggingface_hub is not installed.
        UnreadableFile: no such model or revision, no access, no network, or a broken download.
        UnsupportedFormat: the model has no safetensors file, or the address is malformed.
    """
    text = str(address)
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise UnsupportedFormat(text, "is no address of a model", _FORM)
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ModuleNotFoundError as e:
        remedy = "pip install 'jaxmha[hub]'"
        raise MissingDependency(text, "huggingface_hub is not installed", remedy) from e
    model, revision = found["model"], found["revision"]
    with _one_message(text, huggingface_hub.errors):
        commit, names = _listed(model, revision)
        wanted = _wanted(names)
        if not wanted:
            others = ", ".join(n for n in names if n.endswith((".bin", ".h5", ".gguf", ".msgpack")))
            problem = f"has no safetensors file (it has {others or 'no weights'})"
            raise UnsupportedFormat(text, problem, "download another file and name that")
        wanted = [*(name for name in names if name == _CONFIG), *wanted]
        paths = [_downloaded(model, name, commit) for name in wanted]
    with contextlib.suppress(OSError):  # a read-only cache gets no note
        note = _note(paths[0].parent)
        note.parent.mkdir(exist_ok=True)
        note.write_text(json.dumps(wanted))
    return Fetched(paths[0].parent, f"{SCHEME}{model}@{commit}")


def _note(folder: Path) -> Path:
    """The path of a note that lists the fetched files of one commit; it is outside their folder."""
    return folder.parents[1] / ".jaxmha" / folder.name


def _downloaded(model: str, name: str, commit: str) -> Path:
    import huggingface_hub

    return Path(huggingface_hub.hf_hub_download(model, name, revision=commit))


def _wanted(names: Sequence[str]) -> list[str]:
    """The safetensors files named as by `save_pretrained`; if there are none, all at the top."""
    known = [name for name in names if "/" not in name and name.endswith(_FETCHED)]
    usual = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    return [name for name in known if usual.fullmatch(name)] or known


def _listed(model: str, revision: str | None) -> tuple[str, list[str]]:
    """Commit and file names of a model, from the hub, or from the cache if it cannot be reached."""
    import huggingface_hub
    import huggingface_hub.errors

    api = huggingface_hub.HfApi()
    try:
        info = api.model_info(model, revision=revision)
    except huggingface_hub.errors.HfHubHTTPError:
        raise
    except Exception:
        kept = _cached(model, revision)
        if kept is None:
            raise
        return kept
    return str(info.sha), [str(one.rfilename) for one in info.siblings or ()]


def _cached(model: str, revision: str | None) -> tuple[str, list[str]] | None:
    """Commit and cached files of a revision (default: main); None if any file is missing.

    Without a revision, the only cached commit is used if main is not in the cache.
    """
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE) / _folder_name(model)
    commits = {path.name: path for path in (cache / "snapshots").glob("*")}
    commit = revision or "main"
    with contextlib.suppress(OSError):
        commit = (cache / "refs" / commit).read_text().strip()
    if revision is None and commit not in commits and len(commits) == 1:
        (commit,) = commits
    if commit not in commits:
        return None
    names = [path.name for path in commits[commit].iterdir()]
    return (commit, names) if _is_whole(commits[commit], names) else None


def _is_whole(folder: Path, names: Sequence[str]) -> bool:
    """True if a cached folder holds all files of a download.

    The note of `fetch` lists them. Without a note, the folder must hold an index and all its
    shards, or `model.safetensors`; other names do not show that all files are present.
    """
    with contextlib.suppress(OSError, ValueError):
        return set(json.loads(_note(folder).read_text())) <= set(names)
    wanted = _wanted(names)
    indexes = [name for name in wanted if name.endswith(shards_read.SUFFIX)]
    for name in indexes:
        with contextlib.closing(Source(folder / name)) as source:
            if not set(shards_read.parse(source, Limits()).shards.values()) <= set(names):
                return False
    return bool(indexes) or wanted == ["model.safetensors"]


def _folder_name(model: str) -> str:
    return f"models--{model.replace('/', '--')}"


@contextlib.contextmanager
def _one_message(address: str, errors: Any) -> Iterator[None]:
    """Converts errors of huggingface_hub and of its network library to an UnreadableFile error.

    The warnings of huggingface_hub about retries are hidden.
    """
    login = "log in with `hf auth login`, and accept the terms on the page of the model"
    table: tuple[tuple[type[Exception], str, str], ...] = (
        (errors.GatedRepoError, "is gated, and this token has no access", login),
        (
            errors.RepositoryNotFoundError,
            "there is no such model, or it is private",
            "check the name; for a private model log in with `hf auth login`",
        ),
        (errors.RevisionNotFoundError, "the model has no such revision", "check the revision"),
        (errors.HFValidationError, "is no name of a model", _FORM),
        (errors.LocalEntryNotFoundError, "the download failed", "check the network and try again"),
        (errors.OfflineModeIsEnabled, "HF_HUB_OFFLINE is set", "unset it, or download it first"),
    )
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(40)  # logging.ERROR
    try:
        yield
    except CheckpointError:
        raise
    except Exception as e:
        for kind, problem, remedy in table:
            if isinstance(e, kind):
                raise UnreadableFile(address, problem, remedy) from e
        reason = (" ".join(str(e).split()) or type(e).__name__)[:200]
        problem = f"the download failed ({reason})"
        raise UnreadableFile(address, problem, "check the network and try again") from e
    finally:
        logging.set_verbosity(level)
