"""A finished build folder as a context: what `validate` and `bench` run their stages over, on any machine."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mod_export.config import BuildConfig
from mod_export.environment import EXPORTERS, versions
from mod_export.errors import BuildFolderError, CheckpointError
from mod_export.folder.manifest import MANIFEST, GenerationFacts, Manifest, ModelFacts, open_folder
from mod_export.folder.programs import PROGRAM
from mod_export.folder.workspace import Step
from mod_export.model.checkpoint import model_from_checkpoint, model_from_weights
from mod_export.model.protocol import ExportableModel, GeneratingModel
from mod_export.pipeline.context import Context, Make, Models
from mod_export.pipeline.plan import generating_form
from mod_export.rows.failures import sentences
from mod_export.rows.parity import ParityRow
from mod_export.runtime.deployment import runnable_engines
from mod_export.types import ModelKind

if TYPE_CHECKING:
    import torch


class _Finished:
    """The steps of a folder in which nothing is recorded any more."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root, self._manifest = root, manifest

    def step(self, name: str, inputs: Mapping[str, Any], outputs: Sequence[str], make: Make) -> Step:
        """Always made; a step of a finished folder writes no files."""
        assert not outputs, name
        return Step(name=name, result=json.loads(json.dumps(make([]))))

    def hash_of(self, output: str) -> str:
        return self._manifest.files[output].sha256


class FolderContext(Context):
    """A context over a finished folder. The models are rebuilt from the folder's own spec and weights, or a checkpoint.

    Attributes:
        manifest: of the folder.
        checkpoint: that the weights are compared with; None for the folder's own.
    """

    def __init__(
        self,
        root: Path,
        config: BuildConfig | None,
        targets: Sequence[str],
        checkpoint: Path | None = None,
        *,
        verify: bool,
    ) -> None:
        """`config` replaces the folder's own, `targets` names those to run (all if empty).

        Raises:
            BuildFolderError: not a whole build folder, or, with `verify`, a file that is not what was built.
            TargetError: nothing to run.
        """
        self.manifest = manifest = open_folder(root, verify=verify)
        self.checkpoint = checkpoint
        config = _as_built(config, manifest.config)
        models = Models(self._restored, self._generating, config)
        super().__init__(
            _Finished(root, manifest), config, models, manifest.models, manifest.generation, manifest.buckets
        )
        self.targets = tuple(targets)
        self.graphs += manifest.graphs
        self.engines += manifest.engines
        self.weight_digests |= manifest.weight_digests
        self.work |= manifest.work
        self.missing = manifest.failed
        self.add(manifest.cost)
        # Refused with the reasons before anything else is done.
        forward = [engine for engine in manifest.engines if engine.role == "forward"]
        runnable_engines(root, forward, targets, failed=manifest.failed)

    @property
    def exports_alike(self) -> bool:
        """Whether a fresh export here must give the same graphs: other versions differ for good reasons."""
        return self.manifest.exporters == versions(*EXPORTERS)

    def _restored(self, kind: ModelKind) -> ExportableModel:
        facts = self.facts[kind]
        weights = self._checkpoint_weights(kind) or _weights_of_folder(self.root, facts)
        if facts.architecture == PROGRAM:
            from mod_export.model.program_files import read_graphs

            return read_graphs(self.root, kind, facts.spec, weights)
        loaded = model_from_weights(facts.name, facts.architecture, facts.spec, weights, facts.checkpoint_sha256).loaded
        try:
            loaded.module()
        except RuntimeError as error:  # What torch raises for weights that do not fit the model.
            raise BuildFolderError(
                f"{self.root / MANIFEST}: the reference cannot be rebuilt from spec and weights "
                f"({str(error).splitlines()[0]}); build again"
            ) from error
        return loaded

    def _generating(self, kind: ModelKind) -> GeneratingModel:
        assert isinstance(self.generation, GenerationFacts)
        return generating_form(self.models.loaded(kind), kind, self.generation.window, self.config)

    def _checkpoint_weights(self, kind: ModelKind) -> Mapping[str, torch.Tensor]:
        """The weights of the checkpoint that was named, if this model was built from it.

        Raises:
            CheckpointError: it is another one than the folder was built from.
        """
        expected = self.facts[kind].checkpoint_sha256
        if self.checkpoint is None or expected != self.facts["mod"].checkpoint_sha256:
            return {}
        model = model_from_checkpoint(self.checkpoint)
        if model.checkpoint_sha256 != expected:
            raise CheckpointError(
                f"{self.checkpoint}: is not the checkpoint that {self.root} was built from (SHA-256 "
                f"{model.checkpoint_sha256[:12]}, expected {expected[:12]})"
            )
        # With the folder's spec all the same: its capacity may be another than the checkpoint's own.
        return model.of_kind(kind).weights


def _as_built(config: BuildConfig | None, built: BuildConfig) -> BuildConfig:
    """A configuration with what the graphs were made for, whatever it says itself."""
    if config is None:
        return built
    made_for = {name: getattr(built.generation, name) for name in ("window", "slack", "slots")}
    generation = config.generation.model_copy(update=made_for)
    return config.model_copy(update={"generation": generation, "outputs": built.outputs})


def _weights_of_folder(root: Path, facts: ModelFacts) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(root / facts.weights)
        return {name: tensors[name] for name in facts.tensors}
    except (SafetensorError, KeyError, OSError) as error:
        raise BuildFolderError(
            f"{root / facts.weights}: the reference cannot be rebuilt from it ({error}); build again"
        ) from error


def notes(context: FolderContext) -> list[str]:
    """What was not run or not compared, because it cannot be here or was not asked for."""
    ran = {context.hash_of(row.artifact) for row in context.rows(ParityRow) if row.artifact is not None}
    missed = [
        f"{engine.target} engines{'' if engine.role == 'forward' else ' that write text'}"
        for engine in context.engines
        if context.hash_of(engine.path) not in ran
    ]
    missed += [
        f"{graph.dtype} graphs of {graph.target or 'no target'}"
        for graph in context.graphs
        if graph.role == "forward" and context.hash_of(graph.path) not in ran
    ]
    counts = Counter(missed)
    lost = [row for row in context.missing if not context.targets or row.target in (None, *context.targets)]
    lines = [f"not in this folder: {sentence}" for sentence in sentences(lost)]
    lines += [f"not run: {count} {what}; of these only the files were looked at" for what, count in counts.items()]
    if not context.exports_alike:
        lines.append(
            "graphs were not compared with a fresh export: other versions are installed than those that built them"
        )
    return lines
