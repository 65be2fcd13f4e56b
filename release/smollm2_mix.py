"""One corpus of two, for a run that learns from documents and chats alike."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fathomlm.train.data.corpus import TOKENIZER, Corpus
from fathomlm.train.data.manifest import FILE, Manifest, Shard, Split


def mix(documents: Path, chats: Path, out: Path, share: float = 0.5) -> Corpus:
    """A corpus of which chats are about a `share` of the training tokens: links to the shards of both, those of the one with
    too few named as often as it takes. Rows are drawn from all of it alike, so a run sees that share of them, whatever its
    budget. What is held out is the chats', on which exits are used; `measure` also has the documents' loss."""
    parts = {"documents": Corpus.open(documents), "chats": Corpus.open(chats)}
    manifests = [part.manifest for part in parts.values()]
    for name in ("kind", "fingerprint", "dtype", "separator"):
        if getattr(manifests[0], name) != getattr(manifests[1], name):
            raise SystemExit(f"{documents} and {chats} differ in their {name}; prepare both with the same tokenizer")
    shares = {"documents": 1 - share, "chats": share}
    weights = {name: shares[name] / part.manifest.splits["train"].tokens for name, part in parts.items()}
    out.mkdir(parents=True, exist_ok=True)
    train = Split()
    for name, part in parts.items():
        shards = [_linked(part, shard, name, out) for shard in part.manifest.splits["train"].shards]
        for shard in shards * round(weights[name] / min(weights.values())):
            train = train.plus(shard)
    validation = Split()
    for shard in parts["chats"].manifest.splits["validation"].shards:
        validation = validation.plus(_linked(parts["chats"], shard, "chats", out))
    _link(parts["documents"].path / TOKENIZER, out / TOKENIZER)
    sources = tuple(source for manifest in manifests for source in manifest.sources)
    splits = {"train": train, "validation": validation}
    manifest = dataclasses.replace(manifests[0], sources=sources, splits=splits, empty_documents=0)
    if not (out / FILE).exists() or Manifest.read(out) != manifest:
        manifest.write(out)
    return Corpus.open(out)


def _linked(corpus: Corpus, shard: Shard, kind: str, out: Path) -> Shard:
    """The shard under a name of its own in `out`."""
    name = f"{kind}-{shard.file}"
    for suffix in (".bin", ".idx"):
        _link((corpus.path / shard.file).with_suffix(suffix), (out / name).with_suffix(suffix))
    return dataclasses.replace(shard, file=name)


def _link(path: Path, link: Path) -> None:
    if link.is_symlink() and link.resolve() == path.resolve():
        return  # another run may be reading it
    link.unlink(missing_ok=True)
    link.symlink_to(path.resolve())
