"""Reads facts that no tensor holds from the configurations next to a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jaxmha import checkpoint
from jaxmha.checkpoint.errors import listed, printable
from jaxmha.converters.discovery import contradictions, head_count, hf_config, keras_config, notes
from jaxmha.converters.discovery.attention_blocks import Block
from jaxmha.converters.discovery.head_count import Configured


@dataclass(frozen=True)
class Description:
    """The facts that the configurations of a checkpoint give.

    Attributes:
      heads: the head counts. epsilon: the epsilons of norms.
      unlike: kind of norms -> why other frameworks' norms do not compute it
        (`hf_config.offset_norms`).
      unbiased: the kind of norms without a bias (`hf_config.unbiased_norms`).
      aside: True if config.json contradicts the blocks, and was ignored.
      notes: why a configuration was ignored, or could not be read.
    """

    heads: Configured | None = None
    epsilon: notes.Epsilons = notes.Epsilons()  # noqa: RUF009 (immutable)
    unlike: Mapping[str, str] = field(default_factory=dict)
    unbiased: str = ""
    aside: bool = False
    notes: tuple[str, ...] = ()


def of(file: checkpoint.Checkpoint, blocks: Sequence[Block]) -> Description:
    """The description of an open checkpoint; ignores a configuration that contradicts the blocks.

    Of a configuration that is ignored, settings that change attention still raise
    (`hf_config.refuse_behaviour`), and norms in `unlike` are still copied unchanged: this is safe
    even if the configuration belongs to another model.
    """
    shapes = {name: tuple(info.shape) for name, info in file.info.items()}
    configured = head_count.in_config(file.path)
    if configured is not None:
        configured = configured.over([block.prefix for block in blocks])
    content = hf_config.readable(file.path)
    by_key, unbiased = hf_config.epsilons(file.path), hf_config.unbiased_norms(file.path)
    found_notes = list(_unread(file.path))
    if wrong := (of_others := contradictions.find(content, configured, blocks, shapes)):
        path = file.path.parent / hf_config.CONFIG
        configured, by_key, unbiased = _aside(path, wrong, configured), {}, ""
        found_notes.append(f"{path} was set aside, epsilon and all: {listed(wrong, 3, '; ')}")
    by_prefix = keras_config.epsilons(file.config, file.names)
    if wrong := list(keras_config.contradictions(file.config, file.names, shapes)):
        by_prefix = {}
        found_notes.append(f"{keras_config.WHERE} was set aside: {listed(wrong, 3, '; ')}")
    return Description(
        configured,
        notes.Epsilons(by_key, by_prefix),
        hf_config.offset_norms(file.path),
        unbiased,
        bool(of_others),
        tuple(map(printable, found_notes)),
    )


def _unread(path: Path) -> Iterator[str]:
    """Yields a note if a configuration is present and cannot be read.

    `hf_config.refuse_behaviour` refuses to convert with such a configuration.
    """
    try:
        hf_config.read(path)
    except (ValueError, RecursionError) as error:
        yield f"{hf_config.unreadable(path, error)}: nothing that it says was used"


def _aside(path: Path, wrong: Sequence[str], configured: Configured | None) -> Configured | None:
    if configured is None or configured.wrong:
        return configured
    return Configured(
        path, (), f"{path} does not describe these tensors ({listed(wrong, 3, '; ')})"
    )
