"""What to deploy: the files that serve the MoD model, each with what was found for it on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mod_export.report.schema import Artifact, BuildReport
from mod_export.report.summary import Setting, settings_of

__all__ = ["Deployment", "deployments"]

State = Literal["passed", "failed", "not run here", "portable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A file that serves the MoD model: the engines of a target, or, with `target` None, the portable graphs.

    `setting` is what was found for it on this machine, None when it did not run.
    """

    target: str | None
    artifact: Artifact
    state: State
    setting: Setting | None


def deployments(report: BuildReport) -> tuple[Deployment, ...]:
    """What to deploy: engines that ran here, then those built for elsewhere, then portable graphs."""
    decoding = report.generation.parity if report.generation else ()
    judged = [row for row in (*report.parity, *decoding) if row.model == "mod"]
    by_path = {row.artifact: row.passed for row in judged if row.artifact is not None}
    by_setting = {(row.target, row.bucket, row.dtype): row.passed for row in judged}
    settings = {(one.target, one.bucket, one.dtype): one for one in settings_of(report)}
    # A portable graph is often the very file that ONNX Runtime runs: what was found for one holds for the other.
    by_bytes = {item.sha256: by_path[item.path] for item in report.artifacts if item.path in by_path}
    states: dict[bool | None, State] = {True: "passed", False: "failed"}
    found = []
    for artifact in report.artifacts:
        if artifact.model != "mod" or artifact.kind == "weights":
            continue
        key = (artifact.target or "", artifact.bucket or "", artifact.dtype)
        if artifact.kind == "engine" and artifact.role in ("prefill", "decode"):
            # What was timed at the bucket of this name is another engine.
            state, setting = states.get(by_path.get(artifact.path), "not run here"), None
        elif artifact.kind == "engine":
            passed = by_path.get(artifact.path, by_setting.get(key))
            state, setting = states.get(passed, "not run here"), settings.get(key)
        elif artifact.target is None:
            state, setting = states.get(by_bytes.get(artifact.sha256), "portable"), None
        else:
            continue
        found.append(Deployment(target=artifact.target, artifact=artifact, state=state, setting=setting))
    order = {"passed": 0, "failed": 0, "not run here": 1, "portable": 2}
    return tuple(sorted(found, key=lambda item: (item.target is None, order[item.state], item.target or "")))
